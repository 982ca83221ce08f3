"""What a GPU will do, as far as a machine without one can know.

Kernels are stubs that note how they were called, or run in Triton's interpreter; the
model runs on small tensors, or on `meta` ones, which have shapes but no contents.
"""

import random
from collections import namedtuple
from functools import partial, wraps

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import record_calls
from nanopaged import model, sampler
from nanopaged.attention import TorchAttention
from nanopaged.model_runner import ModelRunner, Staging
from nanopaged.scheduler import ControlMessage
from nanopaged.triton_attention import TritonAttention

pytest.importorskip("triton", reason="pip install triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu has the real thing", allow_module_level=True)

KERNELS = ["rotate_and_store", "paged_attention", "merge_parts", "copy_blocks"]
FUSIONS = [
    (model, "add_norm"),
    (model, "silu_mul"),
    (sampler, "draw_tokens"),
]


class StubKernels:
    """In place of `kernels.py`: notes what Triton would compile, and does nothing."""

    def __init__(self, kernels, note):
        vars(self).update(vars(kernels))
        for name in KERNELS:
            setattr(self, name, self.launcher(name, note))

    def launcher(self, name, note):
        class Kernel:
            def __getitem__(self, grid):
                def launch(*arguments, **options):
                    kinds = [getattr(x, "dtype", x) for x in arguments]
                    if name == "copy_blocks":
                        del kinds[3:]  # numbers of blocks, which are not compiled in
                    note((name, *kinds, *options.items()))

                return launch

        return Kernel()


@pytest.fixture
def noted(monkeypatch):
    """`noted(llm)`: a set of what the engine has compiled up to now, as on a GPU."""
    torch._dynamo.reset()
    seen = set()

    def compiled(module, name):
        def backend(graph, inputs):
            seen.add((name, len(seen)))
            return graph.forward

        function = getattr(module, name).__wrapped__
        monkeypatch.setattr(module, name, torch.compile(function, backend=backend))

    def watch(llm):
        backend = llm.runner.backend
        backend.kernels = StubKernels(backend.kernels, seen.add)
        for module, name in FUSIONS:
            compiled(module, name)
        return seen

    yield watch
    torch._dynamo.reset()


def random_message(rng, config):
    """A step of chunks and decodes, some of which sample."""
    message = ControlMessage()
    if rng.random() < 0.1:
        message.copies = [(rng.randrange(60), 60 + i) for i in range(rng.randint(1, 4))]
    num_seqs = rng.choice([1, 2, rng.randint(1, config.max_num_seqs)])
    left = config.max_num_batched_tokens
    for row in rng.sample(range(config.max_num_seqs), num_seqs):
        count = 1 if rng.random() < 0.7 else rng.randint(1, min(left, 60))
        left -= count
        message.token_ids += [rng.randrange(100)] * count
        message.counts.append(count)
        message.ends.append(count + rng.randrange(60))
        message.rows.append(row)
        if rng.random() < 0.9:
            message.samples.append(len(message.rows) - 1)
            message.sampled_rows.append(row)
    return message


@pytest.mark.parametrize(
    "num_steps", [50, pytest.param(1000, marks=pytest.mark.slow)]
)
def test_serving_compiles_nothing_that_the_start_has_not(
    llama, engine, noted, num_steps
):
    llm = engine(
        llama,
        num_blocks=64,
        max_model_len=120,
        max_num_seqs=17,
        max_num_batched_tokens=512,
        attention_backend="triton",
    )
    seen = noted(llm)
    llm.runner.warm_up()
    at_start = set(seen)
    assert {name for name, *_ in at_start} >= {"paged_attention", "draw_tokens"}

    rng = random.Random(0)
    params = llm.runner.sampler.params
    for _ in range(num_steps):
        params["temperature"] = rng.choice([0, 0.7])
        params["top_p"] = rng.choice([1, 0.9])
        params["top_k"] = rng.choice([0, 5])
        llm.runner.run(random_message(rng, llm.config))
    assert seen == at_start


@pytest.mark.parametrize("num_blocks", [None, 32])
def test_the_start_warms_up_whether_or_not_the_pool_has_a_given_size(
    llama, engine, monkeypatch, num_blocks
):
    calls = []

    def measure(runner):
        calls.append(runner.num_layers)  # on a GPU it runs `warm_up`
        return 1 << 20

    monkeypatch.setattr(ModelRunner, "_measure_free_bytes", measure)
    llm = engine(llama, num_blocks=num_blocks, max_model_len=16)
    assert len(calls) == 1
    assert num_blocks in (None, llm.runner.num_blocks)


def test_graphs_hold_no_logits(llama, engine):
    """They would be of one more size for each graph, and the pool could not share them.
    """
    llm = engine(llama, max_num_seqs=64, attention_backend="triton")
    record_calls(llm.runner)
    graphs = llm.runner.graphs
    assert {*graphs} == {1, 2, 4, 8, 16, 32, 48, 64}
    for size, graph in graphs.items():
        assert graph.last_states.shape == (size, llm.model_config.hidden_size)


def test_staged_arrays_arrive_as_they_were_added():
    staging = Staging(4096, torch.device("cpu"))
    rng = np.random.default_rng(0)
    for _ in range(3):  # the same buffer, step after step
        staging.begin()
        arrays = [
            rng.integers(0, 99, (3, 5)),
            rng.integers(0, 99, 7).astype(np.int32),
            rng.random((4, 1), np.float32),
            rng.random(9) < 0.5,
            np.zeros((0, 4), np.int32),
        ]
        tensors = [staging.add(array) for array in arrays]
        staging.send()
        for array, tensor in zip(arrays, tensors, strict=True):
            assert tensor.data_ptr() % 16 == 0
            assert torch.equal(tensor, torch.from_numpy(array))


def test_an_array_that_does_not_fit_arrives_by_itself():
    staging = Staging(64, torch.device("cpu"))
    small, large = np.arange(3), np.arange(100)
    tensors = [staging.add(small), staging.add(large)]
    staging.send()
    assert [tensor.tolist() for tensor in tensors] == [small.tolist(), large.tolist()]


# --- copies and swaps ---

MOVES = {
    "apart": [(0, 5), (3, 1), (0, 2)],
    "one": [(4, 0)],
}


def move_blocks(kind, moves, source, target=None):
    """Blocks of [num_layers, num_blocks, 2, 3, 4, 5] elements."""
    backend = kind(6, 3, 5, 4, source.dtype, torch.device("cpu"))
    backend.copy_blocks(source, source if target is None else target, np.array(moves))


@pytest.mark.parametrize("kind", [TorchAttention, TritonAttention])
@pytest.mark.parametrize("moves", MOVES.values(), ids=MOVES)
def test_blocks_are_copied_in_all_layers(kind, moves):
    pool = torch.randn(7, 6, 2, 3, 4, 5)
    expected = pool.clone()
    for source, target in moves:
        expected[:, target] = expected[:, source]
    move_blocks(kind, moves, pool)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("kind", [TorchAttention, TritonAttention])
def test_swaps_are_between_pools_of_different_sizes(kind):
    source, target = torch.randn(3, 6, 2, 3, 4, 5), torch.randn(3, 9, 2, 3, 4, 5)
    expected = target.clone()
    expected[:, [8, 0]] = source[:, [1, 5]]
    move_blocks(kind, [(1, 8), (5, 0)], source, target)
    assert torch.equal(target, expected)


def test_copies_hold_no_more_than_a_layer_at_a_time(monkeypatch):
    sizes = []
    index_select = torch.Tensor.index_select

    def watched(self, dim, index):
        result = index_select(self, dim, index)
        sizes.append(result.numel())
        return result

    monkeypatch.setattr(torch.Tensor, "index_select", watched)
    pool = torch.randn(7, 6, 2, 3, 4, 5)
    move_blocks(TorchAttention, MOVES["apart"], pool)
    assert sizes == [3 * pool[0, 0].numel()] * 7


def test_on_a_gpu_the_swap_space_is_pinned(monkeypatch):
    made = []
    monkeypatch.setattr(torch, "zeros", lambda shape, **options: made.append(options))
    runner = object.__new__(ModelRunner)
    runner.num_layers, runner.block_shape, runner.dtype = 2, (2, 1, 4, 8), torch.float16
    runner.device = torch.device("cuda")
    for device in (runner.device, torch.device("cpu")):
        runner._make_pool(3, device)
    assert [options["pin_memory"] for options in made] == [False, True]


# --- what a decode step launches ---

NO_LAUNCH = ("empty", "view", "reshape", "detach", "alias", "lift", "is_pinned")


class Launches(TorchDispatchMode):
    """Counts what would run on a GPU; a fused function counts as one kernel."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.is_fused = False

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        name = function._overloadpacket.__name__
        is_view = function.is_view or any(part in name for part in NO_LAUNCH)
        on_device = any(
            isinstance(x, torch.Tensor) and x.is_meta for x in (*arguments, result)
        )
        if on_device and not is_view and not self.is_fused:
            from_host = name == "copy_" and arguments[1].is_cpu
            self.names.append("copy to the device" if from_host else name)
        return result

    def fused(self, function):
        @wraps(function)
        def run(*arguments):
            self.is_fused = True
            result = function.__wrapped__(*arguments)
            self.is_fused = False
            self.names.append(function.__name__)
            return result

        return run


@pytest.fixture
def launches(monkeypatch):
    """`launches(llm)`: the engine's tensors have no contents from here on; what a
    step launches is counted.
    """
    mode = Launches()

    def watch(llm):
        meta, runner = torch.device("meta"), llm.runner
        for module, name in FUSIONS:
            monkeypatch.setattr(module, name, mode.fused(getattr(module, name)))
        runner.model.to(meta)
        runner.kv_caches = runner.kv_caches.to(meta)
        runner.last_tokens = runner.last_tokens.to(meta)
        runner.device = runner.backend.device = meta
        runner.staging = Staging(1 << 22, meta)
        backend = runner.backend
        backend.to_device = runner.staging.add
        note = lambda kinds: mode.names.append(kinds[0])  # noqa: E731
        backend.kernels = StubKernels(backend.kernels, note)
        # The copy to the host, which a step ends with, needs contents.
        output = namedtuple("Output", "token_ids")
        monkeypatch.setattr(sampler, "SamplerOutput", output)
        return mode

    return watch


def decodes(count):
    rows = list(range(count))
    return ControlMessage(
        token_ids=[-1] * count,
        counts=[1] * count,
        ends=[50 + row % 7 for row in rows],
        rows=rows,
        samples=rows,
        sampled_rows=rows,
    )


def test_a_decode_step_of_256_makes_one_copy_and_few_launches(
    make_model, engine, launches
):
    """On `meta` tensors a wait for the device would raise, and so would a mix of
    devices.
    """
    nodes = {}
    for num_layers in (1, 3):
        path = make_model("qwen3", num_hidden_layers=num_layers)
        llm = engine(
            path,
            num_blocks=32,
            max_model_len=64,
            max_num_seqs=256,
            max_num_batched_tokens=256,
            attention_backend="triton",
        )
        mode = launches(llm)
        recorded = []

        def record(run, recorded=recorded, mode=mode):
            mode.names.clear()
            states = run()
            recorded.append(len(mode.names))
            return partial(mode.names.append, "graph"), states

        llm.runner.sampler.params["temperature"] = 0.6
        llm.runner.sampler.params["top_p"] = 1
        with mode:
            llm.runner.capture_graphs(record)
            mode.names.clear()
            llm.runner.run(decodes(256))
        nodes[num_layers] = recorded[0]  # of the largest graph
        assert mode.names.count("copy to the device") == 1
        assert len(mode.names) <= 8

    per_layer = (nodes[3] - nodes[1]) // 2
    # Four matrix products, two norms, one activation; rotation, attention, merge.
    assert per_layer == 10
    assert nodes[1] - per_layer <= 14


def test_min_tokens_excludes_tokens_of_all_samples_at_once(llama, engine, launches):
    """A list as an index, and a number as a value, would be copied for each of them,
    and waited for.
    """
    llm = engine(
        llama,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        attention_backend="triton",
    )
    mode = launches(llm)
    params = llm.runner.sampler.params
    params["min_len"] = 1000
    for row in range(8):
        params["stop_token_ids"][row] = [3, 7]
    with mode:
        llm.runner.run(decodes(8))
    assert mode.names.count("copy to the device") == 1
    assert mode.names.count("index_put_") == 2  # the other one: into last_tokens
    assert "scalar_tensor" not in mode.names
