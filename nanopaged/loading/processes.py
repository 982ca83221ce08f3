"""How the processes of an engine find each other, and how they end.

When rank 0's script ends, for whatever reason, its process leaves the process group. By
then the other ranks are waiting for the next batch. Instead of a batch they get an
error, and exit. If any rank fails or is killed, torchrun stops those that it started.
On other machines the ranks get an error in the step that they compute.
"""

import os
import socket
import weakref
from datetime import timedelta

import torch

from nanopaged.checks import check
from nanopaged.config import EngineConfig
from nanopaged.loading.checkpoint import ModelConfig
from nanopaged.ranks import Ranks, dist

# The sizes that the ranks divide. The vocabulary is not divided: otherwise the ranks
# would have to exchange embeddings and logits in every step.
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def divide(model_config: ModelConfig, num_ranks: int) -> ModelConfig:
    """The config of one rank's share of the model."""
    share = ModelConfig(**vars(model_config))
    for name in DIVIDED if num_ranks > 1 else ():
        size = getattr(model_config, name)
        check(size % num_ranks == 0, "tensor_parallel_size",
              f"a divisor of {name}={size}", num_ranks)
        setattr(share, name, size // num_ranks)
    return share


def join(config: EngineConfig) -> Ranks:
    """Join the other ranks, if there are any."""
    size = config.tensor_parallel_size
    if size == 1:
        return Ranks()
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    check(num_processes == size, "tensor_parallel_size", f"{num_processes}, the number "
          "of processes (torchrun starts several)", size)
    backend = "gloo"
    if config.device != "cpu" and torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost"):
        # Listen on the loopback interface alone. (Linux calls it lo, a Mac lo0.)
        names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
    dist.init_process_group(backend)
    # An engine may be idle for a long time, so the others wait for rank 0's next batch
    # without a timeout. All other waits have torch's own, half an hour, because gloo
    # does not always notice that a connection was closed.
    rank = dist.get_rank()
    timeout = timedelta(days=365) if rank > 0 else None
    ranks = Ranks(size, rank, dist.new_group(backend="gloo", timeout=timeout))
    # At exit, `ModelRunner.free` must run before `leave`. Finalizers run from the
    # newest to the oldest, and this one is registered before the model is made. (What
    # is registered with `atexit` would run before both.) A finalizer belongs to an
    # object: here to the module torch.distributed, which lives until exit.
    weakref.finalize(dist, leave, ranks)
    return ranks


def leave(ranks: Ranks) -> None:
    """Leave the other ranks. NCCL would wait for them; `abort` does not.

    Gloo's threads must end before Python does: they need the GIL to release tensors.
    """
    if dist.is_initialized():
        del ranks.batch_group
        dist.group.WORLD.abort()
        dist.destroy_process_group()
