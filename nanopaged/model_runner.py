"""What touches tensors: the model, the KV pool, the inputs of a step, CUDA graphs.

The scheduler deals in rows, tokens and block ids. The runner keeps the block tables of
all running sequences, one row each, so that a step only has to say what is new in them.
It turns a `ControlMessage` into one forward pass over one flat batch of tokens.
"""

import ctypes
import logging
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm.auto import tqdm
from transformers.modeling_utils import local_torch_dtype

from nanopaged.attention import NumbaAttention, TorchAttention, ceil_div
from nanopaged.block_manager import Moves
from nanopaged.config import EngineConfig, check_int
from nanopaged.loader import load_dummy_weights, load_weights
from nanopaged.model import CausalLM, Linear
from nanopaged.parallel import Ranks
from nanopaged.sampler import Sampler, SamplerOutput
from nanopaged.scheduler import PENDING, Batch, ControlMessage
from nanopaged.triton_attention import KERNELS_NEED, FlashAttention, TritonAttention

logger = logging.getLogger("nanopaged")
BACKENDS: dict[str, Any] = {
    "torch": TorchAttention,
    "numba": NumbaAttention,
    "triton": TritonAttention,
    "flash": FlashAttention,
}
CPU_POOL_BYTES = 4 << 30  # if num_blocks is not given; unused pages cost nothing


class Graph(NamedTuple):
    """A recorded forward pass, which always reads and writes the same tensors."""

    replay: Callable[[], object]
    last_states: Tensor  # [num_seqs, hidden_size]


class Staging:
    """The arrays of a step, on their way to a GPU in a single copy.

    Each copy takes about 10 us, however small it is. So `add` returns a tensor whose
    contents arrive with `send`. Arrays of the same sizes, added in the same order, get
    the same places in every step: recorded graphs find their inputs there.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.device = device
        self.on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.begin()

    def begin(self) -> None:
        # Torch keeps pinned memory that was freed, until copies from it are done.
        is_gpu = self.device.type == "cuda"
        num_bytes = len(self.on_device)
        self.on_host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_gpu)
        self.used = 0

    def add(self, values: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(values)
        end = self.used + values.nbytes
        # On a CPU nothing fits, as num_bytes is 0; on a GPU a large mask may not.
        if end > len(self.on_device):
            return tensor.to(self.device)
        place = slice(self.used, end)
        self.used = ceil_div(end, 16) * 16  # kernels are compiled for such addresses
        self.on_host.numpy()[place] = values.reshape(-1).view(np.uint8)
        return self.on_device[place].view(tensor.dtype).view(values.shape)

    def send(self) -> None:
        sent = slice(0, self.used)
        self.on_device[sent].copy_(self.on_host[sent], non_blocking=True)


class ModelRunner:
    def __init__(self, config: EngineConfig, model_config: Any, path: Path,
                 ranks: Ranks) -> None:
        self.config = config
        self.ranks = ranks
        self.device = pick_device(config.device)
        self.dtype = pick_dtype(config.dtype, model_config.dtype, self.device)
        if self.device.type == "cpu" and sys.platform == "linux":
            keep_freed_memory()

        max_positions = model_config.max_position_embeddings
        self.max_model_len = config.max_model_len or max_positions
        check_int("max_model_len of this model", self.max_model_len, 2, max_positions)

        share = ranks.share  # the sizes of this rank's part of the model
        self.num_layers = share.num_hidden_layers
        self.attention = pick_attention(config.attention_backend, self.device)
        self.backend = BACKENDS[self.attention](
            share.num_attention_heads, share.num_key_value_heads, share.head_dim,
            config.block_size, self.dtype, self.device)
        if self.attention == "numba":
            logger.info("attention: compiling its loops, which later runs find on disk")
            self.backend.compile()
        self.model: Any = self._load_model(model_config, path)
        self.sampler = Sampler(config.max_num_seqs)

        # One block of one layer: first all its K, then all its V, head by head.
        num_kv_heads = share.num_key_value_heads
        self.block_shape = (2, num_kv_heads, config.block_size, share.head_dim)
        elements_per_token = self.num_layers * 2 * num_kv_heads * share.head_dim
        self.token_bytes = elements_per_token * self.dtype.itemsize

        # What a rank must remember of every running sequence, by row. Entries after the
        # last block of a table are stale or 0, but valid block ids: a kernel may load
        # from them, and masks what it loaded.
        max_blocks = ceil_div(self.max_model_len, config.block_size)
        self.block_tables = np.zeros((config.max_num_seqs, max_blocks), np.int64)
        self.last_tokens = torch.zeros(
            config.max_num_seqs, dtype=torch.int64, device=self.device)

        num_bytes = 0
        if self.device.type == "cuda":
            # At most 128 bytes for each token, the block tables as int32, and 1 MiB for
            # what depends on neither.
            most_tokens = config.max_num_batched_tokens
            num_bytes = 128 * most_tokens + 4 * self.block_tables.size + (1 << 20)
        self.staging = Staging(num_bytes, self.device)
        self.backend.to_device = self.staging.add

        self.graphs: dict[int, Graph] = {}  # by number of sequences
        # Steps that are run to measure them need one block, and nothing to swap.
        self.kv_caches = self._make_pool(1, self.device)
        self.swap_space = self._make_pool(0, torch.device("cpu"))
        self.num_blocks, self.num_swap_blocks = self._size_pools()
        self.kv_caches = self._make_pool(self.num_blocks, self.device)
        self.swap_space = self._make_pool(self.num_swap_blocks, torch.device("cpu"))
        # Graphs are padded, and only Triton's kernels know padding.
        knows_padding = self.attention in ("triton", "flash")
        if self.device.type == "cuda" and knows_padding and not config.enforce_eager:
            # A pool and a stream of its own: cuBLAS keeps a workspace for each stream,
            # and it goes when any graph that was recorded on that stream does.
            memory_pool = torch.cuda.graph_pool_handle()
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self.capture_graphs(partial(record_cuda_graph, memory_pool, stream))

    # -- A step ------------------------------------------------------------------------

    def execute(self, batch: Batch) -> SamplerOutput:
        """Run a step on all ranks; the tensors of the result are still on the device.
        """
        self.ranks.send(batch.message)
        for seq in batch.admitted:
            self.sampler.set_row(seq)
        return self.run(batch.message)

    @torch.inference_mode()
    def run(self, message: ControlMessage) -> SamplerOutput:
        """This rank's part of a step: move blocks, then one forward pass."""
        self._move_blocks(self.kv_caches, self.swap_space, message.swaps_out)
        self._move_blocks(self.swap_space, self.kv_caches, message.swaps_in)
        self._move_blocks(self.kv_caches, self.kv_caches, message.copies)
        for row, first, block_ids in message.table_updates:
            self.block_tables[row, first : first + len(block_ids)] = block_ids
        if not message.rows:  # everybody waits for tokens that are not read yet
            return SamplerOutput(self.last_tokens[:0])

        # A recorded graph finds its inputs in the staging buffer, where `_prepare` and
        # `send` put those of every step.
        self.staging.begin()
        size = self._graph_size(message)
        inputs = self._prepare(padded(message, size) if size else message)
        rows = np.array(message.sampled_rows, np.int64)
        positions = np.array(message.ends)[message.samples]  # of the new tokens
        plan = self.sampler.plan(rows, positions, self.staging.add)
        sampled_rows = self.staging.add(rows)
        self.staging.send()

        if size:
            graph = self.graphs[size]
            graph.replay()
            logits = self.model.head(graph.last_states[: len(rows)])
        else:
            logits = self.model(*self._with_tokens(*inputs))
        output = self.sampler.sample(logits, plan)
        # Only rank 0 knows the parameters of the requests, so its tokens count.
        tokens = self.ranks.broadcast(output.token_ids)
        # A sample that failed is -1, which is no token. The next step may read it
        # before the host notices, so it finds 0 instead.
        self.last_tokens[sampled_rows] = tokens.clamp(min=0)
        return output

    def _graph_size(self, message: ControlMessage) -> int:
        """The smallest graph for this step; 0 if it must run without one."""
        num_seqs = len(message.rows)
        all_sample = message.samples == list(range(num_seqs))
        if len(message.token_ids) > num_seqs or not all_sample:
            return 0  # not every entry is a decode
        return min((size for size in self.graphs if size >= num_seqs), default=0)

    def _prepare(self, message: ControlMessage) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Token ids and the row of each, the last indices of entries that sample, and
        metadata for attention.
        """
        rows = np.array(message.rows, np.int64)
        counts = np.array(message.counts, np.int64)
        ends = np.array(message.ends, np.int64)
        last_indices = (np.cumsum(counts) - 1)[message.samples]
        width = max(1, ceil_div(ends.max(), self.config.block_size))  # columns in use
        block_tables = self.block_tables[rows, :width]
        return (
            self.staging.add(np.array(message.token_ids, np.int64)),
            self.staging.add(np.repeat(rows, counts)),
            self.staging.add(last_indices),
            self.backend.prepare(block_tables, ends - counts, counts),
        )

    def _with_tokens(self, token_ids: Tensor, rows: Tensor, last_indices: Tensor,
                     metadata: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
        """What the model wants. Pending tokens come from where the last step left them.
        """
        pending = self.last_tokens[rows]
        tokens = torch.where(token_ids == PENDING, pending, token_ids)
        return tokens, last_indices, self.kv_caches, metadata

    def _move_blocks(self, source: Tensor, target: Tensor, moves: Moves) -> None:
        """Copy blocks; those in CPU memory are numbered after the device's."""
        if not moves:
            return
        ids = np.array(moves)  # [num_moves, 2]
        if source is self.swap_space:
            ids[:, 0] -= self.num_blocks
        if target is self.swap_space:
            ids[:, 1] -= self.num_blocks
        self.backend.copy_blocks(source, target, ids)

    # -- CUDA graphs -------------------------------------------------------------------

    def capture_graphs(self, record: Callable[..., Any]) -> None:
        """Record the forward pass of decodes for some batch sizes; others are padded.

        `record` runs a function; it returns a function that repeats the run, and the
        result. A graph repeats the same kernels on the same tensors, so each step puts
        its inputs into the same places of the staging buffer. The head is not recorded:
        logits for every batch size would take more memory than all the rest.
        """
        most = self.config.max_num_seqs
        sizes = {min(size, most) for size in (1, 2, 4, 8, *range(16, most + 16, 16))}
        for size in tqdm(sorted(sizes, reverse=True), "CUDA graphs"):
            self.staging.begin()
            inputs = self._prepare(padded(ControlMessage(), size))
            self.staging.send()
            self.graphs[size] = Graph(*record(partial(self._decode, inputs)))

    @torch.inference_mode()
    def _decode(self, inputs: Any) -> Tensor:
        """All but the head: [num_seqs, hidden_size]."""
        states: Tensor = self.model.last_states(*self._with_tokens(*inputs))
        return states

    # -- Memory ------------------------------------------------------------------------

    def _load_model(self, model_config: Any, path: Path) -> CausalLM:
        with self.device, local_torch_dtype(self.dtype):
            model = CausalLM(self.ranks.share, self.backend, self.ranks)
        if self.config.load_format == "dummy":
            load_dummy_weights(model, self.config.seed)
        else:
            # Only for the shapes of the whole tensors: a single rank divides nothing.
            with torch.device("meta"):
                alone = Ranks(EngineConfig(), model_config)
                whole = CausalLM(model_config, self.backend, alone)
            load_weights(model, whole, self.ranks, path)
        for module in model.modules():
            if isinstance(module, Linear):
                module.pack()
        return model

    def _make_pool(self, num_blocks: int, device: torch.device) -> Tensor:
        shape = (self.num_layers, num_blocks, *self.block_shape)
        if self.device.type == "cuda":
            # Pinned memory of the CPU: a GPU copies from and to it without waiting.
            is_pinned = device.type == "cpu"
            return torch.zeros(
                shape, dtype=self.dtype, device=device, pin_memory=is_pinned)
        # NumPy's zeros are calloc's: the system hands out a page when it is first
        # written.
        zeros = np.zeros(shape, f"i{self.dtype.itemsize}")
        return torch.from_numpy(zeros).view(self.dtype)

    def _size_pools(self) -> tuple[int, int]:
        """How many blocks the device and the CPU get: as asked for; else what fits and
        can be used.

        Lowers max_model_len to what fits, unless that was asked for too.
        """
        config = self.config
        block_bytes = self.token_bytes * config.block_size
        max_num_seqs, blocks_per_seq = self.block_tables.shape
        most = max_num_seqs * blocks_per_seq
        # Measured even if num_blocks is given: that also compiles all kernels.
        num_blocks = min(self._measure_free_bytes() // block_bytes, most)
        num_blocks = config.num_blocks or num_blocks
        num_swap_blocks = min(int(config.swap_space * 2**30) // block_bytes, most)

        # All ranks have the same block ids, so the smallest pools decide.
        pools = torch.tensor([[num_blocks], [num_swap_blocks]], device=self.device)
        num_blocks, num_swap_blocks = map(int, self.ranks.gather(pools).amin(1))
        fewest = blocks_per_seq if config.max_model_len else 1
        if num_blocks < fewest:
            raise ValueError(
                f"num_blocks must be at least {fewest}, as max_model_len is "
                f"{self.max_model_len}, got {num_blocks}: raise it, free memory, or "
                "lower max_model_len")
        self.max_model_len = min(self.max_model_len, num_blocks * config.block_size)
        return num_blocks, num_swap_blocks

    def _measure_free_bytes(self) -> int:
        """What K and V may take on the device, found by running one of the largest
        steps.

        Besides the pool there must be room for such a step, and about as much for
        graphs.
        """
        if self.device.type == "cpu":
            return CPU_POOL_BYTES
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            self.warm_up()
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"max_num_batched_tokens={self.config.max_num_batched_tokens} and "
                f"max_num_seqs={self.config.max_num_seqs} do not fit into the device's "
                f"memory, lower one: {error}") from error
        step_bytes = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        reserved = (1 - self.config.gpu_memory_utilization) * total
        return int(free - reserved) - 2 * step_bytes

    def warm_up(self) -> None:
        """Run the largest step, and others of every kind.

        They compile all kernels, so that no request waits for that. All sequences are
        in row 0, and everything is read from and stored to block 0.
        """
        most_tokens = self.config.max_num_batched_tokens
        decodes = [1] * most_tokens
        chunk = [min(most_tokens, self.max_model_len)]
        params = self.sampler.params
        # torch.compile treats sizes of 1 in a way of its own.
        for counts in (decodes, chunk, [1, 1], [1]):
            samples = list(range(min(len(counts), len(params))))
            # Greedy; drawn; drawn after sorting all tokens, which takes most memory.
            for temperature, top_p in ((0, 1), (1, 1), (1, 0.5)):
                params["temperature"] = temperature
                params["top_p"] = top_p
                self.run(ControlMessage(
                    token_ids=[0] * sum(counts), counts=counts, ends=counts,
                    rows=[0] * len(counts), samples=samples, sampled_rows=samples))
        self._move_blocks(self.kv_caches, self.kv_caches, [(0, 0)])
        self.sampler = Sampler(len(params))  # without the parameters of these steps

    def describe(self) -> str:
        """What was decided, for the log."""
        num_slots = self.num_blocks * self.config.block_size
        return (
            f"{self.dtype} on {self.device}; KV cache: {self.num_blocks:,} blocks of "
            f"{self.config.block_size} tokens of {self.token_bytes:,} bytes, for "
            f"{num_slots / self.max_model_len:.1f} sequences of {self.max_model_len:,}"
            f"; attention: {self.attention} ({self.config.attention_backend})")

    def free(self) -> None:
        """Give back the memory, even if somebody still holds the engine."""
        self.graphs = {}
        self.model = None
        self.kv_caches = self.swap_space = self.last_tokens[:0]


def padded(message: ControlMessage, size: int) -> ControlMessage:
    """Decodes, filled up to `size` entries with one token at position -1 each.

    An entry that computes 1 token up to position 0 begins at -1, which backends skip.
    """
    padding = [0] * (size - len(message.rows))
    return ControlMessage(
        token_ids=message.token_ids + padding,
        counts=[1] * size,
        ends=message.ends + padding,
        rows=message.rows + padding,
        samples=list(range(size)))


def record_cuda_graph(pool: Any, stream: Any,
                      run: Callable[[], Tensor]) -> tuple[Any, Tensor]:
    run()  # a first call may set things up that must not be recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool, stream):
        result = run()
    return graph.replay, result


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
    if name == "cuda" and not has_gpu:
        raise ValueError("device must be 'cpu' or 'auto', torch sees no GPU: got cuda")
    if name == "auto":
        name = "cuda" if has_gpu else "cpu"
    return torch.device(name)


def pick_attention(name: str, device: torch.device) -> str:
    if name != "auto":
        return name
    if device.type == "cpu":
        return "numba" if find_spec("numba") else "torch"
    capability = torch.cuda.get_device_capability()
    if capability < KERNELS_NEED:
        logger.warning(
            "attention: by torch, and slow: the kernels need a GPU of compute "
            "capability %s, got %s", KERNELS_NEED, capability)
        return "torch"
    return "triton" if find_spec("triton") else "torch"


def pick_dtype(name: str, model_dtype: torch.dtype | None,
               device: torch.device) -> torch.dtype:
    """The checkpoint's dtype; if that is of half precision, one that the processor has
    instructions for.
    """
    if name != "auto":
        return getattr(torch, name)  # type: ignore[no-any-return]
    if device.type == "cpu" and model_dtype in (torch.float16, torch.bfloat16):
        fast = torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    if device.type == "cuda" and model_dtype == torch.bfloat16:
        fast = torch.cuda.get_device_capability() >= (8, 0)
        return torch.bfloat16 if fast else torch.float16
    return model_dtype or torch.float32
