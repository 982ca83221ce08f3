"""What is compiled for a GPU: one kernel for all layers and batch sizes.

Here each fusion is compiled for the CPU and compared with the same function in plain
torch.
"""

import pytest
import torch

from helpers import run_python
from nanopaged import model

SIZES = [1, 2, 5, 16, 64, 7]


@pytest.fixture
def count(monkeypatch):
    """`count(function)`: the function compiled as on a GPU, and a list of graphs."""
    torch._dynamo.reset()

    def compiled(function):
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        return torch.compile(function.__wrapped__, backend=backend), graphs

    yield compiled
    torch._dynamo.reset()


def arguments(name, size):
    norm = torch.rand(24), 1e-6
    return {
        "add_norm": (torch.randn(size, 24), torch.randn(size, 24), *norm),
        "silu_mul": (torch.randn(size, 48),),
    }[name]


@pytest.mark.parametrize("name", ["add_norm", "silu_mul"])
@torch.inference_mode()
def test_layers_and_batch_sizes_share_a_compiled_kernel(count, name):
    function = getattr(model, name)
    compiled, graphs = count(function)
    for size in SIZES:
        for _ in range(3):  # layers
            inputs = arguments(name, size)
            torch.testing.assert_close(compiled(*inputs), function(*inputs))
    assert len(graphs) <= 3, (
        "one for the first size, one for all, one for a single token"
    )


def test_without_a_gpu_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", None)
    model.silu_mul(torch.ones(2, 4))


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    is_cuda = True


def test_a_process_with_many_models_runs_nothing_uncompiled(monkeypatch):
    """Past dynamo's limit a function would run uncompiled, and nobody would know."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: compile_(f, backend=backend))
    with torch._dynamo.config.patch(recompile_limit=4):
        silu_mul = model.fused(model.silu_mul.__wrapped__)
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            before = len(graphs)
            for num_tokens in (7, 5, 1):
                x = torch.ones(num_tokens, 8, dtype=dtype)
                silu_mul(x.as_subclass(OnGpu))
            assert len(graphs) >= before + 2
    torch._dynamo.reset()


INDUCTOR = '''
import re
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from nanopaged import model, sampler

H200 = SimpleNamespace(
    name="H200", major=9, minor=0, multi_processor_count=132, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
    max_threads_per_block=1024, total_memory=141 << 30, gcnArchName="",
    shared_memory_per_block=48 << 10, shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10, L2_cache_size=50 << 20)
driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0, is_active=lambda: True))


def kernels(function, *shapes):
    """How often Inductor's code for this function launches a kernel."""
    with FakeTensorMode():
        tensors = [torch.empty(shape, dtype=dtype, device="cuda")
                   for shape, dtype in shapes]
    traced = make_fx(function, select_decomp_table(), "fake")(*tensors)
    graph = GraphLowering(traced)
    with V.set_graph_handler(graph), V.set_debug_handler(DebugContext()):
        graph.run(*tensors)
        code = graph.codegen()[0]
    return len(re.findall(r"triton_[0-9a-z_]+[.]run[(]", code.value))


with ExitStack() as stack:
    properties = staticmethod(lambda *_: H200)
    for place in (CudaInterface, CudaInterface.Worker, torch.cuda):
        stack.enter_context(patch.object(place, "get_device_properties", properties))
    for name, value in (("current_device", 0), ("get_device_capability", (9, 0)),
                        ("is_available", True), ("device_count", 1)):
        stack.enter_context(patch.object(torch.cuda, name, lambda *_, v=value: v))
    bf16, f32 = torch.bfloat16, torch.float32
    add_norm = model.add_norm.__wrapped__
    draw = sampler.draw_tokens.__wrapped__
    x, logits, ones = ((256, 1024), bf16), ((256, 151936), bf16), ((256, 1), f32)
    print(kernels(model.silu_mul.__wrapped__, ((256, 6144), bf16)),
          kernels(lambda *xs: add_norm(*xs, 1e-6), x, x, ((1024,), bf16)),
          kernels(lambda x, *two: draw(x, None, *two), logits, ones, ones))
'''


@pytest.mark.slow
def test_inductor_makes_one_kernel_of_each_fusion_between_matrix_products():
    """The code that it would run on an H200; nothing of it needs one."""
    pytest.importorskip("triton", reason="pip install triton")
    silu, norm, draw = run_python("-c", INDUCTOR, TRITON_INTERPRET=None).split()[-3:]
    assert (silu, norm) == ("1", "1")
    assert int(draw) <= 7  # three of them read all logits, and none writes as many
