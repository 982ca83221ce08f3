"""Processors to pretend, because they decide what code computes.

A test marked EACH_CPU runs on each of them, whichever machine runs it. All tests run on
one of them with `pytest --cpu KIND`, and any script does with

    PYTHONPATH=tests python -m tools.cpus KIND script.py ARGUMENTS

(A process that a test starts sees the machine's own.)
"""

import runpy
import sys
from types import SimpleNamespace

import pytest
import torch

KINDS = {
    "blocks": "it has bfloat16, and oneDNN arranges W for our kernel",
    "other-blocks": "it has bfloat16, and oneDNN arranges W in another way",
    "float32": "it has no instructions for bfloat16",
    "no-operators": "nor has torch those of oneDNN, as on a Mac",
    "threads": "as float32, and two threads compute even a small model",
    "no-numba": "torch computes everything"}
# (Threads that wait for each other take very long on a busy machine.)
OWN_CPU = pytest.mark.parametrize("cpu", [None], indirect=True)  # whatever is asked for
EACH_CPU = pytest.mark.parametrize(
    "cpu", [kind for kind in KINDS if kind != "threads"], indirect=True)


def pretend(kind, patch):
    """Make this process see such a CPU; `patch` is pytest's MonkeyPatch."""
    from nanopaged.loading import start_up, weights
    from nanopaged.loading.settings import own_settings

    if kind == "no-numba":
        for module in (start_up, weights):
            patch.setattr(module, "products", None)
        return
    from nanopaged.cpu import products  # not before, because Numba may be missing

    has_bfloat16 = "blocks" in kind
    patch.setattr(products, "has_bfloat16", lambda: has_bfloat16)
    patch.setattr(
        products, "find_blocks", arrange if kind == "blocks" else lambda *_: None)
    if kind == "no-operators":
        patch.setattr(torch.ops, "mkldnn", None)
    elif has_bfloat16 and products.reorder(torch.zeros(2, 2).bfloat16()) is None:
        patch.setattr(torch.ops, "mkldnn", SlowOperators)
    if kind == "threads":
        patch.setattr(start_up, "own_settings", lambda device, number=2: own_settings(
            device, 2 if number else 0))


def arrange(packed, weight):
    """What `find_blocks` finds where oneDNN has bfloat16, arranged by hand."""
    from nanopaged.cpu.threads import bits

    num_outputs, size = weight.shape
    if weight.dtype != torch.bfloat16 or num_outputs % 64 or size % 2:
        return None
    pairs = weight.view(-1, 64, size // 2, 2).transpose(1, 2).contiguous()
    return bits(pairs).view("uint32")[..., 0]


class SlowOperators:
    """Those of oneDNN where it cannot compute in bfloat16, not even slowly."""

    real = torch.ops.mkldnn

    @classmethod
    def _reorder_linear_weight(cls, weight, _):
        if weight.dtype == torch.float32:
            return cls.real._reorder_linear_weight(weight, None)
        with torch.inference_mode(False):
            return weight.clone()

    def default(x, weight, bias, *others):
        if not weight.is_mkldnn:
            weight = SlowOperators._reorder_linear_weight(weight.float(), None)
        bias = None if bias is None else bias.float()
        product = SlowOperators.real._linear_pointwise.default
        return product(x.float(), weight, bias, *others).to(x.dtype)

    _linear_pointwise = SimpleNamespace(default=staticmethod(default))


if __name__ == "__main__":
    kind, *sys.argv = sys.argv[1:]
    with pytest.MonkeyPatch.context() as patch:
        pretend(kind, patch)
        runpy.run_path(sys.argv[0], run_name="__main__")
