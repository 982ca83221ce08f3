"""CUDA graphs: steps of decodes, recorded once and then repeated.

A forward pass launches hundreds of kernels, and for a few decodes the host takes longer
to launch them than the GPU takes to run them. A CUDA graph is a recording of all these
launches, and a single launch repeats it: the same kernels with the same sizes and the
same addresses. Therefore:

  - only steps of decodes are recorded, for some numbers of sequences. Other numbers are
    padded up to the next of these. A step with a chunk of several tokens runs without a
    graph (`compute`)
  - models whose layers keep states have no graphs, because each step makes new states
    (`loading/start_up.py` decides that). Nor do models whose modules wait for the GPU
  - a backend's plan has a shape that depends only on the number of sequences
  - `ModelRunner.prepare` lays the inputs out one after another, in every step from the
    same address. Only the last one, the block tables, may grow
  - a recorded step also chooses tokens. If a request changes its logits or limits its
    draws, `sample` goes on from the logits, and these tokens are not used. Blocks are
    moved before the recorded step (`ModelRunner.run`)
"""

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopaged.batch import Batch
from nanopaged.model_runner import ModelRunner
from nanopaged.sampler import choose


def record(runner: ModelRunner) -> "Graphs | None":
    """Record steps of decodes, if the host does not wait for the device in them. In
    some families it does: in a mixture of experts, for example, to learn which ones the
    tokens chose. A graph cannot wait, so such families are served without graphs.
    """
    with runner.settings():
        metadata = runner.prepare(pad(Batch(), 1, runner.padding_block))
        torch.cuda.set_sync_debug_mode("error")  # for whatever waits
        try:
            runner.forward(metadata)
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            logging.getLogger("nanopaged").warning(
                "this model's modules wait for the GPU, so no CUDA graphs are recorded")
            return None
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return Graphs(runner)


class Graphs:
    """Steps of decodes, recorded for some numbers of sequences."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.recorded: dict[int, tuple[Any, ...]] = {}  # by number of sequences
        largest = runner.config.max_num_seqs
        # All graphs write their logits into one tensor, as large as the largest step's.
        logits: Any = None
        sizes = {min(n, largest) for n in (1, 2, 4, 8, *range(16, largest + 16, 16))}
        # cuBLAS has a workspace for each stream, and freeing a graph frees that of its
        # stream. So each engine records on a stream of its own.
        memory_pool = torch.cuda.graph_pool_handle()
        stream: Any = torch.cuda.Stream()
        for size in sorted(sizes, reverse=True):  # smaller ones reuse memory
            metadata = runner.prepare(pad(Batch(), size, runner.padding_block))
            # The first calls may set up, or compile, what later ones need.
            _, new, draws = runner.forward(metadata)
            choose(new, draws, runner.ops)
            logits = new if logits is None else logits
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on using the GPU.
            with torch.cuda.graph(graph, memory_pool, stream, "thread_local"):
                hidden, new, draws = runner.forward(metadata)
                kept = logits[:size].copy_(new)
                tokens = choose(kept, draws, runner.ops)
            self.recorded[size] = graph, hidden, kept, draws, tokens

    def compute(self, batch: Batch) -> tuple[Tensor, ...]:
        """Like `ModelRunner.compute`, but decodes repeat a recorded step."""
        runner, count = self.runner, len(batch.sample_entries)
        if len(batch.token_ids) > len(batch.counts):
            return runner.compute(batch)  # it has a chunk of a prompt
        # If a group forks, there are more samples than entries.
        most = max(len(batch.counts), count)
        size = min(size for size in self.recorded if size >= most)
        runner.prepare(pad(batch, size, runner.padding_block))
        graph, hidden, logits, draws, tokens = self.recorded[size]
        graph.replay()  # it reads what `prepare` wrote, and fills these tensors
        return hidden, logits[:count], draws[:, :count], tokens[:count]

    def free(self) -> None:
        for graph, *_ in self.recorded.values():
            graph.reset()  # otherwise NCCL would wait for it when the ranks shut down
        self.recorded = {}


def pad(batch: Batch, size: int, padding_block: int) -> Batch:
    """The same step with more sequences, of one token each, and more samples. They must
    not overwrite the K and V of others, so theirs go to the padding block, which
    belongs to none.
    """
    padding = size - len(batch.counts)
    return replace(
        batch, token_ids=batch.token_ids + [0] * padding,
        counts=batch.counts + [1] * padding, ends=batch.ends + [1] * padding,
        block_ids=np.append(batch.block_ids, np.full(padding, padding_block)),
        sample_entries=batch.sample_entries + [0] * (size - len(batch.sample_entries)))
