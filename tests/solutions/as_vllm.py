"""Run programs written for vLLM: `import as_vllm` before they import vllm.

vLLM's names then refer to what is here, to nanopaged's classes, and to vllm_options.py,
which decides which options are accepted. Structured outputs need xgrammar.
"""

import sys
from argparse import ArgumentParser
from dataclasses import replace
from functools import cached_property, lru_cache
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import vllm_options
import vllm_outputs
from structured import Grammars
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_options import DEFAULTS, RequestOutputKind, SamplingParams, known
from vllm_outputs import Counter, Gauge, Writer

import nanopaged
from nanopaged.frontend.prompts import as_prompts
from nanopaged.loading.checkpoint import load_generation_config, load_tokenizer

DTYPES = {"half": "float16", "float": "float32", "None": "auto"}
TEMPLATE = {"add_generation_prompt", "chat_template", "continue_final_message", "tools"}
# With their defaults, log-probabilities are the same before and after processing.
PROCESSING = (
    "temperature", "top_p", "top_k", "min_p", "min_tokens", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "logits_processors",
    "structured_outputs", "bad_words", "allowed_token_ids")


# -- The engine ------------------------------------------------------------------------

class ModelConfig(SimpleNamespace):
    """vLLM's. It also has what the model's config.json has."""

    def __getattr__(self, name):
        return getattr(self.__dict__["hf_config"], name)

    def get_vocab_size(self):
        return self.vocab_size


class LLM(nanopaged.LLM):
    def __init__(self, model, tokenizer=None, **options):
        # `prepare` refuses what would make a difference.
        self.is_processed = options.get("logprobs_mode") == "processed_logprobs"
        dtype = str(options.pop("dtype", None)).removeprefix("torch.")
        num_blocks = options.pop("num_gpu_blocks_override", None)
        options = {"num_blocks": num_blocks} | options
        super().__init__(model, **known("EngineConfig", options),
                         dtype=DTYPES.get(dtype, dtype))
        if tokenizer is not None:
            is_name = isinstance(tokenizer, str | Path)
            self.tokenizer = load_tokenizer(tokenizer) if is_name else tokenizer
            self.eos_token_ids, self.default_params = load_generation_config(
                self.model_config, self.tokenizer)
        self.model_config = ModelConfig(
            **vars(self.model_config), model=model,
            max_model_len=self.engine.max_model_len)
        self.grammars = lru_cache(1)(lambda: Grammars(self))
        self.writer = Writer(self.tokenizer)
        self.new_weights = {}
        self.llm_engine = LLMEngine(self)

    @classmethod
    def from_engine_args(cls, engine_args):
        return cls(**vars(engine_args))

    def get_default_sampling_params(self):
        fields = vars(self.default_params)
        names = fields.keys() & DEFAULTS["SamplingParams"]
        return SamplingParams(**{name: fields[name] for name in names})

    def generate(self, prompts=None, sampling_params=None, use_tqdm=True,
                 lora_request=None, prompt_token_ids=None, **options):
        known("SamplingParams", {"lora_request": lora_request} | options)
        prompts = as_prompts(prompts if prompt_token_ids is None else prompt_token_ids)
        params = sampling_params or self.get_default_sampling_params()
        params = params if isinstance(params, list | tuple) else [params] * len(prompts)
        outputs = super().generate(
            prompts, [*map(self.prepare, params)], bool(use_tqdm))
        return [*map(self.writer.request, outputs, params)]

    def chat(self, messages, sampling_params=None, use_tqdm=True, lora_request=None,
             *, chat_template_kwargs=None, **options):
        template = {name: options.pop(name) for name in TEMPLATE & options.keys()}
        known("SamplingParams", {"lora_request": lora_request} | options)
        return super().chat(messages, sampling_params, use_tqdm,
                            template | (chat_template_kwargs or {}))

    def beam_search(self, prompts, params, lora_request=None, use_tqdm=False,
                    concurrency_limit=None):
        known("SamplingParams", {"lora_request": lora_request})
        self.check_weights()
        params = nanopaged.BeamSearchParams(**known("BeamSearchParams", vars(params)))
        outputs = super().generate(prompts, params, bool(use_tqdm))
        return [self.writer.beams(output) for output in outputs]

    def prepare(self, given):
        """nanopaged's parameters for one request."""
        self.check_weights()
        vocab_size = self.model_config.vocab_size
        for name in PROCESSING if self.is_processed else ():
            default = DEFAULTS["SamplingParams"][name]
            if getattr(given, name) not in (default, []):
                raise ValueError(f"{name} must be {default} for processed_logprobs")
        processors = [*(given.logits_processors or []),
                      *given.processors(self.tokenizer, vocab_size)]
        if form := given.structured_outputs:
            processors.append(self.grammars().processor(
                form.kind, form.value, f"{form.kind} in structured_outputs"))
        return replace(given.ours(vocab_size), logits_processors=processors or None)

    def get_metrics(self):
        stats, model = self.stats(), str(self.model_config.source)
        labels = {"engine": "0", "model_name": model}
        preemptions = stats.preemptions_recompute + stats.preemptions_swap
        counts = {"num_preemptions": preemptions} | self.writer.counts
        usage = stats.blocks_used / stats.blocks_total
        return [Gauge("vllm:kv_cache_usage_perc", labels, usage)] + [
            Counter(f"vllm:{name}", labels, count) for name, count in counts.items()]

    # -- Weights

    @cached_property
    def weight_names(self):
        """Those that a checkpoint may have, and those that it must have."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.model_config.hf_config)
        return {*model.state_dict()}, {name for name, _ in model.named_parameters()}

    def receive(self, weights):
        """Trainers bring weights one by one. Keep copies until all have come."""
        every, needed = self.weight_names
        for name, tensor in weights:
            if name not in every:
                raise ValueError(f"the name of a weight must be like {min(needed)}, "
                                 f"got {name}")
            if name in needed:  # others are tied to one of these
                self.new_weights[name] = tensor.detach().clone()
        if self.new_weights.keys() == needed:
            self.check_weights()

    def check_weights(self):
        """Load those that have come, if they are all."""
        if not self.new_weights:
            return
        if missing := sorted(self.weight_names[1] - self.new_weights.keys()):
            raise RuntimeError(f"load_weights must bring {len(missing)} more weights "
                               f"before the next request, such as {missing[0]}")
        self.load_weights(self.new_weights.items())
        self.new_weights.clear()

    def sleep(self, *arguments, **options):
        """The memory stays in use."""

    wake_up = start_profile = stop_profile = sleep


class LLMEngine:
    """Requests one by one. For everything else, it has what its LLM has."""

    def __init__(self, llm):
        self.llm, self.requests = llm, {}
        part = SimpleNamespace(load_weights=llm.receive)
        for name in "model", "model_runner", "driver_worker":
            part = SimpleNamespace(**{name: part})
        self.model_executor = part

    def __getattr__(self, name):
        return getattr(self.__dict__["llm"], name)

    @classmethod
    def from_engine_args(cls, engine_args):
        return LLM.from_engine_args(engine_args).llm_engine

    def add_request(self, request_id, prompt, params, arrival_time=None, **options):
        known("SamplingParams", options)
        if params.output_kind == RequestOutputKind.DELTA:
            raise ValueError("output_kind must be CUMULATIVE or FINAL_ONLY, got DELTA")
        ours = self.llm.add_request(prompt, self.llm.prepare(params))
        self.requests[ours] = request_id, params.clone()
        return request_id

    def step(self):
        outputs = []
        for output in self.llm.step():
            output.request_id, params = self.requests[ours := output.request_id]
            if output.finished:
                del self.requests[ours]
            if output.finished or params.output_kind == RequestOutputKind.CUMULATIVE:
                outputs.append(self.llm.writer.request(output, params))
        return outputs

    def abort_request(self, request_ids):
        wanted = [request_ids] if isinstance(request_ids, str) else request_ids
        for ours, (request_id, _) in self.requests.items():
            if request_id in wanted:
                self.llm.abort_request(ours)

    def get_num_unfinished_requests(self):
        return len(self.requests)


# -- vLLM's modules --------------------------------------------------------------------

def get_tokenizer(name, tokenizer_mode=None, trust_remote_code=None, **options):
    return AutoTokenizer.from_pretrained(name, **options)


def resolve_hf_chat_template(tokenizer, chat_template=None, **options):
    return chat_template or tokenizer.chat_template


def clean_up(*arguments, **options):
    """There is nothing to do."""


class Unsupported:
    """Programs may import it, but not use it."""

    def __init__(self, *arguments, **options):
        raise TypeError(f"{type(self).__name__} is not supported: use LLM or LLMEngine")


VERSION = "0.31.0"  # TRL wants 0.22 to 0.31
NAMES = {name: getattr(nanopaged, name) for name in nanopaged.__all__}
NAMES |= {each.__name__: each for each in (
    vllm_options.BeamSearchParams, vllm_options.EngineArgs, RequestOutputKind,
    SamplingParams, vllm_options.StructuredOutputsParams, vllm_outputs.CompletionOutput,
    Counter, Gauge, vllm_outputs.Logprob, vllm_outputs.RequestOutput, LLM, LLMEngine,
    get_tokenizer, resolve_hf_chat_template)}
NAMES |= {
    "FlexibleArgumentParser": ArgumentParser, "TextPrompt": dict, "TokensPrompt": dict,
    "GuidedDecodingParams": vllm_options.StructuredOutputsParams,
    "__version__": VERSION}
NAMES |= dict.fromkeys((
    "cleanup_dist_env_and_memory", "destroy_distributed_environment",
    "destroy_model_parallel"), clean_up)
NAMES |= {name: type(name, (Unsupported,), {}) for name in (
    "AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine", "Histogram", "LoRARequest",
    "PoolingParams", "Vector", "get_ip", "packed_nccl_broadcast_producer",
    "trainer_init")}
MODULES = """
    vllm vllm.distributed vllm.distributed.parallel_state
    vllm.distributed.weight_transfer vllm.distributed.weight_transfer.nccl_common
    vllm.distributed.weight_transfer.packed_tensor vllm.engine vllm.engine.arg_utils
    vllm.engine.async_llm_engine vllm.engine.llm_engine vllm.entrypoints
    vllm.entrypoints.chat_utils vllm.entrypoints.llm vllm.inputs vllm.logprobs vllm.lora
    vllm.lora.request vllm.outputs vllm.sampling_params vllm.tokenizers
    vllm.transformers_utils vllm.transformers_utils.tokenizer vllm.utils
    vllm.utils.argparse_utils vllm.utils.network_utils vllm.v1 vllm.v1.engine
    vllm.v1.engine.async_llm vllm.v1.engine.llm_engine vllm.v1.metrics
    vllm.v1.metrics.reader"""
for name in MODULES.split():  # every module has all the names
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(NAMES, __spec__=ModuleSpec(name, None), __path__=[])
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
installed = metadata.version
metadata.version = lambda name: VERSION if name == "vllm" else installed(name)
