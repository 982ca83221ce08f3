"""What the caller may choose.

Frozen dataclasses that validate themselves: an object that exists is valid, so nothing below checks
again. A wrong value is a `TypeError` or `ValueError` that names field, value and what would do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from math import inf
from typing import Any


def check(name: str, value: Any, kind: str = "int", low: float = -inf, high: float = inf,
          choices: Sequence[Any] = ()) -> None:
    """Raise unless `value` is of a `kind` as in annotations, within bounds, and a choice."""
    kinds = kind.replace("None", "NoneType").replace("float", "int | float").split(" | ")
    # The exact type: a bool is an int to isinstance, and never what was meant.
    if type(value).__name__ not in [part.split("[")[0] for part in kinds]:
        raise TypeError(f"{name} must be {kind}, got {value!r}")
    if choices and value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")
    if isinstance(value, (int, float)) and not (low <= value <= high and abs(value) < inf):
        raise ValueError(f"{name} must be finite, from {low} to {high}, got {value}")


def check_token_ids(name: str, ids: Iterable[Any], vocab_size: float = inf) -> None:
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:  # only then the slow check
            check(f"every token id in {name}", token, "int", 0, vocab_size - 1)


def option(default: Any, low: float = -inf, high: float = inf, choices: Sequence[Any] = ()) -> Any:
    """A dataclass field with bounds, or choices, for `Checked`."""
    return field(default=default, metadata={"low": low, "high": high, "choices": choices})


class Checked:
    """Checks every field against its annotation, and against its bounds if it is an `option`."""

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]  # always mixed into a dataclass
            check(f.name, getattr(self, f.name), str(f.type), **f.metadata)


@dataclass(frozen=True)
class SamplingParams(Checked):
    """How the tokens of one request are chosen; names and defaults are vLLM's.

    `n` continuations of one prompt share its K and V. `temperature=0` is greedy. `top_k=0` (or
    -1), `top_p=1` and `min_p=0` keep every token. `seed` makes the draws repeatable, whoever else
    is served (None: one drawn from the engine's).
    `max_tokens=None` runs to `max_model_len`. No stop or EOS token comes among the first
    `min_tokens`; `ignore_eos` goes on behind one. `stop` strings end a sequence and are left out of
    its text; `stop_token_ids` end it and stay in. `logprobs=k` returns the log-probabilities of the
    k most likely tokens and of the sampled one, at every position. `cache_salt` keeps cached blocks
    apart from those of requests with another salt.
    """

    n: int = option(1, low=1)
    temperature: float = option(1.0, low=0, high=1e30)
    top_p: float = option(1.0, low=1e-6, high=1)
    top_k: int = option(0, low=-1, high=2**31)
    min_p: float = option(0.0, low=0, high=1)
    max_tokens: int | None = option(16, low=1)
    min_tokens: int = option(0, low=0, high=2**31)
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | set[int] | None = None
    ignore_eos: bool = False
    seed: int | None = option(None, low=0, high=2**63 - 1)
    logprobs: int | None = option(None, low=0)
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check("min_tokens", self.min_tokens, high=self.max_tokens or inf)
        if not all(type(stop) is str and stop for stop in self.stop_strings):
            raise ValueError(f"stop must be strings, and none of them empty, got {self.stop!r}")
        check_token_ids("stop_token_ids", self.stop_token_ids or ())

    @property
    def stop_strings(self) -> Sequence[str]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()


@dataclass(frozen=True)
class BeamSearchParams(Checked):
    """A beam search, with the rules of transformers' `generate(num_beams=beam_width)`.

    Complete beams are ranked by their summed log-probability / length**length_penalty.
    `early_stopping` ends when there are `beam_width` of them, and else it goes on while the best
    running one, as it is, would be better than the last of them. Beams end after `max_tokens`, or
    at an EOS token but with `ignore_eos`.
    """

    beam_width: int = option(MISSING, low=1)
    max_tokens: int = option(MISSING, low=1)
    length_penalty: float = option(1.0, low=-10, high=10)
    early_stopping: bool = False
    ignore_eos: bool = False


@dataclass(frozen=True)
class EngineConfig(Checked):
    """The keyword arguments of `LLM`, counted in tokens, blocks or sequences.

    `None` and "auto" are decided from the model, the machine and its memory; see the startup log.
    `model` is a directory or a hub id (None: the bundled one); `load_format="dummy"` gives it
    random weights. There are `num_blocks` of `block_size` tokens (None: what
    `gpu_memory_utilization` of the GPU leaves, 4 GiB on a CPU). A step has at most `max_num_seqs`
    sequences and `max_num_batched_tokens` tokens, a sequence at most `max_model_len`, prompt
    included.
    `swap_space` is in GiB of CPU memory; `preemption_mode="auto"` swaps groups of several sequences
    and computes single ones again. `attention_backend`: "torch" runs anywhere, "triton" on GPUs,
    "flash" like it but with prompts by FlashAttention. `enforce_eager` does without CUDA graphs.
    `tensor_parallel_size` is the number of ranks: processes, each with a GPU where there are any.
    `seed` is where requests without a seed get theirs from.
    """

    model: str | None = None
    dtype: str = option("auto", choices=("auto", "float32", "float16", "bfloat16"))
    device: str = option("auto", choices=("auto", "cpu", "cuda"))
    block_size: int = option(16, choices=[2**i for i in range(11)])  # kernels need powers of two
    num_blocks: int | None = option(None, low=1, high=2**31)
    max_model_len: int | None = option(None, low=2)
    max_num_seqs: int = option(256, low=1, high=2**20)
    max_num_batched_tokens: int = option(8192, low=1)
    gpu_memory_utilization: float = option(0.9, low=0.01, high=1)
    swap_space: float = option(4, low=0, high=2**20)
    enable_prefix_caching: bool = True
    preemption_mode: str = option("auto", choices=("auto", "recompute", "swap"))
    attention_backend: str = option("auto", choices=("auto", "torch", "triton", "flash"))
    enforce_eager: bool = False
    tensor_parallel_size: int = option(1, low=1)
    load_format: str = option("auto", choices=("auto", "dummy"))
    seed: int = option(0, low=0, high=2**63 - 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        # With fewer some sequences could not decode in a step.
        check("max_num_batched_tokens, at least max_num_seqs,", self.max_num_batched_tokens,
              low=self.max_num_seqs)
