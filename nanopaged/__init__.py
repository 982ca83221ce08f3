"""nanopaged: the engine of the PagedAttention paper, written to be read.

Read the files in this order: llm, config, sequence, block_manager, scheduler,
beam_search, model_runner, attention, cpu_kernels, kernels, model, parallel, loader,
sampler, detokenizer, outputs.
"""

from nanopaged.config import BeamSearchParams, EngineConfig, SamplingParams
from nanopaged.llm import LLM
from nanopaged.outputs import CompletionOutput, EngineStats, Logprob, RequestOutput

__all__ = ["LLM", "BeamSearchParams", "CompletionOutput", "EngineConfig", "EngineStats",
           "Logprob", "RequestOutput", "SamplingParams"]

__version__ = "0.1.0"
