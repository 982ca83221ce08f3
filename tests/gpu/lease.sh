#!/usr/bin/env bash
# A GPU that is lent for 15 minutes in all, in two calls: README.md says how. They take
# 420 and 410 s at most. Figures go to files in $OUT as soon as they are there, and to the
# terminal, the most important ones last.
set -u
call=${1:-} quick=${2:-}
[[ $call == [ab] && $quick =~ ^(--quick)?$ ]] || {
    echo "usage: [OUT=DIR] [COMMIT=NAME] bash $0 a|b [--quick]" >&2; exit 2; }
mkdir -p "${OUT:=/tmp/out}"
OUT=$(cd "$OUT" && pwd)
cd "$(dirname "$0")/../.." || exit
python=${PYTHON:-python3}
commit=${COMMIT:-$([[ -e .git ]] && git rev-parse HEAD || echo unknown)}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1

run() {  # VARIANT PARTS SECONDS
    (cd ".peers/variants/$1" && COMMIT="$commit $1" "$python" tests/gpu/run.py $quick \
        --parts "$2" --seconds "$3" --json "$OUT/$1-${2%%,*}.json")
}

call_a() {  # Is it right without waits, and how fast is it?
    # The first import reads gigabytes from a cold disk.
    [[ $quick ]] || timeout 120 "$python" -c "import torch, transformers"
    run base same 140 & run no_pdl same 140 & wait
    # If a fault shows, the variant without PDL is still measured.
    local best=base
    "$python" tests/gpu/equal.py "$OUT"/{base,no_pdl}-same.json || best=no_pdl
    run $best workload,step $((400 - SECONDS))
}

call_b() {  # Is it right with late stores? What is PDL worth? And nano-vllm itself.
    run late same 80
    run no_pdl workload,step 100
    if [[ -z $quick && -e .peers/peer_nano.py ]]; then
        PYTHONPATH=$PWD/.peers/nano:$PWD/.peers/stand_in timeout $((405 - SECONDS)) \
            "$python" .peers/peer_nano.py 2
    fi
}

bash tests/gpu/variants.sh && "call_$call" 2>&1 | tee "$OUT/$call.log"
grep -E '^(== |equal|the tokens|nano-vllm)|"(output_tokens_per_s|step_ms)"' \
    "$OUT/$call.log" | cut -c -250
