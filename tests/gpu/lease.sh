#!/usr/bin/env bash
# A lent GPU, for half an hour in all, in calls of at most ten minutes:
#   bash tests/gpu/lease.sh 1    is it right, how fast is it, and where does time go
#   bash tests/gpu/lease.sh 2    kernels against float64; transformers serves the same
#   bash tests/gpu/lease.sh 3 [NAME...]    variants of the engine (variants.sh), in turns
# Figures go to files in $OUT as soon as they are there, and to the terminal: the most
# important ones last. COMMIT names what is measured, where there is no .git. QUICK=1: all
# is tiny, without a GPU.
set -u
call=${1:-}
[[ $call == [123] ]] || { echo "usage: [QUICK=1] [OUT=DIR] bash $0 1|2|3" >&2; exit 2; }
mkdir -p "${OUT:=/tmp/out}"
OUT=$(cd "$OUT" && pwd)
cd "$(dirname "$0")/../.." || exit
python=${PYTHON:-python3}
export COMMIT=${COMMIT:-$([[ -e .git ]] && git rev-parse HEAD || echo unknown)}

measure() {  # parts, separated by commas: one report
    "$python" tests/gpu/run.py ${QUICK:+--quick} --json "$OUT/$call-${1%%,*}.json" \
        --parts "$@"
}

compare() {  # names of variants: a report of each, and an equal share of the time
    while (($#)); do
        (cd ".peers/variants/$1" && COMMIT="$COMMIT $1" measure "${PARTS:-workload,step}" \
            --json "$OUT/3-$1.json" --seconds $(((570 - SECONDS) / $#)))
        shift
    done
}

rm -f "$OUT/$call"[-.]*
case $call in
1)  # The first import reads gigabytes from a cold disk, so nothing else runs beside it.
    timeout 150 "$python" -c "import torch, transformers; torch.cuda.device_count()"
    echo "== import: exit status $?, $SECONDS s"
    # Correct? Beside it an engine compiles; its figures are replaced by the next ones.
    measure tokens & measure workload --seconds 160 >/dev/null & wait
    measure workload,nano,step,shapes,speed --seconds $((560 - SECONDS)) ;;
2)  measure kernels,peer ;;
3)  bash tests/gpu/variants.sh
    shift
    (($#)) || set -- $(ls .peers/variants)
    compare "$@" ;;
esac 2>&1 | tee "$OUT/$call.log"
grep -E '^== |"(output_tokens_per_s|step_ms|sort_ms)"' "$OUT/$call.log" | cut -c -250
