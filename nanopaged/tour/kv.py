"""How much memory the K and V of a model need. It follows from sizes in config.json.

    >>> MODELS["Qwen3-0.6B"].bytes_per_token  # K and V, of all layers
    114688
    >>> 24 * GIB // MODELS["Qwen3-0.6B"].total(tokens=4096, seqs=1)  # fit in 24 GiB
    54
"""

from typing import Any, NamedTuple

from nanopaged.config import EngineConfig

GIB = 2**30
ELEMENT_BYTES = 2  # in float16 and bfloat16


class KVShape(NamedTuple):
    """The sizes that K and V depend on. Vocabulary and hidden size do not matter."""

    layers: int
    heads: int  # query heads
    kv_heads: int  # as many, or fewer if several query heads share one
    head_dim: int

    @property
    def bytes_per_layer(self) -> int:
        """Of one token: its K and its V, in every KV head."""
        return 2 * self.kv_heads * self.head_dim * ELEMENT_BYTES

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.bytes_per_layer

    def total(self, tokens: int, seqs: int) -> int:
        """The bytes of `seqs` sequences of `tokens` tokens each."""
        return self.bytes_per_token * tokens * seqs


# As in the config.json that each model is published with. OPT-13B, the paper's model,
# is older than grouped heads, and so is Llama 2 of this size.
MODELS = {
    "Qwen3-0.6B": KVShape(28, 16, 8, 128),
    "Qwen3-8B": KVShape(36, 32, 8, 128),
    "Llama-2-7B": KVShape(32, 32, 32, 128),
    "Llama-3-8B": KVShape(32, 32, 8, 128),
    "OPT-13B": KVShape(40, 40, 40, 128),
    "Llama-3-70B": KVShape(80, 64, 8, 128)}

# The paper's smallest experiment: OPT-13B on an A100 with 40 GB, of which we assume
# four fifths of the bytes/s on its data sheet, and half of the operations/s.
BANDWIDTH = 0.8 * 1.555e12
RATE = 0.5 * 312e12
PARAMETERS = 13e9  # 2 bytes each, and 2 operations per token
LONGEST = 2048  # tokens in and out together: OPT's context
SLOTS = 12 * GIB // MODELS["OPT-13B"].bytes_per_token  # what is left for K and V

# The tour's own example, wherever no figure of the paper's is reproduced: Llama-3-8B in
# bfloat16 on a GPU with 80 GB.
LLAMA = MODELS["Llama-3-8B"]
WEIGHTS = 2 * 8.03e9  # bytes; for a token, as many operations where it is multiplied
EMBEDDING = 2 * 128_256 * 4096  # bytes: looked up, never multiplied
DECODED = WEIGHTS - EMBEDDING  # what a decode reads, and multiplies
# What every token of a prompt is multiplied with. (The matrix that makes the logits, as
# large as the embeddings, is needed only where a token is sampled.)
LAYERS = DECODED - EMBEDDING
DEFAULTS = EngineConfig()
SHARE = DEFAULTS.gpu_memory_utilization


def step_ms(gpu: dict[str, float], seqs: int, length: float, kv_share: float = 1.0
            ) -> float:
    """A decode of so many sequences: its products wait for the weights, or for the
    operations. In each layer, attention comes after them, and waits for K and V.
    """
    products = max(DECODED / gpu["bytes_per_s"], seqs * DECODED / gpu["flops_per_s"])
    num_bytes = kv_share * seqs * length * LLAMA.bytes_per_token
    return 1000 * (products + num_bytes / gpu["bytes_per_s"])


def prompt_ms(gpu: dict[str, float], tokens: int) -> tuple[float, float]:
    """The products of a prompt, and its attention: a token sees half of the others."""
    scores = tokens * tokens / 2 * LLAMA.layers * LLAMA.heads * LLAMA.head_dim
    return (1000 * tokens * LAYERS / gpu["flops_per_s"],
            1000 * 4 * scores / gpu["flops_per_s"])


# "room" is for so many tokens. Of an A100, we assume the same shares as above.
EXAMPLE: dict[str, Any] = {
    "defaults": DEFAULTS, "share": SHARE, "llama": LLAMA, "weights": WEIGHTS,
    "gpu_bytes": 85e9, "room": int((SHARE * 85e9 - WEIGHTS) / LLAMA.bytes_per_token),
    "a100": {"bytes_per_s": 0.8 * 2.039e12, "flops_per_s": RATE},
    "decoded": DECODED, "layers": LAYERS, "embedding": EMBEDDING,
    "step_ms": step_ms, "prompt_ms": prompt_ms}


def token_bytes(llm: Any) -> int:
    """What the pool of a running engine has for the K and V of a token."""
    return int(llm.engine.runner.kv_caches[:, 0].nbytes) // int(llm.config.block_size)
