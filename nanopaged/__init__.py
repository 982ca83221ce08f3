"""nanopaged: the engine of the PagedAttention paper, written to be read.

First reading, how it works: llm, sequence, block_manager, prefix_cache, batch,
scheduler, beam_search, model_runner, attention, cpu_kernels, model, sampler.

Second reading, what makes it fast, safe and large: config, outputs, serving,
detokenizer, start_up, loader, parallel, cpu_products, cpu_attention,
product_kernel, gpu_attention, kernels, processors, drawing, fused.
"""

from nanopaged.config import BeamSearchParams, EngineConfig, SamplingParams
from nanopaged.llm import LLM
from nanopaged.outputs import CompletionOutput, EngineStats, Logprob, RequestOutput

__all__ = ["LLM", "BeamSearchParams", "CompletionOutput", "EngineConfig", "EngineStats",
           "Logprob", "RequestOutput", "SamplingParams"]

__version__ = "0.1.0"
