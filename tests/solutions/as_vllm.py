"""Run programs written for vLLM: `import as_vllm` before they import vllm.

vLLM's names then refer to what is here, to nanopaged's classes, and to vllm_options.py,
which decides which options are accepted. Structured outputs need xgrammar.
"""

import os
import sys
from argparse import ArgumentParser
from collections import defaultdict
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from importlib import import_module, metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import vllm_options
import vllm_outputs
from structured import Grammars
from transformers import AutoTokenizer
from vllm_options import DEFAULTS, RequestOutputKind, SamplingParams, known
from vllm_outputs import Counter, Gauge, Writer

import nanopaged
from nanopaged.checks import check
from nanopaged.frontend.prompts import as_dict, as_prompts, make_requests
from nanopaged.loading.checkpoint import load_generation_config, load_tokenizer

DTYPES = {"half": "float16", "float": "float32", "None": "auto"}
TEMPLATE = {"add_generation_prompt", "chat_template", "continue_final_message", "tools"}
# With their defaults, log-probabilities are the same before and after processing.
PROCESSING = (
    "temperature", "top_p", "top_k", "min_p", "min_tokens", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "logits_processors",
    "structured_outputs", "bad_words", "allowed_token_ids")


# -- The engine ------------------------------------------------------------------------

class LLM(nanopaged.LLM):
    def __init__(self, model, tokenizer=None, **options):
        # `prepare` refuses what would make a difference.
        self.is_processed = options.get("logprobs_mode") == "processed_logprobs"
        dtype = str(options.pop("dtype", None)).removeprefix("torch.")
        options.setdefault("num_blocks", options.pop("num_gpu_blocks_override", None))
        is_invariant = bool(int(os.environ.get("VLLM_BATCH_INVARIANT", "0")))
        super().__init__(model, **known("EngineConfig", options),
                         dtype=DTYPES.get(dtype, dtype), batch_invariant=is_invariant)
        if tokenizer is not None:
            is_name = isinstance(tokenizer, str | Path)
            self.tokenizer = load_tokenizer(tokenizer) if is_name else tokenizer
            self.eos_token_ids, self._defaults = load_generation_config(
                self.model_config, self.tokenizer)
        if options.get("generation_config") == "vllm":  # not the model's file
            self._defaults = {}
        # vLLM's also has what the model's config.json has.
        self.model_config = SimpleNamespace(
            **vars(self.model_config.hf_config) | vars(self.model_config) | {
                "model": model, "max_model_len": self.engine.max_model_len,
                "dtype": self.engine.runner.dtype,
                "get_vocab_size": lambda: self.model_config.vocab_size})
        self.grammars = lru_cache(1)(lambda: Grammars(self))
        self.writer = Writer(self.tokenizer)
        self.new_weights, self.ids = {}, count()
        self.llm_engine = LLMEngine(self)

    def get_default_sampling_params(self):
        return SamplingParams(**{name: each for name, each in vars(
            self.default_params).items() if name in DEFAULTS["SamplingParams"]})

    def generate(self, prompts=None, sampling_params=None, use_tqdm=True,
                 lora_request=None, prompt_token_ids=None, **options):
        prompts = prompts if prompt_token_ids is None else prompt_token_ids
        prompts, params = self.pairs(
            prompts, sampling_params, lora_request=lora_request, **options)
        outputs = super().generate(
            prompts, [*map(self.prepare, params)], bool(use_tqdm))
        return [self.writer.request(*pair, defaultdict(list))
                for pair in zip(outputs, params, strict=True)]

    def pairs(self, prompts, params, tokenization_kwargs=None, **options):
        """Prompts, and vLLM's parameters for each."""
        prompts, others = as_prompts(prompts), dict(tokenization_kwargs or {})
        most = others.pop("truncate_prompt_tokens", None)
        known("SamplingParams", options | {"tokenization_kwargs": others})
        if most is not None:
            prompts = [self.cut(as_dict(prompt), most) for prompt in prompts]
        params = params or self.get_default_sampling_params()
        return prompts, (
            params if isinstance(params, list | tuple) else [params] * len(prompts))

    def cut(self, prompt, most):
        """A prompt's last tokens. A first special token stays, and -1 is all that fit.
        """
        most = self.engine.max_model_len - 1 if most == -1 else most
        check(isinstance(most, int) and most > 0, "truncate_prompt_tokens",
              "-1 or at least 1", most)
        ids = prompt.get("prompt_token_ids") or prompt["prompt"]
        if isinstance(ids, str):
            tokenizer = deepcopy(self.get_tokenizer())
            tokenizer.truncation_side = "left"
            ids = tokenizer(ids, truncation=True, max_length=most).input_ids
        return {**prompt, "prompt_token_ids": ids[-most:]}

    def enqueue(self, prompts, sampling_params=None, use_tqdm=True, **options):
        """Queue requests for `wait_for_completion`, and return their ids."""
        prompts, params = self.pairs(prompts, sampling_params, **options)
        make_requests(self, prompts, map(self.prepare, params))  # none, or all of them
        return [self.llm_engine.add_request(str(next(self.ids)), *pair)
                for pair in zip(prompts, params, strict=True)]

    def wait_for_completion(self, output_type=None, use_tqdm=True):
        """The outputs of all that `enqueue` has queued, in its order."""
        outputs = []
        while self.has_unfinished_requests():
            outputs += [each for each in self.llm_engine.step() if each.finished]
        return sorted(outputs, key=lambda output: int(output.request_id))

    def chat(self, messages, sampling_params=None, use_tqdm=True, lora_request=None,
             *, chat_template_kwargs=None, **options):
        template = {name: options.pop(name) for name in TEMPLATE & options.keys()}
        known("SamplingParams", {"lora_request": lora_request} | options)
        return super().chat(messages, sampling_params, use_tqdm,
                            template | (chat_template_kwargs or {}))

    def beam_search(self, prompts, params, lora_request=None, use_tqdm=False,
                    concurrency_limit=None):
        known("SamplingParams", {"lora_request": lora_request})
        params = nanopaged.BeamSearchParams(**known("BeamSearchParams", vars(params)))
        self.check_weights()
        return [*map(self.writer.beams, super().generate(prompts, params, use_tqdm))]

    def prepare(self, given):
        """nanopaged's parameters for one request."""
        self.check_weights()
        vocab_size = self.model_config.vocab_size
        for name in PROCESSING if self.is_processed else ():
            default = DEFAULTS["SamplingParams"][name]
            check(getattr(given, name) in (default, []), name,
                  f"{default} for processed_logprobs", getattr(given, name))
        ours = given.ours(vocab_size)
        processors = given.processors(self.tokenizer, vocab_size)
        if form := given.structured_outputs:
            processors.append(self.grammars().processor(
                form.kind, form.value, f"{form.kind} in structured_outputs"))
        return replace(ours, logits_processors=processors or None)

    def get_metrics(self):
        stats, model = self.stats(), str(self.model_config.source)
        labels = {"engine": "0", "model_name": model}
        preemptions = stats.preemptions_recompute + stats.preemptions_swap
        counts = {"num_preemptions": preemptions} | self.writer.counts
        usage = stats.blocks_used / stats.blocks_total
        return [Gauge("vllm:kv_cache_usage_perc", labels, usage)] + [
            Counter(f"vllm:{name}", labels, count) for name, count in counts.items()]

    # -- Weights

    def receive(self, weights):
        """Trainers bring weights one by one. Keep copies until the next request."""
        self.new_weights |= {name: each.detach().clone() for name, each in weights}

    def check_weights(self):
        """Load those that have come: a ValueError names what is missing, or wrong."""
        if self.new_weights:
            self.load_weights(self.new_weights)
            self.new_weights.clear()

    def sleep(self, *arguments, **options):
        """The memory stays in use."""

    wake_up = start_profile = stop_profile = sleep


class LLMEngine:
    """Requests one by one. For everything else, it has what its LLM has."""

    def __init__(self, llm):
        self.llm, self.requests = llm, {}
        # Trainers look for `load_weights` in some of these.
        self.model_executor = self.driver_worker = self.model_runner = self.model = self
        self.load_weights = llm.receive

    def __getattr__(self, name):
        return getattr(self.__dict__["llm"], name)

    @classmethod
    def from_engine_args(cls, engine_args):
        return LLM(**vars(engine_args)).llm_engine

    def add_request(self, request_id, prompt, params, arrival_time=None, **options):
        known("SamplingParams", options)
        check(params.output_kind != RequestOutputKind.DELTA, "output_kind",
              "CUMULATIVE or FINAL_ONLY", params.output_kind)
        ours = self.llm.add_request(prompt, self.llm.prepare(params))
        self.requests[ours] = request_id, params.clone(), defaultdict(list)
        return request_id

    def step(self):
        outputs = []
        for output in self.llm.step():
            output.request_id, *given = self.requests[ours := output.request_id]
            if output.finished:
                del self.requests[ours]
            if output.finished or given[0].output_kind == RequestOutputKind.CUMULATIVE:
                outputs.append(self.llm.writer.request(output, *given))
        return outputs

    def abort_request(self, request_ids):
        wanted = [request_ids] if isinstance(request_ids, str) else request_ids
        for ours, (request_id, *_) in self.requests.items():
            if request_id in wanted:
                self.llm.abort_request(ours)

    def get_num_unfinished_requests(self):
        return len(self.requests)


# -- vLLM's modules --------------------------------------------------------------------

def get_tokenizer(name, tokenizer_mode=None, trust_remote_code=None, **options):
    return AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)


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
    "__version__": VERSION, "resolve_chat_template": resolve_hf_chat_template}
NAMES |= dict.fromkeys((
    "cleanup_dist_env_and_memory", "destroy_distributed_environment",
    "destroy_model_parallel"), clean_up)
NAMES |= {name: type(name, (Unsupported,), {}) for name in (
    "AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine", "Histogram", "LoRARequest",
    "PoolingParams", "Vector", "get_ip", "packed_nccl_broadcast_producer",
    "trainer_init")}


class Finder(MetaPathFinder, Loader):
    """Imports vllm and whatever is within it: each module has all the names."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vllm":
            return ModuleSpec(name, self, is_package=True)

    def exec_module(self, module):
        vars(module).update(NAMES)


sys.meta_path.insert(0, Finder())
for name in ("distributed", "engine", "entrypoints", "inputs", "lora", "outputs",
             "sampling_params", "transformers_utils", "utils"):
    import_module(f"vllm.{name}")  # those that `import vllm` imports
installed = metadata.version
metadata.version = lambda name: VERSION if name == "vllm" else installed(name)
