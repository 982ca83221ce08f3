"""What the caller may choose: options of the engine, parameters of a request.

These dataclasses check themselves, so whatever exists is valid and nobody checks it
again. A wrong type is a `TypeError`, a wrong value a `ValueError`; both name the field,
the value and what would be right. Numbers may be NumPy's, and become Python's.
"""

import inspect
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from functools import partial
from math import inf
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeAlias

MAX_SEED = 2**63 - 1
DTYPES = {"half": "float16", "float": "float32"}  # aliases
P = ParamSpec("P")
PathLike: TypeAlias = str | os.PathLike[str]

EXERCISE = "penalties are an exercise of the tour (python -m nanopaged.tour)"
CONSTRAINED = "there is no constrained decoding"


def check_int(name: str, value: Any, low: int, high: float = inf,
              optional: bool = False) -> Any:
    """Return `value` as an int, if it is a whole number from `low` to `high`."""
    if optional and value is None:
        return None
    # A bool is an int to Python, but nobody means one where a number is asked for.
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {value!r:.80}")
    try:
        # Every array has __index__, but it fails unless the array is one integer.
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r:.80}") from None
    check_range(name, number, low, high)
    return number


def check_float(name: str, value: Any, low: float, high: float) -> float:
    """Return `value` as a float, if it is a number from `low` to `high`."""
    is_bool = "bool" in type(value).__name__  # Python's or NumPy's
    if is_bool or isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {value!r:.80}")
    number = float(value)
    check_range(name, number, low, high)
    return number


def check_range(name: str, value: Any, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN is not in any range
        limits = f"at least {low}" if high == inf else f"between {low} and {high}"
        raise ValueError(f"{name} must be {limits}, got {value}")


def check_type(name: str, value: Any, kind: Any, optional: bool = False) -> Any:
    """Return `value`, if it is of this type, or of one of these."""
    if not (isinstance(value, kind) or (optional and value is None)):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join(k.__name__ for k in kinds)
        raise TypeError(f"{name} must be a {expected}, got {value!r:.80}")
    return value


def check_path(name: str, value: Any) -> Any:
    """Return `value`, if it is a path, the id of a repository, or None."""
    return check_type(name, value, (str, os.PathLike), optional=True)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """Return `value`, if it is one of these strings."""
    check_type(name, value, str)
    if value not in choices:
        expected = ", ".join(map(repr, choices))
        raise ValueError(f"{name} must be one of {expected}, got {value!r:.80}")
    return str(value)


def check_dtype(name: str, value: Any) -> str:
    """Return torch's name of a dtype; `value` may be a torch.dtype."""
    text = value if isinstance(value, str) else str(value).removeprefix("torch.")
    choices = "auto", "float32", "float16", "bfloat16"
    return check_choice(name, DTYPES.get(text, text), choices)


def check_supported(name: str, value: Any, supported: Sequence[Any],
                    reason: str) -> Any:
    """Return `value`, if it asks for nothing that is missing here."""
    if value not in supported:
        raise ValueError(f"{name}={value!r:.80} is not supported: {reason}")
    return value


def check_token_ids(name: str, token_ids: Iterable[Any],
                    vocab_size: float = inf) -> list[int]:
    """Return a list of plain ints, if all are ids of the vocabulary."""
    checked = list(token_ids)
    for index, token in enumerate(checked):
        if type(token) is not int or not 0 <= token < vocab_size:
            what = f"every token id in {name}"
            checked[index] = check_int(what, token, 0, vocab_size - 1)
    return checked


def check_name(owner: str, name: str, known: Iterable[str],
               kind: type[Exception] = TypeError) -> None:
    """Raise an error of this kind, if `owner` has nothing of this name."""
    if name not in known:
        similar = get_close_matches(name, known, 1)
        hint = f": did you mean {similar[0]!r}?" if similar else ""
        raise kind(f"{owner} has no {name!r}{hint}")


def option(default: Any, check: Callable[..., Any], **limits: Any) -> Any:
    """A dataclass field that `Checked` checks by `check(name, value, **limits)`."""
    return field(default=default, metadata={"check": partial(check, **limits)})


def only(*supported: Any, reason: str) -> Any:
    """A field of vLLM's that accepts only these values; the first is the default."""
    return option(supported[0], check_supported, supported=supported, reason=reason)


class Checked:
    """A dataclass that checks its fields, when it is made and when one is changed.

    A checked value is written through `vars(self)`, so that it is not checked again.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __new__(cls, *values: Any, **named: Any) -> Any:
        for name in named:
            check_name(cls.__name__, name, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for f in fields(self):
            if "check" in f.metadata:
                value = f.metadata["check"](f.name, getattr(self, f.name))
                vars(self)[f.name] = value

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in vars(self):  # set by `__init__`, or misspelt
            known = self.__dataclass_fields__
            check_name(type(self).__name__, name, known, AttributeError)
        else:  # changed: all fields are checked again
            changed: Any = replace(self, **{name: value})
            value = getattr(changed, name)
        vars(self)[name] = value


@dataclass
class SamplingParams(Checked):
    """How the tokens of one request are chosen; names and defaults are vLLM's.

    n: how many continuations; they share the K and V of the prompt.
    temperature: 0 always takes the most likely token.
    top_p, top_k, min_p: sample among the most likely tokens only. `top_p=1`, `top_k=0`
        (or -1) and `min_p=0` keep all tokens.
    max_tokens: None means as many as the engine's `max_model_len` allows.
    min_tokens: before this many tokens, no EOS or stop token is sampled, and stop
        strings do not count.
    stop: one string or several. They end a sequence and are not part of its text,
        unless `include_stop_str_in_output` is set.
    stop_token_ids: tokens that end a sequence, as EOS tokens do.
    ignore_eos: go on after an EOS token.
    seed: makes the result repeatable, whatever else is served. None (or -1): the engine
        draws one.
    logprobs: how many of the most likely tokens to return log-probabilities for, at
        every position; the sampled one's comes too. -1: all tokens.
    detokenize: False returns token ids only.
    skip_special_tokens: leave tokens such as EOS out of the text.
    cache_salt: requests share cached blocks only with requests of the same salt.

    The fields after these have no effect. They are for scripts that spell out vLLM's
    defaults: a value that asks for something else is refused, unless it would make no
    difference here.
    """

    n: int = option(1, check_int, low=1)
    temperature: float = option(1.0, check_float, low=0, high=1e30)
    top_p: float = option(1.0, check_float, low=1e-6, high=1)
    top_k: int = option(0, check_int, low=-1, high=2**31, optional=True)
    min_p: float = option(0.0, check_float, low=0, high=1)
    max_tokens: int | None = option(16, check_int, low=1, optional=True)
    min_tokens: int = option(0, check_int, low=0, high=2**31)
    stop: str | Sequence[str] | None = None
    stop_token_ids: Iterable[int] | None = None
    ignore_eos: bool = option(False, check_type, kind=bool)
    seed: int | None = option(None, check_int, low=-1, high=MAX_SEED, optional=True)
    logprobs: int | None = option(None, check_int, low=-1, optional=True)
    detokenize: bool = option(True, check_type, kind=bool)
    skip_special_tokens: bool = option(True, check_type, kind=bool)
    include_stop_str_in_output: bool = option(False, check_type, kind=bool)
    cache_salt: str | None = option(None, check_type, kind=str, optional=True)

    spaces_between_special_tokens: bool = option(True, check_type, kind=bool)
    presence_penalty: float = only(0.0, reason=EXERCISE)
    frequency_penalty: float = only(0.0, reason=EXERCISE)
    repetition_penalty: float = only(1.0, reason=EXERCISE)
    logit_bias: None = only(None, reason="it is an exercise of the tour")
    prompt_logprobs: None = only(None, reason="it is an exercise of the tour")
    bad_words: None = only(None, [], reason=CONSTRAINED)
    allowed_token_ids: None = only(None, reason=CONSTRAINED)
    structured_outputs: None = only(None, reason=CONSTRAINED)
    guided_decoding: None = only(None, reason=CONSTRAINED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed == -1:
            vars(self)["seed"] = None
        if self.top_k is None:
            vars(self)["top_k"] = 0
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got "
                f"{self.min_tokens}")
        # Lists are copied, so that nobody can change them later.
        if self.stop_token_ids is not None:
            if isinstance(self.stop_token_ids, str):
                raise TypeError(
                    f"stop_token_ids must be a list, got {self.stop_token_ids!r:.80}")
            check_type("stop_token_ids", self.stop_token_ids, Iterable)
            token_ids = check_token_ids("stop_token_ids", self.stop_token_ids)
            vars(self)["stop_token_ids"] = token_ids
        if self.stop is not None and not isinstance(self.stop, str):
            vars(self)["stop"] = list(check_type("stop", self.stop, Sequence))
        for string in self.stop_strings:
            if not isinstance(string, str) or not string:
                raise ValueError(
                    f"stop must be non-empty strings, got {self.stop!r:.80}")
        if self.stop and not self.detokenize:
            raise ValueError(
                "stop must be empty if detokenize=False: it is looked for in the text")

    @property
    def stop_strings(self) -> Sequence[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def clone(self) -> "SamplingParams":
        """A copy with lists of its own."""
        return replace(self)


@dataclass(frozen=True)
class BeamSearchParams(Checked):
    """A beam search, with the rules of transformers' `generate(num_beams=beam_width)`.

    Beams are ranked by their score, log-probability / length**length_penalty. The
    search ends when `beam_width` beams are complete, and (unless `early_stopping` is
    set) no running beam scores above the worst of them. A beam is complete after
    `max_tokens`, or with an EOS token unless `ignore_eos` is set. `cache_salt`: see
    `SamplingParams`.
    """

    beam_width: int = option(MISSING, check_int, low=1)
    max_tokens: int = option(MISSING, check_int, low=1)
    length_penalty: float = option(1.0, check_float, low=-10, high=10)
    early_stopping: bool = option(False, check_type, kind=bool)
    ignore_eos: bool = option(False, check_type, kind=bool)
    cache_salt: str | None = option(None, check_type, kind=str, optional=True)

    temperature: float = only(0.0, reason="beams are compared, not sampled")
    include_stop_str_in_output: bool = only(False, reason="beams have no stop strings")


@dataclass(frozen=True)
class EngineConfig(Checked):
    """The keyword arguments of `LLM`. "auto" and None are decided by the engine.

    model: a directory, or a repository's id on the hub. None: the bundled model.
    tokenizer: the same, if the tokenizer comes from somewhere else.
    skip_tokenizer_init: load no tokenizer; prompts are token ids, and there is no text.
    revision: a branch, a tag or a commit of the repository.
    download_dir: where to keep what is downloaded; None is the hub's own cache.
    trust_remote_code: run the code that comes with a tokenizer. Models need none.
    hf_overrides: fields of config.json that are different.
    dtype: "auto" is the checkpoint's, as far as the processor has instructions for it.
    device: "auto" is "cuda" if there is a GPU.
    block_size: tokens in a block; a power of two.
    num_blocks: None means as many as fit into `gpu_memory_utilization` of the GPU, or
        into 4 GiB on a CPU. `num_gpu_blocks_override` is the same.
    max_model_len: the longest sequence, prompt included.
    max_num_seqs, max_num_batched_tokens: the most sequences and tokens in a step.
    max_logprobs: the most log-probabilities a request may ask for; -1: no limit.
    swap_space: GiB of CPU memory for swapped blocks.
    preemption_mode: "auto" swaps groups of several sequences, and recomputes others.
    attention_backend: "torch" runs anywhere, "numba" on CPUs, "triton" on GPUs; "flash"
        is Triton with prompts by FlashAttention.
    enforce_eager: do not use CUDA graphs.
    tensor_parallel_size: the number of ranks. Each is a process, with a GPU of its own
        where there are any.
    load_format: "dummy" gives random weights to a model that has only a config.json.
    seed: where the seeds of requests without one come from; None: from the system.

    The fields after these have no effect. They are for scripts written for vLLM: a
    value that asks for something else than the engine does is refused, unless it would
    make no difference here.
    """

    model: PathLike | None = option(None, check_path)
    tokenizer: PathLike | None = option(None, check_path)
    skip_tokenizer_init: bool = option(False, check_type, kind=bool)
    revision: str | None = option(None, check_type, kind=str, optional=True)
    download_dir: PathLike | None = option(None, check_path)
    trust_remote_code: bool = option(False, check_type, kind=bool)
    hf_overrides: dict[str, Any] | None = option(
        None, check_type, kind=dict, optional=True)
    dtype: Any = option("auto", check_dtype)
    device: str = option("auto", check_choice, choices=("auto", "cpu", "cuda"))
    block_size: int = option(16, check_int, low=1, high=1024)
    num_blocks: int | None = option(None, check_int, low=1, high=2**31, optional=True)
    num_gpu_blocks_override: int | None = option(
        None, check_int, low=1, high=2**31, optional=True)
    max_model_len: int | None = option(None, check_int, low=2, optional=True)
    max_num_seqs: int = option(256, check_int, low=1, high=2**20)
    max_num_batched_tokens: int = option(8192, check_int, low=1)
    max_logprobs: int = option(-1, check_int, low=-1)
    gpu_memory_utilization: float = option(0.9, check_float, low=0.01, high=1)
    swap_space: float = option(4, check_float, low=0, high=2**20)
    enable_prefix_caching: bool = option(True, check_type, kind=bool)
    preemption_mode: str = option(
        "auto", check_choice, choices=("auto", "recompute", "swap"))
    attention_backend: str = option(
        "auto", check_choice, choices=("auto", "torch", "numba", "triton", "flash"))
    enforce_eager: bool = option(False, check_type, kind=bool)
    tensor_parallel_size: int = option(1, check_int, low=1)
    load_format: str = option(
        "auto", check_choice, choices=("auto", "safetensors", "dummy"))
    seed: int | None = option(0, check_int, low=0, high=MAX_SEED, optional=True)

    tokenizer_mode: str = only("auto", reason="every tokenizer is transformers' own")
    quantization: str | None = only(None, reason="weights must be floats")
    kv_cache_dtype: str = only("auto", reason="K and V have the dtype of the model")
    enable_chunked_prefill: bool | None = only(
        None, True, reason="a prompt that does not fit into a step is always divided")
    enable_lora: bool = only(False, reason="merge adapters into the weights")
    limit_mm_per_prompt: Any = only(None, {}, reason="models read text only")
    speculative_config: Any = only(None, reason="the model computes every token itself")
    cpu_offload_gb: float = only(0, reason="weights stay on the device")
    pipeline_parallel_size: int = only(1, reason="use tensor_parallel_size")
    data_parallel_size: int = only(1, reason="start an engine for each replica")
    distributed_executor_backend: str | None = only(
        None, "mp", reason="ranks are processes, or started by torchrun")
    guided_decoding_backend: str | None = only(None, "auto", reason=CONSTRAINED)
    disable_custom_all_reduce: bool = option(False, check_type, kind=bool)
    disable_log_stats: bool = option(False, check_type, kind=bool)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_gpu_blocks_override is not None:
            vars(self)["num_blocks"] = self.num_gpu_blocks_override
        if self.block_size & (self.block_size - 1):
            raise ValueError(
                f"block_size must be a power of two, got {self.block_size}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                "max_num_batched_tokens must be at least max_num_seqs, so that all "
                f"sequences can decode in one step, got {self.max_num_batched_tokens} "
                f"and {self.max_num_seqs}: raise it, or lower max_num_seqs too")


def takes_arguments_of(
    config: Callable[P, Any]
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give a method the signature of `config`, for `help` and for editors."""

    def decorate(method: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = inspect.signature(config)
        parameters = [this, *signature.parameters.values()]
        vars(method)["__signature__"] = signature.replace(parameters=parameters)
        return method

    return decorate
