"""The program ``megatron-offload``, which is ``python -m megatron_offload`` too."""

import sys

from megatron_offload.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
