"""CUDA graphs: steps of decodes, recorded once and then repeated.

A forward pass launches hundreds of kernels, and for a few decodes the host takes longer
to launch them than the GPU takes to run them. A CUDA graph is a recording of all these
launches, and a single launch repeats it: the same kernels with the same sizes and the
same addresses. Therefore:

  - only steps of decodes are recorded, for some numbers of sequences. Other numbers are
    padded up to the next of these
  - a backend's plan has a shape that depends only on this number
  - `ModelRunner._upload` lays the inputs out one after another, in every step from the
    same address. The last one, `last_indices`, moves when the block tables before it
    grow. Only the model's `head` needs it, so the head is not recorded. (Recording it
    would also take memory for the logits of every size.)
"""

import logging
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention import Metadata
from nanopaged.batch import Batch
from nanopaged.model_runner import ModelRunner


def record(runner: ModelRunner) -> "Graphs | None":
    """Record steps of decodes, if the host does not wait for the device in them. In
    some families it does: in a mixture of experts, for example, to learn which ones the
    tokens chose. A graph cannot wait, so such families are served without graphs.
    """
    with runner.modes():
        if not waits_for_device(runner):
            return Graphs(runner)
    logging.getLogger("nanopaged").warning(
        "the modules of this model wait for the GPU, so no CUDA graphs are recorded")
    return None


def waits_for_device(runner: ModelRunner) -> bool:
    """Whether the host waits for the device in the forward pass of a decode."""
    metadata = runner.prepare(pad(Batch(), 1, runner.padding_block))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            runner.forward(metadata)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return any("called a synchronizing" in str(each.message) for each in found)


class Graphs:
    """The forward pass of decodes, recorded for some numbers of sequences."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.recorded: dict[int, tuple[Any, Tensor]] = {}  # by number of sequences
        largest = runner.config.max_num_seqs
        sizes = {min(n, largest) for n in (1, 2, 4, 8, *range(16, largest + 16, 16))}
        # Freeing a graph also frees cuBLAS's memory for its stream, so each engine
        # records on a stream of its own.
        memory_pool = torch.cuda.graph_pool_handle()
        stream: Any = torch.cuda.Stream()
        for size in sorted(sizes, reverse=True):  # smaller ones reuse memory
            metadata = runner.prepare(pad(Batch(), size, runner.padding_block))
            runner.forward(metadata)  # the first call may set up what later ones need
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on using the GPU.
            with torch.cuda.graph(graph, memory_pool, stream, "thread_local"):
                hidden = runner.forward(metadata)
            self.recorded[size] = (graph, hidden)

    def compute(self, batch: Batch) -> tuple[Tensor, Metadata]:
        """As `ModelRunner.compute`, but decodes repeat a recorded step."""
        runner, num_seqs = self.runner, len(batch.counts)
        if len(batch.token_ids) > num_seqs:
            return runner.compute(batch)  # it has a chunk of a prompt
        size = min(size for size in self.recorded if size >= num_seqs)
        metadata = runner.prepare(pad(batch, size, runner.padding_block))
        graph, hidden = self.recorded[size]
        graph.replay()  # it reads what `prepare` wrote, and fills `hidden`
        return hidden, metadata

    def free(self) -> None:
        for graph, _ in self.recorded.values():
            graph.reset()  # otherwise NCCL would wait for it when the ranks shut down
        self.recorded = {}


def pad(batch: Batch, size: int, padding_block: int) -> Batch:
    """The same step with more sequences, of one token each. They must not overwrite the
    K and V of others, so theirs go to the padding block, which belongs to none. (Moves,
    which are done, and what only rank 0 has are left out.)
    """
    padding = size - len(batch.counts)
    ones = [1] * padding
    padding_blocks = np.full(padding, padding_block)
    return Batch(batch.token_ids + [0] * padding, batch.counts + ones,
                 batch.ends + ones, np.append(batch.block_ids, padding_blocks),
                 batch.sample_entries)
