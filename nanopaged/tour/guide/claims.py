"""Claims that circulate and are wrong, with the right numbers. An A100, in numbers."""

from typing import Any

from nanopaged.tour import kv

# An A100 with 80 GB, from its data sheet: bytes/s, and operations/s in bfloat16.
BANDWIDTH = 2.0e12
RATE = 312e12
HIDDEN_SIZE = 8192  # of Llama 70B
TOKENS, SEQS = 4096, 8


def claims() -> dict[str, Any]:
    large, small = kv.MODELS["Llama-3-70B"], kv.MODELS["Llama-3-8B"]
    return {
        "tokens": TOKENS, "seqs": SEQS, "large": large, "small": small,
        "grouped": large.total(TOKENS, SEQS) / kv.GIB,
        "ungrouped": large.ungrouped.total(TOKENS, SEQS) / kv.GIB,
        "one_layer": TOKENS * small.bytes_per_layer / 2**20,
        "all_layers": small.total(TOKENS, 1) / kv.GIB,
        "hidden_size": HIDDEN_SIZE,
        "wrong_bytes": large.layers * HIDDEN_SIZE * 2 * large.item_bytes,
    }
