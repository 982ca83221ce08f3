"""One step on the device: the pool of K and V, the inputs, the forward pass.

The scheduler deals in tokens and block ids. The runner turns its `Batch` into one
forward pass over one flat batch of tokens. From one step to the next it keeps two
things: the contents of the pool, and the tokens that the last step sampled.

`loading/start_up.py` makes a runner and decides how many blocks its pool has. On a GPU
it also records the steps of `gpu/graphs.py`.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention import Metadata, TorchAttention, cdiv, locate, slot_mapping
from nanopaged.batch import Batch
from nanopaged.config import EngineConfig
from nanopaged.logits import score_prompts
from nanopaged.ranks import Ranks
from nanopaged.sampler import SamplerOutput, sample


class ModelRunner:
    def __init__(self, config: EngineConfig, ranks: Ranks, backend: TorchAttention,
                 model: Any, max_model_len: int) -> None:
        self.config, self.ranks = config, ranks
        self.backend, self.model = backend, model
        self.device, self.dtype = backend.device, backend.dtype
        self.is_gpu = self.device.type == "cuda"
        # Whether torch.compile compiles the functions that are marked `@fused`.
        self.compiles = self.is_gpu and not config.enforce_eager
        self.graphs: Any = None  # recorded steps, if there are any
        self.max_model_len = max_model_len
        self.max_blocks = config.max_num_seqs * cdiv(
            max_model_len, config.block_size)  # more can never be in use
        # Room for the inputs of a step: for each token an id, a position, a slot, up to
        # 6 numbers in a plan, and perhaps a sample. Recorded steps are padded, and a
        # plan on a GPU has a few thousand numbers more.
        num_tokens = config.max_num_batched_tokens + config.max_num_seqs
        num_inputs = (1 + 1 + 1 + 6 + 1) * num_tokens + self.max_blocks + 2**16
        self.inputs = torch.zeros(num_inputs, dtype=torch.int64, device=self.device)
        self.last_tokens = self.inputs.new_zeros(config.max_num_seqs)
        self.make_pools(0, 0)  # `loading/start_up.py` finds out how large they can be

    def make_pools(self, num_blocks: int, num_swap_blocks: int) -> None:
        """Make room for K and V: blocks on the device, and blocks in CPU memory."""
        self.num_blocks, self.num_swap_blocks = num_blocks, num_swap_blocks
        # The device's pool has one block more than the manager knows. Padding writes
        # there: in trial steps, and in recorded ones. (It is never moved. In `moves`
        # this number is the first block in CPU memory.)
        self.padding_block = num_blocks
        self.kv_caches = self._make_pool(num_blocks + 1, self.device)
        self.swap_space = self._make_pool(num_swap_blocks, "cpu")

    def _make_pool(self, num_blocks: int, device: Any) -> Tensor:
        """Memory for K and V of all layers. Nothing is read before it is written."""
        config = self.ranks.local_config  # the sizes of this rank's part of the model
        return torch.empty(
            config.num_hidden_layers, num_blocks, 2, config.num_key_value_heads,
            self.config.block_size, config.head_dim, dtype=self.dtype, device=device)

    def execute(self, batch: Batch) -> SamplerOutput:
        """Run a step on all ranks. (On a GPU this only launches it.)"""
        self.ranks.send(batch)
        return self.run(batch)

    def run(self, batch: Batch) -> SamplerOutput:
        """This rank's part of a step: move blocks, compute the tokens, and sample."""
        # The thread may have another current GPU, or may have told torch.compile to do
        # something else. During a step, the engine's own settings hold.
        stance = "default" if self.compiles else "force_eager"
        with (torch.inference_mode(), torch.compiler.set_stance(stance),
              torch.accelerator.device_index(self.device.index)):
            for old, new in batch.moves:
                self._block(new).copy_(self._block(old))
            if not batch.counts:
                return SamplerOutput(self.last_tokens[:0], {})
            states, metadata = self._compute(batch)
            score_prompts(self.model.head, states, batch)
            logits = self.model.head(states[metadata.last_indices])
            output = sample(logits, batch.receivers)
            # Only rank 0 knows the requests. The others take the most likely tokens,
            # and then get those of rank 0.
            tokens = self.ranks.broadcast(output.token_ids)
            self.last_tokens[: len(tokens)] = tokens
            return output

    def _block(self, block_id: int) -> Tensor:
        """A block's place in all layers: [num_layers, 2, num_kv_heads, block_size,
        head_dim]. Blocks in CPU memory are numbered after the device's.
        """
        if block_id < self.num_blocks:
            return self.kv_caches[:, block_id]
        return self.swap_space[:, block_id - self.num_blocks]

    def _compute(self, batch: Batch) -> tuple[Tensor, Metadata]:
        """The last hidden states of all tokens, [num_tokens, hidden_size]. (A recorded
        step has some padding after them.)
        """
        if self.graphs and (computed := self.graphs.compute(batch)):
            return computed  # type: ignore[no-any-return]
        metadata = self.prepare(batch)
        return self.forward(metadata), metadata

    def prepare(self, batch: Batch) -> Metadata:
        """What the forward pass needs to know, on the device. (The next file explains
        `Metadata`, `locate` and `slot_mapping`.)
        """
        counts, ends = np.array(batch.counts), np.array(batch.ends)
        block_tables, block_size = np.array(batch.block_ids), self.config.block_size
        at = locate(counts, ends, block_size)
        tensors = self._upload(
            token_ids=np.array(batch.token_ids),
            positions=at.positions,
            slots=slot_mapping(block_tables, at, block_size),
            plan=self.backend.plan(counts, ends),
            # The order matters for CUDA graphs: see `gpu/graphs.py`.
            block_tables=block_tables,
            last_indices=np.cumsum(counts)[batch.samples] - 1)
        return Metadata(counts, ends, **tensors)

    def _upload(self, **arrays: Any) -> dict[str, Tensor]:
        """Copy arrays to the device, in one transfer, because each has a fixed cost.
        (It overwrites the previous step's inputs, which is safe: in the GPU's queue it
        comes after that step.)
        """
        flat = torch.from_numpy(np.concatenate([*arrays.values()], axis=None))
        flat = flat.pin_memory() if self.is_gpu else flat
        sent = self.inputs[: len(flat)].copy_(flat, non_blocking=True)
        pieces = sent.split([array.size for array in arrays.values()])
        return {name: piece.view(array.shape)
                for piece, (name, array) in zip(pieces, arrays.items(), strict=True)}

    def forward(self, metadata: Metadata) -> Tensor:
        """Run the model; `_compute` says what it returns."""
        token_ids = metadata.token_ids
        # -1 - i stands for sample i of the last step, if the host has not read it yet.
        # (For all other tokens, sample 0 is looked up, and not used.)
        pending = self.last_tokens[(-1 - token_ids).clamp(min=0)]
        token_ids = torch.where(token_ids < 0, pending, token_ids)
        return self.model(token_ids, self.kv_caches, metadata)  # type: ignore[no-any-return]

    def free(self) -> None:
        """Free the memory, even if the engine is still referenced."""
        self.model = None
        if self.graphs:
            self.graphs.free()
        self.kv_caches = self.swap_space = self.last_tokens[:0]
