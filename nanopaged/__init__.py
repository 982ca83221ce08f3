"""nanopaged: the engine of the PagedAttention paper, readable in one sitting.

Read in this order: llm, config, sequence, block_manager, scheduler, beam_search,
model_runner, attention, cpu_kernels, kernels, model, parallel, loader, sampler,
detokenizer, outputs.
"""

from typing import TYPE_CHECKING, Any

from nanopaged.config import BeamSearchParams, EngineConfig, SamplingParams
from nanopaged.outputs import (
    CompletionOutput,
    EngineStats,
    RequestMetrics,
    RequestOutput,
)

if TYPE_CHECKING:
    from nanopaged.llm import LLM

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "EngineStats",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    """Import the engine, and so torch, only when somebody asks for it."""
    if name == "LLM":
        from nanopaged.llm import LLM

        return LLM
    raise AttributeError(f"module 'nanopaged' has no attribute {name!r}")
