"""Several processes, one engine: each rank has a share of the weights and of K and V.

    torchrun --nproc-per-node 2 script.py    # LLM(.., tensor_parallel_size=2)

Every process runs the same script, as far as its `LLM`. There rank 0 goes on, and the
others serve it until it ends. Rank 0 schedules. Every step it sends the others a
message of plain numbers; block ids mean the same everywhere. All ranks run the same
layers, each with its share of the weights, and add up their partial results
(Megatron-LM, Shoeybi et al. 2019). The tokens are those of rank 0. If a rank fails,
torchrun ends the others.
"""

import os
import weakref
from collections.abc import Callable
from copy import copy
from dataclasses import fields
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopaged.config import EngineConfig, check
from nanopaged.scheduler import Batch

dist: Any = torch.distributed
# What the ranks divide, as far as a model has it. Not the vocabulary: they would have
# to exchange embeddings and logits in every step.
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
# What is sent of a batch. Moves are flattened, and become pairs again where they are
# used. Nothing is unpickled.
FIELDS = [field.name for field in fields(Batch) if field.name != "receivers"]


class Ranks:
    """This process among the ranks of an engine."""

    def __init__(self, config: EngineConfig, model_config: Any) -> None:
        self.size = config.tensor_parallel_size
        self.rank = 0
        self.share = copy(model_config)  # the sizes of one rank's share
        for name in DIVIDED:
            size = getattr(model_config, name, 0)
            check(size % self.size == 0, "tensor_parallel_size",
                  f"a divisor of {name}={size}", self.size)
            setattr(self.share, name, size // self.size)
        if self.size == 1:
            return

        num_found = int(os.environ.get("WORLD_SIZE", 1))
        check(num_found == self.size, "tensor_parallel_size", f"{num_found}, as many "
              "processes as there are (torchrun starts several)", self.size)
        backend = "gloo"
        if config.device != "cpu" and torch.cuda.is_available():
            backend = "cpu:gloo,cuda:nccl"  # messages go by the first
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # listen nowhere else
        # An engine may idle for long, and no timeout is needed to notice that a rank
        # has died: torchrun notices that.
        dist.init_process_group(backend, timeout=timedelta(days=365))
        weakref.finalize(dist, leave)  # at the script's end, after `ModelRunner.free`
        self.rank = dist.get_rank()

    # -- What a step needs -------------------------------------------------------------

    def all_reduce(self, x: Tensor, operator: str = "SUM") -> Tensor:
        """The sum of the ranks' tensors, or their "MIN", in place."""
        if self.size > 1:
            dist.all_reduce(x, getattr(dist.ReduceOp, operator))
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """The tensor of rank 0, in place."""
        if self.size > 1:
            dist.broadcast(x, 0)
        return x

    def send(self, batch: Batch) -> None:
        """Tell the other ranks what the next step is: how many numbers each field of
        the batch has, then all of them.
        """
        if self.size > 1:
            numbers = [np.array(getattr(batch, name), np.int64) for name in FIELDS]
            self.broadcast(torch.tensor([field.size for field in numbers]))
            self.broadcast(torch.from_numpy(np.concatenate(numbers, axis=None)))

    def serve(self, run: Callable[[Batch], object]) -> None:
        """Run what rank 0 sends until its process ends. Then end this one, too."""
        while self.rank > 0:
            sizes = torch.empty(len(FIELDS), dtype=torch.int64)
            try:
                self.broadcast(sizes)
            except RuntimeError:
                os._exit(0)  # at once: at its end NCCL would wait for recorded graphs
            numbers = self.broadcast(torch.empty(int(sizes.sum()), dtype=torch.int64))
            run(Batch(*[part.tolist() for part in numbers.split(sizes.tolist())]))


def leave() -> None:
    """Leave the process group without waiting for anybody. Gloo's threads must not
    outlive Python, whose lock they may need for a tensor that they let go of.
    """
    if dist.is_initialized():
        dist.group.WORLD.abort()  # by itself, NCCL would wait for the other ranks
        dist.destroy_process_group()
