"""nanopaged: the engine of the PagedAttention paper, readable in one sitting.

Read in this order: llm, config, sequence, block_manager, scheduler, model_runner, attention, model,
layers, loader, sampler, detokenizer, outputs.
"""

from nanopaged.config import EngineConfig, SamplingParams
from nanopaged.llm import LLM
from nanopaged.outputs import CompletionOutput, EngineStats, RequestMetrics, RequestOutput

__all__ = ["LLM", "CompletionOutput", "EngineConfig", "EngineStats", "RequestMetrics",
           "RequestOutput", "SamplingParams"]
