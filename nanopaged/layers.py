"""The parts of a decoder that are not attention: linear layers, and fusions."""

from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """On a GPU, what `function` does becomes one kernel, by torch.compile.

    Between the matrix products every operation is a pass over memory, and a launch. On a CPU they
    cost little beside the products, and `function` runs as it is written. Weights are arguments, so
    that all layers share one kernel.
    """
    compiled = cache(lambda: torch.compile(function))  # at its first use
    return wraps(function)(lambda x, *rest: (compiled() if x.is_cuda else function)(x, *rest))


@fused
def add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, F.rms_norm(total, weight.shape, weight, eps)


@fused
def silu_mul(gate_up: Tensor) -> Tensor:
    """[num_tokens, 2 * size] -> [num_tokens, size]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class Linear(nn.Linear):
    """y = x W^T + b, where W stacks the checkpoint's matrices `parts` (name -> rows).

    One product for q, k and v reads x once and fills the machine better than three small ones.
    """

    __call__: Callable[..., Tensor]  # where nn.Module only says Any

    def __init__(self, in_features: int, parts: Mapping[str, int], bias: bool) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = dict(parts)
        self.packed: Tensor | None = None

    def reset_parameters(self) -> None:
        """Weights are loaded: nothing is drawn for them."""

    def pack(self) -> None:
        """Reorder W once into oneDNN's own layout: 1.3 to 2.7 times as fast for few rows.

        These are the operators that torch.compile's freezing emits. They are private to torch, so
        nothing else here names them, and where they are missing `forward` does without.
        """
        if hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, None)
            self.weight = nn.Parameter(torch.empty(0), False)  # free the plain one

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return super().forward(x)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


@fused
def norm_rotate(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [num_tokens, any number of heads, head_dim]; cos, sin: [num_tokens, 1, head_dim].

    The two halves of a head's vector turn by angles that grow with the position (RoFormer):
    (x1 cos - x2 sin, x2 cos + x1 sin) = [x1, x2] * [cos, cos] + [-x2, x1] * [sin, sin].
    """
    x = x if weight is None else F.rms_norm(x, weight.shape, weight, eps)
    x1, x2 = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((-x2, x1), -1), sin)
