"""``python -m megatron_offload`` is the command ``megatron-offload``."""

import sys

from megatron_offload.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
