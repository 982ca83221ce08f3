"""Qwen3-MoE in our own decoder: the tokens of transformers, for all kinds of routing.

    python moe.py [number of kinds]
    torchrun --nproc-per-node 2 moe.py 1
"""

import os
import sys

import torch
from any_decoder import MOE, check_family

KINDS = [
    {"norm_topk_prob": True},
    {"norm_topk_prob": False, "num_hidden_layers": 4, "mlp_only_layers": [1],
     "decoder_sparse_step": 2},
    {"num_experts_per_tok": 1},
    {"num_experts_per_tok": 8, "tie_word_embeddings": True}]

if __name__ == "__main__":
    torch.set_num_threads(1)
    size = int(os.environ.get("WORLD_SIZE", 1))
    # A rank serves one engine only.
    modes = ["recompute"] if size > 1 else ["recompute", "swap"]
    for fields in KINDS[: int(sys.argv[1]) if sys.argv[1:] else None]:
        decoder = check_family("qwen3_moe", modes=modes, tensor_parallel_size=size,
                               **MOE | fields)
        assert decoder == "CausalLM", decoder
    print("moe: ok")
