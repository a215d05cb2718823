#!/bin/sh
# The whole check of a card, by the clock of a lease: sh tools/lease.sh [SECONDS [COPIES [ARGUMENT...]]]
#
# SECONDS   what this call may take in all (600). Called again on the same machine it goes on: what
#           has not ended runs. Its results are in out/lease (RESULTS).
# COPIES    a folder that gets a copy of them, also while the check runs; '' for none.
# ARGUMENT  for tools/gpu_check.py, as `--only step,rivals`.
#
# GPU_CHECK_HOST_GIB=120 says how much host memory there is, where a machine is given its memory as it
# uses it; without it, it is found by touching some. WHEELS (.whl), COMMIT and PYTHON as for
# `make gpu-check`.
set -u
cd "$(dirname "$0")/.." || exit 1

seconds=${1:-600}
copies=${2:-}
if [ "$#" -ge 2 ]; then shift 2; else shift "$#"; fi
results=${RESULTS:-out/lease}
mkdir -p "$results" || exit 1

copy() {
    if [ -n "$copies" ]; then
        for file in "$results"/results.json "$results"/*.txt "$results"/*.xml "$results"/step-*; do
            if [ -f "$file" ]; then cp "$file" "$copies"/; fi
        done
    fi
}

if [ -f "$results/results.json" ]; then
    set -- --resume "$results/results.json" "$@"
fi
# It ends before the machine does: what is ended by the machine cannot say what it had found.
"${PYTHON:-python3}" tools/gpu_check.py --wheels "${WHEELS:-.whl}" --results "$results" \
    --commit "${COMMIT:-unknown}" --budget-s "$((seconds - 15))" "$@" &
check=$!
trap 'kill -TERM "$check" 2>/dev/null' TERM INT
while kill -0 "$check" 2>/dev/null; do
    sleep 2
    copy
done
wait "$check"
status=$?
copy
exit "$status"
