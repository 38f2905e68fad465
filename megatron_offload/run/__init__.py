"""A Megatron job's own script with offload: its flags, and what is put in place before it runs."""
