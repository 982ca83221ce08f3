"""What touches tensors: the model, the KV pool, the inputs of a step, CUDA graphs.

The scheduler deals in rows, tokens and block ids. The runner keeps the block tables of
all running sequences, one row each, so that a step only has to say what is new in them.
It turns a `Batch` into one forward pass over one flat batch of tokens.
"""

import ctypes
import logging
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_utils import local_torch_dtype

from nanopaged.attention import BACKENDS, Metadata, ceil_div, place_tokens, to_device
from nanopaged.block_manager import Moves
from nanopaged.config import EngineConfig, SamplingParams, check
from nanopaged.loader import load_weights
from nanopaged.model import CausalLM
from nanopaged.parallel import Ranks
from nanopaged.sampler import SamplerOutput, sample
from nanopaged.scheduler import PENDING, Batch
from nanopaged.sequence import SequenceGroup

# If num_blocks is not given. On a CPU, unused pages cost nothing.
CPU_POOL_BYTES = 4 << 30
GRAPH_BYTES = 256 << 20  # what graphs take besides the memory of a step
# What a backend needs: a package, and a kind of device.
NEEDS = {"numba": ("numba", "cpu"), "triton": ("triton", "cuda"),
         "flash": ("flash_attn", "cuda")}

logger = logging.getLogger("nanopaged")


class ModelRunner:
    def __init__(self, config: EngineConfig, model_config: Any, path: Path,
                 ranks: Ranks) -> None:
        self.config = config
        self.ranks = ranks
        self.share = ranks.share  # the sizes of this rank's part of the model
        self.started = time.perf_counter()
        self.device = pick_device(config.device)
        self.is_gpu = self.device.type == "cuda"
        self.dtype = pick_dtype(config.dtype, model_config.dtype, self.device)
        name = pick_attention(config.attention_backend, self.device, self.dtype)
        self.backend = BACKENDS[name](
            self.share, config.block_size, self.dtype, self.device)
        if sys.platform == "linux":
            keep_freed_memory()
        with self.device, local_torch_dtype(self.dtype):
            self.model: Any = CausalLM(self.share, self.backend, ranks)
        load_weights(self.model, config, path)
        self._log(f"weights in {self.dtype} on {self.device}")

        # Attention within a sliding window is full as long as that is not filled.
        longest = model_config.max_position_embeddings
        longest = min(longest, getattr(model_config, "sliding_window", None) or longest)
        self.max_model_len = config.max_model_len or longest
        check(self.max_model_len <= longest, "max_model_len",
              f"at most {longest} for this model", self.max_model_len)

        # What a rank must remember of every running sequence, by row. The last row is
        # padding: its K and V go to a block that nobody else has, the pool's last one.
        num_rows = config.max_num_seqs + 1
        max_blocks = ceil_div(self.max_model_len, config.block_size)
        self.block_tables = np.zeros((num_rows, max_blocks), np.int64)
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        # Where the numbers of a step go, see `_prepare`: fewer than 32 for each token
        # or row, and the block tables.
        num_inputs = 32 * (config.max_num_batched_tokens + num_rows) + (1 << 16)
        self.inputs = torch.empty(num_inputs + self.block_tables.size,
                                  dtype=torch.int64, device=self.device)

        self.graphs: dict[int, tuple[Any, Tensor]] = {}  # by number of sequences
        # The first steps only have padding, so one block is enough for them.
        self._make_pools(0, 0)
        self._warm_up()
        self._log(f"first steps, attention by {name}")
        self._make_pools(*self._size_pools())
        if self.is_gpu and name != "torch" and not config.enforce_eager:
            self._capture_graphs()
            self._log(f"{len(self.graphs)} CUDA graphs")

    def _log(self, what: str) -> None:
        now = time.perf_counter()
        logger.info("%s: %.1f s", what, now - self.started)
        self.started = now

    # -- A step ------------------------------------------------------------------------

    def execute(self, batch: Batch) -> SamplerOutput:
        """Run a step on all ranks; the tensors of the result are still on the device.
        """
        self.ranks.send(batch)
        return self.run(batch)

    @torch.inference_mode()
    def run(self, batch: Batch) -> SamplerOutput:
        """This rank's part of a step: move blocks, then one forward pass."""
        self._move_blocks(self.kv_caches, self.swap_space, batch.swaps_out)
        self._move_blocks(self.swap_space, self.kv_caches, batch.swaps_in)
        self._move_blocks(self.kv_caches, self.kv_caches, batch.copies)
        updates = np.array(batch.table_updates, np.int64).reshape(-1, 3)
        rows, indices, block_ids = updates.T
        self.block_tables[rows, indices] = block_ids
        if not batch.rows:  # everybody waits for tokens that are not read yet
            return SamplerOutput(self.last_tokens[:0], {})

        # The smallest graph for as many decodes; none (0) if not all decode.
        num_seqs = len(batch.rows)
        all_decode = len(batch.token_ids) == num_seqs
        sizes = [size for size in self.graphs if all_decode and size >= num_seqs]
        size = min(sizes, default=0)
        *inputs, last_indices, sampled_rows = self._prepare(batch, size - num_seqs)
        if size:
            graph, states = self.graphs[size]
            graph.replay()
        else:
            states = self._forward(*inputs)

        logits = self.model.head(states[last_indices])
        positions = [batch.ends[entry] for entry in batch.samples]
        output = sample(logits, batch.sampled, positions)
        # Only rank 0 knows the parameters of the requests, so its tokens count.
        self.last_tokens[sampled_rows] = self.ranks.broadcast(output.token_ids)
        return output

    def _prepare(self, batch: Batch, padding: int) -> list[Any]:
        """What `_forward` takes; then the last indices of entries that sample, and the
        rows of the sequences that get the tokens. Padding are sequences of one token.

        All numbers travel in one copy, as each copy takes its time, whatever its size.
        A graph finds them where they were when it was recorded.
        """
        ones = [1] * padding
        counts, ends = np.array(batch.counts + ones), np.array(batch.ends + ones)
        rows = np.array(batch.rows + [len(self.block_tables) - 1] * padding)
        width = ceil_div(int(ends.max()), self.config.block_size)  # columns in use
        tables = self.block_tables[rows, :width]
        # With longer sequences tables get wider: what comes before them stays in place.
        arrays = [np.array(batch.token_ids + ones), np.repeat(rows, counts),
                  *place_tokens(tables, counts, ends, self.config.block_size),
                  *self.backend.plan(counts, ends, width), tables,
                  (np.cumsum(counts) - 1)[batch.samples],
                  np.array(batch.sampled_rows, np.int64)]
        flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
        flat = flat.pin_memory() if self.is_gpu else flat
        sent = self.inputs[: len(flat)].copy_(flat, non_blocking=True)
        parts = sent.split([array.size for array in arrays])  # type: ignore[no-untyped-call]
        ids, token_rows, positions, slots, *plan, block_tables, last, sampled = [
            part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
        metadata = Metadata(positions, slots, block_tables, counts, ends, plan)
        return [ids, token_rows, metadata, last, sampled]

    def _forward(self, token_ids: Tensor, rows: Tensor, metadata: Metadata) -> Tensor:
        """The last hidden states of all tokens. Pending ones come from where the last
        step left them.
        """
        token_ids = torch.where(token_ids == PENDING, self.last_tokens[rows], token_ids)
        return self.model(token_ids, self.kv_caches, metadata)  # type: ignore[no-any-return]

    def _move_blocks(self, source: Tensor, target: Tensor, moves: Moves) -> None:
        """Copy blocks; those in CPU memory are numbered after the device's."""
        if moves:
            ids = np.array(moves).reshape(-1, 2)
            ids -= self.num_blocks * (ids >= self.num_blocks)
            self.backend.copy_blocks(source, target, to_device(ids, self.device))

    @torch.inference_mode()
    def _capture_graphs(self) -> None:
        """Record the forward pass of decodes for some batch sizes; others are padded.

        A graph repeats the same kernels on the same tensors, so each step puts its
        inputs into the same places. The head is not recorded: logits for every batch
        size would take more memory than all the rest.
        """
        most = self.config.max_num_seqs
        sizes = {min(size, most) for size in (1, 2, 4, 8, *range(16, most + 16, 16))}
        # A pool and a stream of its own: cuBLAS keeps a workspace for each stream, and
        # it goes when any graph that was recorded on that stream does.
        memory_pool = torch.cuda.graph_pool_handle()
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for size in sorted(sizes, reverse=True):
            inputs = self._prepare(Batch(), size)[:3]
            self._forward(*inputs)  # a first call may set up what others need
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, memory_pool, stream):
                states = self._forward(*inputs)
            self.graphs[size] = (graph, states)

    # -- Memory ------------------------------------------------------------------------

    def _make_pools(self, num_blocks: int, num_swap_blocks: int) -> None:
        """Memory for K and V, with one block more for padding. Nothing is read before
        it is written.
        """
        self.num_blocks, self.num_swap_blocks = num_blocks, num_swap_blocks
        share = self.share
        shape = (2, share.num_key_value_heads, self.config.block_size, share.head_dim)
        self.kv_caches = torch.empty(
            share.num_hidden_layers, num_blocks + 1, *shape, dtype=self.dtype,
            device=self.device)
        # In pinned memory: a GPU copies from and to it without waiting.
        self.swap_space = torch.empty(
            share.num_hidden_layers, num_swap_blocks, *shape, dtype=self.dtype,
            pin_memory=self.is_gpu)
        self.block_tables[-1] = num_blocks

    def _warm_up(self) -> None:
        """Run steps of padding. On a GPU they are the largest ones of every kind, so
        that all kernels are compiled, and it is known what memory a step takes.
        """
        most = self.config.max_num_batched_tokens
        longest = min(most, self.max_model_len)
        decodes = [1] * min(most, self.config.max_num_seqs)
        kinds = [[1], decodes, [longest] * (most // longest)] if self.is_gpu else [[1]]
        for counts in kinds:
            rows = [len(self.block_tables) - 1] * len(counts)
            # Drawn after sorting all tokens, which takes most memory; drawn; greedy.
            for temperature, top_p in ((1, 0.5), (1, 1), (0, 1)):
                params = SamplingParams(temperature=temperature, top_p=top_p)
                group = SequenceGroup(None, [0], params, set(), longest, None)
                self.run(Batch(
                    [0] * sum(counts), counts, ends=counts, rows=rows,
                    samples=list(range(len(counts))), sampled_rows=rows,
                    sampled=group.sequences * len(counts)))
        self._move_blocks(self.kv_caches, self.kv_caches, [(0, 0)])

    def _size_pools(self) -> tuple[int, int]:
        """How many blocks the device and the CPU get: as asked for; else what fits and
        can be used. Lowers max_model_len to what fits.
        """
        config = self.config
        num_bytes = CPU_POOL_BYTES
        if self.is_gpu:
            step_bytes = (
                torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self.device)
            reserved = int((1 - config.gpu_memory_utilization) * total)
            num_bytes = free - reserved - step_bytes - GRAPH_BYTES
        block_bytes = self.kv_caches.nbytes  # so far the pool has one block
        most = config.max_num_seqs * self.block_tables.shape[1]
        num_blocks = config.num_blocks or min(num_bytes // block_bytes, most)
        num_swap_blocks = min(int(config.swap_space * 2**30) // block_bytes, most)

        # All ranks have the same block ids, so the smallest pools decide.
        pools = torch.tensor([[num_blocks], [num_swap_blocks]], device=self.device)
        num_blocks, num_swap_blocks = map(int, self.ranks.gather(pools).amin(1))
        fewest = self.block_tables.shape[1] if config.max_model_len else 1
        check(num_blocks >= fewest, "num_blocks", f"at least {fewest}: raise it, free "
              "memory, or lower max_model_len", num_blocks)
        self.max_model_len = min(self.max_model_len, num_blocks * config.block_size)
        self._log(f"{num_blocks} blocks of {block_bytes} bytes")
        return num_blocks, num_swap_blocks

    def free(self) -> None:
        """Give back the memory, even if somebody still holds the engine."""
        for graph, _ in self.graphs.values():
            graph.reset()  # the end of NCCL's group would wait for any that is left
        self.graphs = {}
        self.model = None
        self.kv_caches = self.swap_space = self.last_tokens[:0]


def keep_freed_memory() -> None:
    """Let glibc's malloc keep what is freed: the next step needs it again.

    By default large pieces go back to the system, and getting their pages again takes a
    tenth of every step. See M_TRIM_THRESHOLD (-1) and M_MMAP_THRESHOLD (-3) in
    mallopt(3).
    """
    for parameter in (-1, -3):
        ctypes.CDLL(None).mallopt(parameter, 1 << 30)


def pick_device(name: str) -> torch.device:
    has_gpu = torch.cuda.is_available()
    check(has_gpu or name != "cuda", "device", "'cpu', as torch sees no GPU", name)
    return torch.device(name.replace("auto", "cuda" if has_gpu else "cpu"))


def pick_dtype(name: str, model_dtype: Any, device: torch.device) -> torch.dtype:
    """The checkpoint's dtype, but on a CPU one that it has instructions for."""
    if name != "auto":
        return getattr(torch, name)  # type: ignore[no-any-return]
    if device.type == "cpu" and model_dtype in (torch.float16, torch.bfloat16):
        has_bfloat16 = torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if has_bfloat16 else torch.float32
    return model_dtype or torch.float32


def pick_attention(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend's name; ValueError if it cannot run here."""
    has_numba = find_spec("numba") is not None and dtype != torch.float16
    if name == "auto":
        on_cpu = "numba" if has_numba else "torch"
        name = "triton" if device.type == "cuda" else on_cpu
    package, kind = NEEDS.get(name, (name, device.type))
    is_new = device.type == "cpu" or torch.cuda.get_device_capability() >= (8, 0)
    fits = kind == device.type or os.environ.get("TRITON_INTERPRET") == "1"
    can_run = is_new and fits and find_spec(package) is not None
    check(can_run or name == "torch", "attention_backend",
          f"'torch' here, as {name!r} needs device {kind!r} (a GPU of compute capability"
          f" 8.0 or newer) and the package {package} (pip install {package})", name)
    return name
