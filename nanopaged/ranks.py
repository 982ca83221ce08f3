"""Several processes, one engine: each rank has a share of the weights and of K and V.

    torchrun --nproc-per-node 2 script.py    # LLM(..., tensor_parallel_size=2)

torchrun starts the script several times. Each of these processes is a rank. Rank 0 runs
the script to its end. The other ranks run it as far as its `LLM(...)`, which does not
return there: from then on they only serve rank 0.

Rank 0 schedules. In every step it sends the batch to the other ranks, as plain numbers.
Block ids mean the same on all of them. All ranks run the same layers, each with its
share of the heads and of the MLP, and add up their results (Megatron-LM, Shoeybi et al.
2019). The tokens are those that rank 0 samples.

`loading/processes.py` explains how the processes find each other, and how they end.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopaged.batch import Batch

dist: Any = torch.distributed
# The fields of a batch that the other ranks need.
SENT = ("token_ids", "counts", "ends", "block_ids", "sample_entries", "moves")


class Ranks:
    """This process among the ranks of an engine."""

    def __init__(self, size: int = 1, rank: int = 0, batch_group: Any = None) -> None:
        self.size, self.rank = size, rank
        self.batch_group = batch_group  # a process group only for batches

    def all_reduce(self, x: Tensor, operator: str = "SUM") -> Tensor:
        """The sum of all ranks' tensors, or their "MIN"; it overwrites `x`."""
        if self.size > 1:
            dist.all_reduce(x, getattr(dist.ReduceOp, operator))
        return x

    def broadcast(self, x: Tensor, group: Any = None) -> Tensor:
        """The tensor of rank 0; it overwrites `x`."""
        if self.size > 1:
            dist.broadcast(x, 0, group)
        return x

    def send(self, batch: Batch) -> None:
        """Send the next batch to the other ranks: how many numbers each of these fields
        has, and then all these numbers. Moves become one flat list.
        """
        if self.size > 1:
            numbers = [np.array(getattr(batch, name), np.int64) for name in SENT]
            sizes = np.array([each.size for each in numbers])
            for message in (sizes, np.concatenate(numbers, axis=None)):
                self.broadcast(torch.from_numpy(message), self.batch_group)

    def serve(self, run: Callable[[Batch], object]) -> None:
        """Run what rank 0 sends, until it leaves. On rank 0, return at once."""
        while self.rank > 0:  # which never changes
            sizes = torch.empty(len(SENT), dtype=torch.int64, device="cpu")
            try:
                self.broadcast(sizes, self.batch_group)
            except RuntimeError:  # rank 0 has left the group
                os._exit(0)  # a normal exit would make NCCL wait for CUDA graphs
            numbers = sizes.new_empty(int(sizes.sum()))
            self.broadcast(numbers, self.batch_group)
            pieces = map(Tensor.tolist, numbers.split(sizes.tolist()))
            batch = Batch(**dict(zip(SENT, pieces, strict=True)))
            batch.moves = [(old, new) for old, new in np.reshape(batch.moves, (-1, 2))]
            run(batch)
