"""The engine's classes with the names and call forms that Megatron-core's documentation gives them.

Read next: `megatron_offload.fine_grained_activation_offload`, which gathers them.
"""
