"""A GPU that is only pretended, for tests of all the code that runs on a real one.

Its tensors lie in the CPU's memory and say that they are on a GPU. Mixing them with
others is an error, as it would be there, and so is all that would need a copy first.
Whatever would be launched is noted: operations, Triton's kernels (in the interpreter),
and compiled functions. A recorded graph repeats its operations on the same tensors.
"""

import inspect
import time
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch._dynamo import eval_frame
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import conftest  # noqa: F401 (it mends the interpreter)
from nanopaged import fused
from nanopaged.gpu import kernels

DEVICE = torch.device("cuda", 0)
KERNELS = ("store", "paged_attention", "merge_parts")
# What copies between devices, or asks for no elements.
CROSSING = {"copy_", "to", "cpu", "__get__", "__set__", "is_pinned", "set_data"}
WAITING = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__",
           "nonzero", "masked_select", "equal", "allclose", "unique"}


class Pinned(torch.Tensor):
    """A tensor in pinned memory."""


class Generator(torch.Generator):
    """One that draws on the CPU, for whatever device it is."""

    def __new__(cls, device=None):
        return super().__new__(cls)


class Pretended(torch.Tensor):
    """A tensor in the CPU's memory that says it is on a GPU."""

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        options = options or {}
        name = function.__name__
        if name == "_has_compatible_shallow_copy_type":  # a module moves here
            return len(types) == len(arguments)
        gpu = PretendedGpu.current
        index = tensors_of(arguments[1:2]) if "etitem__" in name else ()
        if name in WAITING or any(x.dtype == torch.bool for x in index):
            gpu.wait(name)
        tensors = tensors_of((arguments, options))
        # On a GPU, an index may be on the CPU, and so may a single number.
        with torch._C.DisableTorchFunctionSubclass():
            mixed = any(x.dim() and not isinstance(x, (Pretended, CausalBias))
                        for x in tensors)
        if mixed and "etitem__" not in name and name not in CROSSING:
            raise RuntimeError(f"{name}: tensors are on several devices")
        if any(isinstance(x, CausalBias) for x in tensors):
            return on_gpu(function(*plain(arguments), **options))
        if name == "copy_":
            return gpu.copy(*arguments, **options)
        if name in ("to", "cpu", "cuda"):
            kind = "cpu" if name == "cpu" else kind_of((*arguments[1:],
                                                        *options.values()))
            if kind == "cpu":
                gpu.copies_to_host += 1
                if not options.get("non_blocking"):
                    gpu.wait("a copy to the CPU")
                return plain(arguments[0]).clone()
            arguments, options = without_device(arguments, options)
        with gpu.launching():
            return super().__torch_function__(function, types, arguments, options)


def tensors_of(x):
    return [value for value in tree_flatten(x)[0] if isinstance(value, torch.Tensor)]


def copy_all(source, targets):
    for target, x in zip(targets, tensors_of(source), strict=True):
        if target is not x:
            target.copy_(x)


def plain(x):
    """The same tensors, or structures of them, as ordinary ones."""
    with torch._C.DisableTorchFunctionSubclass():
        return tree_map_only(
            (Pretended, Pinned), lambda t: t.as_subclass(torch.Tensor), x)


def on_gpu(x):
    with torch._C.DisableTorchFunctionSubclass():
        return tree_map_only(torch.Tensor, lambda t: t.as_subclass(Pretended), x)


def kind_of(values):
    """The kind of device that is among these arguments, or None."""
    named = [str(x).split(":")[0] for x in values if isinstance(x, str | torch.device)]
    return next((kind for kind in named if kind in ("cpu", "cuda")), None)


def without_device(arguments, options):
    """The same arguments, for the CPU."""
    def changed(value):
        return torch.device("cpu") if kind_of([value]) == "cuda" else value

    options = {key: changed(value) for key, value in options.items()
               if key != "pin_memory"}
    return tuple(map(changed, arguments)), options


class PretendedGpu(TorchFunctionMode):
    """`with PretendedGpu() as gpu`: torch.cuda is there.

    launches       names of what was launched, a recorded graph being one
    waits          where the host waited for the device
    copies         how many copies there were to the device
    kernel_keys    what Triton would have compiled a kernel for, each once
    compiled       calls of functions that torch.compile has seen: name, arguments
    graphs         the recorded ones: lists of (name, what to repeat)
    """

    current = None

    def __init__(self, capability=(9, 0), free_bytes=320 << 20, computes=True):
        super().__init__()
        self.capability, self.free_bytes = capability, free_bytes
        self.computes = computes  # False: what attention returns is all zeros
        self.launches, self.waits, self.graphs = [], [], []
        self.copies = self.copies_to_host = 0
        self.kernel_keys, self.compiled = {}, {}
        self.depth, self.recording, self.selected = 0, None, set()
        self.sync_mode = "default"
        # What engines that came before have given back, and torch still holds.
        self.held = 100 << 30
        self.operations = Operations(self)

    def __enter__(self):
        PretendedGpu.current = self
        replaced = [(torch.cuda, *pair) for pair in self.functions().items()]
        replaced += [(torch, "Generator", Generator), (
            torch.accelerator, "device_index",
            lambda index: self.selected.add(index) or nullcontext())]
        replaced += [(kernels, name, Kernel(self, getattr(kernels, name)))
                     for name in KERNELS]
        replaced.append((fused, "compiled", self.compile))
        replaced.append((torch._C, "_cuda_getDriverVersion", lambda: 13000))
        # (The interpreter has no other kernel to wait for.)
        replaced += [(kernels, name, lambda **_: None)
                     for name in ("gdc_wait", "gdc_launch_dependents")]
        self.stack = ExitStack()
        for place, name, value in replaced:
            self.stack.enter_context(patch.object(place, name, value, create=True))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.stack.close()

    def functions(self):
        """Those of torch.cuda that the engine calls."""
        properties = SimpleNamespace(multi_processor_count=1, total_memory=1 << 30,
                                     major=self.capability[0])
        gpu = self

        class Event:
            def __init__(self, **_):
                self.record()

            def record(self, *_):
                self.time = time.perf_counter()
                return self

            def synchronize(self):
                gpu.wait("an event")

            def elapsed_time(self, end):
                return 1e3 * (end.time - self.time)

        stream = SimpleNamespace(record_event=lambda *_: Event())

        class CUDAGraph:
            def __init__(self):
                self.operations, self.is_reset = [], False
                gpu.graphs.append(self)

            def replay(self):
                assert not self.is_reset, "a graph that was reset"
                gpu.launches.append("graph")
                with torch.inference_mode():
                    for _, repeat in self.operations:
                        repeat()

            def reset(self):
                self.is_reset = True

        @contextmanager
        def record(graph, pool=None, stream=None, mode="global"):
            assert gpu.recording is None
            gpu.recording, gpu.capture_mode = graph.operations, mode
            try:
                yield
            finally:
                gpu.recording = None

        return {
            "is_available": lambda: True, "device_count": lambda: 1,
            "current_device": lambda: 0, "set_device": lambda _: None,
            "get_device_properties": lambda *_: properties,
            "_sleep": lambda _: None, "synchronize": lambda: self.wait("synchronize"),
            # Later, the first steps will take so much again.
            "empty_cache": lambda: vars(self).update(held=1000),
            "mem_get_info": lambda *_: (self.free_bytes - self.held, self.free_bytes),
            "graph_pool_handle": lambda: None, "Event": Event, "graph": record,
            "set_sync_debug_mode": lambda mode: setattr(self, "sync_mode", mode),
            "Stream": lambda: stream, "current_stream": lambda *_: stream,
            "CUDAGraph": CUDAGraph}

    # -- Tensors -----------------------------------------------------------------------

    def __torch_function__(self, function, types, arguments=(), options=None):
        """What is made on the GPU, or copied there, is `Pretended`."""
        options = options or {}
        name = function.__name__
        if name == "pin_memory":
            return arguments[0].clone().as_subclass(Pinned)
        named = (*arguments[1:], *options.values())
        to_gpu = kind_of(named) == "cuda" and name not in ("__get__", "get_device")
        pinned = options.get("pin_memory")
        if to_gpu and isinstance(arguments[0] if arguments else None, Pretended):
            return function(*arguments, **options)  # it is there already
        if to_gpu or "pin_memory" in options:
            arguments, options = without_device(arguments, options)
        if not to_gpu:
            result = function(*arguments, **options)
            return result.as_subclass(Pinned) if pinned else result
        if name in ("to", "tensor", "as_tensor"):
            self.copies += 1
            is_pinned = isinstance(arguments[0], Pinned)
            if not (is_pinned and options.pop("non_blocking", False)):
                self.wait("a copy of memory that is not pinned")
            return on_gpu(function(*plain(arguments), **options).clone())
        with self.launching():
            return on_gpu(plain(function(*arguments, **options)))

    def copy(self, target, source, non_blocking=False):
        kinds = [isinstance(x, Pretended) for x in (target, source)]
        if all(kinds) or not source.dim():
            with self.launching():
                plain(target).copy_(plain(source))
            return target
        self.copies += kinds[0]
        self.copies_to_host += kinds[1]
        other = source if kinds[0] else target
        if not (non_blocking and isinstance(other, Pinned)):
            self.wait("a copy of memory that is not pinned")
        assert self.recording is None, "a copy from the host while a graph is recorded"
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.copy_(target, source)
        return target

    def wait(self, why):
        if self.recording is not None:
            raise RuntimeError(f"while a graph is recorded the host waits: {why}")
        if self.sync_mode == "error":
            raise RuntimeError(f"called a synchronizing operation: {why}")
        self.waits.append(why)

    @contextmanager
    def launching(self):
        """Operations in here run on the GPU."""
        self.depth += 1
        try:
            with self.operations if self.depth == 1 else nullcontext():
                yield
        finally:
            self.depth -= 1

    def note(self, name, repeat):
        """Something was launched."""
        if self.recording is None:
            self.launches.append(name)
        else:
            self.recording.append((name, repeat))

    # -- Compiled functions ------------------------------------------------------------

    def compile(self, function, uses_pdl):
        """A stand-in for a compiled function: one kernel, whose arguments are noted."""

        def run(*arguments):
            if eval_frame._stance.stance == "force_eager":
                return function(*arguments)
            name, shapes = function.__name__, tree_map(shape_of, arguments)
            self.compiled.setdefault((name, str(shapes)), (function, shapes))

            def call():
                with torch._C.DisableTorchFunction():
                    return function(*plain(arguments))

            result = call()
            outs = tensors_of(result)
            self.note(name, lambda: copy_all(call(), outs))
            return on_gpu(result)

        return run


def shape_of(x):
    if isinstance(x, torch.Tensor):
        x = plain(x)
        return SimpleNamespace(shape=tuple(x.shape), stride=x.stride(), dtype=x.dtype)
    return x


class Operations(TorchDispatchMode):
    """Notes the operations that run on the GPU, and can repeat them."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        result = function(*arguments, **options)
        name = function._overloadpacket.__name__
        if "empty" in name:
            return result
        outs = tensors_of(result)
        storages = {x.untyped_storage()._cdata
                    for x in tensors_of((arguments, options))}
        is_view = all(x.untyped_storage()._cdata in storages for x in outs)
        if is_view and not function._schema.is_mutable:
            return result

        def repeat():
            with torch._C.DisableTorchFunctionSubclass():
                copy_all(function(*arguments, **options), outs)

        self.gpu.note(name, repeat)
        return result


# -- Triton's kernels ------------------------------------------------------------------


class Kernel:
    """A kernel of Triton: notes what it would be compiled for, then interprets it."""

    backend = make_backend(GPUTarget("cuda", 90, 32))

    def __init__(self, gpu, kernel):
        self.gpu, self.kernel = gpu, kernel
        options = inspect.signature(JITFunction).parameters
        known = {key: value for key, value in kernel.kwargs.items() if key in options}
        self.jit = JITFunction(kernel.fn, **known)
        self.bind = create_function_from_signature(
            self.jit.signature, self.jit.params, self.backend)

    def __getitem__(self, grid):
        grid = grid if isinstance(grid, tuple) else (grid,)

        def launch(*arguments, **options):
            values, kinds, others = self.bind(*arguments, **options)
            key = self.jit.__name__, *kinds, *sorted(others.items())
            self.gpu.kernel_keys.setdefault(str(key), (self.jit, values, kinds, others))
            if not all(grid):
                raise RuntimeError("invalid configuration: a grid of nothing")

            def run():
                if self.gpu.computes:
                    with torch._C.DisableTorchFunction():
                        self.kernel[grid](*plain(arguments), **plain(options))
                elif "out" in self.jit.arg_names:
                    plain(arguments[self.jit.arg_names.index("out")]).zero_()

            run()
            self.gpu.note(self.jit.__name__, run)

        return launch
