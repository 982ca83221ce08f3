"""The engine on a GPU that is only pretended: from its start to its last token.

`Pretended` tensors lie in the CPU's memory, and say that they are on a GPU. Mixing them
with others is an error, as it would be on a GPU, and so is everything that would need
a copy first. All of the engine's code for GPUs runs: the pool that is sized by running
a step, staged copies, recorded graphs (a stand-in repeats the calls), one step ahead.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from helpers import counters, draw_requests, repeat_calls, serve
from nanopaged import model_runner

pytest.importorskip("triton", reason="pip install triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu has the real thing", allow_module_level=True)

GPU = torch.device("cuda", 0)
FREE_BYTES = 1 << 22
# What copies between devices, or asks for no elements.
CROSSING = ("copy_", "to", "cpu", "__get__", "__set__", "is_pinned")


class Pretended(torch.Tensor):
    """A tensor in the CPU's memory that says it is on a GPU."""

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        options = options or {}
        name = function.__name__
        if name == "numpy":
            raise TypeError("a GPU's tensor must be copied to the CPU first")
        tensors = [
            x
            for x in tree_flatten((arguments, options))[0]
            if isinstance(x, torch.Tensor)
        ]
        # On a GPU, an index may be on the CPU, and so may a single number.
        is_index = name in ("__getitem__", "__setitem__")
        with torch._C.DisableTorchFunctionSubclass():
            mixed = any(x.dim() and not isinstance(x, Pretended) for x in tensors)
        if mixed and not is_index and name not in CROSSING:
            raise RuntimeError(f"{name}: tensors are on several devices")
        if name == "copy_" and not isinstance(arguments[0], Pretended):
            return on_cpu(function, arguments, options)
        if name in ("to", "cpu"):
            device = device_of((*arguments[1:], *options.values()))
            if name == "cpu" or device == "cpu":
                return on_cpu(function, arguments, options).clone()
            arguments, options = without_device(arguments, options)
        return super().__torch_function__(function, types, arguments, options)


def on_cpu(function, arguments, options):
    """Call a function with plain tensors."""

    def plain(x):
        return x.as_subclass(torch.Tensor) if isinstance(x, Pretended) else x

    with torch._C.DisableTorchFunctionSubclass():
        return function(*tree_map(plain, arguments), **tree_map(plain, options))


def device_of(values):
    """The kind of device that is among these arguments, or None."""
    for value in values:
        if isinstance(value, torch.device):
            return value.type
        if value in ("cpu", "cuda"):
            return value
    return None


def without_device(arguments, options):
    """The same arguments, for the CPU."""
    cpu = torch.device("cpu")

    def changed(value):
        is_gpu = isinstance(value, torch.device) and value.type == "cuda"
        return cpu if is_gpu or (isinstance(value, str) and value == "cuda") else value

    options = {key: changed(value) for key, value in options.items()}
    if "pin_memory" in options:
        options["pin_memory"] = False
    return tuple(map(changed, arguments)), options


class PretendGPU(TorchFunctionMode):
    """What is made on a GPU, or copied there, is `Pretended`."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = options or {}
        named = (*arguments[1:], *options.values())
        to_gpu = device_of(named) == "cuda" and function.__name__ != "__get__"
        if function.__name__ == "pin_memory":
            return arguments[0]
        if to_gpu or "pin_memory" in options:
            arguments, options = without_device(arguments, options)
        result = function(*arguments, **options)
        if to_gpu and isinstance(result, torch.Tensor):
            result = result.clone().as_subclass(Pretended)
        return result


@pytest.fixture
def pretended_gpu(monkeypatch):
    """torch.cuda's functions, as far as the engine calls them."""
    event = SimpleNamespace(synchronize=lambda: None)
    cuda = {
        "is_available": lambda: True,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(
            multi_processor_count=4
        ),
        "reset_peak_memory_stats": lambda: None,
        "memory_allocated": lambda: 0,
        "max_memory_allocated": lambda: 1000,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (FREE_BYTES, FREE_BYTES),
        "graph_pool_handle": lambda: None,
        "Stream": lambda: None,
        "current_stream": lambda: SimpleNamespace(record_event=lambda: event),
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(
        model_runner, "record_cuda_graph", lambda pool, stream, run: repeat_calls(run)
    )

    return PretendGPU


def test_the_pretended_gpu_refuses_what_a_real_one_would(pretended_gpu):
    with pretended_gpu():
        x = torch.zeros(3, device="cuda")
        assert x.is_cuda and (x + 1).is_cuda and x[:2].device == GPU
        assert not x.cpu().is_cuda and x.cpu().numpy().tolist() == [0, 0, 0]
        with pytest.raises(RuntimeError, match="several devices"):
            x + torch.zeros(3)
        with pytest.raises(TypeError, match="copied"):
            x.numpy()


@pytest.mark.parametrize(
    ("attention_backend", "num_blocks", "preemption_mode"),
    [("auto", None, "auto"), ("auto", 14, "swap"), ("torch", 14, "recompute")],
)
def test_an_engine_on_a_gpu_starts_and_serves(
    llama, engine, pretended_gpu, attention_backend, num_blocks, preemption_mode
):
    limits = {"vocab_size": 160, "most": 3, "max_tokens": 12, "stop": ()}
    lengths = [1, 2, 3, 7, 8, 9, 20]
    requests = list(draw_requests(seed=24, count=8, lengths=lengths, **limits))
    options = {"max_num_seqs": 7, "max_model_len": 40, "max_num_batched_tokens": 16}
    expected = serve(engine(llama, **options), requests)

    with pretended_gpu():
        llm = engine(
            llama,
            device="cuda",
            num_blocks=num_blocks,
            attention_backend=attention_backend,
            preemption_mode=preemption_mode,
            **options,
        )
        assert llm.runner.kv_caches.is_cuda and llm.steps_ahead == 1
        assert bool(llm.runner.graphs) == (attention_backend == "auto")
        assert serve(llm, requests) == expected
        if num_blocks is not None:
            assert counters(llm)[f"preemptions_{preemption_mode}"] > 0
