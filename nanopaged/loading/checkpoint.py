"""What a checkpoint says: its config, its tokenizer, and its parameters for requests
that have none.
"""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, TokenizersBackend
from transformers.utils import cached_file

from nanopaged.checks import check
from nanopaged.config import EngineConfig
from nanopaged.loading.any_decoder import check_family
from nanopaged.loading.errors import REPAIR, explained

# What would change an answer, if transformers read over it.
READ = (".json", ".jinja", ".model", ".safetensors", "merges.txt", "vocab.txt")


def find_file(name: str | Path, file: str) -> Any:
    """The path of a file of the checkpoint; None if it has no such file."""
    return cached_file(name, file, _raise_exceptions_for_missing_entries=False)


def check_files(folder: Path) -> None:
    """ValueError if a name in it has no file: where a link leads nowhere, transformers
    does without.
    """
    for path in folder.glob("[!.]*"):  # an editor's locks, for example, are links
        is_filled = path.is_file() and path.stat().st_size > 0
        with explained(f"cannot read {path.name} of {folder} ({REPAIR}): "):
            check(is_filled or not path.name.endswith(READ), "it", "a file with "
                  "contents, and no link to nothing", os.path.realpath(path))


# -- config.json -----------------------------------------------------------------------

# What the engine reads from a config, as transformers' `attribute_map` names it for
# every family. A family may lack some of them.
COPIED = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "layer_types", "num_attention_heads", "num_key_value_heads", "head_dim", "dtype",
    "sliding_window", "max_position_embeddings", "rope_parameters", "rms_norm_eps",
    "attention_bias", "mlp_bias", "tie_word_embeddings")


class ModelConfig(SimpleNamespace):
    """What the engine knows about a model: the fields in `COPIED`, and

    source: a directory, or an id of the hub
    hf_config: config.json as transformers has read it
    model_impl: whose modules compute the model, "nanopaged" or "transformers"
    longest_sequence: how many tokens a sequence may have
    """


BUNDLED = Path(__file__).parents[1] / "shakespeare"
MODEL = ("an existing directory with a config.json, or the id of a repository on the "
         "Hugging Face hub")
# What config.json may say. There are more ways to rotate Q and K, but with these the
# angles depend on the position alone, and not on the length of the sequence.
ATTENTION = (None, "full_attention", "sliding_attention")
KNOWN = {
    "quantization_config": (None,),
    "rope_type": ("default", "linear", "llama3", "yarn", "proportional", None),
    "is_causal": (None, True),
    "layer_types": (*ATTENTION, "linear_attention", "conv", "hybrid", "mlp", "moe")}
# What our own decoder can compute. Transformers' modules compute the others.
OURS = {"model_type": ("llama", "mistral", "qwen2", "qwen3"), "hidden_act": ("silu",)}
WITHIN_OURS = {"layer_types": ATTENTION, "partial_rotary_factor": (None, 1)}


def load_config(config: EngineConfig) -> ModelConfig:
    """The model's config; ValueError if what `model_impl` names cannot compute it."""
    name = os.path.expanduser(BUNDLED if config.model is None else config.model)
    check(not Path(name, "adapter_config.json").is_file(), "model", "a whole model, "
          "and not an adapter (peft's `merge_and_unload` makes one of it)", name)
    is_local = os.path.lexists(Path(name, "config.json"))
    is_id = isinstance(config.model, str) and not os.path.isfile(name)
    check(is_local or is_id, "model", MODEL, name)
    remedy = REPAIR if is_local else f"model must be {MODEL}; is there a network?"
    with explained(f"cannot read config.json of {name} ({remedy}): "):
        found = AutoConfig.from_pretrained(name, trust_remote_code=False)
    check_files(Path(find_file(name, "config.json")).parent)
    # (A model may have other parts, with configs of their own.)
    text = found.get_text_config(decoder=True)
    impl = choose_decoder(config.model_impl, found, text)
    sizes = read_sizes(text, source=name, hf_config=found, model_impl=impl)
    sizes.longest_sequence = longest_sequence(config, sizes)
    return sizes


def choose_decoder(model_impl: str, found: Any, text: Any) -> str:
    """Whose modules compute the model; ValueError if they cannot."""
    facts = text.to_dict() | {
        "model_type": found.model_type,
        "quantization_config": getattr(found, "quantization_config", None)}
    # In transformers 5, `rope_parameters` has all fields about positions. If a family
    # has several types of layers, there may be such a dict for each type.
    ropes = facts.get("rope_parameters") or {}
    kinds = [rope for rope in ropes.values() if isinstance(rope, dict)] or [ropes]
    facts["rope_type"] = [rope.get("rope_type") for rope in kinds]
    # (Ours rotates whole heads, as Llama's in transformers does by default.)
    facts["partial_rotary_factor"] = [
        rope.get("partial_rotary_factor") for rope in kinds
        if rope.get("rope_type") in ("linear", "llama3", "yarn")]
    if model_impl == "auto":
        fits = all(facts.get(field) in known for field, known in OURS.items())
        model_impl = "nanopaged" if fits else "transformers"
    more = OURS | WITHIN_OURS if model_impl == "nanopaged" else {}
    for field, known in (KNOWN | more).items():
        value = facts.get(field)
        values = value if isinstance(value, list) else [value]
        check(all(each in known for each in values), f"{field} in config.json",
              f"one of {known}", value)
    if model_impl == "transformers":
        check_family(found)
    return model_impl


def read_sizes(text: Any, **more: Any) -> ModelConfig:
    """The fields in `COPIED`, whatever a family leaves out."""
    # Let sizes be read even if they differ between layers: `attend` pads K and V.
    text.allow_global_per_layer_attribute_access = True
    sizes = ModelConfig(**more, **{name: getattr(text, name, None) for name in COPIED})
    # Without attention (Mamba) there are no heads, and there is no longest sequence.
    num_heads = sizes.num_attention_heads = sizes.num_attention_heads or 1
    sizes.max_position_embeddings = sizes.max_position_embeddings or 2**15
    sizes.num_key_value_heads = sizes.num_key_value_heads or num_heads
    check(num_heads % sizes.num_key_value_heads == 0,
          "num_key_value_heads in config.json",
          f"a divisor of num_attention_heads={num_heads}", sizes.num_key_value_heads)
    # Multi-head latent attention (DeepSeek) rotates a part of each head.
    mla = [getattr(text, f"qk_{part}_head_dim", None) or 0 for part in ("nope", "rope")]
    sizes.head_dim = sum(mla) or sizes.head_dim or sizes.hidden_size // num_heads
    for layer in text.per_layer_config:  # the pool has the largest shape of K and V
        for name in ("head_dim", "num_key_value_heads"):
            most = max(getattr(sizes, name), getattr(layer, name, None) or 0)
            setattr(sizes, name, most)
    return sizes


def longest_sequence(config: EngineConfig, sizes: ModelConfig) -> int:
    """The most tokens a sequence may have; ValueError if more are asked for."""
    longest = sizes.max_position_embeddings
    # With these two ways to rotate Q and K, config.json may give the length before the
    # positions were stretched by `factor`.
    rope = sizes.rope_parameters or {}
    if rope.get("rope_type") in ("linear", "yarn"):
        original = rope.get("original_max_position_embeddings") or longest
        longest = max(longest, int(original * rope.get("factor", 1)))
    max_model_len = config.max_model_len or longest
    check(max_model_len <= longest, "max_model_len",
          f"at most {longest} for this model", max_model_len)
    return int(max_model_len)


# -- The tokenizer ---------------------------------------------------------------------

def load_tokenizer(name: str | Path) -> Any:
    """The tokenizer; None for a directory without one. (ByT5's has no other file than
    tokenizer_config.json.)
    """
    path = Path(name)
    if path.is_dir() and not [*path.glob("tokenizer*.*"), *path.glob("vocab.*")]:
        return None
    with explained(f"cannot read the tokenizer of {name} ({REPAIR}): "):
        # Some classes of transformers replace rules of tokenizer.json with their own.
        kind = TokenizersBackend if find_file(name, "tokenizer.json") else AutoTokenizer
        # With clean-up, the text of a token would depend on the tokens that follow.
        return kind.from_pretrained(
            name, clean_up_tokenization_spaces=False, trust_remote_code=False)


# -- generation_config.json ------------------------------------------------------------

# What is read as the parameters of a request.
DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty",
            "max_tokens")


def load_generation_config(model_config: ModelConfig, tokenizer: Any = None
                           ) -> tuple[list[int], dict[str, Any]]:
    """The ids of all EOS tokens, and the parameters for requests without their own.

    The tokenizer's EOS token comes first. The others, and the parameters, come from
    generation_config.json, if the model has one. It may name several EOS tokens where
    config.json has one or none.
    """
    name = model_config.source
    with explained(f"cannot read generation_config.json of {name} ({REPAIR}): "):
        found = GenerationConfig.from_model_config(model_config.hf_config)
        fields: dict[str, Any] = {"eos_token_id": found.eos_token_id}
        if find_file(name, "generation_config.json"):
            fields |= GenerationConfig.from_pretrained(name).to_diff_dict()
        eos = fields["eos_token_id"]
        eos = [getattr(tokenizer, "eos_token_id", None),
               *(eos if isinstance(eos, list) else [eos])]
        eos_ids = dict.fromkeys(int(each) for each in eos if each is not None)
    fields["max_tokens"] = fields.get("max_new_tokens")
    if fields.get("top_p") == 0:
        fields["top_p"] = 1e-6  # the least that is allowed; it keeps what ties
    params = {name: fields[name] for name in DEFAULTS if fields.get(name) is not None}
    return [id for id in eos_ids if id in range(model_config.vocab_size)], params
