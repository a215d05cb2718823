#!/bin/sh
# The whole check of a card, by the clock of a lease: `sh tools/lease.sh [SECONDS] [COPIES]`.
#
# SECONDS  what the call may take in all (600). Called again, it goes on where the last call ended:
#          what has not ended runs. The results of this machine are in out/lease.
# COPIES   a folder that gets a copy of them, also while the check runs.
#
# GPU_CHECK_HOST_GIB=120 says how much host memory there is, where the machine is given its memory as
# it uses it; without it, it is found by touching some. COMMIT is recorded.
set -u
cd "$(dirname "$0")/.." || exit 1

seconds=${1:-600}
copies=${2:-}
results=out/lease
mkdir -p "$results"

copy() {
    if [ -n "$copies" ]; then
        cp "$results"/results.json "$results"/log.txt "$results"/conformance.txt \
            "$results"/junit.xml "$results"/step-* "$copies"/ 2>/dev/null
    fi
}

resume=
if [ -f "$results/results.json" ]; then
    resume="--resume $results/results.json"
fi
# Ends before the machine does: what ended by its limit alone would not be written.
# shellcheck disable=SC2086 # two words, or none
"${PYTHON:-python3}" tools/gpu_check.py --wheels "${WHEELS:-.whl}" --results "$results" \
    --commit "${COMMIT:-unknown}" --budget-s "$((seconds - 15))" $resume &
check=$!
trap 'kill -TERM "$check" 2>/dev/null' TERM INT
while kill -0 "$check" 2>/dev/null; do
    sleep 5
    copy
done
wait "$check"
status=$?
copy
exit "$status"
