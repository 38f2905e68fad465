"""What this machine gives: how fast it copies, what stands in the way, and where the host waits.

What can't be read is unknown, and unknown is a finding, never a crash.
"""
