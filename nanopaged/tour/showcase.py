"""One run in which everything happens: small blocks, a small pool, four requests.

The bundled model serves them from 22 blocks of 4 tokens: too few, so that groups are
swapped out, as long as there is room in CPU memory, and computed again when there is
none. The budget is 12 tokens a step, so that long prompts come in chunks.
"""

from pathlib import Path

from nanopaged import LLM, BeamSearchParams, SamplingParams
from nanopaged.tour.recorder import Trace, trace

FEATURES = (
    "prefix", "chunk", "fork", "copy", "beam", "recompute", "swap_out", "swap_in",
    "evict", "publish", "finish")
SOFT = "ROMEO:\nBut, soft! what light through yonder"
JULIET = "JULIET:\nO Romeo, Romeo! wherefore art thou Romeo?"


def showcase(path: str | Path | None = None) -> Trace:
    """Record the run; its page goes to `path`, if given."""
    llm = LLM(
        device="cpu", dtype="float32", block_size=4, num_blocks=22, max_model_len=64,
        max_num_seqs=8, max_num_batched_tokens=12, swap_space=0.00025,
        preemption_mode="swap", attention_backend="torch")
    title = "Four requests in a pool that is too small for them"
    with llm, trace(llm, path, title) as run:
        greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        samples = SamplingParams(n=3, temperature=0.8, max_tokens=9, seed=5)
        llm.add_request(JULIET, greedy)
        llm.add_request(SOFT, samples)
        for _ in range(4):
            llm.step()

        llm.add_request(SOFT, BeamSearchParams(beam_width=3, max_tokens=7))
        llm.add_request(SOFT + " window", greedy)
        while llm.has_unfinished_requests():
            llm.step()
    return run
