"""One step on the device: the pool of K and V, the inputs, the forward pass.

The scheduler knows tokens and block ids. The runner turns its `Batch` into one forward
pass over one flat batch of tokens. From one step to the next it keeps the contents of
the pool, the tokens that the last step sampled, and what penalties have counted.

    execute    give the batch to all ranks, then `run` it
    run        move blocks, `compute` the logits, sample
    compute    `prepare` and `forward`, or repeat a recorded step (`gpu/graphs.py`)
    prepare    make the inputs, on the device
    forward    call the model

`loading/start_up.py` makes a runner and decides how many blocks its pool has. On a GPU
it also records the steps of `gpu/graphs.py`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention import INPUTS, Metadata, TorchAttention, cdiv
from nanopaged.batch import Batch, Draws
from nanopaged.config import EngineConfig
from nanopaged.logits import TokenCounts
from nanopaged.logprobs import score_prompts
from nanopaged.ranks import Ranks
from nanopaged.sampler import SamplerOutput, sample


class ModelRunner:
    """A rank's share of the model and of the pool.

    longest_sequence: how many tokens a sequence may have, if the pool is large enough.
    most_tokens: how many tokens the largest step has.
    settings: a context manager with torch's settings while the runner computes.
    """

    def __init__(self, config: EngineConfig, ranks: Ranks, backend: TorchAttention,
                 model: Any, model_config: Any, most_tokens: int,
                 settings: Callable[[], AbstractContextManager[None]]) -> None:
        self.config, self.ranks = config, ranks
        self.backend, self.ops, self.model = backend, backend.ops, model
        self.settings, self.most_tokens = settings, most_tokens
        self.num_layers = model_config.num_hidden_layers
        self.vocab_size = model_config.vocab_size
        self.longest_sequence = model_config.longest_sequence
        self.device, self.dtype = backend.device, backend.dtype
        self.is_gpu = self.device.type == "cuda"
        self.graphs: Any = None  # recorded steps, if there are any
        self.state_bytes = 0  # of a sequence's state, if the model has any
        # Room for INPUTS. Ten numbers are a token's id, position and slot, 6 of a plan
        # (an item of `TritonAttention`), and the index of a sample. Block tables may be
        # there twice, because `FlashAttention` plans with them. 2^16 is for the rest of
        # a plan. For graphs, a step is padded with max_num_seqs tokens.
        num_tokens = most_tokens + config.max_num_seqs
        size = (10 + len(Draws._fields)) * num_tokens + 2 * self.most_blocks + 2**16
        self.inputs = torch.zeros(size, dtype=torch.int64, device=self.device)
        self.last_tokens = self.inputs.new_zeros(config.max_num_seqs)
        self.token_counts = TokenCounts(self.last_tokens, self.vocab_size)
        self.make_pools(0, 0)  # `loading/start_up.py` finds out how large they can be

    @property
    def most_blocks(self) -> int:
        """How many blocks can be in use at once."""
        most = cdiv(self.longest_sequence, self.config.block_size)
        return int(self.config.max_num_seqs * most)

    def make_pools(self, num_blocks: int, num_swap_blocks: int) -> None:
        """Make room for K and V: blocks on the device, and blocks in CPU memory."""
        self.num_blocks, self.num_swap_blocks = num_blocks, num_swap_blocks
        # One extra block on the device is for padding. No move names it: there, its
        # number means the first block in CPU memory.
        self.padding_block = num_blocks
        # Not in inference mode, so that other code may write into the pools.
        with self.settings(), torch.inference_mode(False):
            self.kv_caches = self._make_pool(num_blocks + 1, self.device)
            self.swapped_kv = self._make_pool(num_swap_blocks, torch.device("cpu"))

    def _make_pool(self, num_blocks: int, device: torch.device) -> Tensor:
        """Memory for K and V of all layers. Nothing is read before it is written."""
        shape = self.num_layers, num_blocks, *self.backend.block_shape
        return torch.empty(*shape, dtype=self.dtype, device=device)

    def execute(self, batch: Batch) -> SamplerOutput:
        """Run a step on all ranks. On a GPU this launches it, and waits for nothing but
        log-probabilities.
        """
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
            output = sample(batch, self.token_counts, self.ops, *results)
            # Only rank 0 knows the requests, so all others get its tokens.
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
        of all samples, [num_samples, vocab_size]; how to draw them, [8, num_samples];
        and, if the step was recorded, their tokens.
        """
        return self.forward(self.prepare(batch))

    def prepare(self, batch: Batch) -> Metadata:
        """What the forward pass needs to know, on the device. Copies have a fixed cost,
        so there is only one. It overwrites the previous step's inputs. That is safe,
        because in the GPU's queue it comes after that step.
        """
        metadata = Metadata(batch, self.backend)
        arrays = [vars(metadata)[name] for name in INPUTS]
        sizes = [array.size for array in arrays]
        # torch reuses this pinned memory only once the copy is done.
        flat = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=self.is_gpu)
        np.concatenate(arrays, axis=None, out=flat.numpy())
        sent = self.inputs[: len(flat)].copy_(flat, non_blocking=True)
        for name, array, piece in zip(INPUTS, arrays, sent.split(sizes), strict=True):
            vars(metadata)[name] = piece.view(array.shape)
        metadata.draws = metadata.draws.view(torch.float64)
        return metadata

    def forward(self, metadata: Metadata) -> tuple[Tensor, ...]:
        """Run the model; `compute` says what it returns."""
        token_ids = self.ops.fill_pending(metadata.token_ids, self.last_tokens)
        hidden = self.model(token_ids, self.kv_caches, metadata)
        return hidden, self.model.head(hidden[metadata.last_indices]), metadata.draws
