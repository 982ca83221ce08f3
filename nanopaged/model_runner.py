"""Everything that touches tensors: model, KV pool, inputs of a step, CUDA graphs.

The scheduler deals in tokens and block ids. The runner turns its `Batch` into one
forward pass over one flat batch of tokens. From one step to the next it keeps two
things: the contents of the pool, and the tokens that the last step sampled.
"""

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention import Metadata, divide_up, make_backend, place_tokens
from nanopaged.config import EngineConfig, SamplingParams, check
from nanopaged.loader import load_model
from nanopaged.parallel import Ranks
from nanopaged.sampler import SamplerOutput, sample
from nanopaged.scheduler import Batch
from nanopaged.sequence import SequenceGroup


class ModelRunner:
    def __init__(self, config: EngineConfig, model_config: Any, ranks: Ranks) -> None:
        self.config = config
        self.ranks = ranks
        self.is_gpu = torch.cuda.is_available() and config.device != "cpu"
        check(self.is_gpu or config.device != "cuda", "device",
              "'cpu', because torch sees no GPU", config.device)
        # With an index, because another thread may have a different default device.
        device = f"cuda:{torch.cuda.current_device()}" if self.is_gpu else "cpu"
        self.device = torch.device(device)
        self.compiles = self.is_gpu and not config.enforce_eager
        self.dtype = pick_dtype(config.dtype, model_config.dtype, self.device)
        self.backend = make_backend(config.attention_backend, ranks.share,
                                    config.block_size, self.dtype, self.device)
        self.model: Any = load_model(config, self.backend, ranks)

        # Up to the size of the window, sliding-window attention is the same as full
        # attention.
        longest = model_config.max_position_embeddings
        longest = min(longest, getattr(model_config, "sliding_window", None) or longest)
        self.max_model_len = config.max_model_len or longest
        check(self.max_model_len <= longest, "max_model_len",
              f"at most {longest} for this model", self.max_model_len)
        self._start()

    # -- A step ------------------------------------------------------------------------

    def execute(self, batch: Batch) -> SamplerOutput:
        """Run a step on all ranks; the tensors of the result are still on the device.
        """
        self.ranks.send(batch)
        return self.run(batch)

    def run(self, batch: Batch) -> SamplerOutput:
        """This rank's part of a step: move blocks, compute the tokens, and sample.

        Who reads which field of the batch: this method reads the moves. The sampler and
        `Scheduler.update` read `receivers`, which only rank 0 has. `_prepare` reads the
        rest. (This method only counts the entries and tokens.)
        """
        # Whether torch.compile compiles the functions that are marked `@fused`.
        stance = "default" if self.compiles else "force_eager"
        with (torch.inference_mode(), torch.compiler.set_stance(stance),
              torch.accelerator.device_index(self.device.index)):
            for old, new in np.reshape(batch.moves, (-1, 2)):
                self._block(new).copy_(self._block(old))
            num_seqs = len(batch.counts)
            if num_seqs == 0:  # all sequences are waiting for tokens still to be read
                return SamplerOutput(self.last_tokens[:0], {})

            # A decode-only step is padded to the next size that has a graph.
            all_decode = len(batch.token_ids) == num_seqs
            fitting = [size for size in self.graphs if all_decode and size >= num_seqs]
            size = min(fitting, default=num_seqs)
            metadata = self._prepare(batch, padding=size - num_seqs)
            if fitting:
                graph, states = self.graphs[size]
                graph.replay()  # it reads what `_prepare` wrote, and fills `states`
            else:
                states = self._forward(metadata)

            logits = self.model.head(states[metadata.last_indices])
            output = sample(logits, batch.receivers)
            # Only rank 0 knows the requests. The others take the most likely tokens,
            # and then get those of rank 0.
            tokens = self.ranks.broadcast(output.token_ids)
            self.last_tokens[: len(tokens)] = tokens
            return output

    def _prepare(self, batch: Batch, padding: int) -> Metadata:
        """What the forward pass needs to know, on the device; see `Metadata`.

        This adds `padding` sequences of one token each. They must not overwrite the K
        and V of others, so theirs go to an extra block at the end of the device's pool.
        (Here it has the number `num_blocks`. To the block manager, which does not know
        it, that is the CPU's first block.)
        """
        block_size = self.config.block_size
        counts = np.array(batch.counts + [1] * padding)
        ends = np.array(batch.ends + [1] * padding)
        block_tables = np.append(batch.block_ids, np.full(padding, self.num_blocks))
        positions, slots = place_tokens(block_tables, counts, ends, block_size)
        tensors = self._upload(
            token_ids=np.array(batch.token_ids + [0] * padding),
            positions=positions,
            slots=slots,
            plan=self.backend.plan(counts, ends),
            # What follows the tables moves when they grow. So all that a graph reads
            # comes before `last_indices`, which no graph reads.
            block_tables=block_tables,
            last_indices=np.cumsum(counts)[batch.samples] - 1)
        return Metadata(counts, ends, **tensors)

    def _upload(self, **arrays: Any) -> dict[str, Tensor]:
        """Copy arrays to the device: in one transfer, because every transfer has a
        fixed cost, and always to the same addresses, because graphs read there. (The
        copy waits in the GPU's queue until the previous step has read the old ones.)
        """
        flat = torch.from_numpy(np.concatenate([*arrays.values()], axis=None))
        flat = flat.pin_memory() if self.is_gpu else flat
        sent = self.inputs[: len(flat)].copy_(flat, non_blocking=True)
        parts = sent.split([array.size for array in arrays.values()])
        return {name: part.view(array.shape)
                for part, (name, array) in zip(parts, arrays.items(), strict=True)}

    def _forward(self, metadata: Metadata) -> Tensor:
        """The last hidden states of all tokens: [num_tokens, hidden_size].

        A token id of -1 - i is pending: it stands for sample i of the last step, which
        the host has not read yet. (It has read those of earlier steps.)
        """
        token_ids = metadata.token_ids
        pending = self.last_tokens[(-1 - token_ids).clamp(min=0)]
        token_ids = torch.where(token_ids < 0, pending, token_ids)
        return self.model(token_ids, self.kv_caches, metadata)  # type: ignore[no-any-return]

    def _block(self, block_id: int) -> Tensor:
        """A block's place in all layers: [num_layers, 2, num_kv_heads, block_size,
        head_dim]. Blocks in CPU memory are numbered after the device's.
        """
        if block_id < self.num_blocks:
            return self.kv_caches[:, block_id]
        return self.swap_space[:, block_id - self.num_blocks]

    # -- The start ---------------------------------------------------------------------

    # torch compiles the functions again for each hidden size of any engine in this
    # process, and gives up after 8 versions.
    @torch.compiler.config.patch(recompile_limit=256)  # type: ignore
    def _start(self) -> None:
        """Make room for the inputs of a step and for K and V, and record CUDA graphs.
        """
        config, block_size = self.config, self.config.block_size
        most_seqs, most_tokens = config.max_num_seqs, config.max_num_batched_tokens
        most_blocks = most_seqs * divide_up(self.max_model_len, block_size)
        # At most ten numbers for each token (six are the plan's), then the block
        # tables, and room to spare.
        num_inputs = 10 * (most_tokens + most_seqs) + most_blocks + 2**16
        self.inputs = torch.zeros(num_inputs, dtype=torch.int64, device=self.device)
        self.last_tokens = self.inputs.new_zeros(most_seqs)
        self.graphs: dict[int, tuple[Any, Tensor]] = {}  # by number of sequences

        # Run steps of padding, for which a pool of one block is enough. On a GPU, the
        # largest steps follow. They compile everything that a step may need, and show
        # how much memory a step can take.
        self.num_blocks = self.num_swap_blocks = 0
        self.kv_caches = self.swap_space = self._make_pool(1, self.device)
        self._run_padding([1])
        if self.is_gpu:
            torch.cuda.empty_cache()
            self._run_padding([1] * min(most_seqs, most_tokens))
            longest = min(most_tokens, self.max_model_len)
            self._run_padding([longest] * min(most_seqs, most_tokens // longest))

        # All ranks have the same block ids, so the smallest pool decides.
        block_bytes = self.kv_caches.nbytes
        fitting = min(most_blocks, self._free_bytes() // block_bytes)
        size = torch.tensor(config.num_blocks or fitting)
        num_blocks = self.num_blocks = int(self.ranks.all_reduce(size, "MIN"))
        check(num_blocks > 0, "num_blocks", "at least 1 (memory is low)", num_blocks)
        self.max_model_len = min(self.max_model_len, num_blocks * block_size)
        self.kv_caches = self._make_pool(num_blocks + 1, self.device)
        if config.preemption_mode == "swap":
            swap_bytes = int(config.swap_space * 2**30)
            self.num_swap_blocks = min(most_blocks, swap_bytes // block_bytes)
        self.swap_space = self._make_pool(self.num_swap_blocks, "cpu")
        if self.compiles and self.backend.can_be_recorded:
            self._capture_graphs()
        logging.getLogger("nanopaged").info(
            "%s in %s. KV cache: %d blocks of %d tokens. %d CUDA graphs.",
            type(self.backend).__name__, self.dtype, num_blocks, block_size,
            len(self.graphs))

    def _make_pool(self, num_blocks: int, device: Any) -> Tensor:
        """Memory for K and V of all layers. Nothing is read before it is written."""
        share = self.ranks.share  # the sizes of this rank's part of the model
        return torch.empty(
            share.num_hidden_layers, num_blocks, 2, share.num_key_value_heads,
            self.config.block_size, share.head_dim, dtype=self.dtype, device=device)

    def _free_bytes(self) -> int:
        """How much memory there is for K and V."""
        if not self.is_gpu:
            return 4 << 30  # what stays unused costs nothing
        # torch keeps the memory of the largest step for later ones, so that does not
        # count as free.
        free, total = torch.cuda.mem_get_info(self.device)
        reserved = (1 - self.config.gpu_memory_utilization) * total
        return int(free - reserved) - (256 << 20)  # for the CUDA graphs

    def _run_padding(self, counts: list[int]) -> None:
        """Run a step of padding, with counts[i] tokens in sequence i."""
        num_seqs = len(counts)
        num_blocks = sum(divide_up(count, self.config.block_size) for count in counts)
        params = SamplingParams(top_p=0.5)  # so that `lowest_kept` is compiled, too
        group = SequenceGroup(None, [0], params, set(), self.max_model_len, None)
        self.run(Batch(
            [0] * sum(counts), counts, counts, [0] * num_blocks, list(range(num_seqs)),
            receivers=group.sequences * num_seqs))

    @torch.inference_mode()
    def _capture_graphs(self) -> None:
        """Record the forward pass of decodes for some batch sizes; others are padded.

        A graph repeats the same kernels with the same sizes and addresses. It fits any
        batch of this size, because `_upload` always writes to the same addresses, and
        plans for equal numbers of decodes have the same shape. The head is not
        recorded: logits for every batch size would take more memory than all the rest.
        """
        largest = self.config.max_num_seqs
        sizes = {min(n, largest) for n in (1, 2, 4, 8, *range(16, largest + 16, 16))}
        # Each engine records on a stream of its own. When a graph is freed, the
        # workspace that cuBLAS keeps for its stream is freed, too, and the graphs of
        # another engine would go on using it.
        memory_pool = torch.cuda.graph_pool_handle()
        stream: Any = torch.cuda.Stream()
        for size in sorted(sizes, reverse=True):
            batch = Batch([0], [1], [1], [self.num_blocks])
            metadata = self._prepare(batch, padding=size - 1)
            self._forward(metadata)  # the first call may set up what later ones need
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on using the GPU.
            with torch.cuda.graph(graph, memory_pool, stream, "thread_local"):
                states = self._forward(metadata)
            self.graphs[size] = (graph, states)

    # -- The end -----------------------------------------------------------------------

    def free(self) -> None:
        """Free the memory, even if the engine is still referenced."""
        self.model = None
        for graph, _ in self.graphs.values():
            graph.reset()  # otherwise NCCL would wait for it when the ranks part
        self.graphs = {}
        self.kv_caches = self.swap_space = self.last_tokens[:0]


def pick_dtype(name: str, model_dtype: Any, device: torch.device) -> torch.dtype:
    """The checkpoint's dtype, or one that the processor has instructions for."""
    if name != "auto":
        return getattr(torch, name)  # type: ignore[no-any-return]
    if device.type == "cpu" and model_dtype in (torch.float16, torch.bfloat16):
        is_fast = torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if is_fast else torch.float32
    if device.type == "cuda" and model_dtype == torch.bfloat16:
        is_fast = torch.cuda.get_device_properties(device).major >= 8
        return torch.bfloat16 if is_fast else torch.float16
    return model_dtype or torch.float32
