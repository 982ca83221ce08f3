"""Run programs written for vLLM: `import as_vllm` before they import vllm.

vLLM's names then refer to nanopaged's classes. Options without an effect here are
accepted, None means the default, and what would change an answer is still an error.
"""

import sys
from dataclasses import fields
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

from transformers import AutoTokenizer

import nanopaged
from nanopaged import EngineConfig, loader
from nanopaged.config import NO_EFFECT

# More options without an effect; below, values without one.
IGNORED = NO_EFFECT | {
    "detokenize", "enable_sleep_mode", "gpu_ids", "max_lora_rank", "max_loras",
    "tokenizer", "tokenizer_revision"}
NEUTRAL = {
    "best_of": 1, "data_parallel_size": 1, "early_stopping": False,
    "enable_lora": False, "length_penalty": 1, "pipeline_parallel_size": 1,
    "revision": "main", "use_beam_search": False}
DTYPES = {"half": "float16", "float": "float32"}


def known(kind, options):
    """The options that nanopaged has; TypeError for one that would have an effect."""
    names = {field.name for field in fields(kind)}
    kept = {}
    for name, value in options.items():
        if name == "dtype" and value is not None:
            value = str(value).removeprefix("torch.")
            value = DTYPES.get(value, value)
        if name in names:
            if value is not None or name == "max_tokens":
                kept[name] = value
        elif name not in IGNORED and value is not None and value != NEUTRAL.get(name):
            raise TypeError(f"{name}={value!r} is not supported")
    return kept


class SamplingParams(nanopaged.SamplingParams):
    # Some libraries look here for the names that they may pass.
    __annotations__ = dict(nanopaged.SamplingParams.__annotations__)

    def __new__(cls, *values, **options):
        return object.__new__(cls)

    def __init__(self, *values, include_stop_str_in_output=False, **options):
        names = ("n", "presence_penalty", "frequency_penalty", "repetition_penalty",
                 "temperature", "top_p", "top_k")  # in vLLM's order
        object.__setattr__(self, "keeps_stop", include_stop_str_in_output)
        options |= dict(zip(names, values, strict=False))
        super().__init__(**known(nanopaged.SamplingParams, options))


class LLM(nanopaged.LLM):
    def __init__(self, model, tokenizer=None, **options):
        super().__init__(model, **known(EngineConfig, options))
        if isinstance(tokenizer, str):
            self.tokenizer = loader.load_tokenizer(tokenizer)
        elif tokenizer is not None:
            self.tokenizer = tokenizer
        config = SimpleNamespace(max_model_len=self.runner.max_model_len,
                                 hf_config=self.model_config)
        self.llm_engine = SimpleNamespace(
            model_config=config, get_tokenizer=self.get_tokenizer)

    def get_default_sampling_params(self):
        return self.default_params

    def generate(self, prompts=None, sampling_params=None, use_tqdm=True,
                 lora_request=None, prompt_token_ids=None):
        if lora_request is not None:
            raise TypeError("lora_request is not supported")
        prompts = prompts if prompt_token_ids is None else prompt_token_ids
        outputs = super().generate(prompts, sampling_params, use_tqdm)
        params = sampling_params if isinstance(sampling_params, list | tuple) else [
            sampling_params] * len(outputs)
        for output, param in zip(outputs, params, strict=True):
            for answer in output.outputs if getattr(param, "keeps_stop", False) else []:
                if isinstance(answer.stop_reason, str):
                    answer.text += answer.stop_reason
        return outputs

    def chat(self, messages, sampling_params=None, use_tqdm=True,
             lora_request=None, chat_template_kwargs=None, **options):
        if lora_request is not None:
            raise TypeError("lora_request is not supported")
        template = {name: value for name, value in options.items() if value is not None}
        return super().chat(messages, sampling_params, use_tqdm,
                            template | (chat_template_kwargs or {}))

    def sleep(self, level=1):
        """The memory stays in use."""

    wake_up = sleep


class LoRARequest:
    def __init__(self, *arguments, **options):
        raise TypeError("lora_request is not supported")


def get_tokenizer(name, revision=None, tokenizer_mode="auto", trust_remote_code=False,
                  **options):
    return AutoTokenizer.from_pretrained(name, revision=revision, **options)


def make_module(name, **contents):
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(contents, __spec__=ModuleSpec(name, None), __path__=[])


VERSION = "0.8.2"
NAMES = {name: getattr(nanopaged, name) for name in nanopaged.__all__} | {
    "LLM": LLM, "SamplingParams": SamplingParams, "TextPrompt": dict,
    "TokensPrompt": dict, "__version__": VERSION}
for name in ("", ".inputs", ".outputs", ".sampling_params", ".entrypoints",
             ".entrypoints.llm", ".lora", ".transformers_utils"):
    make_module(f"vllm{name}", **NAMES)
make_module("vllm.lora.request", LoRARequest=LoRARequest)
make_module("vllm.transformers_utils.tokenizer", get_tokenizer=get_tokenizer)
installed = metadata.version
metadata.version = lambda name: VERSION if name == "vllm" else installed(name)
