"""Several processes, one engine: each rank has a share of the weights, and of K and V its heads.

Rank 0 schedules and decides the tokens. What a step is goes to all ranks as one message of plain
numbers (block ids are the same everywhere), and all run the same model, each with its share, and
add up what the others need to know (Megatron-LM, Shoeybi et al. 2019).

The other ranks come from torchrun, which runs the user's script everywhere, or are started here.
Either way they make an `LLM` too, which serves rank 0 and then ends the process.
"""

import atexit
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, start_processes

from nanopaged.config import EngineConfig

dist: Any = torch.distributed


def start_rank(index: int, options: dict[str, Any], port: int) -> None:
    """What a process does that rank 0 has started: the same as under torchrun."""
    from nanopaged import LLM

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0
    size, rank = str(options["tensor_parallel_size"]), str(index + 1)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    LLM(**options)


class Ranks:
    """This process among the ranks of an engine."""

    def __init__(self, config: EngineConfig) -> None:
        self.rank, self.size, self.step = 0, config.tensor_parallel_size, 0  # steps that were sent
        self.workers: Any = None  # the processes that were started here
        self.store: Any = None  # where ranks find each other, and rank 0 puts its messages
        self.group: Any = None  # for tensors
        if self.size > 1:
            atexit.register(self.close)  # for who forgets it
            with self.watched():
                self._connect(config)

    def _connect(self, config: EngineConfig) -> None:
        if os.environ.get("WORLD_SIZE") == str(self.size):
            self.store, self.rank, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=3)))
        else:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self.workers = start_processes(  # type: ignore[no-untyped-call]
                start_rank, (asdict(config), self.store.port), self.size - 1, False, daemon=True)
        self.store.set_timeout(timedelta(days=365))  # an engine may idle; a lost peer is noticed
        if self.store.add(f"rank {self.rank}", 1) > 1:
            raise RuntimeError("under torchrun a script can have one engine with ranks, once")
        while self.workers and not self.store.check([f"rank {i}" for i in range(self.size)]):
            self.workers.join(0.02)  # raises if one has ended
        backend = dist.ProcessGroupGloo
        if config.device != "cpu" and torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
            backend = dist.ProcessGroupNCCL
        self.group = backend(self.store, self.rank, self.size)

    # -- who has what --------------------------------------------------------------------------

    def share(self, config: Any) -> Any:
        """The model's config with this rank's sizes; `starts` is where they begin in the whole.

        Query heads stay with their KV head. Where ranks outnumber KV heads, several have the same
        one and share its query heads.
        """
        share, num_kv_heads, rank = copy(config), config.num_key_value_heads, self.rank
        firsts = [num_kv_heads * i // self.size for i in range(self.size + 1)]  # of every rank
        kv, mates = firsts[rank], firsts.count(firsts[rank])  # who have the same KV heads
        share.num_key_value_heads = max(1, firsts[rank + 1] - kv)
        group_size = config.num_attention_heads // num_kv_heads
        heads, index = group_size * share.num_key_value_heads, rank - firsts.index(kv)
        q, q_end = (group_size * kv + heads * i // mates for i in (index, index + 1))
        unit, unit_end = (config.intermediate_size * i // self.size for i in (rank, rank + 1))
        token, token_end = (config.vocab_size * i // self.size for i in (rank, rank + 1))
        share.num_attention_heads, share.intermediate_size = q_end - q, unit_end - unit
        share.vocab_size, share.total_vocab_size = token_end - token, config.vocab_size
        q, kv = q * config.head_dim, kv * config.head_dim
        share.starts = {"q_proj": q, "k_proj": kv, "v_proj": kv, "o_proj": q, "gate_proj": unit,
                        "up_proj": unit, "down_proj": unit, "embed_tokens": token, "lm_head": token}
        return share

    # -- what a step needs ---------------------------------------------------------------------

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the ranks' tensors, in place."""
        if self.size > 1:
            self.group.allreduce(x).wait()
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's tensor, in place: the others add zeros."""
        return self.all_reduce(x.mul_(self.rank == 0)) if self.size > 1 else x

    def gather(self, x: Tensor, at: int, total: int) -> Tensor:
        """x: the columns from `at` on of a matrix that has `total`; returns all of them."""
        return self.all_reduce(F.pad(x, (at, total - at - x.shape[1]))) if self.size > 1 else x

    def send(self, message: object) -> None:
        if self.store and self.rank == 0:
            self.step += 1
            self.store.set(f"step {self.step}", pickle.dumps(message))
            self.store.delete_key(f"step {self.step - 9}")  # nobody is so far behind

    def serve(self, run: Callable[[Any], object]) -> None:
        """Do what rank 0 sends, until it ends; then end this process."""
        while (message := pickle.loads(self.store.get(f"step {self.step + 1}"))) is not None:
            self.step += 1
            run(message)
        os._exit(0)  # at once: NCCL's group would wait for the recorded graphs

    # -- how it ends ---------------------------------------------------------------------------

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What fails in here ends the ranks that were started here; what failed there is told."""
        try:
            yield
        except BaseException as error:
            try:
                if self.workers and isinstance(error, RuntimeError):
                    self.workers.join(2)  # raises if one has failed: that is why we have
                raise
            except ProcessException as failure:
                raise RuntimeError(f"rank {failure.error_index + 1} failed: {failure}") from error
            finally:
                self.close()

    def close(self) -> None:
        """Tell the other ranks to end, and end those that were started here."""
        self.send(None)
        for process in self.workers.processes if self.workers else ():
            process.kill()
            process.join()
        self.workers = self.store = None
        # A rank that failed says why before it is missed; NCCL's group would wait for the graphs.
        self.group = self.group if self.rank or torch.cuda.is_available() else None
