"""Qwen3-MoE in our own decoder: the tokens of transformers, for all kinds of routing.

    python moe.py [number of kinds]
    torchrun --nproc-per-node 2 moe.py 1
"""

import os
import random
import sys
import tempfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nanopaged import LLM, SamplingParams

VOCAB = 160
SHAPE = {
    "hidden_size": 64, "intermediate_size": 136, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB,
    "max_position_embeddings": 256, "eos_token_id": 3, "bos_token_id": 1,
    "pad_token_id": None}
MOE = {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 8,
       "num_experts_per_tok": 3}
KINDS = [
    {"norm_topk_prob": True},
    {"norm_topk_prob": False, "num_hidden_layers": 4, "mlp_only_layers": [1],
     "decoder_sparse_step": 2},
    {"num_experts_per_tok": 1, "use_sliding_window": True, "sliding_window": 12},
    {"num_experts_per_tok": 8, "tie_word_embeddings": True}]
OPTIONS = {"dtype": "float32", "device": "cpu", "block_size": 4, "max_model_len": 96}


def write_model(folder, family, **fields):
    """A tiny model, and its copy in a directory. With usual random weights it would
    repeat one token forever, so they are larger here.
    """
    config = AutoConfig.for_model(family, **SHAPE | fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        scale = 0.05 if "embed_tokens" in name else 0.2
        weight.data.normal_(0, scale, generator=generator)
        weight.data += name.endswith("norm.weight")
    model.tie_weights()
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def check_tokens(model, prompt, tokens):
    """Each token is what transformers would choose (or ties with it, almost)."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    behind = logits.amax(-1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert behind.max() < 1e-3, (prompt, tokens, behind)


def check_family(family, modes=("recompute", "swap"), backend="torch",
                 tensor_parallel_size=1, **fields):
    """Chunks of prompts, shared prefixes, and a pool that is too small for all.

    Returns the name of the decoder.
    """
    rng = random.Random(0)
    prefix, *rest = [[rng.randrange(VOCAB) for _ in range(length)]
                     for length in (9, 1, 5, 23, 40, 11, 3)]
    prompts = [prefix * (i % 2) + tokens for i, tokens in enumerate(rest)]
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(folder, family, **fields)
        for mode in modes:
            with LLM(folder, **OPTIONS, num_blocks=40, max_num_batched_tokens=9,
                     attention_backend=backend, preemption_mode=mode,
                     tensor_parallel_size=tensor_parallel_size) as llm:
                params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
                outputs = llm.generate(prompts, params, use_tqdm=False)
                stats, decoder = llm.stats(), type(llm.engine.runner.model).__name__
            answers = [output.outputs[0].token_ids for output in outputs]
            for prompt, tokens in zip(prompts, answers, strict=True):
                check_tokens(model, prompt, tokens)
            # A model that repeats itself would prove nothing.
            assert len(set(sum(answers, []))) > 15, answers
            assert stats.prefix_hit_tokens >= 16 and stats.blocks_used == 0, stats
            assert getattr(stats, f"preemptions_{mode}") > 0, stats
    return decoder


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
