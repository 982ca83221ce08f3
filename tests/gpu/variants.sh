#!/usr/bin/env bash
# Copies of the engine in .peers/variants: `base`, and others with one change each.
set -eu
cd "$(dirname "$0")/../.."

variant() {  # NAME [FILE COMMAND]: a command of sed, which must change the file
    local copy=.peers/variants/$1
    rm -rf "$copy"
    mkdir -p "$copy"
    cp -Rp nanopaged tests bench.py "$copy"
    if (($# > 1)); then
        sed -i "$3" "$copy/$2"
        ! cmp -s "$2" "$copy/$2" || { echo "$1: $2 does not change" >&2; exit 1; }
    fi
}

variant base
variant no_pdl nanopaged/gpu/attention.py 's/= (gpu.major >= 9 and/= (False and/'
# Our kernels store 20 us late: if the next one does not wait for that, tokens differ.
sleep='tl.inline_asm_elementwise("nanosleep.u32 20000; \/\/ $0", "=r", [], tl.int32, '
sleep+='is_pure=False, pack=1)'
variant late nanopaged/gpu/kernels.py "s/^        gdc_launch_dependents()\$/&\\n        $sleep/"
