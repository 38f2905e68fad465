"""``torchrun ... -m megatron_offload.run SCRIPT ...``: `megatron_offload.cli.run` on every rank."""

import sys

from megatron_offload.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
