"""What the caller may choose: options of the engine, parameters of a request.

These dataclasses are frozen and check themselves, so whatever exists is valid and
nobody checks it again. `dataclasses.replace` makes a changed copy. An error names the
field, what would be right, and the value.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints


def check(is_right: bool, name: str, expected: object, value: object,
          error: type[Exception] = ValueError) -> None:
    """Every error about a value that the caller passed is raised here, in one form."""
    if not is_right:
        raise error(f"{name} must be {expected}, got {value!r:.200}")


def fits(value: object, annotation: Any) -> bool:
    """Whether a value is what its annotation says."""
    options = get_args(annotation)
    if get_origin(annotation) is Literal:
        return repr(value) in map(repr, options)  # not `in options`: True equals 1
    if get_origin(annotation) is list:
        return isinstance(value, list) and all(type(v) is options[0] for v in value)
    if options:  # a union
        return any(fits(value, option) for option in options)
    is_bool = isinstance(value, bool)  # Python counts True among the integers
    kind = (int, float) if annotation is float else annotation
    return isinstance(value, kind) and is_bool == (annotation is bool)


def within(low: float, high: float, default: Any = MISSING) -> Any:
    """A field for a number from `low` to `high`, or None if its type allows that."""
    return field(default=default, metadata={"low": low, "high": high})


class Checked:
    """Base of the dataclasses that check their fields when they are made."""

    def __post_init__(self) -> None:
        annotations = get_type_hints(type(self))
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            error = ValueError if f.type.startswith("Literal") else TypeError
            expected = f.type.replace("Literal", "one of ")
            check(fits(value, annotations[f.name]), f.name, expected, value, error)
            if f.metadata and value is not None:
                low, high = f.metadata["low"], f.metadata["high"]
                limits = f"at least {low}" if high == inf else f"from {low} to {high}"
                check(low <= value <= high, f.name, limits, value)


@dataclass(frozen=True)
class SamplingParams(Checked):
    """How the tokens of one request are chosen; names and defaults are vLLM's.

    n: how many continuations; they share the K and V of the prompt.
    temperature: 0 always takes the most likely token.
    top_p, top_k: sample among the most likely tokens only. `top_p=1` and `top_k=0` keep
        all tokens.
    max_tokens: None means as many as the engine's `max_model_len` allows.
    min_tokens: before this many tokens, no EOS or stop token is sampled, and stop
        strings do not count.
    stop: one string or several. They end a sequence and are not part of its text.
    stop_token_ids: tokens that end a sequence, as EOS tokens do.
    ignore_eos: go on after an EOS token.
    seed: makes the draws repeatable, whatever else is served. None: the engine draws
        one.
    logprobs: how many of the most likely tokens to return log-probabilities for, at
        every position; the sampled one's comes too.
    cache_salt: requests share cached blocks only with requests of the same salt.
    """

    n: int = within(1, inf, default=1)
    temperature: float = within(0, 1e30, default=1.0)
    top_p: float = within(1e-6, 1, default=1.0)
    top_k: int = within(0, 2**31, default=0)
    max_tokens: int | None = within(1, inf, default=16)
    min_tokens: int = within(0, inf, default=0)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = within(0, 2**63 - 1, default=None)
    logprobs: int | None = within(0, 2**31, default=None)
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check(all(self.stop_strings), "stop", "strings that are not empty", self.stop)
        check(self.min_tokens <= (self.max_tokens or inf), "min_tokens",
              f"at most max_tokens={self.max_tokens}", self.min_tokens)

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


@dataclass(frozen=True)
class BeamSearchParams(Checked):
    """A beam search, with the rules of transformers' `generate(num_beams=beam_width)`.

    Beams are ranked by their score, log-probability / length**length_penalty. The
    search ends when `beam_width` beams are complete, and no running beam scores above
    the worst of them. A beam is complete after `max_tokens`, or with an EOS token
    unless `ignore_eos` is set.
    """

    beam_width: int = within(1, inf)
    max_tokens: int = within(1, inf)
    length_penalty: float = within(-10, 10, default=1.0)
    ignore_eos: bool = False


@dataclass(frozen=True)
class EngineConfig(Checked):
    """The keyword arguments of `LLM`. "auto" and None are decided by the engine.

    model: a directory, or a repository's id on the hub. None: the bundled model.
    dtype: "auto" is the checkpoint's, as far as the processor has instructions for it.
    device: "auto" is "cuda" if there is a GPU.
    block_size: tokens in a block.
    num_blocks: None means as many as can be used, and fit into
        `gpu_memory_utilization` of the GPU, or into 4 GiB on a CPU.
    max_model_len: the longest sequence, prompt included. None means as long as the
        model allows. It is lowered to what the pool holds.
    max_num_seqs, max_num_batched_tokens: the most sequences that run at the same time,
        and the most tokens that a step computes.
    gpu_memory_utilization: the part of the GPU's memory that may be in use, by other
        processes, too.
    swap_space: GiB of CPU memory for swapped blocks, if `preemption_mode` is "swap".
    enable_prefix_caching: let requests share the blocks of equal beginnings.
    preemption_mode: what happens to K and V when the pool is full: "recompute" or
        "swap".
    attention_backend: "torch" runs anywhere, "numba" on CPUs, "triton" on GPUs; "flash"
        is Triton with prompts by FlashAttention.
    enforce_eager: compile nothing and record no CUDA graphs: slower, but starts faster.
    tensor_parallel_size: the number of ranks, processes that torchrun starts. Each has
        a GPU of its own where there are any.
    load_format: "dummy" gives random weights to a model that has only a config.json.
    seed: where the seeds of requests without one come from, and dummy weights.
    """

    model: str | Path | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    block_size: Literal[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024] = 16
    num_blocks: int | None = within(1, 2**31, default=None)
    max_model_len: int | None = within(2, inf, default=None)
    max_num_seqs: int = within(1, 2**20, default=256)
    max_num_batched_tokens: int = within(1, inf, default=8192)
    gpu_memory_utilization: float = within(0.01, 1, default=0.9)
    swap_space: float = within(0, 2**20, default=4)
    enable_prefix_caching: bool = True
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    attention_backend: Literal["auto", "torch", "numba", "triton", "flash"] = "auto"
    enforce_eager: bool = False
    tensor_parallel_size: int = within(1, 2**10, default=1)
    load_format: Literal["auto", "dummy"] = "auto"
    seed: int = within(0, 2**63 - 1, default=0)
