"""nanopaged: the engine of the PagedAttention paper, written to be read.

The files of this folder and of gpu/ are the engine. The first one is its idea in one
file, which imports none of the others. Read in this order: smallest, engine, sequence,
block_manager, prefix_cache, batch, scheduler, beam_search, attention, model_runner,
paged_attention, model, fused, sampler, logits, logprobs, config, stats, checks, ranks.
Then comes gpu/.

One could leave out any folder but loading/:

    gpu/        attention in Triton, CUDA graphs
    cpu/        faster attention, norms and matrix products
    loading/    from a checkpoint to a runner that is ready for its first step
    frontend/   the caller's side: prompts in, text out, from any thread
    tour/       a page that explains and plays runs
    paper/      the paper's figures on memory, simulated
    shakespeare/  the bundled model, and how it was trained
"""

from typing import TYPE_CHECKING, Any

from nanopaged.config import BeamSearchParams, EngineConfig, SamplingParams
from nanopaged.sequence import Logprob
from nanopaged.stats import EngineStats

if TYPE_CHECKING:
    from nanopaged.frontend.llm import LLM
    from nanopaged.frontend.outputs import CompletionOutput, RequestOutput
else:
    def __getattr__(name: str) -> Any:
        """Import the front end when it is first asked for: that imports torch, which
        takes seconds. Without this folder, use `Engine`.
        """
        if name not in ("LLM", "CompletionOutput", "RequestOutput"):
            raise AttributeError(f"module 'nanopaged' has no attribute {name!r}")
        from nanopaged.frontend import llm, outputs

        return getattr(llm if name == "LLM" else outputs, name)

__all__ = ["LLM", "BeamSearchParams", "CompletionOutput", "EngineConfig", "EngineStats",
           "Logprob", "RequestOutput", "SamplingParams"]

__version__ = "0.3.0"
