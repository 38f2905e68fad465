#!/usr/bin/env bash
# The tests that need a device, one process a file; prints what they end with and the longest of them.
#
#   scripts/gpu_tests.sh OUTPUT_FOLDER [FILE...]         # such as test_cuda; by default all
#   PYTEST_ADDOPTS="-m two_gpus" scripts/gpu_tests.sh OUTPUT_FOLDER test_compare_on_gpus
#
# What compares bits runs side by side; what measures the device, or fills it, runs alone behind it.
# Kernels are deterministic. Exit status 1 if a file's is not 0.
set -uo pipefail
cd "$(dirname "$0")/.."
output=$1
shift
alone=(test_faults test_machine)
others=()
for file in tests/gpu/test_*.py tests/memory/test_conformance.py; do
    name=$(basename "$file" .py)
    [[ " ${alone[*]} " == *" $name "* ]] || others+=("$name")
done
chosen=${*:-${alone[*]} ${others[*]}}
mkdir -p "$output"
export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 CUBLAS_WORKSPACE_CONFIG=:4096:8 PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=1
python3 -c 'import torch; print(torch.__version__, torch.cuda.device_count(), "x", torch.cuda.get_device_name())'

run() {
    local started=$SECONDS status=0
    python3 -m pytest tests/*/"$1.py" -q -p no:cacheprovider --durations 8 >"$output/$1.log" 2>&1 || status=$?
    echo "$1, $((SECONDS - started)) s: $(grep -E ' in [0-9.]+s' "$output/$1.log" | tail -n 1)"
    [[ $status -eq 0 || $status -eq 5 ]] || touch "$output/failed"
}

rm -f "$output/failed"
for name in "${others[@]}"; do
    [[ " $chosen " == *" $name "* ]] && run "$name" &
done
wait
for name in "${alone[@]}"; do
    [[ " $chosen " == *" $name "* ]] && run "$name"
done
grep -hE '^ *[0-9.]+s (call|setup)' "$output"/*.log | sort -rn | head -n 15
grep -hE '^(FAILED|ERROR)' "$output"/*.log
[[ ! -e "$output/failed" ]]
