"""One step on the device: the pool of K and V, the inputs, the forward pass.

The scheduler knows tokens and block ids. The runner turns its `Batch` into one forward
pass over one flat batch of tokens. From one step to the next it keeps two things: the
contents of the pool, and the tokens that the last step sampled.

    execute    give the batch to all ranks, then `run` it
    run        move blocks, `compute` the logits, sample
    compute    `prepare` and `forward`, or repeat a recorded step (`gpu/graphs.py`)
    prepare    make the inputs, on the device
    forward    call the model

`loading/start_up.py` makes a runner and decides how many blocks its pool has. On a GPU
it also records the steps of `gpu/graphs.py`.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention import Metadata, TorchAttention, cdiv, locate, slot_mapping
from nanopaged.batch import Batch
from nanopaged.config import EngineConfig
from nanopaged.logits import score_prompts
from nanopaged.ranks import Ranks
from nanopaged.sampler import SamplerOutput, draw_table, sample


class ModelRunner:
    """A rank's share of the model and of the pool. (`ops`: see `fused.py`.)

    longest_sequence: how many tokens a sequence may have, if the pool is large enough.
    """

    def __init__(self, config: EngineConfig, ranks: Ranks, backend: TorchAttention,
                 ops: Any, model: Any, model_config: Any) -> None:
        self.config, self.ranks = config, ranks
        self.backend, self.ops, self.model = backend, ops, model
        self.num_layers = model_config.num_hidden_layers
        self.vocab_size = model_config.vocab_size
        self.longest_sequence = model_config.longest_sequence
        self.device, self.dtype = backend.device, backend.dtype
        self.is_gpu = self.device.type == "cuda"
        self.num_threads = torch.get_num_threads()
        self.graphs: Any = None  # recorded steps, if there are any
        self.state_bytes = 0  # of a sequence's state, if the model has any
        # Room for a step's inputs: at most 15 numbers for each token (id, position and
        # slot; 6 in a plan; 6 for a sample: its index, and 5 to draw it), the block
        # tables, and the rest of a plan. `gpu/graphs.py` adds at most max_num_seqs.
        num_tokens = config.budget + config.max_num_seqs
        num_inputs = 15 * num_tokens + self.most_blocks + 2**16
        self.inputs = torch.zeros(num_inputs, dtype=torch.int64, device=self.device)
        self.last_tokens = self.inputs.new_zeros(config.max_num_seqs)
        self.make_pools(0, 0)  # `loading/start_up.py` finds out how large they can be

    @property
    def most_blocks(self) -> int:
        """How many blocks can be in use at once."""
        most = cdiv(self.longest_sequence, self.config.block_size)
        return int(self.config.max_num_seqs * most)

    def make_pools(self, num_blocks: int, num_swap_blocks: int) -> None:
        """Make room for K and V: blocks on the device, and blocks in CPU memory."""
        self.num_blocks, self.num_swap_blocks = num_blocks, num_swap_blocks
        # One block more, for padding. (In moves, this id is the first CPU block.)
        self.padding_block = num_blocks
        # (Not in inference mode: other programs may write into the pools.)
        with self.settings(), torch.inference_mode(False):
            self.kv_caches = self._make_pool(num_blocks + 1, self.device)
            self.swapped_kv = self._make_pool(num_swap_blocks, torch.device("cpu"))

    def _make_pool(self, num_blocks: int, device: torch.device) -> Tensor:
        """Memory for K and V of all layers. Nothing is read before it is written."""
        backend = self.backend
        return torch.empty(
            self.num_layers, num_blocks, 2, backend.num_kv_heads, backend.block_size,
            backend.head_dim, dtype=self.dtype, device=device)

    def settings(self) -> AbstractContextManager[None]:
        return own_settings(self.device, self.num_threads)

    def execute(self, batch: Batch) -> SamplerOutput:
        """Run a step on all ranks. (On a GPU this only launches it.)"""
        self.ranks.send(batch)
        return self.run(batch)

    def run(self, batch: Batch) -> SamplerOutput:
        """This rank's part of a step: move blocks, run the model, and sample."""
        with self.settings():
            for old, new in batch.moves:
                self._block(new).copy_(self._block(old))
            if not batch.counts:
                return SamplerOutput(self.last_tokens[:0], {})
            hidden, *results = (self.graphs or self).compute(batch)
            score_prompts(self.model.head, hidden, batch)
            output = sample(batch, self.last_tokens, self.ops, *results)
            # Only rank 0 knows the requests. The others take the most likely tokens,
            # and then get those of rank 0.
            tokens = self.ranks.broadcast(output.token_ids)
            self.last_tokens[: len(tokens)] = tokens
            return output

    def _block(self, block_id: int) -> Tensor:
        """A view of this block in every layer: [num_layers, 2, num_kv_heads,
        block_size, head_dim]. Blocks in CPU memory are numbered after the device's.
        """
        if block_id < self.num_blocks:
            return self.kv_caches[:, block_id]
        return self.swapped_kv[:, block_id - self.num_blocks]

    def compute(self, batch: Batch) -> tuple[Tensor, ...]:
        """The last layer's output for all tokens, [num_tokens, hidden_size]; the logits
        of all samples, [num_samples, vocab_size]; how to draw them, [5, num_samples];
        and, if the step was recorded, their tokens.
        """
        return self.forward(self.prepare(batch))

    def prepare(self, batch: Batch) -> Metadata:
        """What the forward pass needs to know, on the device."""
        counts, ends = np.array(batch.counts), np.array(batch.ends)
        block_tables, block_size = np.array(batch.block_ids), self.config.block_size
        at = locate(counts, ends, block_size)
        tensors = self._upload(
            token_ids=np.array(batch.token_ids),
            positions=at.positions,
            slots=slot_mapping(block_tables, at, block_size),
            plan=self.backend.plan(counts, ends),
            last_indices=np.cumsum(counts)[batch.sample_entries] - 1,
            draws=draw_table(batch).view(np.int64),  # only bits are copied
            block_tables=block_tables)  # the last, for graphs: see `gpu/graphs.py`
        tensors["draws"] = tensors["draws"].view(torch.float64)
        return Metadata(counts, ends, seqs=batch.seqs, **tensors)

    def _upload(self, **arrays: Any) -> dict[str, Tensor]:
        """Copy arrays to the device, in one transfer, because each has a fixed cost. It
        overwrites the previous step's inputs. That is safe, because in the GPU's queue
        it comes after that step.
        """
        sizes = [array.size for array in arrays.values()]
        # (torch reuses this pinned memory only once the copy is done.)
        flat = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=self.is_gpu)
        np.concatenate([*arrays.values()], axis=None, out=flat.numpy())
        sent = self.inputs[: len(flat)].copy_(flat, non_blocking=True)
        pieces = sent.split(sizes)
        return {name: piece.view(array.shape)
                for piece, (name, array) in zip(pieces, arrays.items(), strict=True)}

    def forward(self, metadata: Metadata) -> tuple[Tensor, ...]:
        """Run the model; `compute` says what it returns."""
        token_ids = self.ops.fill_pending(metadata.token_ids, self.last_tokens)
        hidden = self.model(token_ids, self.kv_caches, metadata)
        logits = self.model.head(hidden[metadata.last_indices])
        return hidden, logits, metadata.draws

    def free(self) -> None:
        """Free the memory, even if the engine is still referenced."""
        model, self.model = self.model, None
        for module in [*model.modules()] if model else ():
            vars(module).clear()  # some refer to themselves, or to the model
        if self.graphs:
            self.graphs.free()
        self.kv_caches = self.swapped_kv = self.last_tokens[:0]


LOCK = threading.Lock()
CALLERS: list[tuple[int, bool]] = []


@contextmanager
def own_settings(device: torch.device, num_threads: int = 0) -> Iterator[None]:
    """Torch's settings while an engine is made, and while it computes. The caller may
    have set others: autocast, for example, or another default device. Two belong to the
    process, where several engines may compute at once: the number of threads (0:
    unchanged), and whether new memory is filled. Whoever leaves puts back what the
    first found: the threads at once, the filling when nobody is left.
    """
    torch_fills: Any = torch.utils.deterministic
    is_default = torch.get_default_device().type == "cpu"
    is_gpu = device.type == "cuda"
    with LOCK:
        callers = torch.get_num_threads(), torch_fills.fill_uninitialized_memory
        CALLERS.append(CALLERS[0] if CALLERS else callers)
    try:
        torch_fills.fill_uninitialized_memory = False
        torch.set_num_threads(num_threads or CALLERS[0][0])
        with (torch.inference_mode(), torch.autocast(device.type, enabled=False),
              torch.accelerator.device_index(device.index),
              nullcontext() if is_default else torch.device("cpu"),
              torch.compiler.set_stance("default") if is_gpu else nullcontext()):
            yield
    finally:
        with LOCK:
            num_threads, fills = CALLERS.pop()
            torch.set_num_threads(num_threads)
            torch_fills.fill_uninitialized_memory = fills and not CALLERS
