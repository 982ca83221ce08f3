"""Several processes, one engine: each rank has a share of the weights and of K and V.

    torchrun --nproc-per-node 2 script.py    # LLM(..., tensor_parallel_size=2)

torchrun starts the script several times. Each of these processes is a rank. Rank 0 runs
the script to its end. The other ranks run it as far as its `LLM(...)`, which does not
return there: from then on they only serve rank 0.

Rank 0 schedules. In every step it sends the batch to the other ranks, as plain numbers.
Block ids mean the same on all of them. All ranks run the same layers, each with its
share of the heads and of the MLP, and add up their results (Megatron-LM, Shoeybi et al.
2019). The tokens are those that rank 0 samples.

How it ends: when rank 0's script ends, for whatever reason, its process leaves the
process group. By then the other ranks are waiting for the next batch. Instead of a
batch they get an error, and exit. If any rank fails or is killed, torchrun stops all
the others.
"""

import os
import weakref
from collections.abc import Callable
from copy import copy
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopaged.batch import SENT, Batch
from nanopaged.checks import check
from nanopaged.config import EngineConfig

dist: Any = torch.distributed
# The sizes that the ranks divide, if a model has them. The vocabulary is not divided:
# otherwise the ranks would have to exchange embeddings and logits in every step.
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


class Ranks:
    """This process among the ranks of an engine."""

    def __init__(self, config: EngineConfig, model_config: Any) -> None:
        self.size = config.tensor_parallel_size
        self.rank = 0
        self.local_config = copy(model_config)  # with the sizes of one rank's share
        for name in DIVIDED:
            size = getattr(model_config, name, 0)
            check(size % self.size == 0, "tensor_parallel_size",
                  f"a divisor of {name}={size}", self.size)
            setattr(self.local_config, name, size // self.size)
        if self.size == 1:
            return

        num_processes = int(os.environ.get("WORLD_SIZE", 1))
        check(num_processes == self.size, "tensor_parallel_size", f"{num_processes}, "
              "the number of processes (torchrun starts several)", self.size)
        check(not dist.is_initialized(), "tensor_parallel_size", "1 for another engine "
              "in this process, because the other ranks serve the first", self.size)
        backend = "gloo"
        if config.device != "cpu" and torch.cuda.is_available():
            backend = "cpu:gloo,cuda:nccl"  # batches are sent by gloo
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # listen nowhere else
        # An engine may be idle for a long time, so waiting for the next batch has no
        # timeout. If a rank dies, torchrun notices.
        dist.init_process_group(backend, timeout=timedelta(days=365))
        self.rank = dist.get_rank()
        # At exit, `ModelRunner.free` must run before `leave`. Finalizers run from the
        # newest to the oldest, and this one is registered before the model is made.
        # (What is registered with `atexit` would run before both.) A finalizer belongs
        # to an object: here to the module torch.distributed, which lives until exit.
        weakref.finalize(dist, leave)

    # -- What a step needs -------------------------------------------------------------

    def all_reduce(self, x: Tensor, operator: str = "SUM") -> Tensor:
        """The sum of all ranks' tensors, or their "MIN"; it overwrites `x`."""
        if self.size > 1:
            dist.all_reduce(x, getattr(dist.ReduceOp, operator))
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """The tensor of rank 0; it overwrites `x`."""
        if self.size > 1:
            dist.broadcast(x, 0)
        return x

    def send(self, batch: Batch) -> None:
        """Send the next batch to the other ranks: how many numbers each of its fields
        has, and then all these numbers. (Moves are sent as one flat list. Nothing is
        pickled.)
        """
        if self.size > 1:
            numbers = [np.array(getattr(batch, name), np.int64) for name in SENT]
            self.broadcast(torch.tensor([field.size for field in numbers]))
            self.broadcast(torch.from_numpy(np.concatenate(numbers, axis=None)))

    def serve(self, run: Callable[[Batch], object]) -> None:
        """Run what rank 0 sends, until it leaves. On rank 0, return at once."""
        while self.rank > 0:  # which never changes
            sizes = torch.empty(len(SENT), dtype=torch.int64)
            try:
                self.broadcast(sizes)
            except RuntimeError:  # rank 0 has left the group
                os._exit(0)  # a normal exit would make NCCL wait for recorded graphs
            numbers = self.broadcast(torch.empty(int(sizes.sum()), dtype=torch.int64))
            pieces = map(Tensor.tolist, numbers.split(sizes.tolist()))
            batch = Batch(**dict(zip(SENT, pieces, strict=True)))
            flat: Any = batch.moves
            batch.moves = list(zip(flat[::2], flat[1::2], strict=True))
            run(batch)


def leave() -> None:
    """Leave the process group. NCCL would wait for the other ranks; `abort` does not.

    Gloo's threads must end before Python does: they need the GIL to release tensors.
    """
    if dist.is_initialized():
        dist.group.WORLD.abort()
        dist.destroy_process_group()
