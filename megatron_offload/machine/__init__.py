"""What this machine gives: how fast it copies, what stands in the way, and where the host waits.

Knows the kernel's files, the environment, installed versions, and devices through
`megatron_offload.backends`. Must not know groups, the engine, megatron or how anything is shown
(`megatron_offload.cli.doctor`).

Invariant: what can't be read is unknown, and unknown is a finding, never a crash. Read next:
`megatron_offload.machine.examine`.
"""
