"""The Triton kernels against attention in float64, and as compiled for GPUs.

Without a GPU they run in Triton's interpreter (conftest.py sets TRITON_INTERPRET before
anything imports triton); with one they are compiled, and the tests are the same.
Whatever must not be read is NaN: slots that were never written and blocks that no
sequence holds. Past a sequence's end, block tables name blocks that do not exist.
"""

import json
import random
import re
import sys

import numpy as np
import pytest
import torch

import nanopaged
from helpers import run_python
from nanopaged.attention import TorchAttention
from nanopaged.model_runner import pick_attention, pick_dtype
from nanopaged.triton_attention import TritonAttention
from test_attention import GARBAGE, Case

pytest.importorskip("triton", reason="pip install triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # relative
F32, F16, BF16 = TOLERANCE


@pytest.fixture(autouse=True)
def bfloat16_in_the_interpreter(monkeypatch):
    """Its matrix product mistakes bfloat16 numbers for the integers that store them."""
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder

    dot = InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        a, b = (
            self.cast_impl(x, float32) if x.dtype == bfloat16 else x for x in (a, b)
        )
        return dot(self, a, b, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


class TritonCase(Case):
    def __init__(
        self, seqs, heads=(4, 2, 64), block_size=16, dtype=F32, seed=0, temper=1.0
    ):
        super().__init__(seqs, heads, block_size, dtype, seed)
        self.q *= temper
        self.cache[self.cache == torch.tensor(GARBAGE, dtype=dtype)] = torch.nan
        for row, (past, new) in enumerate(seqs):
            self.tables[row, -(-(past + new) // block_size) :] = 2**30
        self.cache = self.cache.to(DEVICE)

    def backend(self, num_places=1):
        """With as many programs for each KV head at the same time."""
        backend = TritonAttention(*self.heads, self.block_size, self.dtype, DEVICE)
        backend.few_places = backend.many_places = num_places
        return backend

    def run(self, backend=None):
        return super().run(backend).cpu()

    def check(self, backend=None):
        """Check the largest error of a token's result relative to that result."""
        expected = self.expected()
        out = self.run(backend).double()
        assert out.shape == expected.shape
        error = ((out - expected).norm(dim=1) / expected.norm(dim=1)).max().item()
        assert error < TOLERANCE[self.dtype]  # and so no NaN
        return error


def key_tile(heads, dtype):
    return TritonAttention(*heads, 16, dtype, DEVICE).key_tile


def around(*lengths):
    return [
        length + delta
        for length in lengths
        for delta in (-1, 0, 1)
        if length + delta > 0
    ]


def decodes(heads, block_size, dtype):
    """Decodes whose keys end near the end of a block, of one key tile, and of two."""
    tile = key_tile(heads, dtype)
    return [
        (length - 1, 1) for length in dict.fromkeys(around(block_size, tile, 2 * tile))
    ]


def chunks(heads, block_size):
    """Chunks of about one small tile of queries, from 0 or after a cached prefix."""
    group = heads[0] // heads[1]
    sizes = around(16 // group)
    pasts = (0, block_size, 2 * block_size - 1)
    mixed = [(block_size - 1, block_size + 2), (0, 1), (5, 1)]
    return [*zip(pasts, sizes, strict=False), *mixed]


# dtype, (query heads, KV heads, head_dim), block size: each with some of the others
MATRIX = [
    (F32, (1, 1, 64), 8),
    (BF16, (2, 2, 64), 16),
    (F16, (4, 2, 64), 32),
    (F32, (3, 1, 80), 16),
    (BF16, (8, 2, 80), 64),
    (F32, (5, 1, 96), 32),
    (F16, (6, 1, 96), 8),
    (BF16, (7, 1, 128), 16),
    (F32, (14, 2, 64), 16),
    (BF16, (8, 1, 128), 128),
    (F32, (2, 1, 128), 256),
    (F16, (16, 2, 128), 16),
    (BF16, (4, 2, 256), 16),
    (F32, (4, 1, 256), 8),
    (BF16, (20, 1, 64), 16),
    (F32, (6, 3, 24), 1),
]


def thinned(first):
    """Every other case is slow: on a CPU each takes a second or more."""
    return [
        pytest.param(*case, marks=[pytest.mark.slow] * ((index + first) % 2))
        for index, case in enumerate(MATRIX)
    ]


@pytest.mark.parametrize("dtype, heads, block_size", thinned(0), ids=str)
def test_decodes_around_the_ends_of_blocks_and_tiles(dtype, heads, block_size):
    TritonCase(decodes(heads, block_size, dtype), heads, block_size, dtype).check()


@pytest.mark.parametrize("dtype, heads, block_size", thinned(1), ids=str)
def test_chunks_and_decodes_in_one_step(dtype, heads, block_size):
    TritonCase(chunks(heads, block_size), heads, block_size, dtype).check()


def num_parts(metadata):
    """The number of parts of each divided tile; the rows of their results differ."""
    rows = metadata.items[:, 6]
    rows = rows[(rows >= 0) & (metadata.items[:, 3] > 0)].tolist()
    assert len({*rows}) == len(rows)
    assert all(0 <= row < metadata.num_part_rows for row in rows)
    parts = {}
    for _, first, count, _ in metadata.merges.tolist():
        if count:
            parts[first] = count
    return list(parts.values())


@pytest.mark.parametrize("dtype, heads, block_size", MATRIX[::3], ids=str)
def test_dividing_the_keys_changes_nothing(dtype, heads, block_size):
    seqs = decodes(heads, block_size, dtype)
    case = TritonCase([*seqs, (0, 3), (2, 20), (0, 1)], heads, block_size, dtype)
    backend = case.backend(num_places=40)
    assert num_parts(case.prepare(backend))
    case.check(backend)


@pytest.mark.parametrize("num_places, expected", [(1, [2]), (2, [4]), (10, [4])])
def test_few_sequences_are_divided_so_that_they_fill_the_chip(num_places, expected):
    case = TritonCase([(500, 1), (60, 1)], (4, 2, 64), dtype=BF16)
    backend = case.backend(num_places)
    assert backend.key_tile == 128
    assert num_parts(case.prepare(backend)) == expected
    case.check(backend)


def test_one_token_can_have_many_parts():
    case = TritonCase([(2000, 1)], (4, 2, 64), dtype=BF16)
    backend = case.backend(num_places=100)
    backend.key_tile = 16
    assert num_parts(case.prepare(backend)) == [126]
    case.check(backend)


@pytest.mark.slow
def test_parts_use_memory_for_tokens_of_divided_tiles_only():
    case = TritonCase([(500, 1), (0, 500)], (4, 2, 64), dtype=BF16)
    assert case.prepare(case.backend()).num_part_rows == 0
    backend = case.backend(num_places=4)
    metadata = case.prepare(backend)
    # The decode, and the last tiles of 64, 64 and 52 queries, have two parts each.
    assert num_parts(metadata) == [2] * (1 + 64 + 64 + 52)
    assert metadata.num_part_rows == 2 * (1 + 64 + 64 + 52)
    case.check(backend)


@pytest.mark.parametrize(
    "lengths",
    [
        [500] * 63 + [32768],
        [800] * 256,
        [100] * 200 + [20000] * 3,
        [32768],
        [600] * 5,
        [*range(100, 2048, 9)],
    ],
    ids=lambda lengths: f"{len(lengths)} of {min(lengths)}..{max(lengths)}",
)
def test_no_program_of_a_decode_is_much_longer_than_the_others(lengths):
    """Modelled: programs of one KV head run one after the other in the free places."""
    case = TritonCase([(0, 1)], (16, 8, 128), dtype=BF16)
    backend = case.backend(num_places=3 * 132 // 8)  # of an H200
    ends = np.array(lengths)
    ones = np.ones_like(ends)
    items, _, _ = backend.plan(
        ends - ones, ones, ends - ones, 8, backend.few_places, table_size=2048
    )
    keys = (items[:, 5] - items[:, 4]).tolist()
    assert sum(keys) == sum(lengths)

    places = [0] * backend.few_places
    for count in keys:
        places.sort()
        places[0] += count
    share = max(sum(keys) / len(places), 2 * backend.key_tile)
    assert max(places) <= 1.35 * share
    if len(lengths) == 64:
        programs = [count for count in keys if count]
        assert max(programs) <= 1.2 * np.mean(programs)


@pytest.mark.parametrize(
    "heads, block_size, dtype", [((4, 1, 64), 16, F32), ((7, 1, 96), 32, BF16)]
)
def test_chunks_around_a_large_tile_of_queries(heads, block_size, dtype):
    size = TritonAttention(*heads, block_size, dtype, DEVICE).many_queries
    pasts = (0, 1, block_size - 1, block_size, 100, 0)
    seqs = [*zip(pasts, around(size, 2 * size), strict=True), (31, 1)]
    TritonCase(seqs, heads, block_size, dtype).check()
    case = TritonCase([(size + 1, 3 * size)], heads, block_size, dtype)
    case.check(case.backend(num_places=20))


@pytest.mark.parametrize("temper", [0.0, 30.0])
@pytest.mark.parametrize("num_places", [1, 20])
def test_flat_and_steep_scores(temper, num_places):
    case = TritonCase([(0, 1), (200, 1), (300, 40)], (3, 1, 64), temper=temper)
    case.check(case.backend(num_places))


def test_more_heads_in_a_group_than_rows_in_a_tile():
    TritonCase([(20, 1), (4, 9)], (33, 1, 64)).check()
    TritonCase([(20, 1), (4, 3)], (130, 1, 16)).check()


def test_tiles_are_small_where_a_sequence_has_few_queries_on_average():
    for seqs, rows, sizes in (
        ([(9, 5), (0, 6), (7, 1)], 16, [5, 1, 1, 5]),
        ([(0, 11), *[(7, 1)] * 3], 16, [1, 5, 1, 1, 1, 5]),
        ([(9, 5), (0, 6), (7, 1), (0, 43)], 128, [1, 42, 5, 1, 6]),
    ):
        case = TritonCase(seqs, (6, 2, 64), dtype=BF16)
        metadata = case.prepare(case.backend())
        assert metadata.num_rows == rows
        assert metadata.items[:, 3].tolist() == sizes
        case.check()


def test_tiles_with_the_most_keys_run_first():
    case = TritonCase(
        [(5, 1), (90, 1), (0, 200), (40, 1), (60, 170)], (2, 1, 64), dtype=BF16
    )
    items = case.prepare(case.backend()).items
    ends = items[:, 5].tolist()
    assert (items[:, 4] == 0).all()
    assert ends == sorted([6, 91, 41, 64, 128, 192, 200, 124, 188, 230], reverse=True)


def test_a_sequence_reads_what_another_stores_in_the_same_step():
    case = TritonCase([(0, 33), (32, 1)])
    case.tables[1, :2] = case.tables[0, :2]
    case.dense[1][:, :32] = case.dense[0][:, :32]
    case.cache.fill_(torch.nan)
    case.check()


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= 4)) for seed in range(100)],
)
def test_random_steps(seed):
    rng = random.Random(seed)
    kv_heads = rng.randint(1, 3)
    dim = rng.choice([16, 64, 80, 96, 128, 256])
    heads = (rng.randint(1, 8) * kv_heads, kv_heads, dim)
    seqs = [
        (rng.choice([0, rng.randint(0, 200)]), rng.choice([1, 1, rng.randint(1, 150)]))
        for _ in range(rng.randint(1, 6))
    ]
    dtype = rng.choice(list(TOLERANCE))
    block_size = 2 ** rng.randint(0, 8)
    case = TritonCase(seqs, heads, block_size, dtype, seed)

    case.check(case.backend(rng.choice([1, 4, 20])))


# --- padding, and reused metadata ---


class PaddedCase(TritonCase):
    """Decodes followed by padding up to a fixed batch size, as in a CUDA graph."""

    def __init__(self, seqs, padding, max_blocks=20, **options):
        super().__init__(seqs, **options)
        tables = np.full((len(seqs) + padding, max_blocks), 2**30)
        tables[: len(seqs), : self.tables.shape[1]] = self.tables[:, :max_blocks]
        self.tables, self.padding = tables, padding
        self.q = torch.cat(
            (self.q, self.q.new_full((padding, *self.q.shape[1:]), torch.nan))
        )

    def new(self):
        return [
            torch.cat((x, x.new_full((self.padding, *x.shape[1:]), torch.nan)))
            for x in super().new()
        ]

    def prepare(self, backend):
        past, new = zip(*self.seqs, *[(-1, 1)] * self.padding, strict=True)
        return backend.prepare(self.tables, np.array(past), np.array(new))

    def expected(self):
        q = self.q
        self.q = self.q[: len(self.seqs)]
        out = super().expected()
        self.q = q
        return torch.cat((out, out.new_zeros(self.padding, out.shape[1])))

    def check(self, backend=None):
        torch.testing.assert_close(
            self.run(backend).double(), self.expected(), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("num_places", [1, 20])
def test_padding_is_not_stored_and_its_result_is_zero(num_places):
    case = PaddedCase([(40, 1), (17, 1)], padding=3)
    expected = case.cache.clone()
    for row, (past, new) in enumerate(case.seqs):
        case.write(expected, row, past, past + new)
    case.check(case.backend(num_places))
    assert torch.equal(case.cache.nan_to_num(7), expected.nan_to_num(7))


def test_a_batch_of_nothing_but_padding():
    case = PaddedCase([(0, 1)], padding=2)
    case.seqs, case.padding = [], 2
    case.tables = case.tables[1:]
    case.q = case.q[1:]
    backend = case.backend(20)
    out = backend.attend(case.q.to(DEVICE), case.cache, case.prepare(backend))
    assert (out == 0).all()


@pytest.mark.parametrize("num_places", [1, 4, 20])
def test_new_contents_in_old_metadata_make_another_step(num_places):
    """As in a CUDA graph: the launches stay, the contents of their tensors change."""
    first = PaddedCase([(70, 1), (3, 1), (200, 1), (15, 1)], padding=0)
    backend = first.backend(num_places)

    metadata = first.prepare(backend)
    for seqs, padding in (
        ([(300, 1), (9, 1), (31, 1)], 1),
        ([(0, 1)], 3),
        ([(16, 1)] * 4, 0),
    ):
        case = PaddedCase(seqs, padding)
        new = case.prepare(backend)
        assert metadata.num_rows == new.num_rows
        assert metadata.num_part_rows == new.num_part_rows
        for name, value in vars(new).items():
            if isinstance(value, torch.Tensor):
                vars(metadata)[name].copy_(value)
        case.prepare = lambda _: metadata
        case.check(backend)


# --- store and copy ---


@pytest.mark.parametrize("dtype, heads, block_size", MATRIX, ids=str)
def test_store_writes_its_slots_and_nothing_else(dtype, heads, block_size):
    case = TritonCase(
        [(0, 3), (block_size, 1), (1, block_size)], heads, block_size, dtype
    )
    expected = case.cache.clone()
    backend = case.backend()
    for row, (past, new) in enumerate(case.seqs):
        case.write(expected, row, past, past + new)
    case.store(backend, case.prepare(backend))
    assert torch.equal(case.cache.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("with_norms", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "heads", [(4, 2, 64), (3, 1, 80), (5, 5, 96), (16, 8, 128), (1, 1, 256)], ids=str
)
def test_heads_are_normalised_and_rotated_as_in_torch(heads, dtype, with_norms):
    num_heads, num_kv_heads, dim = heads
    case = TritonCase([(0, 3), (16, 2)], heads, dtype=dtype)
    draw = case.draw
    qkv = draw(5, num_heads + 2 * num_kv_heads)
    weights = [draw() for _ in range(2 * with_norms)]
    rotation = draw(5, 1), draw(5, 1)

    results = []
    for kind, to_dtype in ((TritonAttention, dtype), (TorchAttention, torch.float64)):
        inputs, *lists = (
            [x.to(DEVICE, to_dtype) for x in tensors]
            for tensors in ([qkv, case.cache.nan_to_num(7)], weights, rotation)
        )
        backend = kind(*heads, 16, to_dtype, DEVICE)
        qkv_, cache = inputs
        metadata = case.prepare(backend)
        q = backend.rotate_and_store(qkv_, lists[0], 1e-6, lists[1], cache, metadata)
        results.append([q.double(), cache.double()])
    for ours, exact in zip(*results, strict=True):
        atol = TOLERANCE[dtype] * exact.abs().max().item()
        torch.testing.assert_close(ours, exact, rtol=0, atol=atol)


# --- the engine ---


def test_the_engine_gives_the_same_tokens_as_with_torch():
    prompts = ["ROMEO:\nBut soft, what light through yonder", "To be"]
    params = nanopaged.SamplingParams(temperature=0, max_tokens=6)

    texts = {}
    for backend in ("torch", "triton"):
        options = {"dtype": "float32", "num_blocks": 64, "max_num_seqs": 4}
        with nanopaged.LLM(
            attention_backend=backend, max_num_batched_tokens=16, **options
        ) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            # Its prefix is cached.
            outputs += llm.generate(prompts[:1], params, use_tqdm=False)
        texts[backend] = [output.outputs[0].token_ids for output in outputs]

    assert texts["triton"] == texts["torch"]
    assert len({tuple(ids) for ids in texts["torch"]}) == len(prompts)


def test_branches_of_one_prompt_copy_the_block_they_share():
    params = nanopaged.SamplingParams(n=2, temperature=0.9, seed=1, max_tokens=4)
    texts = {}
    for backend in ("torch", "triton"):
        with nanopaged.LLM(
            attention_backend=backend, dtype="float32", num_blocks=64
        ) as llm:
            (output,) = llm.generate(["MACBETH:\nIs this"], params, use_tqdm=False)
            assert llm.stats().blocks_copied > 0
        texts[backend] = [branch.token_ids for branch in output.outputs]
    assert texts["triton"] == texts["torch"]


def make_backend():
    return TritonAttention(2, 1, 64, 16, F32, torch.device("cpu"))


def test_a_cpu_is_rejected_except_by_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    make_backend()
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(
        ValueError, match=r"attention_backend 'triton'.* device 'cuda', got 'cpu'"
    ):
        make_backend()


def test_without_triton_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ValueError, match="pip install triton"):
        make_backend()


# --- as compiled for GPUs ---

COMPILE = """
import json, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nanopaged import kernels

for arch, title, name, kinds, constants, options in json.loads(sys.argv[1]):
    kernel = getattr(kernels, name)
    signature = {arg: kinds.get(arg, "constexpr") for arg in kernel.arg_names}
    attributes = {(i,): [["tt.divisibility", 16]]
                  for i, arg in enumerate(kernel.arg_names)
                  if kinds.get(arg, "")[:1] == "*" or arg == "q_stride"}
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", arch, 32)
    compiled = triton.compile(source, target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = lambda knob, *words: subprocess.run(
            [knob.path, *words, file.name], capture_output=True, text=True, check=True)
        usage = tool(triton.knobs.nvidia.cuobjdump, "-res-usage")
        report = usage.stdout + usage.stderr
        registers, stack, local = (re.search(rf"{what}:(\\d+)", report)[1]
                                   for what in ("REG", "STACK", "LOCAL"))
        spills = int(stack) + int(local)
        print(json.dumps([arch, title, int(registers), spills,
                          compiled.metadata.shared]))
        if len(sys.argv) > 2:
            sass = tool(triton.knobs.nvidia.nvdisasm, "-c").stdout
            open(f"{sys.argv[2]}/{arch} {title}.sass", "w").write(sass)
"""
# What a program may have, in KiB.
SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
ARCHS = [*SHARED_MEMORY]


class Launches(dict):
    """In place of `kernels.py`: how each kernel is launched, by title."""

    def __init__(self, kernels):
        super().__init__()
        self.kernels = kernels

    def __getattr__(self, name):
        kernel = getattr(self.kernels, name)
        if not hasattr(kernel, "arg_names"):
            return kernel

        def launch(*arguments, **options):
            values = dict(zip(kernel.arg_names, arguments, strict=False))
            for arg in set(options) & {*kernel.arg_names}:
                values[arg] = options.pop(arg)
            kinds = {
                arg: "*" + KINDS[x.dtype] if isinstance(x, torch.Tensor) else scalar(x)
                for arg, x in values.items()
                if not arg.isupper() and x is not None
            }
            constants = {arg: x for arg, x in values.items() if arg not in kinds}
            title = name
            if name == "paged_attention":
                title += ", decodes" if values["ROWS"] == 16 else ", chunks"
            self[title] = (name, kinds, constants, options)

        return Grid(launch)


def scalar(x):
    return "fp32" if isinstance(x, float) else "i32"


class Grid:
    def __init__(self, launch):
        self.launch = launch

    def __getitem__(self, grid):
        return self.launch


KINDS = {
    F32: "fp32",
    F16: "fp16",
    BF16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}


def launches(heads, dtype):
    """All launches of a decode, a chunk and a copy, as the backend makes them."""
    noted = {}
    for seqs in ([(100, 1)], [(0, 200)]):
        case = TritonCase(seqs, heads, 16, dtype)
        backend = case.backend()
        backend.kernels = Launches(backend.kernels)
        case.run(backend)
        case.store(backend, case.prepare(backend), with_norms=True)
        backend.copy_blocks(case.cache[None], case.cache[None], np.array([[0, 1]]))
        noted |= backend.kernels
    return noted


def compile_all(archs, shapes, folder=None):
    """(arch, dtype, head_dim, kernel) -> registers, spilled bytes, shared memory.

    In a process in which Triton does not interpret. This needs no GPU.
    """
    cases = [
        (arch, f"{dtype} {heads[2]} {title}", *launch)
        for heads, dtype in shapes
        for title, launch in launches(heads, dtype).items()
        for arch in archs
    ]
    folders = [str(folder)] if folder else []
    arguments = COMPILE, json.dumps(cases), *folders
    stdout = run_python("-c", *arguments, TRITON_INTERPRET=None)
    figures = {}
    for line in stdout.splitlines():
        arch, title, *rest = json.loads(line)
        figures[(arch, *title.split(" ", 2))] = rest
    return figures


@pytest.fixture(scope="module")
def sass(tmp_path_factory):
    return tmp_path_factory.mktemp("sass")


@pytest.fixture(scope="module")
def compiled(sass):
    """(arch, kernel) -> registers, spilled bytes a thread, shared memory."""
    figures = compile_all([80, 90], [((16, 8, 128), BF16)], sass)
    return {(arch, kernel): rest for (arch, _, _, kernel), rest in figures.items()}


def test_every_kernel_compiles_for_ampere_and_hopper(compiled, capsys):
    with capsys.disabled():
        print(
            f"\n{'head_dim 128, bfloat16':32} registers  spills  shared memory, bytes"
        )
        for (arch, title), (registers, spills, shared) in compiled.items():
            print(f"sm_{arch} {title:26} {registers:9} {spills:7} {shared:14}")
    assert len(compiled) == 10
    for (arch, _), (_, _, shared) in compiled.items():
        assert shared <= SHARED_MEMORY[arch] << 10


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    "kernel",
    ["rotate_and_store", "paged_attention, decodes", "merge_parts", "copy_blocks"],
)
def test_what_a_decode_runs_spills_nothing(compiled, arch, kernel):
    assert compiled[arch, kernel][1] == 0


@pytest.mark.parametrize("arch, programs", [(80, 2), (90, 3)])
def test_programs_of_a_decode_fit_into_a_multiprocessor(compiled, arch, programs):
    registers, _, shared = compiled[arch, "paged_attention, decodes"]
    assert programs * 128 * registers <= 64 << 10
    assert programs * (shared + 1024) <= {80: 164 << 10, 90: 228 << 10}[arch]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_every_gpu_has_room_for_the_kernels(dim, dtype):
    figures = compile_all(ARCHS, [((16, 8, dim), dtype)])
    assert len(figures) >= 4 * len(ARCHS)
    for (arch, _, _, kernel), (_, spills, shared) in figures.items():
        assert shared <= SHARED_MEMORY[arch] << 10, (arch, kernel)
        if "chunks" not in kernel and dtype != F32:
            assert spills == 0, (arch, kernel)


@pytest.mark.parametrize(
    "capability, expected", [((7, 5), "torch"), ((8, 0), "triton"), ((12, 0), "triton")]
)
def test_gpus_without_room_for_the_kernels_get_torch_and_are_told(
    monkeypatch, caplog, capability, expected
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    device = torch.device("cuda")
    assert pick_attention("auto", device) == expected
    told = f"the kernels need a GPU of compute capability (8, 0), got {capability}"
    assert (told in caplog.text) == (expected == "torch")
    half = pick_dtype("auto", BF16, device)
    assert half == (BF16 if expected == "triton" else F16)
    if expected == "torch":
        with pytest.raises(ValueError, match=r"capability \(8, 0\), got \(7, 5\)"):
            TritonAttention(2, 1, 64, 16, F16, device)


def rounds(sass):
    """The instructions of every loop, as lists of lines."""
    lines = [line.strip() for line in sass.splitlines()]
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    loops = []
    for i, line in enumerate(lines):
        target = re.search(r"BRA[^`]*`\((\S+)\)", line)
        first = labels.get(target[1], i) if target else i
        if first < i:
            loops.append([x for x in lines[first:i] if x.startswith("/*")])
    return loops


@pytest.mark.slow
def test_the_machine_code_of_a_decode_stays_lean(compiled, sass):
    """Of sm_90, for a round of 64 keys; vLLM's kernel takes 616 instructions."""
    assert compiled
    code = (sass / "90 torch.bfloat16 128 paged_attention, decodes.sass").read_text()
    assert not re.search(r"\b(LDL|STL)\b", code), "registers are spilled"
    loop = max(rounds(code), key=len)
    loads = [line for line in loop if "LDGSTS" in line]
    assert all(".128" in line for line in loads)
    assert len(loads) == 16
    assert sum("BAR.SYNC" in line for line in loop) <= 7
    assert len(loop) <= 400, len(loop)
