"""nanopaged: the engine of the PagedAttention paper, written to be read.

Begin with the core, which is one sitting: llm as far as "Requests one by one",
sequence, block_manager, scheduler, model_runner as far as "CUDA graphs", attention,
cpu_kernels, model.

Read all files in this order: llm, config, inputs, sequence, block_manager, scheduler,
beam_search, model_runner, attention, cpu_kernels, triton_attention, kernels, model,
parallel, loader, sampler, detokenizer, outputs.
"""

from typing import TYPE_CHECKING, Any

from nanopaged.config import BeamSearchParams, EngineConfig, SamplingParams
from nanopaged.inputs import TextPrompt, TokensPrompt
from nanopaged.outputs import (
    BeamSearchSequence,
    CompletionOutput,
    EngineStats,
    Logprob,
    RequestMetrics,
    RequestOutput,
)

if TYPE_CHECKING:
    from nanopaged.llm import LLM

__all__ = [
    "LLM",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EngineConfig",
    "EngineStats",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the engine, and so torch, only when somebody asks for it."""
    if name == "LLM":
        from nanopaged.llm import LLM

        return LLM
    raise AttributeError(f"module 'nanopaged' has no attribute {name!r}")
