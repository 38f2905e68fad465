"""``torchrun ... -m megatron_offload.run SCRIPT ...`` is ``-m megatron_offload run SCRIPT ...``."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "run")
    runpy.run_module("megatron_offload", run_name="__main__")
