"""What this machine gives: how fast it copies, what stands in the way, and where the host waits."""
