"""KV arithmetic: what the K and V of a model need, from its config.json alone.

    >>> shape = KVShape(layers=28, heads=16, kv_heads=8, head_dim=128, dtype="bfloat16")
    >>> shape.bytes_per_token  # K and V, of all layers
    114688
    >>> shape.sequences_in(24 * GIB, tokens=4096)
    54
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30
MOST_LAYERS = 10_000
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
ATTENTION = ("full_attention", "sliding_attention")  # kinds of layers that keep K and V


@dataclass(frozen=True)
class KVShape:
    """The sizes that K and V depend on: neither vocabulary nor hidden size is among
    them.
    """

    layers: int
    heads: int  # query heads
    kv_heads: int  # as many, or fewer if several query heads share one
    head_dim: int
    dtype: str

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def bytes_per_layer(self) -> int:
        """Of one token: its K and its V, in every KV head."""
        return 2 * self.kv_heads * self.head_dim * self.item_bytes

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.bytes_per_layer

    @property
    def group_size(self) -> int:
        """How many query heads share one KV head."""
        return self.heads // self.kv_heads

    @property
    def ungrouped(self) -> "KVShape":
        """The same model, if each query head had a KV head of its own."""
        return KVShape(
            self.layers, self.heads, self.heads, self.head_dim, self.dtype)

    def total(self, tokens: int, seqs: int) -> int:
        """The bytes of `seqs` sequences of `tokens` tokens each."""
        return self.bytes_per_token * tokens * seqs

    def sequences_in(self, memory: float, tokens: int) -> int:
        """How many sequences of `tokens` tokens fit into `memory` bytes."""
        return int(memory // self.total(tokens, seqs=1))


# As in the config.json that each model is published with. OPT-13B, the paper's model,
# is older than grouped heads, and so is Llama 2 of this size.
MODELS = {
    "Qwen3-0.6B": KVShape(28, 16, 8, 128, "bfloat16"),
    "Qwen3-8B": KVShape(36, 32, 8, 128, "bfloat16"),
    "Llama-2-7B": KVShape(32, 32, 32, 128, "float16"),
    "Llama-3-8B": KVShape(32, 32, 8, 128, "bfloat16"),
    "OPT-13B": KVShape(40, 40, 40, 128, "float16"),
    "Llama-3-70B": KVShape(80, 64, 8, 128, "bfloat16"),
}


def read_shape(path: str | Path, dtype: str | None = None) -> KVShape:
    """The shape of the model of a config.json, or of a directory that has one.

    transformers knows what each family calls these sizes, and what is left out.
    `dtype` is that of K and V; None takes the checkpoint's.
    """
    config = load_text_config(Path(path).expanduser())
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(
            "this model keeps compressed latents (MLA) in place of K and V: the sum "
            "2 x layers x KV heads x head_dim does not hold for it")
    kinds = getattr(config, "layer_types", None) or []
    others = sorted(set(kinds) - set(ATTENTION))
    if others:
        raise ValueError(
            f"this model has layers of kind {', '.join(others)}, which keep no K and V "
            "for every token: the sum does not hold for it")

    heads = size_of(config, "num_attention_heads")
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or size_of(config, "hidden_size") // heads
    name = dtype or str(config.dtype or "bfloat16").removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise ValueError(f"dtype must be one of {', '.join(ITEM_BYTES)}, got {name}")
    layers = size_of(config, "num_hidden_layers")
    return KVShape(layers, heads, kv_heads, head_dim, name)


def load_text_config(path: Path) -> Any:
    """The part of a config that describes the language model."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"{file} must be a config.json or a directory that has one: download it "
            "with `hf download Qwen/Qwen3-8B config.json`, for example")
    try:
        json.loads(file.read_text(encoding="utf-8"), object_hook=check_counts)
        from transformers import AutoConfig  # some seconds: only when it is needed

        return AutoConfig.from_pretrained(file).get_text_config()
    except Exception as error:  # transformers', JSON's and the system's own
        raise ValueError(
            f"{file} must be a config.json that transformers knows: {error}") from error


def check_counts(fields: dict[str, Any]) -> None:
    """transformers makes a list with an item for each layer, and for each label."""
    for name, value in fields.items():
        is_count = isinstance(value, int) and ("layer" in name or "label" in name)
        if is_count and value > MOST_LAYERS:
            raise ValueError(f"{name} must be at most {MOST_LAYERS:,}")


def size_of(config: Any, name: str) -> int:
    size = getattr(config, name, None)
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"{name} in config.json must be at least 1, got {size!r}")
    return size


def describe(shape: KVShape, tokens: int, seqs: int, memory: float) -> str:
    """The sum, step by step; `memory` is in GiB."""
    heads = f"{shape.kv_heads} KV heads of {shape.head_dim}"
    if shape.group_size > 1:
        heads += f", each for {shape.group_size} of the {shape.heads} query heads"
    item = f"{shape.item_bytes} bytes ({shape.dtype})"
    held = f"{memory:,g} GiB hold"
    lines = [
        f"{shape.layers} layers; {heads}",
        "",
        f"a token in a layer    2 (K and V) x {shape.kv_heads} x {shape.head_dim} x "
        f"{item} = {shape.bytes_per_layer:,} bytes",
        f"a token               {shape.layers} layers x {shape.bytes_per_layer:,} = "
        f"{shape.bytes_per_token:,} bytes",
        f"{tokens:,} tokens x {seqs:,}".ljust(22) + gib(shape.total(tokens, seqs)),
        held.ljust(22) + how_many(shape, tokens, memory),
    ]
    if shape.group_size > 1:
        alone = shape.ungrouped
        lines += [
            "",
            f"Without grouped heads: {alone.bytes_per_token:,} bytes a token, "
            f"{gib(alone.total(tokens, seqs))}, {how_many(alone, tokens, memory)}.",
        ]
    else:
        lines += ["", "Its heads are not grouped: each query head has its own K and V."]
    return "\n".join([*lines, "This is K and V alone: the weights come on top."])


def how_many(shape: KVShape, tokens: int, memory: float) -> str:
    count = shape.sequences_in(memory * GIB, tokens)
    word = "sequence" if count == 1 else "sequences"
    return f"{count:,} {word} of {tokens:,} tokens"


def token_bytes(llm: Any) -> int:
    """What the pool of a running engine has for the K and V of a token."""
    return int(llm.runner.kv_caches[:, 0].nbytes) // int(llm.config.block_size)


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f} GiB"
