#!/usr/bin/env bash
# A lent GPU, for a quarter of an hour in all: `bash tests/gpu/lease.sh 1`; then, if all
# is right, `bash tests/gpu/lease.sh 2`. On an H100 the first takes about 250 seconds, at
# most 520; the second at most 240. Figures go to files in $OUT as soon as they are there,
# and the most important ones to the terminal. With QUICK=1 all is tiny, without a GPU.
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

profile() {  # NVIDIA's profiler looks at a few launches of attention
    command -v ncu || { echo "== ncu: skipped, it is not installed"; return; }
    PYTHONPATH=.:tests timeout 60 ncu --clock-control none -k regex:paged_attention \
        -s 4 -c 2 --section SpeedOfLight --section Occupancy --section WarpStateStats \
        "$python" -c "import gpu.parts as p
attend = p.on_device(p.decode_case(False, '256 x 600'))
[attend() for _ in range(8)]" | grep -E "%|Kernel|Occupancy|cycle|ERR|rror" | head -40
}

rm -f "$OUT/$call"[-.]*
case $call in
1)  # Correct? Beside it an engine compiles; its figures are replaced by the next ones.
    measure kernels & measure tokens & measure workload --seconds 160 >/dev/null & wait
    measure workload,speed,step,sweep ;;
2)  measure peer
    profile ;;
esac 2>&1 | tee "$OUT/$call.log"
grep "^== " "$OUT/$call.log"
