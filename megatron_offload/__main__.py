"""The program ``megatron-offload``, which is ``python -m megatron_offload`` too."""

import sys

try:
    from megatron_offload.cli.main import main
except KeyboardInterrupt:
    sys.stderr.write("megatron-offload: interrupted\n")
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main())
