"""The Numba kernel, in the backend that uses it, against attention written out in
float64.

Whatever must not be read is NaN (see test_attention.py), and block tables name blocks
that do not exist after a sequence's end.
"""

import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import nanopaged
from nanopaged import attention
from nanopaged.attention import NumbaAttention
from test_attention import MIXED, Case

pytest.importorskip("numba", reason="pip install numba")

from nanopaged import cpu_kernels  # noqa: E402

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # relative
F32, F16, BF16 = TOLERANCE
HEADS = [
    (1, 1, 16),
    (2, 2, 64),
    (4, 2, 128),
    (6, 2, 24),
    (4, 1, 80),
    (10, 2, 96),
    (6, 1, 256),
    (14, 2, 64),
    (8, 1, 128),
]
BLOCK_SIZES = [1, 2, 8, 16, 64]


class NumbaCase(Case):
    def __init__(
        self, seqs, heads=(4, 2, 64), block_size=16, dtype=F32, seed=0, temper=1.0
    ):
        super().__init__(seqs, heads, block_size, dtype, seed)
        self.q *= temper
        for row, (past, new) in enumerate(seqs):
            self.tables[row, -(-(past + new) // block_size) :] = 2**30

    def backend(self):
        device = torch.device("cpu")
        return NumbaAttention(*self.heads, self.block_size, self.dtype, device)

    def check(self, backend=None):
        expected, out = self.expected(), self.run(backend)
        assert (out.shape, out.dtype) == (expected.shape, self.dtype)
        error = (out.double() - expected).norm(dim=1) / expected.norm(dim=1)
        assert error.max() < TOLERANCE[self.dtype]  # and so no NaN


def around_blocks(block_size):
    """Decodes that end around the end of the first, second and third block."""
    ends = [count * block_size + delta for count in (1, 2, 3) for delta in (-1, 0, 1)]
    return [(end - 1, 1) for end in sorted(set(ends)) if end > 0]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decodes_around_the_ends_of_blocks(heads, block_size, dtype):
    NumbaCase(around_blocks(block_size), heads, block_size, dtype).check()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_chunks_and_decodes_in_one_step(dtype):
    for seqs in (MIXED, MIXED[::-1], [(0, 9)], [(0, 1)], [(5, 2), (31, 1)]):
        NumbaCase(seqs, dtype=dtype).check()


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "seqs", [[(900, 1)], [(2000, 1), (3, 1), (0, 1), (40, 1)]], ids=str
)
def test_threads_and_parts_change_nothing(seqs, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(attention, "MIN_PART", 16)
    case = NumbaCase(seqs, (4, 1, 32))
    backend = case.backend()
    assert case.prepare(backend).num_parts >= 2 * threads
    case.check(backend)


def test_a_part_without_keys_counts_nothing(monkeypatch):
    monkeypatch.setattr(attention, "MIN_PART", 16)
    case = NumbaCase([(3000, 1), (0, 1), (15, 1)], (2, 1, 16))
    assert (
        case.prepare(case.backend()).num_parts > 2
    )  # sequences of one block have fewer
    case.check()


@pytest.mark.parametrize("temper", [0.0, 30.0, 300.0])
def test_flat_and_steep_scores(temper):
    NumbaCase([(0, 1), (200, 1), (300, 1)], (3, 1, 64), temper=temper).check()


def test_the_first_block_may_score_lower_than_any_finite_number():
    case = NumbaCase([(40, 1)], (1, 1, 16))
    case.q.fill_(1)
    case.dense[0][0, :20] = -torch.inf
    case.write(case.cache, 0, 0, 40)
    case.check()


@pytest.mark.parametrize("where", [0, 1], ids=["K", "V"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_stays_with_its_own_sequence(where, bad):
    seqs = [(33, 1), (20, 1), (0, 5), (7, 3)]
    case = NumbaCase(seqs)
    expected = case.run()
    case.cache[case.tables[0, 1], where] = bad
    out = case.run()
    assert not out[0].isfinite().all()
    assert torch.equal(out[1:], expected[1:])


def test_the_answer_of_a_decode_does_not_depend_on_its_neighbours():
    together = NumbaCase([(90, 1), (17, 1), (300, 1), (0, 1)])
    out = together.run()
    for row, seq in enumerate(together.seqs):
        alone = NumbaCase([seq])
        alone.q, alone.dense = together.q[row : row + 1], [together.dense[row]]
        alone.write(alone.cache, 0, 0, seq[0])
        torch.testing.assert_close(alone.run()[0], out[row], rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_random_steps(seed):
    rng = random.Random(seed)
    kv_heads = rng.randint(1, 4)
    heads = (rng.randint(1, 8) * kv_heads, kv_heads, rng.choice([2, 10, 16, 31, 64]))
    pasts = [rng.choice([0, rng.randint(0, 150)]) for _ in range(rng.randint(1, 9))]
    seqs = [(past, rng.choice([1, 1, rng.randint(1, 40)])) for past in pasts]
    dtype = rng.choice(list(TOLERANCE))
    NumbaCase(seqs, heads, rng.choice([1, 2, 4, 16, 32]), dtype, seed).check()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(
    "dtype, view", [(F16, torch.int16), (BF16, torch.uint16)], ids=str
)
def test_every_half_number_becomes_its_float32(dtype, view):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    widen = getattr(cpu_kernels.to_float32, "py_func", cpu_kernels.to_float32)
    wide = np.array([widen(number) for number in bits.view(view).numpy()])
    expected = bits.float().numpy()
    assert np.array_equal(wide, expected, equal_nan=True)
    assert np.array_equal(np.signbit(wide), np.signbit(expected))


def test_several_engines_may_decode_at_once():
    cases = [NumbaCase([(400 + seed, 1), (30, 1)], seed=seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda case: [case.check() for _ in range(5)], cases))


@pytest.fixture(params=["torch's threads", "other threads"])
def kind_of_threads(request, monkeypatch):
    if request.param == "other threads":
        monkeypatch.setattr(cpu_kernels, "openmp_parallel", None)
    elif cpu_kernels.openmp_parallel is None:
        pytest.skip("torch's OpenMP has no GOMP_parallel here")


@pytest.mark.usefixtures("kind_of_threads")
def test_work_runs_on_as_many_threads_as_asked_for():
    """Each one waits for all the others, so all of them run at the same time."""
    everybody = threading.Barrier(3, timeout=60)
    names = set()

    def work():
        everybody.wait()
        names.add(threading.get_ident())

    for _ in range(3):
        names.clear()
        cpu_kernels.run_on_threads(work, 3)
        assert len(names) == 3


@pytest.mark.usefixtures("kind_of_threads")
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_what_a_thread_raises_is_raised(kind):
    turns = iter(range(3))

    def work():
        if next(turns) == 1:
            raise kind("in one thread")

    with pytest.raises(kind, match="in one thread"):
        cpu_kernels.run_on_threads(work, 3)
    assert next(turns, None) is None, "not all of them ran"


@pytest.mark.usefixtures("kind_of_threads")
def test_threads_share_the_calls(monkeypatch):
    """Short calls, so that the kernel runs in several threads; each is made once."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(attention, "MIN_CALL", 16)
    case = NumbaCase([(90, 1), (17, 1), (0, 5), (300, 1), (0, 1)])
    backend = case.backend()
    metadata = case.prepare(backend)
    assert len(metadata.calls) > 6
    programs = [program for call in metadata.calls for program in range(*call)]
    assert programs == list(range(4 * 2 * metadata.num_parts))
    case.check(backend)


def test_few_keys_are_left_to_the_thread_that_asks(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    case = NumbaCase([(90, 1), (17, 1), (0, 5)])
    backend = case.backend()
    monkeypatch.setattr(cpu_kernels, "run_on_threads", None)
    case.check(backend)


PLAIN = """
from nanopaged import cpu_kernels
from test_cpu_kernels import BF16, F16, F32, NumbaCase
assert type(cpu_kernels.paged_attention).__name__ == "function"
for dtype in (F32, F16, BF16):
    NumbaCase([(5, 1), (0, 1), (3, 2)], (4, 2, 8), 4, dtype).check()
"""


def test_without_compiler_it_is_plain_python():
    """NUMBA_DISABLE_JIT=1: what a debugger steps through."""
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    subprocess.run([sys.executable, "-c", PLAIN], env=environment, check=True)


@pytest.mark.slow
def test_compiled_code_is_kept_for_the_next_process(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    run = "from test_cpu_kernels import *; NumbaCase([(0, 1)]).backend().compile()\n"
    run += "print(sum(cpu_kernels.paged_attention.stats.cache_hits.values()))"
    command = [sys.executable, "-c", run]
    hits = [subprocess.check_output(command, env=environment) for _ in range(2)]
    assert [int(hit) for hit in hits] == [0, 1]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_nothing_is_compiled_after_the_start(dtype):
    case = NumbaCase(MIXED, dtype=dtype)
    backend = case.backend()
    backend.compile()
    signatures = list(cpu_kernels.paged_attention.signatures)
    case.check(backend)
    assert cpu_kernels.paged_attention.signatures == signatures


def test_it_is_the_default_on_a_cpu_and_says_what_it_needs():
    with nanopaged.LLM(num_blocks=8, device="cpu") as llm:
        assert isinstance(llm.runner.backend, NumbaAttention)
    with pytest.raises(
        ValueError, match="'numba' needs numba .* device 'cpu', got 'meta'"
    ):
        NumbaAttention(4, 2, 64, 16, F32, torch.device("meta"))
