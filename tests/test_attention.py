"""Every backend against attention written out in float64, token by token.

Triton's kernels run in its interpreter here (conftest.py asks for it), which cannot
multiply bfloat16; tests/gpu has the compiled ones.
"""

import itertools
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_cases import BF16, CPU, F16, F32, F64, TOLERANCE, Case, make_backend
from helpers import copy_package
from nanopaged import fused
from nanopaged.attention import Metadata
from nanopaged.batch import Batch
from nanopaged.loading import start_up

NUMBA, TRITON = (
    pytest.mark.skipif(not find_spec(name), reason=f"pip install {name}")
    for name in ("numba", "triton"))
DTYPES = {"torch": [F64, F32, F16, BF16], "numba": [F32, BF16], "triton": [F32, F16]}
FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
NO_SINKS = torch.full((4,), -torch.inf)
WITH_NUMBA = pytest.param("numba", marks=NUMBA)
WITH_TRITON = pytest.param("triton", marks=TRITON)
EACH = pytest.mark.parametrize("name", ["torch", WITH_NUMBA, WITH_TRITON])
SLOW = pytest.mark.slow
# Query heads, KV heads, head_dim.
HEADS = [(1, 1, 16), (14, 2, 64), (4, 2, 80), (3, 3, 96), (4, 1, 256), (10, 2, 24),
         (8, 1, 128), (33, 1, 16)]


def random_case(seed, name, longest):
    rng = random.Random(seed)
    pasts = [rng.choice([0, rng.randint(0, longest)]) for _ in range(rng.randint(1, 6))]
    seqs = [(past, rng.choice([1, 1, rng.randint(1, longest // 2)])) for past in pasts]
    return Case(seqs, HEADS[seed % len(HEADS)], 2 ** rng.randint(0, 8),
                rng.choice(DTYPES[name]), seed)


# -- Attention -------------------------------------------------------------------------


@pytest.mark.parametrize("name, seeds, longest", [
    ("torch", range(40), 80), pytest.param("numba", range(40), 80, marks=NUMBA),
    pytest.param("triton", range(8), 60, marks=TRITON),
    pytest.param("triton", range(8, 60), 150, marks=[SLOW, TRITON])])
def test_random_steps(name, seeds, longest):
    for seed in seeds:
        random_case(seed, name, longest).check(name, target_parts=seed % 5 * 20 + 2)


@EACH
def test_dividing_the_keys_changes_nothing(name):
    """At most once a round of the kernel: one tile of queries has up to 57 parts."""
    for seqs in ([(300, 1), (0, 1)], [(90, 40), (3, 1)], [(900, 1), (3, 1), (0, 1)]):
        Case(seqs, (2, 1, 256), 16).check(name, target_parts=64, keys_per_round=16)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("sinks", [None, NO_SINKS], ids=["", "no sinks"])
@pytest.mark.parametrize("name", [WITH_NUMBA, WITH_TRITON])
def test_the_first_keys_may_score_lower_than_any_finite_number(name, sinks):
    case = Case([(140, 1)], block_size=16, sinks=sinks)
    case.q.fill_(1)
    case.dense[0][:70, 0] = -torch.inf
    case.write(case.cache, 0, 0, 140)
    case.check(name, keys_per_round=16, target_parts=16)


@EACH
def test_a_sequence_reads_what_another_one_stores_in_the_same_step(name):
    case = Case([(0, 33), (32, 1)], block_size=16)
    case.tables[1, :2] = case.tables[0, :2]
    case.dense[1][:32] = case.dense[0][:32]
    case.cache.fill_(torch.nan)
    case.check(name)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@EACH
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_wrong_with_a_sequence_stays_with_it(name, bad):
    for where in (0, 1):  # K, V
        case = Case([(33, 1), (20, 1), (0, 5), (7, 3)], block_size=16)
        expected = case.check(name)
        case.cache[case.tables[0, 1], where] = bad
        out = case.run(make_backend(name))
        assert not out[0].isfinite().all()
        assert torch.equal(out[1:], expected[1:])


# The interpreter takes long: it computes little of this, unless it is asked for all.
@pytest.mark.parametrize("name, is_brief", [
    ("torch", False), pytest.param("numba", False, marks=NUMBA),
    pytest.param("triton", True, marks=TRITON),
    pytest.param("triton", False, marks=[SLOW, TRITON])])
def test_windows_sinks_and_scales(name, is_brief):
    """Windows end within blocks, rounds, parts and tiles, and between them. Kernels do
    not even read the rounds before a window. (Torch reads them, and on a CPU it
    computes the long chunks.)
    """
    seqs = [(70, 1), (0, 9), (0, 1), (32, 3), (0, 20), (90, 12), (33, 1), (300, 1)]
    seqs, windows = (seqs[:2], [5]) if is_brief else (seqs, [None, 1, 5, 16, 33])
    for number, (window, (seed, size)) in enumerate(itertools.product(
            windows, enumerate((4, 16, 32)))):
        has_sinks = is_brief or number % 2 == 0  # in turns: each window has both
        parts = 4, 30, 60
        sinks = 2 * torch.randn(4, generator=torch.Generator().manual_seed(seed))
        case = Case(seqs, (4, 2, 16), size, seed=seed, window=window, scale=0.4,
                    sinks=sinks if has_sinks else None)
        for row, (past, new) in enumerate(seqs):
            is_skipped = window and name != "torch" and new < 9
            for position in range((past + 1 - window) // 64 * 64 if is_skipped else 0):
                case.cache[case.tables[row, position // size], :, :,
                           position % size] = torch.nan
        case.check(name, target_parts=parts[seed], keys_per_round=16)


def test_with_a_window_torch_reads_only_its_keys(monkeypatch):
    """And a mask is as large as some queries times the keys that they see."""
    backend, sizes = make_backend("torch", (2, 1, 8)), []
    mask = backend.mask
    monkeypatch.setattr(backend, "mask", lambda *args: sizes.append(
        args[1]) or mask(*args))
    case = Case([(0, 1500)], (2, 1, 8), 16, window=64)
    case.worst_error(case.run(backend))
    assert sum(sizes) <= 1.5 * 1500 and max(sizes) <= 256 + 64 + 16  # in whole blocks


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@EACH
def test_a_sink_of_minus_infinity_is_none(name):
    """Though a query sees none of the first keys of its tile."""
    for seqs in ([(0, 40)], [(100, 1), (90, 3)], [(40, 20), (200, 1)]):
        Case(seqs, block_size=16, window=5, sinks=NO_SINKS).check(
            name, keys_per_round=16)


# -- What writes to the cache ----------------------------------------------------------


@EACH
def test_a_step_writes_its_slots_and_nothing_else(name):
    """The cache is one layer of the pool, a view."""
    for size, heads, dtype in zip((1, 2, 4, 8, 16, 32, 64, 128), HEADS,
                                  4 * DTYPES[name], strict=False):
        case = Case([(0, 3), (size, 1), (1, size)], heads, size, dtype)
        pool = torch.full((3, *case.cache.shape), torch.nan, dtype=dtype)
        expected = case.cache.clone()
        pool[1], case.cache = case.cache, pool[1]
        for row, (past, new) in enumerate(case.seqs):
            case.write(expected, row, past, past + new)
        case.check(name)
        assert torch.equal(case.cache.nan_to_num(7), expected.nan_to_num(7))
        assert pool[0].isnan().all() and pool[2].isnan().all()


def test_auto_takes_the_plain_loops_where_they_can_run():
    found = [start_up.pick_backend("auto", dtype, CPU) for dtype in (F32, BF16, F16)]
    best = "numba" if start_up.products else "torch"
    assert found == [best, best, "torch"]


# -- The plan --------------------------------------------------------------------------


def triton_plan(counts, ends, heads=(16, 8, 128), target_parts=100):
    backend = make_backend("triton", heads, dtype=BF16)
    backend.target_parts = target_parts
    return plan_of(backend, counts, ends).tolist(), backend


def plan_of(backend, counts, ends):
    num_blocks = sum(-(-end // backend.block_size) for end in ends)
    batch = Batch(counts=counts, ends=ends, block_ids=[0] * num_blocks)
    return Metadata(batch, backend).plan


lengths = st.integers(1, 40) | st.integers(1, 40_000)


@TRITON
@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=40),
       st.sampled_from(HEADS), st.integers(1, 200), st.booleans())
def test_a_plan_covers_every_query_and_key_exactly_once(seqs, heads, places, is_mixed):
    counts = [min(pair) if is_mixed else 1 for pair in seqs]
    items, backend = triton_plan(counts, [max(pair) for pair in seqs], heads, places)
    tiles = {}
    for i, (table, token, position, num_keys, first, end) in enumerate(items):
        if queries := num_keys - position:
            rows, *_ = backend.tile_sizes(np.array(counts))
            assert queries * backend.group_size <= rows
            ranges = tiles.setdefault((token, queries, table, position), [])
            ranges.append((i, first, end))

    expected, token, start = [], 0, 0  # every query: token, its table, position
    for count, (_, end) in zip(counts, map(sorted, seqs), strict=True):
        expected += [(token + i, start, end - count + i) for i in range(count)]
        token += count
        start += -(-end // 16)
    assert sorted((token + i, table, position + i)
                  for token, queries, table, position in tiles
                  for i in range(queries)) == expected

    for (_, queries, _, position), ranges in tiles.items():
        numbers, firsts, ends = map(list, zip(*ranges, strict=True))
        assert numbers == [*range(numbers[0], numbers[0] + len(ranges))]
        assert firsts == [0, *ends[:-1]] and ends[-1] == position + queries
        assert len(ranges) == -(-ends[-1] // ends[0]), "as merge_parts counts them"
        assert len(ranges) == 1 or numbers[-1] < 4 * places, "no room for this part"


@TRITON
@settings(deadline=None, max_examples=60)
@given(st.lists(lengths, min_size=1, max_size=256), st.sampled_from(HEADS))
def test_the_shape_of_a_plan_depends_on_the_number_of_decodes_alone(ends, heads):
    ones = [1] * len(ends)
    shapes = [np.shape(triton_plan(ones, some_ends, heads)[0])
              for some_ends in (ends, ones)]
    assert shapes[0] == shapes[1]


@TRITON
@pytest.mark.parametrize("ends", [
    [500] * 63 + [32_000], [800] * 256, [100] * 200 + [20_000] * 3, [32_768], [600] * 5,
    [*range(100, 2048, 9)], [30] * 256], ids=lambda x: f"{len(x)} of {x[0]}..{x[-1]}")
def test_no_program_of_a_decode_is_much_longer_than_the_others(ends):
    """Modelled: programs of one KV head run one after another in the free places."""
    items, backend = triton_plan([1] * len(ends), ends)
    keys = [end - first for *_, first, end in items]
    mean = max(sum(ends) / (3 * 132 / 8), backend.keys_per_round)
    places = [0] * (3 * 132 // 8)
    for count in keys:
        places[places.index(min(places))] += count
    assert max(keys) <= 1.5 * mean
    assert max(places) <= max(1.5 * mean, mean + max(keys))
    starts = [position for _, _, position, num_keys, *_ in items if num_keys]
    assert starts == sorted(starts, reverse=True), "a long one that starts last"


# -- The CPU's kernel ------------------------------------------------------------------


@NUMBA
def test_threads_share_the_programs_and_change_no_bit(monkeypatch):
    """As many of them as torch uses, or as there are cores."""
    import numba

    case = Case([(90, 1), (17, 2), (0, 9), (3000, 1), (0, 2)], (4, 2, 64), 16)
    outs = []
    for threads in (1, 2, 8):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        outs.append(case.check("numba"))
        most = min(threads, numba.config.NUMBA_NUM_THREADS)
        assert threads == 1 or numba.get_num_threads() == most
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@NUMBA
def test_several_engines_may_decode_at_once():
    cases = [Case([(2400 + seed, 1), (30, 1)], seed=seed) for seed in range(4)]
    outs = [case.check("numba") for case in cases]
    with ThreadPoolExecutor(4) as threads:
        again = threads.map(lambda case: [case.check("numba") for _ in range(5)], cases)
    for out, others in zip(outs, again, strict=True):
        assert all(torch.equal(out, other) for other in others)


SMALL_CASES = """
import os
import sys
import torch
import test_attention
from nanopaged import paged_attention
from nanopaged.cpu import threads
threads.prepare_process()  # as an engine does, so that a fork is safe
torch.set_num_threads(2)
outs = test_attention.small_cases()
if (child := os.fork()) == 0:
    torch.testing.assert_close(outs, test_attention.small_cases(), rtol=1e-5, atol=1e-6)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0, "the forked process"
torch.save(outs, sys.argv[1])
print(type(paged_attention.run_program).__name__)
"""


def small_cases():
    """Outputs of attention, and of a product in which bfloat16 becomes float32."""
    from nanopaged.cpu import products, threads

    torch.manual_seed(1)
    weight = torch.randn(13, 8).to(BF16)
    pairs = threads.bits(weight).view("uint32")
    return [products.float32_product(torch.randn(5, 8), weight, pairs, None, False)] + [
        Case([(keys, 1), (0, 1), (3, 2), (21, 1)], (4, 2, 8), 4, dtype).check("numba")
        for keys in (5, 2500) for dtype in (F32, BF16)]  # 2500 are for several threads


@NUMBA
@pytest.mark.parametrize("num_tokens", [1, 5, 70])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_norms_and_rotation_are_those_of_fused_py(dtype, num_tokens):
    from nanopaged.cpu import norms

    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    x, residual, weight = draw(num_tokens, 48), draw(num_tokens, 48), draw(48)
    heads = draw(num_tokens, 8, 16)[:, :6]  # not contiguous, as in the model
    weights, angles = [draw(16), draw(16)], 3 * draw(num_tokens, 1, 8).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    results = []
    for ops, as_given in ((norms, torch.clone), (fused, torch.Tensor.double)):
        normed, total = ops.add_norm(*map(as_given, (x, residual, weight)), 1e-6)
        rotated = [ops.norm_rotate(
            as_given(heads), [as_given(each) for each in norms], 2, 1e-6,
            as_given(cos), as_given(sin)) for norms in (weights, [])]
        results.append([normed, total, *rotated])
    for found, exact in zip(*results, strict=True):
        assert found.dtype == dtype
        assert (found - exact).norm() < TOLERANCE[dtype] * exact.norm()


@SLOW
@NUMBA
@FORK
@pytest.mark.parametrize("kind, layer", [
    ("function", "default"), ("CPUDispatcher", "default"),
    ("CPUDispatcher", "workqueue")])
def test_kernels_as_plain_python_without_a_folder_and_in_a_forked_process(
        kind, layer, warm, tmp_path):
    """NUMBA_DISABLE_JIT=1 is for debuggers. A container may have no writable folder,
    or may lack GNU's OpenMP.
    """
    has_folder = layer == "workqueue"
    copy = copy_package(tmp_path, *[] if has_folder else ["__pycache__"])
    if not has_folder:
        (copy / "cpu/__pycache__").touch()  # a file, so not even root can write into it
    status, printed = warm(
        "-c", SMALL_CASES, str(tmp_path / "outs"), cwd=tmp_path, HOME="/dev/null",
        PYTHONPATH=str(Path(__file__).parent), XDG_CACHE_HOME=None,
        NUMBA_CACHE_DIR=None, NUMBA_DISABLE_JIT=str(int(kind == "function")),
        NUMBA_THREADING_LAYER=layer)
    assert (status, printed.split()) == (0, [kind])
    torch.testing.assert_close(
        small_cases(), torch.load(tmp_path / "outs"), rtol=1e-2, atol=1e-6)


# -- FlashAttention --------------------------------------------------------------------


@pytest.fixture
def flash_calls(monkeypatch):
    """A stand-in for flash-attn that refuses what it refuses."""
    calls = []

    def flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            softmax_scale=None, causal=False, window_size=(-1, -1), block_table=None):
        starts = cu_seqlens_q, cu_seqlens_k
        assert causal and q.dtype == k.dtype == v.dtype and q.dtype in (F16, BF16)
        assert (q.dim(), k.dim(), v.dim()) == (3, 4, 4) and k.shape[1] % 256 == 0
        assert {x.stride(-1) for x in (q, k, v, block_table)} == {1}
        assert {x.dtype for x in (*starts, block_table)} == {torch.int32}
        assert all(x.is_contiguous() for x in starts)
        assert len(block_table) == len(starts[0]) - 1 == len(starts[1]) - 1
        assert [max_seqlen_q, max_seqlen_k] == [x.diff().max() for x in starts]
        assert type(max_seqlen_q) is type(max_seqlen_k) is int
        assert window_size == (-1, -1) or window_size[1] == 0
        calls.append((len(q), int(cu_seqlens_k[-1]), k.untyped_storage().data_ptr()))
        out = torch.empty_like(q)
        for i, table in enumerate(block_table):
            (first, last), keys = starts[0][i : i + 2], int(starts[1].diff()[i])
            blocks = table[: -(-keys // k.shape[1])].long()
            dense = torch.stack((k[blocks].flatten(0, 1), v[blocks].flatten(0, 1)), 1)
            case = SimpleNamespace(
                heads=(q.shape[1], k.shape[2], q.shape[2]), q=q[first:last],
                counts=[int(last - first)], ends=[keys], dense=[dense[:keys]],
                how={"window": window_size[0] + 1, "scale": softmax_scale})
            out[first:last] = Case.expected.func(case).view(-1, *q.shape[1:])
        return out

    package = ModuleType("flash_attn")
    package.__spec__ = ModuleSpec("flash_attn", None)
    package.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    return calls


@TRITON
@pytest.mark.parametrize("seqs, how, num_calls", [
    ([(0, 40), (0, 7), (32, 20), (3, 9), (0, 2)], {}, 1),
    ([(300, 1), (0, 50), (260, 5)], {"window": 9, "scale": 0.5}, 1),
    ([(40, 1), (3, 1), (0, 1)], {}, 0),
    ([(0, 40), (3, 9)], {"sinks": torch.tensor([1.0, 0.0, -1.0, 3.0])}, 0)],
    ids=["prompts", "mixed", "decodes are Triton's", "sinks are Triton's"])
def test_flash_reads_the_pool_in_place(flash_calls, seqs, how, num_calls):
    for heads, size, dtype in (((4, 2, 80), 256, F16), ((6, 1, 64), 512, BF16)):
        if num_calls or dtype == F16:
            flash_calls.clear()
            case = Case(seqs, heads, size, dtype, **how)
            case.check("flash")
            whole = len(case.q), int(case.ends.sum())
            pool = case.cache.untyped_storage().data_ptr()
            assert flash_calls == [(*whole, pool)] * num_calls
