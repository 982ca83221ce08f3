"""What the engine counts."""

from dataclasses import dataclass


@dataclass
class EngineStats:
    """What `Engine.stats` returns.

    The counters begin again at 0 after an error or Ctrl-C within a step, after
    `LLM.reset_prefix_cache`, and after `LLM.load_weights`.
    """

    blocks_total: int
    blocks_used: int = 0  # held by a sequence
    blocks_cached: int = 0  # in the prefix cache, held or free
    steps: int = 0
    output_tokens: int = 0
    prefix_hit_tokens: int = 0  # found in the prefix cache, and not computed again
    preemptions_recompute: int = 0
    preemptions_swap: int = 0
