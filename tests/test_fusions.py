"""What is compiled for a GPU: one kernel for all layers and batch sizes.

Here each fusion is compiled for the CPU and compared with the same function in plain
torch.
"""

import pytest
import torch

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
