"""Several processes, one engine: each rank has a share of the weights and of K and V.

Rank 0 schedules. Every step it sends the other ranks one message of plain numbers.
Block ids mean the same everywhere, so all ranks run the same model, each with its
share, and add up their partial results (Megatron-LM, Shoeybi et al. 2019). The tokens
are those of rank 0.

The other ranks are processes that torchrun starts with the user's own script, or that
rank 0 starts here. Either way they make an `LLM` too, which serves rank 0 and then ends
the process.
"""

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, start_processes

from nanopaged.config import EngineConfig
from nanopaged.scheduler import ControlMessage

dist: Any = torch.distributed
LOOPBACK = "127.0.0.1"  # an address that no other machine can reach
END = b"end"  # the message after the last step


def start_rank(index: int, options: dict[str, Any], port: int) -> None:
    """What a process does that rank 0 has started: the same as under torchrun."""
    from nanopaged import LLM

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0
    rank = str(index + 1)
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(options["tensor_parallel_size"]),
        MASTER_ADDR=LOOPBACK, MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True")
    LLM(**options)


def share_of(config: Any, num_ranks: int) -> Any:
    """The model's config with the sizes of one rank's share, the same for all ranks.

    Where there are more ranks than KV heads, several ranks have the same KV head.
    """
    share = copy(config)
    for name in ("num_attention_heads", "intermediate_size", "vocab_size"):
        size = getattr(config, name)
        if size % num_ranks:
            raise ValueError(
                f"tensor_parallel_size must divide {name}={size}, got {num_ranks}")
        setattr(share, name, size // num_ranks)

    num_kv_heads = config.num_key_value_heads
    if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
        raise ValueError(
            f"tensor_parallel_size must divide num_key_value_heads={num_kv_heads} or "
            f"be a multiple of it, got {num_ranks}")
    share.num_key_value_heads = max(1, num_kv_heads // num_ranks)
    return share


class Ranks:
    """This process among the ranks of an engine."""

    def __init__(self, config: EngineConfig, model_config: Any) -> None:
        self.rank = 0
        self.size = config.tensor_parallel_size
        self.share = share_of(model_config, self.size)
        self.num_steps = 0  # how many messages were sent or received
        self.workers: Any = None  # the processes that were started here
        self.store: Any = None  # where ranks meet, and rank 0 puts its messages
        self.group: Any = None  # for tensors
        if self.size > 1:
            with self.watched():
                self._connect(config)

    def _connect(self, config: EngineConfig) -> None:
        if os.environ.get("WORLD_SIZE") == str(self.size):
            rendezvous = dist.rendezvous("env://", timeout=timedelta(seconds=3))
            self.store, self.rank, _ = next(rendezvous)
        else:
            # Left to itself, the store listens on all interfaces, and trusts everybody.
            listener = socket.create_server((LOOPBACK, 0))
            port = listener.getsockname()[1]
            self.store = dist.TCPStore(
                LOOPBACK, port, is_master=True, wait_for_workers=False,
                master_listen_fd=listener.detach())
            arguments = (asdict(config), port)
            self.workers = start_processes(  # type: ignore[no-untyped-call]
                start_rank, arguments, self.size - 1, join=False, daemon=True)
        # An engine may idle for long, and no timeout is needed to notice that a peer
        # has died: it breaks its connection.
        self.store.set_timeout(timedelta(days=365))
        if self.store.add(f"rank {self.rank}", 1) > 1:
            raise RuntimeError(
                "under torchrun a script can make only one engine with ranks")
        names = [f"rank {rank}" for rank in range(self.size)]
        while self.workers and not self.store.check(names):
            self.workers.join(0.02)  # raises if one has ended

        self.group = self._make_group(config)

    def _make_group(self, config: EngineConfig) -> Any:
        if config.device != "cpu" and torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
            return dist.ProcessGroupNCCL(self.store, self.rank, self.size)

        gloo = dist.ProcessGroupGloo
        options = gloo._Options()
        if self.store.host == LOOPBACK:
            device = gloo.create_device(hostname=LOOPBACK)
        else:
            device = gloo.create_default_device()
        options._devices = [device]
        return gloo(self.store, self.rank, self.size, options)

    def start_of(self, part: int, whole: int) -> int:
        """Where this rank's part begins in a dimension of a weight that has `whole`
        elements.

        Ranks that share a KV head begin at the same whole part: with 4 ranks and 2 KV
        heads of 64, part=64 and whole=128: 0, 0, 64, 64. In a dimension that is not
        divided, part=whole, and all begin at 0.
        """
        start = self.rank * whole // self.size
        return start // part * part

    # -- What a step needs -------------------------------------------------------------

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the ranks' tensors, in place."""
        if self.size > 1:
            self._wait(self.group.allreduce(x), x)
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """The tensor of rank 0, in place: the others add zeros."""
        if self.rank > 0:
            x.zero_()
        return self.all_reduce(x)

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's columns side by side: [n, columns] -> [n, size * columns]."""
        if self.size == 1:
            return x
        rows = x.new_empty(self.size * len(x), x.shape[1])  # rank by rank
        self._wait(self.group._allgather_base(rows, x.contiguous()), x)
        return rows.view(self.size, *x.shape).transpose(0, 1).flatten(1)

    def _wait(self, work: Any, x: Tensor) -> None:
        """On a CPU, wait in Python: Gloo's own wait would not notice Ctrl-C."""
        try:
            if not x.is_cuda:
                is_done = threading.Event()
                work.get_future().add_done_callback(lambda _: is_done.set())
                is_done.wait()
            work.wait()  # raises if it has failed; a GPU waits, and the host goes on
        finally:
            del work  # in a traceback it would keep the connections open

    def send(self, message: ControlMessage) -> None:
        """Tell the other ranks what the next step is. Loading JSON executes nothing.
        """
        if self.store is not None:
            self._put(json.dumps(vars(message)).encode())

    def _put(self, data: bytes) -> None:
        self.num_steps += 1
        self.store.set(f"step {self.num_steps}", data)
        # Every step sums over all ranks, so none is more than a few steps behind.
        self.store.delete_key(f"step {self.num_steps - 9}")

    def serve(self, run: Callable[[ControlMessage], object]) -> None:
        """Run what rank 0 sends until it ends; then end this process."""
        while True:
            self.num_steps += 1
            data = self.store.get(f"step {self.num_steps}")
            if data == END:
                os._exit(0)  # at once: NCCL's group would wait for the recorded graphs
            run(ControlMessage(**json.loads(data)))

    # -- How it ends -------------------------------------------------------------------

    @contextmanager
    def watched(self) -> Iterator[None]:
        """If something fails in here, end the ranks, and say which of them failed.

        An error in rank 0 is often only the echo of another rank's failure: without
        that rank an all-reduce fails. Then the other rank's failure is raised.
        """
        try:
            try:
                yield
            except RuntimeError:
                if self.workers:
                    self.workers.join(5)  # raises if a rank has failed
                raise
        except ProcessException as failure:
            self.close()
            raise RuntimeError(
                f"rank {failure.error_index + 1} failed: {failure}") from failure
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Tell the other ranks to end, and end those that were started here."""
        if self.store is not None and self.rank == 0:
            self._put(END)
        for process in self.workers.processes if self.workers else ():
            process.kill()
            process.join()
        self.workers = None
        self.store = None
        # A rank that fails keeps its connection until it has printed why.
        if self.rank == 0 and self.group is not None:
            if torch.cuda.is_available():
                self.group.abort()  # anything else waits for the recorded graphs
            self.group = None
