"""What touches tensors: the model, the KV pool, the inputs of a step, CUDA graphs.

The scheduler deals in tokens and block ids. The runner turns its `Batch` into one
forward pass over one flat batch of tokens. From one step to the next it remembers the
contents of the pool, and the tokens that the last step sampled.
"""

import logging
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention import Metadata, make_backend, place_tokens, spread
from nanopaged.config import EngineConfig, SamplingParams, check
from nanopaged.loader import load_model
from nanopaged.parallel import Ranks
from nanopaged.sampler import SamplerOutput, sample
from nanopaged.scheduler import Batch
from nanopaged.sequence import SequenceGroup

logger = logging.getLogger("nanopaged")


class ModelRunner:
    def __init__(self, config: EngineConfig, model_config: Any, ranks: Ranks) -> None:
        start = time.perf_counter()

        def log(text: str, *facts: object) -> None:
            logger.info(f"{time.perf_counter() - start:.1f} s: {text}", *facts)

        self.config = config
        self.ranks = ranks
        self.is_gpu = torch.cuda.is_available() and config.device != "cpu"
        check(self.is_gpu or config.device != "cuda", "device",
              "'cpu', as torch sees no GPU", config.device)
        self.device = torch.device("cuda" if self.is_gpu else "cpu")
        compiles = self.is_gpu and not config.enforce_eager
        self.stance = "default" if compiles else "force_eager"  # of torch.compile
        self.dtype = pick_dtype(config.dtype, model_config.dtype, self.device)
        self.backend = make_backend(config.attention_backend, ranks.share,
                                    config.block_size, self.dtype, self.device)
        self.model: Any = load_model(config, self.backend, ranks)
        log("the model is loaded")

        # Attention within a sliding window is full as long as that is not filled.
        longest = model_config.max_position_embeddings
        longest = min(longest, getattr(model_config, "sliding_window", None) or longest)
        self.max_model_len = config.max_model_len or longest
        check(self.max_model_len <= longest, "max_model_len",
              f"at most {longest} for this model", self.max_model_len)

        # Where the numbers of a step go, see `_prepare`: at most ten for each token,
        # the block tables, and room to spare. And the tokens that the last step
        # sampled.
        max_num_seqs, most_tokens = config.max_num_seqs, config.max_num_batched_tokens
        self.most_blocks = max_num_seqs * -(-self.max_model_len // config.block_size)
        num_inputs = 10 * (most_tokens + max_num_seqs) + self.most_blocks + (1 << 16)
        self.inputs = torch.zeros(num_inputs, dtype=torch.int64, device=self.device)
        self.last_tokens = self.inputs.new_zeros(max_num_seqs)

        # The first steps are all padding, so a pool with the block for padding will do.
        self.graphs: dict[int, tuple[Any, Tensor]] = {}  # by number of sequences
        self.num_blocks = self.num_swap_blocks = 0
        self._make_pools()
        self._warm_up()
        log("first steps have run: %s, %s", type(self.backend).__name__, self.dtype)
        self._size_pools()
        self._make_pools()
        log("KV cache: %d blocks of %d tokens", self.num_blocks, config.block_size)
        if compiles and config.attention_backend != "torch":
            self._capture_graphs()
            log("%d CUDA graphs are recorded", len(self.graphs))

    # -- A step ------------------------------------------------------------------------

    def execute(self, batch: Batch) -> SamplerOutput:
        """Run a step on all ranks; the tensors of the result are still on the device.
        """
        self.ranks.send(batch)
        return self.run(batch)

    def run(self, batch: Batch) -> SamplerOutput:
        """This rank's part of a step: move blocks, then one forward pass."""
        with torch.inference_mode(), torch.compiler.set_stance(self.stance):
            self._move_blocks(self.kv_caches, self.swap_space, batch.swaps_out)
            self._move_blocks(self.swap_space, self.kv_caches, batch.swaps_in)
            self._move_blocks(self.kv_caches, self.kv_caches, batch.copies)
            num_seqs = len(batch.counts)
            if not num_seqs:  # everybody waits for tokens that are not read yet
                return SamplerOutput(self.last_tokens[:0], {})

            # The smallest graph for as many decodes; none (0) if not all decode.
            all_decode = len(batch.token_ids) == num_seqs
            sizes = [size for size in self.graphs if all_decode and size >= num_seqs]
            size = min(sizes, default=0)
            token_ids, metadata, last_indices = self._prepare(batch, size - num_seqs)
            if size:
                graph, states = self.graphs[size]
                graph.replay()
            else:
                states = self._forward(token_ids, metadata)

            output = sample(self.model.head(states[last_indices]), batch.receivers)
            # Only rank 0 knows the parameters of the requests, so its tokens count.
            tokens = self.ranks.broadcast(output.token_ids)
            self.last_tokens[: len(tokens)] = tokens
            return output

    def _prepare(self, batch: Batch, padding: int) -> tuple[Tensor, Metadata, Tensor]:
        """Token ids, metadata, and the last indices of entries that sample.

        Padding consists of sequences of one token. Their K and V go to a block that
        nobody else has, the pool's last one. All numbers travel in one copy, as each
        copy takes its time, whatever its size. A graph finds them where they were when
        it was recorded.
        """
        ends = np.array(batch.ends + [1] * padding)
        counts = np.array(batch.counts + [1] * padding)
        num_blocks = -(-np.array(batch.ends, np.int64) // self.config.block_size)
        table_size = num_blocks.max(initial=1)
        tables = np.full((len(ends), table_size), self.num_blocks)
        tables[spread(num_blocks)] = batch.block_ids
        # Tables get wider as sequences grow, so no input of a graph comes after them.
        arrays = [np.array(batch.token_ids + [0] * padding),
                  *place_tokens(tables, counts, ends, self.config.block_size),
                  *self.backend.plan(counts, ends, table_size), tables,
                  (np.cumsum(counts) - 1)[batch.samples]]
        flat = torch.from_numpy(np.concatenate(arrays, axis=None))
        flat = flat.pin_memory() if self.is_gpu else flat
        sent = self.inputs[: len(flat)].copy_(flat, non_blocking=True)
        parts: Any = torch.split(sent, [array.size for array in arrays])
        token_ids, positions, slots, *plan, block_tables, last_indices = [
            part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
        metadata = Metadata(positions, slots, block_tables, counts, ends, plan)
        return token_ids, metadata, last_indices

    def _forward(self, token_ids: Tensor, metadata: Metadata) -> Tensor:
        """The last hidden states of all tokens. A token id of -1 - i is pending: the
        step before has sampled it as number i.
        """
        pending = self.last_tokens[(-1 - token_ids).clamp(min=0)]
        token_ids = torch.where(token_ids < 0, pending, token_ids)
        return self.model(token_ids, self.kv_caches, metadata)  # type: ignore[no-any-return]

    def _move_blocks(self, source: Tensor, target: Tensor, moves: list[Any]) -> None:
        """Copy blocks; those in CPU memory are numbered after the device's."""
        if moves:
            ids = np.array(moves).reshape(-1, 2)
            ids -= self.num_blocks * (ids >= self.num_blocks)
            self.backend.copy_blocks(source, target, ids)

    @torch.inference_mode()
    def _capture_graphs(self) -> None:
        """Record the forward pass of decodes for some batch sizes; others are padded.

        A graph repeats the same kernels on the same tensors, so each step puts its
        inputs into the same places. The head is not recorded: logits for every batch
        size would take more memory than all the rest.
        """
        largest = self.config.max_num_seqs
        sizes = {min(n, largest) for n in (1, 2, 4, 8, *range(16, largest + 16, 16))}
        # A pool and a stream of its own: cuBLAS keeps a workspace for each stream, and
        # frees it with any graph that was recorded there, another engine's as well.
        memory_pool = torch.cuda.graph_pool_handle()
        stream: Any = torch.cuda.Stream()
        for size in sorted(sizes, reverse=True):
            inputs = self._prepare(Batch(), size)[:2]
            self._forward(*inputs)  # a first call may set up what others need
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, memory_pool, stream):
                states = self._forward(*inputs)
            self.graphs[size] = (graph, states)

    # -- Memory ------------------------------------------------------------------------

    def _make_pools(self) -> None:
        """Memory for K and V, with one block more for padding. Nothing is read before
        it is written.
        """
        share = self.ranks.share  # the sizes of this rank's part of the model
        shape = [share.num_hidden_layers, self.num_blocks + 1, 2,
                 share.num_key_value_heads, self.config.block_size, share.head_dim]
        self.kv_caches = torch.empty(shape, dtype=self.dtype, device=self.device)
        # In pinned memory: a GPU copies from and to it without waiting.
        shape[1] = self.num_swap_blocks
        self.swap_space = torch.empty(shape, dtype=self.dtype, pin_memory=self.is_gpu)

    def _warm_up(self) -> None:
        """Run steps of padding: one token; and on a GPU the most decodes, and the
        largest chunks, so that all is compiled, and the memory of a step is known.
        """
        params = SamplingParams(top_p=0.5)  # sorting all tokens takes most memory
        group = SequenceGroup(None, [0], params, set(), self.max_model_len, None)
        steps = [(1, 1)]  # how many tokens, and how many of each sequence
        if self.is_gpu:
            torch.cuda.empty_cache()
            most = self.config.max_num_batched_tokens
            steps += [(most, 1), (most, min(most, self.max_model_len))]
        for num_tokens, count in steps:
            num_seqs = min(num_tokens // count, self.config.max_num_seqs)
            counts = [count] * num_seqs
            num_blocks = num_seqs * -(-count // self.config.block_size)
            self.run(Batch([0] * sum(counts), counts, counts, [0] * num_blocks,
                           list(range(num_seqs)), receivers=group.sequences * num_seqs))
        self._move_blocks(self.kv_caches, self.kv_caches, [(0, 0)])

    def _size_pools(self) -> None:
        """How many blocks the device and the CPU get: as asked for; else what fits and
        can be used. Lowers max_model_len to what fits.
        """
        config = self.config
        num_bytes: float = 4 << 30  # on a CPU, where unused pages cost nothing
        if self.is_gpu:
            # torch keeps what a step took besides the weights, as the next step needs
            # it again. So that is not free any more.
            free, total = torch.cuda.mem_get_info(self.device)
            num_bytes = free - (1 - config.gpu_memory_utilization) * total
            num_bytes -= 256 << 20  # what graphs take besides the memory of a step
        swap_bytes = config.swap_space * 2**30 * (config.preemption_mode == "swap")
        block_bytes = self.kv_caches.nbytes  # so far the pool has one block
        self.num_swap_blocks = min(int(swap_bytes / block_bytes), self.most_blocks)
        num_blocks = min(int(num_bytes / block_bytes), self.most_blocks)
        # All ranks have the same block ids, so the smallest pool decides.
        pool = torch.tensor(config.num_blocks or num_blocks)
        self.num_blocks = num_blocks = int(self.ranks.all_reduce(pool, "MIN"))
        check(num_blocks >= 1, "num_blocks", "at least 1: free some memory", num_blocks)
        self.max_model_len = min(self.max_model_len, num_blocks * config.block_size)

    def free(self) -> None:
        """Give back the memory, even if somebody still holds the engine."""
        self.model = None
        for graph, _ in self.graphs.values():
            graph.reset()  # at its end NCCL would wait for any graph that is left
        self.graphs = {}
        self.kv_caches = self.swap_space = self.last_tokens[:0]


def pick_dtype(name: str, model_dtype: Any, device: torch.device) -> torch.dtype:
    """The checkpoint's dtype, but on a CPU one that it has instructions for."""
    if name != "auto":
        return getattr(torch, name)  # type: ignore[no-any-return]
    if device.type == "cpu" and model_dtype in (torch.float16, torch.bfloat16):
        is_fast = torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if is_fast else torch.float32
    return model_dtype or torch.float32
