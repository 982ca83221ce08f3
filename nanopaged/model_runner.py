"""Everything that touches tensors: the model, the KV pool, a step's inputs, and CUDA graphs.

The scheduler speaks of rows, tokens and block ids. The runner keeps the block tables of all running
sequences, one row each, so that a step only has to say what changed, and turns a `Batch` into one
forward pass over one flat batch of tokens.
"""

import ctypes
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers.modeling_utils import local_torch_dtype

from nanopaged.attention import FlashAttention, TorchAttention, TritonAttention, to_device
from nanopaged.block_manager import Moves
from nanopaged.config import EngineConfig, check
from nanopaged.loader import load_dummy_weights, load_weights
from nanopaged.model import CausalLM, Linear
from nanopaged.parallel import Ranks
from nanopaged.sampler import Sampler, SamplerOutput
from nanopaged.scheduler import UNREAD, Batch

CPU_POOL_BYTES = 4 << 30  # for K and V where num_blocks is not given; pages unused cost nothing


class ModelRunner:
    def __init__(self, config: EngineConfig, model_config: Any, path: Path, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
        self.device = torch.device(devices[0] if config.device == "auto" else config.device)
        check("device, where torch sees these,", self.device.type, "str", choices=devices)
        if self.device.type == "cpu" and sys.platform == "linux":
            keep_freed_memory()
        self.dtype = pick_dtype(config.dtype, model_config.dtype, self.device)
        self.max_model_len = config.max_model_len or model_config.max_position_embeddings
        check("max_model_len", self.max_model_len, high=model_config.max_position_embeddings)
        share = ranks.share(model_config)
        heads, head_dim, layers = share.num_key_value_heads, share.head_dim, share.num_hidden_layers
        self.token_bytes = 2 * layers * heads * head_dim * self.dtype.itemsize
        default = "triton" if self.device.type == "cuda" and find_spec("triton") else "torch"
        self.attention = config.attention_backend.replace("auto", default)
        backends = {"torch": TorchAttention, "triton": TritonAttention, "flash": FlashAttention}
        self.backend = backends[self.attention](
            share.num_attention_heads, heads, head_dim, config.block_size, self.dtype, self.device)
        self.model: Callable[..., Tensor] = self._load_model(share, model_config, path)
        self.sampler = Sampler(config.max_num_seqs)
        self.last_tokens = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=self.device)
        # Entries past a sequence's end may be read, and masked, so they must name a block: zeros.
        max_blocks = -(-self.max_model_len // config.block_size)
        self.block_tables = np.zeros((config.max_num_seqs, max_blocks), np.int64)
        self.num_layers, self.block_shape = layers, (2, heads, config.block_size, head_dim)
        self.graphs: dict[int, tuple[list[Tensor], Callable[[], object], Tensor]] = {}  # by size
        self.num_blocks, self.num_swap_blocks = self._size_pools()
        self.kv_caches = self._make_pool(self.device, self.num_blocks)
        self.swap_space = self._make_pool(torch.device("cpu"), self.num_swap_blocks)
        # Only Triton's `store` knows padding.
        if self.device.type == "cuda" and self.attention != "torch" and not config.enforce_eager:
            self.capture_graphs(partial(record_cuda_graph, torch.cuda.graph_pool_handle()))

    @torch.inference_mode()
    def execute(self, batch: Batch) -> SamplerOutput:
        """One step: moves, then a forward pass; the result's tensors are still on the device.

        All ranks do it. Rank 0's sampler knows the parameters, so its tokens count.
        """
        self.ranks.send(replace(batch, drawn=[], admitted=[]))  # all but sequences
        self._move_blocks(self.kv_caches, self.swap_space, batch.swaps_out)
        self._move_blocks(self.swap_space, self.kv_caches, batch.swaps_in)
        self._move_blocks(self.kv_caches, self.kv_caches, batch.copies)
        for row, first, block_ids in batch.table_updates:
            self.block_tables[row, first : first + len(block_ids)] = block_ids
        for seq in batch.admitted:
            self.sampler.set_row(seq)
        if not batch.rows:  # those that run wait for what their beams will be
            return SamplerOutput(self.last_tokens[:0])
        logits = self._forward(batch)
        drawn = np.array(batch.drawn_rows, np.int64)
        output = self.sampler.sample(logits, drawn, np.array(batch.ends)[batch.samples])
        self.last_tokens[to_device(drawn, self.device)] = self.ranks.broadcast(output.token_ids)
        return output

    def _forward(self, batch: Batch) -> Tensor:
        """The logits [num_samples, vocab_size]; by a recorded graph, where all compute a token."""
        n = len(batch.rows)
        decodes = len(batch.token_ids) == n and batch.samples == list(range(n))
        size = min((size for size in self.graphs if size >= n and decodes), default=0)
        width = -(-max(batch.ends) // self.config.block_size)
        inputs, metadata = self._prepare(padded(batch, size) if size else batch, width)
        if not size:
            return self.model(*inputs, self.kv_caches, metadata)
        recorded, replay, logits = self.graphs[size]
        for tensor, new in zip(recorded, [*inputs, *metadata.tensors], strict=True):
            tensor[..., : new.shape[-1]].copy_(new)  # of the block tables what is in use
        replay()
        return logits[:n]

    def _prepare(self, batch: Batch, width: int | None = None) -> tuple[list[Tensor], Any]:
        """The model's inputs: token ids, rows that sample; and what the backend makes of the rest.

        width: of the block tables, how many columns are in use.
        """
        lists = batch.token_ids, batch.rows, batch.counts, batch.ends, batch.samples
        token_ids, rows, counts, ends, samples = (np.array(x, np.int64) for x in lists)
        arrays = np.repeat(rows, counts), token_ids, np.cumsum(counts)[samples] - 1
        token_rows, tokens, sampling_rows = (to_device(array, self.device) for array in arrays)
        tokens = torch.where(tokens == UNREAD, self.last_tokens[token_rows], tokens)
        metadata = self.backend.prepare(self.block_tables[rows, :width], ends - counts, counts)
        return [tokens, sampling_rows], metadata

    def capture_graphs(self, record: Callable[..., Any]) -> None:
        """Record the forward pass of decodes for some batch sizes; others are padded to the next.

        `record` runs a function once, and returns what repeats it and where the result is then. A
        graph repeats the same kernels on the same tensors: a step copies its own into them.
        """
        most = self.config.max_num_seqs
        sizes = {min(size, most) for size in (1, 2, 4, 8, *range(16, most + 16, 16))}
        for size in tqdm(sorted(sizes, reverse=True), "CUDA graphs"):  # the largest needs most
            inputs, metadata = self._prepare(padded(Batch(), size))
            replay, logits = record(partial(self.model, *inputs, self.kv_caches, metadata))
            self.graphs[size] = [*inputs, *metadata.tensors], replay, logits

    def _move_blocks(self, source: Tensor, target: Tensor, moves: Moves) -> None:
        """Copy blocks, in every layer. Those in CPU memory are numbered behind the device's."""
        if moves:
            firsts = [self.num_blocks * (pool is self.swap_space) for pool in (source, target)]
            ids, new_ids = (np.array(moves) - firsts).T.copy()  # each [num_moves]
            blocks = source.index_select(1, to_device(ids, source.device)).to(target.device)
            target.index_copy_(1, to_device(new_ids, target.device), blocks)

    def _load_model(self, share: Any, model_config: Any, path: Path) -> CausalLM:
        with self.device, local_torch_dtype(self.dtype):
            model = CausalLM(share, self.backend, self.ranks)
        if self.config.load_format == "dummy":
            load_dummy_weights(model, self.config.seed)
        else:
            with torch.device("meta"):  # for the shapes
                alone = Ranks(EngineConfig())
                whole = CausalLM(alone.share(model_config), self.backend, alone)
            load_weights(model, whole, share.starts, path)
        for module in model.modules():
            if isinstance(module, Linear):
                module.pack()
        return model

    def _make_pool(self, device: torch.device, num_blocks: int) -> Tensor:
        shape = self.num_layers, num_blocks, *self.block_shape
        if device.type == "cuda":
            return torch.zeros(shape, dtype=self.dtype, device=device)
        # NumPy's zeros are calloc's: the system hands out a page when it is first written.
        return torch.from_numpy(np.zeros(shape, f"i{self.dtype.itemsize}")).view(self.dtype)

    def _free_bytes(self) -> int:
        """What K and V may take on the device. One of the largest steps is run to measure it.

        Beside the pool there is room for that step, and about as much for the graphs and the copies
        that `FlashAttention` makes.
        """
        if self.device.type == "cpu":
            return CPU_POOL_BYTES
        num_seqs, num_tokens = self.config.max_num_seqs, self.config.max_num_batched_tokens
        ones = [1] * num_tokens
        batch = Batch(ones, ones, ones, [0] * num_tokens, list(range(num_seqs)))
        self.kv_caches = self._make_pool(self.device, 1)
        # Until sequences set their rows: top_k=0, top_p=0, so all tokens are sorted: it takes most.
        torch.cuda.reset_peak_memory_stats()  # who came before in this process does not count
        before = torch.cuda.memory_allocated()
        try:
            self.sampler.draw(self._forward(batch), self.sampler.params, np.arange(num_seqs))
        except torch.OutOfMemoryError as error:
            raise ValueError(f"max_num_batched_tokens={num_tokens} or max_num_seqs={num_seqs} must "
                             f"be less for the device's memory: {error}") from error
        step = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return int(free - (1 - self.config.gpu_memory_utilization) * total) - 2 * step

    def _size_pools(self) -> tuple[int, int]:
        """Blocks on the device and in CPU memory: what fits, or was asked for, or could be used.

        Shortens max_model_len to fit them, unless that was asked for too.
        """
        config, block_bytes = self.config, self.token_bytes * self.config.block_size
        per_seq, most = self.block_tables.shape[1], self.block_tables.size
        num_blocks = config.num_blocks or min(self._free_bytes() // block_bytes, most)
        swap_blocks = min(int(config.swap_space * 2**30) // block_bytes, most)
        # The smallest pools of all ranks are the pools: [2, num_ranks]
        pools = torch.tensor([[num_blocks], [swap_blocks]], device=self.device)
        pools = self.ranks.gather(pools, self.ranks.rank, self.ranks.size)
        num_blocks, swap_blocks = map(int, pools.amin(1))
        check(f"num_blocks (raise it, free memory, or lower max_model_len={self.max_model_len})",
              num_blocks, low=per_seq if config.max_model_len else 1)
        self.max_model_len = min(self.max_model_len, num_blocks * config.block_size)
        return num_blocks, swap_blocks


def padded(batch: Batch, size: int) -> Batch:
    """Decodes, and as many sequences with one token at position -1 as are missing from `size`."""
    more = [0] * (size - len(batch.rows))
    return Batch(batch.token_ids + more, [1] * size, batch.ends + more, batch.rows + more,
                 list(range(size)))


def record_cuda_graph(pool: Any, run: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
    run()  # what is set up by a first call must not be recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool):
        logits = run()
    return graph.replay, logits


def keep_freed_memory() -> None:
    """Have glibc's malloc keep what is freed: a step's temporaries are the next one's.

    By default large pieces go back to the system, and every step faults their pages in again: a
    tenth of the time of a step. See M_TRIM_THRESHOLD (-1) and M_MMAP_THRESHOLD (-3) in mallopt(3).
    """
    for parameter in (-1, -3):
        ctypes.CDLL(None).mallopt(parameter, 1 << 30)


def pick_dtype(name: str, model_dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The checkpoint's dtype; on a CPU, for half precision, the one it has instructions for."""
    if name != "auto":
        return getattr(torch, name)  # type: ignore[no-any-return]
    if device.type == "cpu" and model_dtype in (torch.float16, torch.bfloat16):
        return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
    return model_dtype or torch.float32
