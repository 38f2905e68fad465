#!/usr/bin/env bash
# The tests that need a device, on as many GPUs as there are; prints what they printed.
#
#   scripts/gpu_tests.sh [OUTPUT_FOLDER]
#
# Kernels are deterministic, because results are compared bit by bit.
set -uo pipefail
cd "$(dirname "$0")/.."
output=${1:-runs/gpu_tests}
mkdir -p "$output"
export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 CUBLAS_WORKSPACE_CONFIG=:4096:8 PYTHONUNBUFFERED=1
python3 -c 'import torch; print(torch.__version__, torch.cuda.device_count(), "x", torch.cuda.get_device_name())'
python3 -m pytest tests -m gpu -q -p no:cacheprovider --timeout 180 2>&1 | tee "$output/gpu_tests.log"
