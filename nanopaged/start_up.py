"""Before the first step: what runs where, how large the pool is, and CUDA graphs.

A forward pass launches hundreds of kernels, and for a few decodes the host takes longer
to launch them than the GPU to run them. A CUDA graph is a recording of all these
launches, which is then repeated with a single one. It repeats the same kernels with the
same sizes and the same addresses. Therefore

  - only steps of decodes are recorded, for some numbers of sequences. Other numbers are
    padded to the next one
  - a backend's plan has a shape that depends only on this number
  - `ModelRunner._upload` puts one input after the other, always at the same place. The
    last one, `last_indices`, moves when the block tables before it grow. Only the
    model's `head` needs it, so that is not recorded. (Recording it would also take
    memory for the logits of every size.)
"""

import logging
import os
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention import Metadata, TorchAttention, cdiv
from nanopaged.batch import Batch
from nanopaged.config import EngineConfig, SamplingParams, check
from nanopaged.cpu_products import HAS_KERNEL
from nanopaged.loader import load_model
from nanopaged.model_runner import ModelRunner
from nanopaged.parallel import Ranks
from nanopaged.sampler import SamplerOutput
from nanopaged.sequence import SequenceGroup


class Runner(ModelRunner):
    """A runner that sets itself up. On a GPU it repeats recorded steps."""

    # torch compiles the functions again for each hidden size of any engine in this
    # process, and gives up after 8 versions.
    @torch.compiler.config.patch(recompile_limit=256)  # type: ignore
    def __init__(self, config: EngineConfig, model_config: Any, ranks: Ranks) -> None:
        is_gpu = torch.cuda.is_available() and config.device != "cpu"
        check(is_gpu or config.device != "cuda", "device",
              "'cpu', because torch sees no GPU", config.device)
        # With an index, because another thread may have a different default device.
        name = f"cuda:{torch.cuda.current_device()}" if is_gpu else "cpu"
        device = torch.device(name)
        dtype = pick_dtype(config.dtype, model_config.dtype, device)
        backend = make_backend(config.attention_backend, ranks.local_config,
                               config.block_size, dtype, device)
        model = load_model(config, backend, ranks)

        # Up to the size of the window, sliding-window attention is the same as full
        # attention.
        longest = model_config.max_position_embeddings
        longest = min(longest, getattr(model_config, "sliding_window", None) or longest)
        max_model_len = config.max_model_len or longest
        check(max_model_len <= longest, "max_model_len",
              f"at most {longest} for this model", max_model_len)
        super().__init__(config, ranks, backend, model, max_model_len)

        self.compiles = is_gpu and not config.enforce_eager
        self.graphs: dict[int, tuple[Any, Tensor]] = {}  # by number of sequences
        self._run_trial_steps()
        self._size_pools()
        if self.compiles and backend.can_be_recorded:
            self._capture_graphs()
        logging.getLogger("nanopaged").info(
            "%s in %s. KV cache: %d blocks of %d tokens. %d CUDA graphs.",
            type(backend).__name__, dtype, self.num_blocks, config.block_size,
            len(self.graphs))

    # -- The size of the pool ----------------------------------------------------------

    def _run_trial_steps(self) -> None:
        """Run steps of padding, for which the padding block is enough. On a GPU, the
        largest steps follow. They compile everything that a step may need, and show
        how much memory a step can take.
        """
        max_seqs = self.config.max_num_seqs
        max_tokens = self.config.max_num_batched_tokens
        self._run_padding([1])
        if self.is_gpu:
            torch.cuda.empty_cache()
            self._run_padding([1] * min(max_seqs, max_tokens))
            longest = min(max_tokens, self.max_model_len)
            self._run_padding([longest] * min(max_seqs, max_tokens // longest))

    def _run_padding(self, counts: list[int]) -> None:
        """Run a step of padding, with counts[i] tokens in sequence i."""
        num_seqs = len(counts)
        num_blocks = sum(cdiv(count, self.config.block_size) for count in counts)
        params = SamplingParams(top_p=0.5)  # so that `lowest_kept` is compiled, too
        group = SequenceGroup(None, [0], params, set(), self.max_model_len, None)
        self.run(Batch(
            [0] * sum(counts), counts, counts, [self.padding_block] * num_blocks,
            list(range(num_seqs)), receivers=group.sequences * num_seqs))

    def _size_pools(self) -> None:
        """Make the pools as large as is asked for, or as large as they can be."""
        config = self.config
        block_bytes = self.kv_caches.nbytes  # so far there is only the padding block
        fitting = min(self.max_blocks, self._free_bytes() // block_bytes)
        # All ranks have the same block ids, so the smallest pool decides.
        size = torch.tensor(config.num_blocks or fitting)
        num_blocks = int(self.ranks.all_reduce(size, "MIN"))
        check(num_blocks > 0, "num_blocks", "at least 1 (memory is low)", num_blocks)
        num_swap_blocks = 0
        if config.preemption_mode == "swap":
            swap_bytes = int(config.swap_space * 2**30)
            num_swap_blocks = min(self.max_blocks, swap_bytes // block_bytes)
        self.make_pools(num_blocks, num_swap_blocks)
        self.max_model_len = min(self.max_model_len, num_blocks * config.block_size)

    def _free_bytes(self) -> int:
        """How much memory there is for K and V."""
        if not self.is_gpu:
            return 4 << 30  # what stays unused costs nothing
        # torch keeps the memory of the largest step for later ones, so that does not
        # count as free.
        free, total = torch.cuda.mem_get_info(self.device)
        reserved = (1 - self.config.gpu_memory_utilization) * total
        return int(free - reserved) - (256 << 20)  # for the CUDA graphs

    # -- CUDA graphs -------------------------------------------------------------------

    @torch.inference_mode()
    def _capture_graphs(self) -> None:
        """Record the forward pass of decodes for some numbers of sequences."""
        largest = self.config.max_num_seqs
        sizes = {min(n, largest) for n in (1, 2, 4, 8, *range(16, largest + 16, 16))}
        # A graph that is freed also frees what cuBLAS keeps for its stream. So each
        # engine records on a stream of its own.
        memory_pool = torch.cuda.graph_pool_handle()
        stream: Any = torch.cuda.Stream()
        for size in sorted(sizes, reverse=True):
            batch = Batch([0], [1], [1], [self.padding_block])
            metadata = self._prepare(self._pad(batch, size - 1))
            self._forward(metadata)  # the first call may set up what later ones need
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on using the GPU.
            with torch.cuda.graph(graph, memory_pool, stream, "thread_local"):
                states = self._forward(metadata)
            self.graphs[size] = (graph, states)

    def run(self, batch: Batch) -> SamplerOutput:
        # Whether torch.compile compiles the functions that are marked `@fused`.
        stance = "default" if self.compiles else "force_eager"
        with (torch.compiler.set_stance(stance),
              torch.accelerator.device_index(self.device.index)):
            return super().run(batch)

    def _compute(self, batch: Batch) -> tuple[Tensor, Metadata]:
        num_seqs = len(batch.counts)
        all_decode = len(batch.token_ids) == num_seqs
        fitting = [size for size in self.graphs if all_decode and size >= num_seqs]
        if not fitting:
            return super()._compute(batch)
        size = min(fitting)
        metadata = self._prepare(self._pad(batch, size - num_seqs))
        graph, states = self.graphs[size]
        graph.replay()  # it reads what `_prepare` wrote, and fills `states`
        return states, metadata

    def _pad(self, batch: Batch, padding: int) -> Batch:
        """The same step with more sequences, of one token each. They must not overwrite
        the K and V of others, so theirs go to the padding block.
        """
        ones = [1] * padding
        blocks = np.append(batch.block_ids, np.full(padding, self.padding_block))
        return Batch(batch.token_ids + [0] * padding, batch.counts + ones,
                     batch.ends + ones, blocks, batch.samples)

    def free(self) -> None:
        """Free the memory, even if the engine is still referenced."""
        self.model = None
        for graph, _ in self.graphs.values():
            graph.reset()  # otherwise NCCL would wait for it when the ranks shut down
        self.graphs = {}
        self.kv_caches = self.swap_space = self.last_tokens[:0]


# -- What runs where -------------------------------------------------------------------

def pick_dtype(name: str, model_dtype: Any, device: torch.device) -> torch.dtype:
    """The checkpoint's dtype, or one in which this processor is faster."""
    if name != "auto":
        return getattr(torch, name)  # type: ignore[no-any-return]
    if model_dtype not in (torch.bfloat16, torch.float16):
        return model_dtype or torch.float32
    if device.type == "cuda":
        is_old = torch.cuda.get_device_properties(device).major < 8
        return torch.float16 if is_old else model_dtype
    has_kernel = HAS_KERNEL and model_dtype == torch.bfloat16
    is_fast = has_kernel or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if is_fast else torch.float32


# A backend's file is imported only if it is used, because it may need a package that is
# missing.
BACKENDS = {
    "torch": "attention.TorchAttention", "numba": "cpu_attention.NumbaAttention",
    "triton": "gpu_attention.TritonAttention", "flash": "gpu_attention.FlashAttention"}


def make_backend(name: str, model_config: Any, block_size: int, dtype: torch.dtype,
                 device: torch.device) -> TorchAttention:
    """An attention backend; ValueError if it cannot run here."""
    names = ["torch"]  # what can run here, the best one first
    if device.type == "cuda":
        if torch.cuda.get_device_properties(device).major >= 8:
            names = ["triton", "flash", "torch"]
    else:
        if HAS_KERNEL and dtype != torch.float16:
            names = ["numba", "torch"]
        if os.environ.get("TRITON_INTERPRET") == "1":  # for tests of both classes
            names += ["triton", "flash"]
    name = names[0] if name == "auto" else name
    check(name in names, "attention_backend",
          f"'auto', or one of {names} with this device and dtype", name)
    module, _, kind = BACKENDS[name].partition(".")
    try:
        backend: Any = getattr(import_module(f"nanopaged.{module}"), kind)
        return backend(model_config, block_size, dtype, device)  # type: ignore[no-any-return]
    except ImportError as error:
        raise ValueError(f"attention_backend={name!r} needs a package that is missing "
                         f"(install it, or use 'torch'): {error}") from error
