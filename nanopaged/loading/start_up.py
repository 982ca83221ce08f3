"""Before the first step: resolve "auto", try the largest steps, size the pools."""

import logging
import os
import re
import weakref
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from nanopaged import fused, logits, sampler
from nanopaged.attention import TorchAttention, cdiv
from nanopaged.batch import Batch
from nanopaged.checks import check
from nanopaged.config import EngineConfig, SamplingParams
from nanopaged.engine import Engine
from nanopaged.loading.checkpoint import ModelConfig
from nanopaged.loading.processes import divide, join
from nanopaged.loading.settings import own_settings
from nanopaged.loading.weights import load_model, products, stored_tensors
from nanopaged.model_runner import ModelRunner
from nanopaged.ranks import Ranks
from nanopaged.sequence import SequenceGroup


def make_engine(config: EngineConfig, model_config: ModelConfig) -> Engine:
    """An engine that is ready for its first step; `load_config` gives model_config.

    On a rank other than 0 this does not return: it runs what rank 0 sends.
    """
    share = divide(model_config, config.tensor_parallel_size)
    ranks, device = join(config), pick_device(config.device)
    # (Inference tensors could not be changed by `load_weights`.)
    with own_settings(device), torch.inference_mode(False):
        runner = make_runner(config, share, ranks, device)
    engine = Engine(runner.config, runner)
    weakref.finalize(engine, free_runner, runner)
    runner.ranks.serve(runner.run)
    return engine


# torch recompiles the functions of `fused.Ops` for each hidden size of any engine in
# this process, and by default gives up after 8 versions.
@torch.compiler.config.patch(recompile_limit=256)  # type: ignore
def make_runner(config: EngineConfig, share: ModelConfig, ranks: Ranks,
                device: torch.device) -> ModelRunner:
    """Load a rank's share of the model, try the largest steps, allocate the pools."""
    most_tokens = config.budget
    if device.type == "cpu" and config.max_num_batched_tokens is None:
        # Products of many rows are faster, but answers would wait for them.
        config, most_tokens = replace(config, max_num_batched_tokens=256), 2048
    dtype = pick_dtype(config, share, device)
    name = pick_backend(config.attention_backend, dtype, device)
    backend: Any = make_backend(name, share, config.block_size, dtype, device)
    can_compile = device.type == "cuda" and find_spec("triton") is not None
    compiles = can_compile and not config.enforce_eager
    if config.batch_invariant:
        check(name == "numba" and share.model_impl == "nanopaged" and ranks.size == 1,
              "batch_invariant", "False (it needs our decoder, Numba, one rank)", True)
        backend.min_queries = 2**62
    backend.ops = make_ops(config, name, compiles, backend.uses_pdl)
    model = load_model(config, share, backend, ranks)
    # On a CPU, a small model gains nothing from threads, and on a busy machine threads
    # that wait for each other take very long.
    num_weights = sum(weight.numel() for weight in model.parameters())
    is_small = device.type == "cpu" and num_weights < 2**24
    settings = partial(own_settings, device, 1 if is_small else torch.get_num_threads())
    runner = ModelRunner(config, ranks, backend, model, share, most_tokens, settings)
    if share.model_impl == "transformers":
        runner.longest_sequence = model.plug_in_attention(runner)
    if products and not runner.is_gpu:
        products.threads.prepare_process()
    run_trial_steps(runner)
    size_pools(runner)
    # (The states of a step are new tensors, and a graph needs the same ones.)
    if compiles and name in ("triton", "flash") and not runner.state_bytes:
        from nanopaged.gpu.graphs import record

        runner.graphs = record(runner)
        run_longest(runner)  # recording has emptied the cache of torch's memory
    num_graphs = len(runner.graphs.recorded) if runner.graphs else 0
    logging.getLogger("nanopaged").info(
        "%s in %s. KV cache: %d blocks of %d tokens. %d CUDA graphs.",
        type(backend).__name__, dtype, runner.num_blocks, config.block_size, num_graphs)
    return runner


# -- What "auto" stands for ------------------------------------------------------------

def pick_device(name: str) -> torch.device:
    """A GPU if there is one; ValueError if one is asked for and there is none."""
    has_gpu = torch.cuda.is_available()
    check(has_gpu or name != "cuda", "device", "'cpu', because torch sees no GPU", name)
    if name == "cpu" or not has_gpu:
        return torch.device("cpu")
    # With an index, because another thread may have a different default device.
    return torch.device("cuda", torch.cuda.current_device())


def pick_dtype(config: EngineConfig, share: ModelConfig, device: torch.device
               ) -> torch.dtype:
    """The dtype of weights, K and V. "auto" is float32, except for a model in 16 bits
    where a dtype of 16 bits, perhaps the other one, is fast.
    """
    if config.dtype != "auto":
        return getattr(torch, config.dtype)  # type: ignore[no-any-return]
    model_dtype: Any = share.dtype
    if model_dtype is None and config.load_format != "dummy":
        largest = max(stored_tensors(share.source).values(), key=torch.numel)
        model_dtype = largest.dtype
    if model_dtype not in (torch.bfloat16, torch.float16):
        return torch.float32
    if device.type == "cuda":
        is_old = torch.cuda.get_device_properties(device).major < 8
        return torch.float16 if is_old else model_dtype
    # Our kernel reads weights in bfloat16, whatever the processor can compute.
    is_fast = products and (model_dtype == torch.bfloat16 or products.has_bfloat16())
    return torch.bfloat16 if is_fast else torch.float32


# For each attention backend: its class, and the operations between matrix products that
# go with it. A file is imported only if it is used, because it may need a package that
# is missing.
BACKENDS = {
    "torch": ("attention:TorchAttention", "fused"),
    "numba": ("cpu.attention:NumbaAttention", "cpu.norms"),
    "triton": ("gpu.attention:TritonAttention", "fused"),
    "flash": ("gpu.attention:FlashAttention", "fused")}


def pick_backend(name: str, dtype: torch.dtype, device: torch.device) -> str:
    """The name of an attention backend; ValueError if it cannot run here."""
    names = ["torch"]  # what can run here, the best one first
    is_gpu, has_triton = device.type == "cuda", find_spec("triton") is not None
    if is_gpu and has_triton and torch.cuda.get_device_properties(device).major >= 8:
        names = ["triton", "flash", "torch"]
    elif not is_gpu and products and dtype != torch.float16:
        names = ["numba", "torch"]
    if not is_gpu and os.environ.get("TRITON_INTERPRET") == "1":  # for tests
        names += ["triton", "flash"]
    name = names[0] if name == "auto" else name
    check(name in names, "attention_backend",
          f"'auto', or one of {names} with this device, dtype and packages", name)
    return name


def make_backend(name: str, *settings: Any) -> TorchAttention:
    """An attention backend; ValueError if a package is missing, and for what flash-attn
    itself would refuse in the first step.
    """
    _, block_size, dtype, _ = settings
    check(name != "flash" or (block_size % 256 == 0 and dtype.itemsize == 2),
          "block_size (with a dtype of 16 bits)", "a multiple of 256 for "
          "attention_backend='flash'", f"{block_size}, {dtype}")
    try:
        return resolve_name(f"nanopaged.{BACKENDS[name][0]}")(*settings)  # type: ignore
    except ImportError as error:
        raise ValueError(f"attention_backend={name!r} needs a package that is missing "
                         f"(install it, or use 'torch'): {error}") from error


def make_ops(config: EngineConfig, name: str, compiles: bool, uses_pdl: bool
             ) -> fused.Ops:
    """The operations that go with an attention backend, perhaps compiled."""
    module = resolve_name(f"nanopaged.{BACKENDS[name][1]}")
    # For `batch_invariant`, `cpu/norms.py` has its own silu_mul.
    silu_mul = (module if config.batch_invariant else fused).silu_mul
    functions = (module.add_norm, module.norm_rotate, silu_mul, sampler.draw,
                 logits.fill_pending, logits.mark, logits.penalize, sampler.lowest_kept)
    return fused.Ops(*(fused.compiled(function, uses_pdl) if compiles else function
                       for function in functions))


# -- The largest steps -----------------------------------------------------------------

def run_trial_steps(runner: ModelRunner) -> None:
    """Run steps whose results nobody reads. All their tokens are stored in one block,
    the padding block, so they need no pool yet. On a GPU, the largest steps follow.
    They compile everything that a step may need, and show how much memory it can take.
    """
    max_seqs, max_tokens = runner.config.max_num_seqs, runner.config.budget
    run_padding(runner, [1])
    if runner.is_gpu:
        torch.cuda.empty_cache()
        # Inductor lays its kernels out for the first step of several rows: a small one.
        for num_seqs in (8, max_seqs):
            run_padding(runner, [1] * min(num_seqs, max_seqs, max_tokens))
        run_longest(runner)


def run_longest(runner: ModelRunner) -> None:
    """Run a step with as many tokens, in as long sequences, as there can be."""
    longest = runner.longest_sequence
    whole, rest = divmod(runner.config.budget, longest)
    counts = [longest] * whole + [rest] * (rest > 0)
    run_padding(runner, counts[: runner.config.max_num_seqs])


def run_padding(runner: ModelRunner, counts: list[int]) -> None:
    """Run a step of padding, with counts[i] tokens in sequence i."""
    num_seqs = len(counts)
    num_blocks = sum(cdiv(count, runner.config.block_size) for count in counts)
    for penalty in (0, 1):  # logits stay as they are, or are changed in float32
        # (Sorting takes the most memory.)
        params = SamplingParams(top_p=0.5, presence_penalty=penalty)
        group = SequenceGroup([0], params, [], runner.longest_sequence)
        group.sequences[0].states = None, {}
        # (All share this state: `size_pools` counts the memory of as many as may run.)
        seqs = group.sequences * num_seqs
        runner.run(Batch(
            token_ids=[0] * sum(counts), counts=counts, ends=counts,
            block_ids=[runner.padding_block] * num_blocks,
            sample_entries=list(range(num_seqs)), seqs=seqs, receivers=seqs,
            draws=[0, *params.draw_numbers] * num_seqs))


# -- The pools -------------------------------------------------------------------------

def size_pools(runner: ModelRunner) -> None:
    """Allocate the pools, at the requested size or at the largest that fits."""
    config = runner.config
    free = free_bytes(runner)
    # Within a step, a sequence has its old state and its new one, if it has any. (While
    # a layer computes, it has copies besides. And a sequence that is swapped out keeps
    # its state. But until it is back, no other one starts, so there are never more
    # states than sequences that may run.)
    seq_bytes = 2 * runner.state_bytes
    num_seqs = config.max_num_seqs
    check(num_seqs * seq_bytes <= max(free, 0), "max_num_seqs",
          f"at most {free // max(seq_bytes, 1)} (the states of a sequence take "
          f"{seq_bytes / 2**20:,.2f} MiB of {free / 2**20:,.2f} MiB)", num_seqs)
    # So far there is only the padding block. (Without attention, it takes no memory.)
    block_bytes = runner.kv_caches.nbytes or 2**16
    free -= num_seqs * seq_bytes
    fitting = min(runner.most_blocks, free // block_bytes)
    # All ranks have the same block ids, so the smallest pool decides.
    size = torch.tensor(config.num_blocks or fitting)
    num_blocks = int(runner.ranks.all_reduce(size, "MIN"))
    check(num_blocks > 0, "num_blocks", "at least 1 (memory is low)", num_blocks)
    swap_bytes = config.swap_space * 2**30 if config.preemption_mode == "swap" else 0
    num_swap_blocks = min(runner.most_blocks, int(swap_bytes) // block_bytes)
    try:
        runner.make_pools(num_blocks, num_swap_blocks)
    except (MemoryError, RuntimeError, TypeError) as error:
        raise ValueError(f"num_blocks={num_blocks} (or swap_space) must be lower: "
                         f"{error}") from error


def free_bytes(runner: ModelRunner) -> int:
    """How much memory there is for K and V, and for states."""
    if not runner.is_gpu:
        # (What stays unused costs nothing.)
        return min(4 << 30, free_memory() // 2)
    # (torch keeps the memory of the largest step, so that is not free.)
    free, total = torch.cuda.mem_get_info(runner.device)
    reserved = (1 - runner.config.gpu_memory_utilization) * total
    # CUDA graphs have memory of their own, too: for logits and probabilities of every
    # token of the vocabulary, and for much that is small.
    num_logits = runner.config.max_num_seqs * runner.vocab_size
    return int(free - reserved - 16 * num_logits - (256 << 20))


# Where Linux tells a process its control group, such as a container, and the limit of a
# group's memory: in version 2 of control groups, and in version 1.
GROUPS = ((r"^0::/(.*)", "sys/fs/cgroup", "memory.max"),
          (r"^\d+:(?:.*,)?memory(?:,.*)?:/(.*)", "sys/fs/cgroup/memory",
           "memory.limit_in_bytes"))


def free_memory(root: Path = Path("/")) -> int:
    """How many bytes this process can still get, of the machine and of its control
    group. Groups are nested, so the smallest limit counts.
    """
    def search(file: Path, pattern: str, missing: Any) -> Any:
        text = file.read_text(errors="replace") if file.is_file() else ""
        found = re.search(pattern, text, re.M)
        return found[1] if found else missing

    resident = int(search(root / "proc/self/status", r"VmRSS:\s+(\d+) kB", 0)) << 10
    # Where the system does not tell what is free, half of the machine's memory counts.
    total = 8 << 30  # Windows tells nothing without more code
    if hasattr(os, "sysconf"):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    half = total // 2 >> 10
    free = [int(search(root / "proc/meminfo", r"MemAvailable:\s+(\d+) kB", half)) << 10]
    for line, place, file in GROUPS:
        group = Path(search(root / "proc/self/cgroup", line, ""))
        for each in (group, *group.parents):
            limit = search(root / place / each / file, r"^(\d+)", 2**62)
            free.append(int(limit) - resident)
    return min(free)


def free_runner(runner: ModelRunner) -> None:
    """Free a runner's memory, even if it is still referenced, and return it to the
    system.
    """
    model, runner.model = runner.model, None
    for module in [*model.modules()] if model else ():
        vars(module).clear()  # some refer to themselves, or to the model
    if runner.graphs:
        runner.graphs.free()
    runner.kv_caches = runner.swapped_kv = runner.last_tokens[:0]
    runner.token_counts.table = runner.kv_caches
    if products:
        products.threads.give_memory_back()
