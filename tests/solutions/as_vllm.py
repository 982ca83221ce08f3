"""Run programs written for vLLM: `import as_vllm` before they import vllm.

vLLM's names then refer to nanopaged's classes. Options without an effect here are
accepted, None means the default, and what would change an answer is still an error.
Structured outputs need xgrammar.
"""

import sys
from dataclasses import fields, replace
from functools import lru_cache
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

from structured import Grammars
from transformers import AutoTokenizer

import nanopaged
from nanopaged.loading.checkpoint import load_tokenizer

# Options without an effect; below, values without one.
IGNORED = {
    "detokenize", "disable_custom_all_reduce", "disable_log_stats",
    "distributed_executor_backend", "download_dir", "enable_chunked_prefill",
    "enable_sleep_mode", "gpu_ids", "max_logprobs", "max_lora_rank", "max_loras",
    "max_parallel_loading_workers", "max_seq_len_to_capture", "model_impl",
    "spaces_between_special_tokens", "tokenizer", "tokenizer_mode",
    "tokenizer_revision", "trust_remote_code"}
NEUTRAL = {
    "best_of": [1], "data_parallel_size": [1], "early_stopping": [False],
    "enable_lora": [False], "length_penalty": [1], "pipeline_parallel_size": [1],
    "logprobs_mode": ["raw_logprobs", "processed_logprobs"],
    "revision": ["main"], "use_beam_search": [False]}
DTYPES = {"half": "float16", "float": "float32"}
# With these values, log-probabilities are the same before and after processing.
UNPROCESSED = {
    "temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "min_tokens": 0,
    "changes_logits": False, "structured_outputs": None}


def known(kind, options):
    """The options that nanopaged has; TypeError for one that would have an effect."""
    names = {field.name for field in fields(kind)}
    kept = {}
    for name, value in options.items():
        if name == "dtype" and value is not None:
            value = DTYPES.get(str(value), str(value).removeprefix("torch."))
        if name in names:
            if value is not None or name == "max_tokens":
                kept[name] = value
        elif name not in IGNORED and value not in (None, *NEUTRAL.get(name, ())):
            raise TypeError(f"{name}={value!r} is not supported")
    return kept


class StructuredOutputsParams:
    """One of json, json_object, regex, choice and grammar."""

    def __init__(self, **options):
        options.pop("disable_any_whitespace", None)  # there never is any
        if options.pop("json_object", None):
            options["json"] = {"type": "object"}
        given = {kind: value for kind, value in options.items() if value}
        kinds = {"json", "regex", "choice", "grammar"}
        if len(given) != 1 or not given.keys() <= kinds:
            raise TypeError("structured_outputs must be one of json, json_object, "
                            f"regex, choice and grammar, got {given}")
        [(self.kind, self.value)] = given.items()


class SamplingParams(nanopaged.SamplingParams):
    # Some libraries look here for the names that they may pass.
    __annotations__ = dict(nanopaged.SamplingParams.__annotations__)
    __struct_fields__ = (*__annotations__, "include_stop_str_in_output")

    def __new__(cls, *values, **options):
        return object.__new__(cls)

    def __init__(self, *values, include_stop_str_in_output=False,
                 structured_outputs=None, guided_decoding=None, **options):
        names = ("n", "presence_penalty", "frequency_penalty", "repetition_penalty",
                 "temperature", "top_p", "top_k")  # in vLLM's order
        vars(self).update(include_stop_str_in_output=include_stop_str_in_output,
                          structured_outputs=structured_outputs or guided_decoding)
        options |= dict(zip(names, values, strict=False))
        super().__init__(**known(nanopaged.SamplingParams, options))


class LLM(nanopaged.LLM):
    def __init__(self, model, tokenizer=None, **options):
        # `generate` refuses what would make a difference.
        self.is_processed = options.get("logprobs_mode") == "processed_logprobs"
        super().__init__(model, **known(nanopaged.EngineConfig, options))
        if tokenizer is not None:
            is_name = isinstance(tokenizer, str)
            self.tokenizer = load_tokenizer(tokenizer) if is_name else tokenizer
        config = SimpleNamespace(max_model_len=self.engine.max_model_len,
                                 hf_config=self.model_config)
        self.grammars = lru_cache(1)(lambda: Grammars(self))
        # Trainers bring the weights one by one. They are kept until all have come.
        self.new_weights = {}
        part = SimpleNamespace(load_weights=self.new_weights.update)
        for name in "model", "model_runner", "driver_worker":
            part = SimpleNamespace(**{name: part})
        self.llm_engine = SimpleNamespace(
            model_config=config, get_tokenizer=self.get_tokenizer, model_executor=part)

    def get_default_sampling_params(self):
        return self.default_params

    def prepare(self, params):
        """The parameters of one request."""
        for name, value in UNPROCESSED.items() if self.is_processed else ():
            if getattr(params, name, value) != value:
                raise TypeError(f"{name} must be {value} for processed_logprobs")
        form = getattr(params, "structured_outputs", None)
        if form is None:
            return params
        process = self.grammars().processor(
            form.kind, form.value, f"{form.kind} in structured_outputs")
        return replace(params, logits_processors=[
            *(params.logits_processors or []), process])

    def generate(self, prompts=None, sampling_params=None, use_tqdm=True,
                 lora_request=None, prompt_token_ids=None):
        known(nanopaged.SamplingParams, {"lora_request": lora_request})
        prompts = prompts if prompt_token_ids is None else prompt_token_ids
        if isinstance(prompts, str | dict) or any(isinstance(p, int) for p in prompts):
            prompts = [prompts]
        params = sampling_params if isinstance(sampling_params, list | tuple) else [
            sampling_params] * len(prompts)
        outputs = super().generate(prompts, [*map(self.prepare, params)], use_tqdm)
        for output, param in zip(outputs, params, strict=True):
            keeps_stop = getattr(param, "include_stop_str_in_output", False)
            for answer in output.outputs if keeps_stop else []:
                if isinstance(answer.stop_reason, str):
                    answer.text += answer.stop_reason
        return outputs

    def chat(self, messages, sampling_params=None, use_tqdm=True,
             lora_request=None, chat_template_kwargs=None, **options):
        known(nanopaged.SamplingParams, {"lora_request": lora_request})
        template = {name: value for name, value in options.items() if value is not None}
        return super().chat(messages, sampling_params, use_tqdm,
                            template | (chat_template_kwargs or {}))

    def reset_prefix_cache(self):
        if self.new_weights:
            self.load_weights(self.new_weights.items())
            self.new_weights.clear()
        return super().reset_prefix_cache()

    def sleep(self, level=1):
        """The memory stays in use."""

    def wake_up(self, tags=None):
        """There is nothing to do."""


def get_tokenizer(name, tokenizer_mode=None, trust_remote_code=None, **options):
    return AutoTokenizer.from_pretrained(name, **options)


def resolve_hf_chat_template(tokenizer, chat_template=None, **options):
    return chat_template or tokenizer.chat_template


class Unsupported:
    """Programs may import it, but not use it."""

    def __init__(self, *arguments, **options):
        raise TypeError("LoRA and a separate server of vLLM's are not supported")


VERSION = "0.31.0"  # TRL wants 0.22 to 0.31
NAMES = {name: getattr(nanopaged, name) for name in nanopaged.__all__}
for each in (LLM, SamplingParams, StructuredOutputsParams, get_tokenizer,
             resolve_hf_chat_template):
    NAMES[each.__name__] = each
NAMES |= {"GuidedDecodingParams": StructuredOutputsParams, "TextPrompt": dict,
          "TokensPrompt": dict, "__version__": VERSION}
NAMES |= dict.fromkeys(("LoRARequest", "get_ip", "packed_nccl_broadcast_producer",
                        "trainer_init"), Unsupported)
# Every module has all the names.
for path in (
        "", ".distributed", ".distributed.weight_transfer",
        ".distributed.weight_transfer.nccl_common",
        ".distributed.weight_transfer.packed_tensor", ".entrypoints",
        ".entrypoints.chat_utils", ".entrypoints.llm", ".inputs", ".lora",
        ".lora.request", ".outputs", ".sampling_params", ".transformers_utils",
        ".transformers_utils.tokenizer", ".utils", ".utils.network_utils"):
    name = f"vllm{path}"
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(NAMES, __spec__=ModuleSpec(name, None), __path__=[])
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
installed = metadata.version
metadata.version = lambda name: VERSION if name == "vllm" else installed(name)
