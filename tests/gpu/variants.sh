#!/usr/bin/env bash
# Copies of the engine in .peers/variants, each with one change undone, or tried: measured
# in turns on one GPU, they show what the change is worth. `lease.sh 3` does that, also
# with other copies that are there.
set -eu
cd "$(dirname "$0")/../.."

copy() {
    rm -rf ".peers/variants/$1"
    mkdir -p ".peers/variants/$1"
    cp -r nanopaged tests bench.py ".peers/variants/$1"
}

change() {  # NAME FILE COMMAND: one of sed, which must change the file
    local file=.peers/variants/$1/nanopaged/$2
    sed "$3" "$file" >"$file.new"
    ! cmp -s "$file" "$file.new" || { echo "$1: nothing to change" >&2; exit 1; }
    mv "$file.new" "$file"
}

for name in base no_draws no_kernel_pdl no_pdl no_split two_stages; do copy "$name"; done
# Recorded steps end with logits.
change no_draws gpu/graphs.py 's/tokens = choose(.*/tokens = kept[:, 0]/'
change no_draws gpu/graphs.py 's/, tokens\[:count\]/, None/'
# PDL only in what Inductor compiles; and nowhere.
change no_kernel_pdl gpu/attention.py 's/= (gpu.major >= 9/= (False/'
change no_kernel_pdl loading/start_up.py 's/backend.uses_pdl)/True)/'
change no_pdl gpu/attention.py 's/= (gpu.major >= 9/= (False/'
# Inductor does not split a long sum over two kernels.
change no_split fused.py 's/enable_pdl": pdl/&, "split_reductions": False/'
change two_stages gpu/attention.py 's/num_warps=8 if rows > 64 else 4,/& num_stages=2,/'
