"""The engine: requests in, tokens out, step by step. After smallest.py, go on here.

The engine repeats one step, `Engine.step`, until no request is left, and the files of
this folder explain its lines. The top of `sequence.py` defines the terms.

The engine knows tokens, and no text. `frontend/` turns prompts into requests, and
tokens into text. `loading/` makes an engine from a checkpoint. `cpu/` and `gpu/` hold
what is specific to a device. They all import this folder, and it imports none of them.
"""

from dataclasses import replace
from itertools import count

from nanopaged.batch import Batch
from nanopaged.block_manager import BlockManager
from nanopaged.checks import check
from nanopaged.config import EngineConfig
from nanopaged.model_runner import ModelRunner
from nanopaged.sampler import SamplerOutput
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Sequence, SequenceGroup
from nanopaged.stats import EngineStats

Changed = dict[str, SequenceGroup]  # requests by id, in the order in which they changed


class Engine:
    """Generates the tokens of requests.

    `check_fits`, `add`, `abort` and `stats` may be called at any time, by any thread,
    even in the middle of a step. Only one thread at a time may call the others. If a
    step breaks off, by an error or by Ctrl-C, call `reset` before the next one.
    """

    def __init__(self, config: EngineConfig, runner: ModelRunner) -> None:
        self.config, self.runner = config, runner
        # The most tokens of a sequence. One of that length must fit into the pool.
        self.max_model_len = min(
            runner.longest_sequence, runner.num_blocks * config.block_size)
        # The prefix cache keeps K and V only. A layer with a state, as in Mamba, would
        # not find the state that belongs to the end of the prefix.
        may_cache = config.enable_prefix_caching and not runner.state_bytes
        self.block_manager = BlockManager(
            runner.num_blocks, config.block_size, may_cache, runner.num_swap_blocks)
        self.scheduler = Scheduler(config, self.block_manager, runner.most_tokens)
        # The steps whose tokens are still to be read.
        self.launched: list[tuple[Batch, SamplerOutput]] = []
        self.steps_ahead = 1 if runner.is_gpu else 0
        self.ids = count()

    def step(self) -> Changed:
        """The whole engine: who runs, one forward pass, what came out of it.

        Returns the engine's own dict of requests that have changed. The caller empties
        it once it has passed them on. If Ctrl-C comes in between, they are still there.

        On a CPU, `steps_ahead` is 0, so a step's tokens are read as soon as it has run.
        On a GPU, the engine runs one step ahead: it reads the tokens of the previous
        step while this one runs. The end of `batch.py` says what follows from that.
        Until you get there, picture a CPU.
        """
        batch = self.scheduler.schedule()
        self.launched.append((batch, self.runner.execute(batch)))
        if len(self.launched) > self.steps_ahead:
            self.scheduler.update(*self.launched.pop(0))
        return self.scheduler.changed

    # -- Requests come and go ----------------------------------------------------------

    def check_fits(self, group: SequenceGroup) -> None:
        """Call this before `add`. ValueError if a request could never run: a group runs
        as a whole, so all its sequences must fit into an empty pool at their longest.
        For a beam search, `params.n` is beam_width.
        """
        manager, n, most = self.block_manager, group.params.n, self.config.max_num_seqs
        check(n <= most, "n (or beam_width)", f"at most max_num_seqs={most}", n)
        # The full blocks of the prompt once, and all others n times.
        needed = manager.max_blocks(group.num_prompt_tokens, [group.max_len] * n)
        check(needed <= manager.num_blocks, "num_blocks", f"at least {needed} for this "
              "request (raise it, or lower max_tokens, n or beam_width)",
              manager.num_blocks)

    def add(self, groups: list[SequenceGroup]) -> None:
        """Give requests their ids, and queue them, all at once."""
        for group in groups:
            group.request_id = str(next(self.ids))  # no two threads get the same
            if group.seed is None:
                group.seed = f"{self.config.seed} {group.request_id}"
        # This is the queue: the requests in the order of their arrival.
        self.scheduler.unfinished.update({group.request_id: group for group in groups})

    def stop(self, seq: Sequence) -> None:
        """End a sequence because its text is complete. Only the caller, who looks for
        stop strings between two steps, can tell.
        """
        self.scheduler.finish(seq, "stop")

    def abort(self, request_id: str) -> None:
        """Have the next step end a request, if it has not ended by then."""
        if request_id in self.scheduler.unfinished:
            self.scheduler.aborted.append(request_id)

    def reset(self) -> Changed:
        """Begin empty: all blocks are free, the prefix cache is empty, and nothing
        runs. Requests that have started are aborted; those that never ran still wait.
        """
        self.launched.clear()
        self.runner.token_counts.counted.clear()
        self.scheduler.reset()
        return self.scheduler.changed

    def reset_if_idle(self) -> Changed:
        """End aborted requests. Then reset, if no request is left. Call this for new
        weights, for example: the prefix cache has K and V of the old ones.
        """
        self.scheduler.end_aborted()
        return self.scheduler.changed if self.num_unfinished else self.reset()

    @property
    def num_unfinished(self) -> int:
        return len(self.scheduler.unfinished)

    def stats(self) -> EngineStats:
        """What the engine holds now, and what it has counted."""
        manager = self.block_manager
        return replace(
            self.scheduler.stats, blocks_cached=len(manager.prefix_cache.published),
            blocks_used=manager.num_blocks - len(manager.free_blocks))
