"""What programs for vLLM pass: options, parameters and command lines.

Every option may have the default that vLLM 0.32 gives it, or a value that makes no
difference here. What would change an answer, and is missing, is an error that names it.
"""

import json
from argparse import BooleanOptionalAction
from copy import deepcopy
from dataclasses import dataclass, field, make_dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import NoBadWordsLogitsProcessor

import nanopaged

# checks/vllm_answers.py records the defaults. Below them are names of earlier versions.
DEFAULTS = json.loads(Path(__file__).with_name("vllm_defaults.json").read_text())
DEFAULTS["SamplingParams"] |= {
    "best_of": None, "cache_salt": None, "early_stopping": False,
    "guided_decoding": None, "length_penalty": 1.0, "logits_processors": None,
    "use_beam_search": False}
# Options without an effect, or that as_vllm.py reads itself; and values without one.
IGNORED = {
    "allowed_token_ids", "async_scheduling", "bad_words", "compilation_config",
    "detokenize", "disable_custom_all_reduce", "disable_log_stats",
    "distributed_executor_backend", "download_dir", "enable_chunked_prefill",
    "enable_sleep_mode", "extra_args", "gpu_ids", "guided_decoding",
    "include_stop_str_in_output", "max_logprobs", "max_lora_rank", "max_loras",
    "max_parallel_loading_workers", "max_seq_len_to_capture", "optimization_level",
    "output_kind", "performance_mode", "served_model_name", "skip_clone",
    "spaces_between_special_tokens", "structured_outputs", "tokenizer_mode",
    "tokenizer_revision", "trust_remote_code", "use_tqdm_on_load"}
NEUTRAL = {
    "best_of": [1], "chat_template_content_format": ["auto", "string"],
    "load_format": ["safetensors", "hf"], "model_impl": ["vllm"], "revision": ["main"],
    "logprobs_mode": ["raw_logprobs", "processed_logprobs"],
    "structured_outputs_config": [
        {"backend": "xgrammar"},
        {"backend": "xgrammar", "disable_any_whitespace": True}]}


def known(kind, options):
    """The options that nanopaged's class of this name has, unless they have vLLM's
    default. ValueError for one that is missing and would have an effect.
    """
    ours, kept = getattr(nanopaged, kind).__dataclass_fields__, {}
    for name, value in options.items():
        default = DEFAULTS[kind].get(name)
        if value == default or value in NEUTRAL.get(name, ()):
            continue
        if name not in ours and name not in IGNORED and (value or default):
            raise ValueError(f"{name} must be {default!r}, because nanopaged has "
                             f"nothing like it, got {value!r:.200}")
        if name in ours and (value is not None or name == "max_tokens"):
            kept[name] = value
    return kept


def with_defaults(kind, *required):
    """A dataclass with vLLM's fields and defaults."""
    return make_dataclass(kind, [*required, *(
        (name, Any, field(default_factory=lambda value=value: deepcopy(value)))
        for name, value in DEFAULTS[kind].items())])


class StructuredOutputsParams:
    """One of json, json_object, regex, choice and grammar."""

    def __init__(self, **options):
        options.pop("disable_any_whitespace", None)  # there never is any
        if options.pop("json_object", None):
            options["json"] = {"type": "object"}
        given = {kind: value for kind, value in options.items() if value}
        kinds = {"json", "regex", "choice", "grammar"}
        if len(given) != 1 or not given.keys() <= kinds:
            raise ValueError("structured_outputs must be one of json, json_object, "
                             f"regex, choice and grammar, got {given}")
        [(self.kind, self.value)] = given.items()


@dataclass
class SamplingParams(with_defaults("SamplingParams")):
    """They may be changed. `ours` is what nanopaged gets with each request."""

    __struct_fields__ = tuple(DEFAULTS["SamplingParams"])

    def __post_init__(self):
        for name in "stop", "stop_token_ids", "bad_words":
            value = getattr(self, name) or []
            setattr(self, name, [value] if isinstance(value, str) else value)
        self.structured_outputs = self.structured_outputs or self.guided_decoding
        self.top_k = 0 if self.top_k == -1 else self.top_k
        self.seed = None if self.seed == -1 else self.seed
        self.ours()  # an error for what is wrong

    def ours(self, vocab_size=1):
        options = {name: getattr(self, name) for name in self.__struct_fields__}
        for name in "logprobs", "prompt_logprobs":
            options[name] = vocab_size if options[name] == -1 else options[name]
        if options["stop"] and not self.detokenize:
            raise ValueError("detokenize must be True with stop strings, got False")
        return nanopaged.SamplingParams(**known("SamplingParams", options))

    def processors(self, tokenizer, vocab_size):
        """Logits processors for bad_words and allowed_token_ids."""
        found, banned = [], []
        for word in self.bad_words:  # as it begins a text, and after a space
            alone, later = (tokenizer.encode(text, add_special_tokens=False)
                            for text in (word.lstrip(), " " + word.lstrip()))
            is_new = later[:1] != alone[:1] and len(later) == len(alone)
            banned += [alone, later] if is_new else [alone]
        if banned:
            found.append(NoBadWordsLogitsProcessor(banned))
        if self.allowed_token_ids is not None:
            every, allowed = {*range(vocab_size)}, {*self.allowed_token_ids}
            if not allowed or not allowed <= every:
                raise ValueError(f"allowed_token_ids must be below {vocab_size}, got "
                                 f"{self.allowed_token_ids!r:.200}")
            rest = torch.tensor([*every - allowed], dtype=torch.long)
            found.append(lambda ids, logits: logits.index_fill(
                1, rest.to(logits.device), -torch.inf))
        return found

    @classmethod
    def from_optional(cls, **options):
        return cls(**{name: value for name, value in options.items()
                      if value is not None or name == "max_tokens"})

    def clone(self):
        return deepcopy(self)


# Libraries look here, or in `__struct_fields__`, for the names that they may pass.
SamplingParams.__annotations__ = dict.fromkeys(SamplingParams.__struct_fields__, Any)
BeamSearchParams = with_defaults("BeamSearchParams", "beam_width", "max_tokens")
RequestOutputKind = IntEnum("RequestOutputKind", "CUMULATIVE DELTA FINAL_ONLY", start=0)


class EngineArgs(with_defaults("EngineConfig")):
    @staticmethod
    def add_cli_args(parser):
        for name, default in DEFAULTS["EngineConfig"].items():
            is_switch = isinstance(default, bool) or name.startswith("enable_")
            kind = {"action": BooleanOptionalAction} if is_switch else {
                "type": yaml.safe_load}  # numbers are numbers, and the rest is text
            parser.add_argument(f"--{name}".replace("_", "-"), default=default, **kind)
        return parser

    @classmethod
    def from_cli_args(cls, args):
        return cls(**{name: value for name, value in vars(args).items()
                      if name in DEFAULTS["EngineConfig"]})
