"""Figures that circulate and are wrong, with the right ones, computed."""

from typing import Any

from nanopaged.tour import kv

# An A100 with 80 GB, from its data sheet: bytes/s, and operations/s in bfloat16.
BANDWIDTH = 2.0e12
RATE = 312e12
HIDDEN_SIZE = 8192  # of Llama 70B
PARAMETERS = 70e9
TOKENS, SEQS = 4096, 8


def claims() -> dict[str, Any]:
    """The values of the chapter on claims."""
    shape = kv.MODELS["Llama-3-70B"]
    total = shape.total(TOKENS, SEQS)
    ungrouped = shape.ungrouped.total(TOKENS, SEQS)
    wrong_width = shape.layers * HIDDEN_SIZE * 2 * shape.item_bytes

    small = kv.MODELS["Llama-3-8B"]
    without_layers = 2 * TOKENS * small.kv_heads * small.head_dim * small.item_bytes

    # The matrices that make K and V, if heads were not grouped.
    num_weights = 2 * shape.layers * HIDDEN_SIZE * shape.heads * shape.head_dim
    read_s = num_weights * shape.item_bytes / BANDWIDTH
    # To have K and V of any layer, one needs all layers before it.
    recompute_s = 2 * PARAMETERS * TOKENS / RATE
    assert ungrouped == shape.group_size * total
    return {
        "tokens": f"{TOKENS:,}",
        "seqs": SEQS,
        "claimed": f"{ungrouped / kv.GIB / 2:.0f}",
        "grouped": f"{total / kv.GIB:.0f}",
        "ungrouped": f"{ungrouped / kv.GIB:.0f}",
        "group_size": shape.group_size,
        "layers": small.layers,
        "without_layers": f"{without_layers / 2**20:.0f} MiB",
        "with_layers": kv.gib(small.total(TOKENS, 1)),
        "wrong_bytes": f"{wrong_width:,}",
        "right_bytes": f"{shape.bytes_per_token:,}",
        "kv_width": f"{shape.kv_heads * shape.head_dim:,}",
        "model_width": f"{HIDDEN_SIZE:,}",
        "kv_weights": f"{num_weights * shape.item_bytes / 1e9:.1f}",
        "read_ms": f"{1e3 * read_s:.0f}",
        "claimed_s": f"{TOKENS * read_s:.0f}",
        "parameters": f"{PARAMETERS / 1e9:.0f}",
        "recompute_s": f"{recompute_s:.1f}",
        "bandwidth": f"{BANDWIDTH / 1e12:g}",
        "rate": f"{RATE / 1e12:g}",
    }
