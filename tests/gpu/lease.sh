#!/usr/bin/env bash
# A lent GPU, for a quarter of an hour in all: `bash tests/gpu/lease.sh 1`; then, if all
# is right, `bash tests/gpu/lease.sh 2`. On an H100 the first takes about 300 seconds, at
# most 530; the second at most 200. Figures go to files in $OUT as soon as they are there,
# and to the terminal: the most important ones last. QUICK=1: all is tiny, without a GPU.
set -u
call=${1:-}
[[ $call == [12] ]] || { echo "usage: [QUICK=1] [OUT=DIR] bash $0 1|2" >&2; exit 2; }
mkdir -p "${OUT:=/tmp/out}"
OUT=$(cd "$OUT" && pwd)
cd "$(dirname "$0")/../.." || exit
python=${PYTHON:-python3}

measure() {  # parts, separated by commas: one report
    "$python" tests/gpu/run.py ${QUICK:+--quick} --json "$OUT/$call-${1%%,*}.json" \
        --parts "$@"
}

rm -f "$OUT/$call"[-.]*
case $call in
1)  # The first import reads gigabytes from a cold disk, so nothing else runs beside it.
    timeout 150 "$python" -c "import torch, transformers; torch.cuda.device_count()"
    echo "== import: exit status $?, $SECONDS s"
    # Correct? Beside it an engine compiles; its figures are replaced by the next ones.
    measure kernels & measure tokens & measure workload --seconds 160 >/dev/null & wait
    measure workload,step,sweep,speed --seconds $((520 - SECONDS)) ;;
2)  measure peer ;;
esac 2>&1 | tee "$OUT/$call.log"
grep -E '^== |"(output_tokens_per_s|step_ms|sort_ms)"' "$OUT/$call.log" | cut -c -250
