"""What programs for vLLM pass: options, parameters and command lines.

Every option may have the default that vLLM 0.32 gives it, or a value that makes no
difference here. What would change an answer, and is missing, is an error that names it.
"""

import json
from argparse import BooleanOptionalAction
from copy import deepcopy
from dataclasses import dataclass, field, make_dataclass
from enum import IntEnum
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import yaml
from structured import of_answers
from transformers import LogitsProcessor, NoBadWordsLogitsProcessor

import nanopaged
from nanopaged.checks import check

# vllm_defaults.json is recorded by checks/vllm_answers.py. vllm_meanings.json is about
# nanopaged: names of earlier versions; options without an effect here, or that
# as_vllm.py reads itself; and values without an effect.
DEFAULTS, MEANINGS = (
    json.loads(Path(__file__).with_name(f"vllm_{name}.json").read_text())
    for name in ("defaults", "meanings"))
DEFAULTS["SamplingParams"] |= MEANINGS["earlier SamplingParams"]


def known(kind, options):
    """The options that nanopaged's class of this name has, unless they have vLLM's
    default. ValueError for one that is missing and would have an effect.
    """
    ours, kept = getattr(nanopaged, kind).__dataclass_fields__, {}
    for name, value in options.items():
        default = DEFAULTS[kind].get(name)
        if value == default or value in MEANINGS["neutral"].get(name, ()):
            continue
        if name not in {*ours, *MEANINGS["without effect"]} and (value or default):
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
        kinds = {"json": dict | str, "regex": str, "choice": list | tuple,
                 "grammar": str}
        check(len(given) == 1 and given.keys() <= kinds.keys(), "structured_outputs",
              "one of json, json_object, regex, choice and grammar", given)
        [(self.kind, self.value)] = given.items()
        texts = self.value if self.kind == "choice" else ()
        check(isinstance(self.value, kinds[self.kind]) and {*map(type, texts)} <= {str},
              f"{self.kind} in structured_outputs", f"{kinds[self.kind]} (of str)",
              self.value, TypeError)


def as_processor(process):
    """One of transformers takes tensors. vLLM's take lists, with or without the prompt,
    and the logits of one token.
    """
    if isinstance(process, LogitsProcessor):
        return process
    names = signature(process).parameters.values() if callable(process) else ()
    count = sum(each.kind < each.VAR_POSITIONAL and each.default is each.empty
                for each in names)
    check(count in (2, 3), "logits_processors", "functions of (ids, logits) or (prompt "
          "ids, ids, logits)", process, TypeError)
    return of_answers(lambda prompt, ids, logits: process(
        *(prompt[0].tolist(), ids[0].tolist(), logits[0])[3 - count :])[None])


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
        del options["include_stop_str_in_output"]  # vllm_outputs.py reads it
        for name in "logprobs", "prompt_logprobs":
            options[name] = vocab_size if options[name] == -1 else options[name]
        form = self.structured_outputs
        check(isinstance(form, StructuredOutputsParams | None), "structured_outputs",
              "StructuredOutputsParams", form, TypeError)
        check(not (form and self.ignore_eos), "ignore_eos", "False with "
              "structured_outputs, because a complete answer ends", self.ignore_eos)
        check(self.detokenize or not self.stop, "detokenize", "True with stop", False)
        return nanopaged.SamplingParams(**known("SamplingParams", options))

    def processors(self, tokenizer, vocab_size):
        """Logits processors: the caller's, for bad_words and for allowed_token_ids."""
        found, banned = [*map(as_processor, self.logits_processors or [])], []
        for word in self.bad_words:  # as it begins a text, and after a space
            check(bool(word.strip()), "bad_words", "words that are not empty", word)
            alone, later = (tokenizer.encode(text, add_special_tokens=False)
                            for text in (word.lstrip(), " " + word.lstrip()))
            is_new = later[:1] != alone[:1] and len(later) == len(alone)
            banned += [alone, later] if is_new else [alone]
        if banned:
            forbid = NoBadWordsLogitsProcessor(banned)
            found.append(of_answers(lambda prompt, ids, logits: forbid(ids, logits)))
        if (allowed := self.allowed_token_ids) is not None:
            rest = {*range(vocab_size)}.difference(allowed)
            check(0 < len({*allowed}) == vocab_size - len(rest), "allowed_token_ids",
                  f"some below {vocab_size}", allowed)
            rest = torch.tensor([*rest], dtype=torch.long)
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
