"""What the caller may choose: the parameters of a request, and the engine's options.

These dataclasses are frozen, and each checks its fields when it is made: what exists is
valid. `dataclasses.replace` makes a changed copy.
"""

from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from nanopaged.checks import Checked, bounded, check


@dataclass(frozen=True)
class SamplingParams(Checked):
    """How to choose the tokens of one request. Names and defaults are vLLM's.

    n: how many continuations to generate. They share the prompt's K and V.
    temperature: 0 always takes the most likely token.
    top_p, top_k: sample only among the most likely tokens. 1 and 0 (or -1) keep all.
    min_p: sample only tokens that are at least `min_p` times as likely as the most
        likely one. This counts before top_k and top_p.
    max_tokens: None means as many as the engine's `max_model_len` allows.
    min_tokens: before that many tokens, no EOS or stop token is sampled, even with
        `ignore_eos`, and stop strings are ignored.
    stop: one string or several. A stop string ends the sequence and is cut off. Of
        several, the one that is complete first counts.
    stop_token_ids: tokens that end a sequence, as EOS tokens do.
    ignore_eos: continue after an EOS token.
    seed: makes the draws repeatable, up to the last bits of logits, which may depend on
        what else the engine serves. None lets the engine choose one.
    logprobs: how many of the most likely tokens to return log-probabilities for, at
        every position, besides the sampled one.
    prompt_logprobs: the same for the tokens of the prompt. It is then computed without
        the prefix cache.
    cache_salt: only requests with the same salt share cached blocks.
    skip_special_tokens: leave special tokens out of the text.
    repetition_penalty: above 1 makes tokens of the prompt and the answer less likely.
    presence_penalty, frequency_penalty: subtracted from the logit of every token that
        is already in the answer: once, or for each occurrence.
    logit_bias: what to add to the logits, by token id. -inf forbids a token.
    logits_processors: functions that change the logits, called one after another before
        all other options take effect. Each gets the ids of the tokens so far,
        [1, num_tokens], and the logits, [1, vocab_size], and returns new logits.
        transformers' processors work. The sequences of a request share them, so use a
        stateful one only with n=1.
    """

    n: int = bounded(1, low=1)
    _: KW_ONLY
    temperature: float | int = bounded(1.0, high=1e30)
    top_p: float | int = bounded(1.0, low=1e-6, high=1)
    top_k: int = bounded(0, low=-1)
    min_p: float | int = bounded(0.0, high=1)
    max_tokens: int | None = bounded(16, low=1)
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    skip_special_tokens: bool = True
    repetition_penalty: float | int = bounded(1.0, low=1e-6)
    presence_penalty: float | int = bounded(0.0, low=-2, high=2)
    frequency_penalty: float | int = bounded(0.0, low=-2, high=2)
    logit_bias: dict[int, float | int] | None = None
    logits_processors: list[Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        check(all(map(callable, self.logits_processors or [])), "logits_processors",
              "functions", self.logits_processors, TypeError)
        bias: Any = self.logit_bias or {}
        check(all(value <= 1e30 for value in bias.values()), "logit_bias",  # so no NaN
              "numbers up to 1e30", self.logit_bias)
        check("" not in self.stop_strings, "stop", "free of empty strings", self.stop)
        if self.max_tokens is not None:
            check(self.min_tokens <= self.max_tokens, "min_tokens",
                  f"at most max_tokens={self.max_tokens}", self.min_tokens)

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @cached_property
    def draw_numbers(self) -> tuple[float, ...]:
        """What `Draws` has of a request, in its order (`batch.py`)."""
        return (self.temperature, self.top_k or 2**31, self.top_p, self.min_p,
                self.repetition_penalty, self.presence_penalty, self.frequency_penalty)

    @cached_property
    def has_penalties(self) -> bool:
        return bool(self.repetition_penalty != 1 or self.presence_penalty
                    or self.frequency_penalty)

    @cached_property
    def changes_logits(self) -> bool:
        """Whether this request changes the logits before a token is chosen."""
        return bool(self.logits_processors or self.logit_bias or self.has_penalties)


@dataclass(frozen=True)
class BeamSearchParams(Checked):
    """A beam search, with the rules of transformers' `generate(num_beams=beam_width)`.

    Beams are ranked by log-probability / length**length_penalty. The search ends when
    `beam_width` beams are complete, and no running one scores above the worst of them.
    A beam is complete after `max_tokens`, or at an EOS token without `ignore_eos`.
    """

    beam_width: int = bounded(low=1)
    max_tokens: int = bounded(low=1)
    _: KW_ONLY
    length_penalty: float | int = bounded(1.0, low=-10, high=10)
    ignore_eos: bool = False


@dataclass(frozen=True)
class EngineConfig(Checked):
    """The keyword arguments of `LLM`. The engine chooses those that are "auto".

    model: a directory, or the id of a repository on the Hugging Face hub. None stands
        for the bundled model.
    dtype: "auto" is the checkpoint's dtype if the processor has instructions for it. A
        CPU without them stores bfloat16 and computes in float32: answers are faster
        than with "float32", long prompts slower. Instead of float16, a CPU takes
        bfloat16 (or float32); instead of bfloat16, a GPU before Ampere takes float16.
    device: "auto" is "cuda" if there is a GPU.
    block_size: how many tokens a block holds.
    num_blocks: None means enough for max_num_seqs sequences of full length, if they
        fit. The limit is `gpu_memory_utilization` on a GPU. On a CPU it is 4 GiB, or
        half of the memory that is still free if that is less.
    max_model_len: the length of the longest sequence, with its prompt. None means what
        the model allows. The pool's size is a limit, too. So is the sliding window of
        the few families whose modules do not pass it to our attention.
    max_num_seqs: how many sequences may run at the same time. If they have states,
        there must be memory for all of these.
    max_num_batched_tokens: how many tokens one step may compute. The next token of an
        answer waits for the chunks of prompts in its step, so this limits the wait.
        None means 8192 on a GPU. On a CPU it means 256, or 2048 while no answer is
        running and all prompts are from `generate` and the like.
    gpu_memory_utilization: the share of the GPU's memory that may be in use, by all
        processes together.
    swap_space: GiB of CPU memory for blocks, if `preemption_mode` is "swap".
    enable_prefix_caching: let requests that begin alike share blocks. Families whose
        sequences have states (Qwen3.5, Mamba) do without: a shared beginning has no
        state after it.
    preemption_mode: what to do with a group's K and V when the pool is full: "swap"
        them to CPU memory, or "recompute" them later.
    attention_backend: "torch" runs anywhere, "numba" on CPUs, "triton" on GPUs. "flash"
        is Triton, with FlashAttention for prompts.
    enforce_eager: compile nothing and record no CUDA graphs. The engine starts sooner
        and runs more slowly.
    tensor_parallel_size: the number of ranks, which are processes that torchrun starts.
        Each has a GPU of its own if there are any.
    model_impl: "nanopaged" is our own decoder, for Llama, Mistral, Qwen2 and Qwen3.
        "transformers" uses the modules of transformers, with our attention plugged in.
        "auto" uses ours for these families, and transformers' for all others.
    load_format: "dummy" gives random weights to a model that has only a config.json.
    batch_invariant: answers are the same to the bit, log-probabilities too, whatever
        else is in the batch. On a CPU, with our own decoder.
    seed: determines the seeds of requests that have none, and dummy weights.
    """

    model: str | Path | None = None
    _: KW_ONLY
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    block_size: Literal[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024] = 16
    num_blocks: int | None = bounded(None, low=1)
    max_model_len: int | None = bounded(None, low=2)
    max_num_seqs: int = bounded(256, low=1)
    max_num_batched_tokens: int | None = bounded(None, low=1)
    gpu_memory_utilization: float | int = bounded(0.9, low=0.01, high=1)
    swap_space: float | int = 4
    enable_prefix_caching: bool = True
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    attention_backend: Literal["auto", "torch", "numba", "triton", "flash"] = "auto"
    enforce_eager: bool = False
    tensor_parallel_size: int = bounded(1, low=1)
    model_impl: Literal["auto", "nanopaged", "transformers"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    batch_invariant: bool = False
    seed: int = 0

    @property
    def budget(self) -> int:
        """How many tokens one step may compute. On a CPU, start-up has set it."""
        return self.max_num_batched_tokens or 8192
