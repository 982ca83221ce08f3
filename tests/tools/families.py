"""Every causal language model of transformers, with tiny random weights: which ones the
engine computes, with transformers' own tokens, and which ones it refuses, and why.

    python tests/tools/families.py [families]    # all: writes results/families.json

Each family is served by both backends of CPUs, in blocks of 4 and 16 tokens, with a
budget of 7 tokens a step, shared prefixes, and a pool that is too small for all. Where
a family has windows, they have 8 tokens. All tokens of an answer are then compared with
what transformers computes for the whole sequence, by its own eager attention.
"""

import json
import os
import random
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from nanopaged import LLM, EngineConfig, SamplingParams
from nanopaged.loading.checkpoint import load_config

logging.set_verbosity_error()
logging.disable_progress_bar()
RESULTS = Path(__file__).parents[1] / "results/families.json"
VOCAB, NEAR_TIE = 160, 1e-3
# Sizes, by all names that families give them: a config takes those that it knows. And
# what some families want besides: every type of layer, and layers of two shapes.
TABLES = json.loads(Path(__file__).with_name("sizes.json").read_text())
SIZES = {name: size for group in TABLES["sizes"].values()
         for name, size in group.items()}
MORE = TABLES["more"]
OTHERS = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
          "num_attention_heads": 2}
TYPES = {  # for families with types of layers
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


def names():
    """The model types of all causal language models."""
    types = {config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING}
    return sorted(types)


def tiny_config(family, **more):
    """A config with small sizes; None if the family cannot be made so small."""
    config = AutoConfig.for_model(family)
    known = config.get_text_config(decoder=True).to_dict()
    known |= {name: None for name in getattr(config, "attribute_map", {})}
    fields = {name: value for name, value in SIZES.items() if name in known}
    types = known.get("layer_types") or []
    if "sliding_attention" in types or "use_sliding_window" in known:
        fields |= TYPES
    if "qk_rope_head_dim" in known:  # MLA counts differently
        fields.pop("head_dim", None)
        fields["num_key_value_heads"] = 4
    fields |= MORE.get(family, {}) | more
    text = config.get_text_config(decoder=True)
    for name in [name for name, value in vars(config).items() if value is text]:
        others = {other: OTHERS for other in ("vision_config", "audio_config")
                  if hasattr(config, other)}
        return AutoConfig.for_model(family, **{name: fields} | others)
    kinds = known.get("layer_types")
    if kinds and "layer_types" not in fields and "layers_block_type" not in fields:
        fields["layer_types"] = kinds[:3]
    if known.get("mlp_layer_types"):
        fields["mlp_layer_types"] = known["mlp_layer_types"][:3]
    return AutoConfig.for_model(family, **fields)


def write_model(family, folder, seed=0, **more):
    """A tiny random model; returns it, as transformers computes it."""
    torch.manual_seed(seed)
    config = tiny_config(family, **more)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    size = sum(parameter.numel() for parameter in model.parameters())
    assert size < 4e7, f"too large: {size} weights"
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        is_vector = weight.ndim == 1 and name.endswith("weight")
        scale = 0.05 if "embed" in name or "wte" in name else 0.2
        noise = torch.randn(weight.shape, generator=generator)
        weight.data = scale * noise + float(is_vector)
    model.tie_weights()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    # (Some families set the embedding of the padding token to zero when it is read.)
    return type(model).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def compare(model, prompt, tokens):
    """Whether each token is the one that transformers would choose, or ties with it."""
    ids = torch.tensor([prompt + tokens])
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return bool((logits.amax(-1) - chosen).max() < NEAR_TIE)


def prompts(vocab_size=VOCAB):
    rng = random.Random(0)
    prefix, *rest = [[rng.randrange(3, vocab_size) for _ in range(length)]
                     for length in (9, 1, 5, 23, 40, 11, 3)]
    return [prefix * (i % 2) + tokens for i, tokens in enumerate(rest)]


OPTIONS = {"model_impl": "transformers"}
CASES = [
    {"block_size": 4, "num_blocks": 24, "attention_backend": "numba"},
    {"block_size": 16, "num_blocks": 9, "attention_backend": "torch",
     "preemption_mode": "swap", "swap_space": 0.001}]


def try_config(family, folder, error):
    """A family whose models need more than sizes: does its config.json say enough?"""
    try:
        AutoConfig.for_model(family).save_pretrained(folder)
        load_config(EngineConfig(folder, model_impl="transformers"))
    except ValueError as refusal:
        return "refused", str(refusal)
    except Exception as other:
        return "not made", f"{other!r}"[:200]
    return "not made", f"{error!r}"[:200]


def try_family(family, cases=CASES, **more):
    """(outcome, reason): "equal", "refused", "wrong", "crashed" or "not made"."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = write_model(family, folder, **more)
        except Exception as error:
            return try_config(family, folder, error)
        for options in cases:
            try:
                llm = LLM(folder, dtype="float32", device="cpu", max_num_seqs=8,
                          max_num_batched_tokens=7, **OPTIONS | options)
            except ValueError as error:
                return "refused", str(error)
            except Exception as error:
                return "crashed", repr(error)[:300]
            with llm:
                params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
                longest = llm.engine.max_model_len
                asked = [p for p in prompts() if len(p) + 20 <= longest]
                if not asked:  # the window is the limit
                    asked = [[5, 6, 7], [5, 6, 7, 8], [9]]
                    params = replace(params, max_tokens=None)
                try:
                    outputs = llm.generate(asked, params, use_tqdm=False)
                except Exception as error:
                    return "crashed", repr(error)[:300]
            answers = [output.outputs[0].token_ids for output in outputs]
            if len(set(sum(answers, []))) < 3:
                return "not made", "the model repeats itself"
            for prompt, tokens in zip(asked, answers, strict=True):
                if not compare(model, prompt, tokens):
                    return "wrong", f"{options}: {prompt} {tokens}"
    return "equal", f"up to {llm.engine.max_model_len} tokens"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = {}
    for name in sys.argv[1:] or names():
        results[name] = try_family(name)
        print(name, *results[name], flush=True)
    outcomes = [outcome for outcome, _ in results.values()]
    print({outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))})
    if not sys.argv[1:]:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
