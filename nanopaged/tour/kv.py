"""KV arithmetic: what the K and V of a model need, from its config.json alone.

    >>> shape = KVShape(layers=28, heads=16, kv_heads=8, head_dim=128, dtype="bfloat16")
    >>> shape.bytes_per_token  # K and V, of all layers
    114688
    >>> 24 * GIB // shape.total(tokens=4096, seqs=1)  # sequences in 24 GiB
    54
"""

from pathlib import Path
from typing import Any, NamedTuple

from nanopaged.config import check

GIB = 2**30
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
ATTENTION = {"full_attention", "sliding_attention"}  # kinds of layers that keep K and V


class KVShape(NamedTuple):
    """The sizes that K and V depend on. Vocabulary and hidden size do not matter."""

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
        return self._replace(kv_heads=self.heads)

    def total(self, tokens: int, seqs: int) -> int:
        """The bytes of `seqs` sequences of `tokens` tokens each."""
        return self.bytes_per_token * tokens * seqs


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


def read_shape(path: str | Path) -> KVShape:
    """The shape of the model of a config.json, or of a directory that has one."""
    config = load_text_config(Path(path).expanduser())
    others = {*(getattr(config, "layer_types", None) or [])} - ATTENTION
    heads = getattr(config, "num_attention_heads", 0)
    if not heads:
        others.add("no attention")
    if getattr(config, "kv_lora_rank", None):
        others.add("compressed latents (MLA)")
    check(not others, "config.json", "that of a model that keeps K and V for every "
          "token, in every layer", ", ".join(sorted(others)))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    name = str(config.dtype or "bfloat16").removeprefix("torch.")
    check(name in ITEM_BYTES, "dtype", f"one of {', '.join(ITEM_BYTES)}", name)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return KVShape(config.num_hidden_layers, heads, kv_heads, head_dim, name)


def load_text_config(path: Path) -> Any:
    """The part of a config that describes the language model, as transformers reads it:
    it knows what each family calls these sizes, and what is left out.
    """
    file = path / "config.json" if path.is_dir() else path
    check(file.is_file(), "CONFIG", "a config.json or a directory that has one (get it "
          "with `hf download Qwen/Qwen3-8B config.json`, for example)", str(path))
    try:
        from transformers import AutoConfig  # some seconds: only when it is needed

        return AutoConfig.from_pretrained(file).get_text_config()
    except Exception as error:  # transformers' own, and the system's
        raise ValueError(
            f"{file} must be a config.json that transformers knows: {error}") from error


def describe(shape: KVShape, tokens: int, seqs: int, memory: float) -> str:
    """The sum, step by step; `memory` is in GiB."""

    def fits(each: KVShape) -> str:
        number = int(memory * GIB // each.total(tokens, seqs=1))
        return f"{memory:,g} GiB hold {number:,} sequences"

    item = f"{shape.item_bytes} bytes ({shape.dtype})"
    lines = [
        f"per token and layer   2 (K and V) x {shape.kv_heads} KV heads x "
        f"{shape.head_dim} x {item} = {shape.bytes_per_layer:,} bytes",
        f"per token             {shape.layers} layers x {shape.bytes_per_layer:,} = "
        f"{shape.bytes_per_token:,} bytes",
        f"{tokens:,} tokens x {seqs:,}".ljust(22) + gib(shape.total(tokens, seqs)),
        f"{fits(shape)} of {tokens:,} tokens",
    ]
    if shape.group_size > 1:
        alone = shape.ungrouped
        lines.append(
            f"Each KV head serves {shape.group_size} of {shape.heads} query heads. "
            f"Otherwise: {gib(alone.total(tokens, seqs))}, and {fits(alone)}.")
    return "\n".join([*lines, "The weights come on top."])


def token_bytes(llm: Any) -> int:
    """What the pool of a running engine has for the K and V of a token."""
    return int(llm.runner.kv_caches[:, 0].nbytes) // int(llm.config.block_size)


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f} GiB"
