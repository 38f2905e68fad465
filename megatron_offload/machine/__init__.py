"""What this machine gives: how fast it copies, what limits it, and where the host waits."""
