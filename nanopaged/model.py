"""One decoder for Llama, Mistral, Qwen2 and Qwen3; their configs say how they differ.

It computes a flat batch of tokens and hands Q, K and V to the attention backend. It
does not know what a sequence is. Modules are named as in the checkpoints, except where
one matrix stacks several of the checkpoint's: then `Linear.parts` has their names.

With several ranks, each of them has this model with its share of the heads and of the
MLP, and `Linear.divided` says how a matrix is divided among them.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

from nanopaged.parallel import Ranks

# Between the matrix products, every operation costs a kernel launch and a pass over
# memory. So on GPUs, torch.compile turns a function marked with this into as few
# kernels as possible. Such a function takes weights as arguments, so that all layers
# share the compiled code.
fused = torch.compile(dynamic=True, disable=not torch.cuda.is_available(),
                      options={"split_reductions": False})  # one kernel sums a row


@fused
def add_norm(x: Tensor, residual: Tensor, weight: Tensor,
             eps: float) -> tuple[Tensor, Tensor]:
    """The sum, normalised by RMSNorm, and the sum itself: the next residual."""
    residual = x + residual
    return F.rms_norm(residual, weight.shape, weight, eps), residual


@fused
def silu_mul(gate_up: Tensor) -> Tensor:
    """[num_tokens, 2 * size] -> [num_tokens, size]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@fused
def norm_rotate(x: Tensor, weights: list[Tensor], eps: float, cos: Tensor,
                sin: Tensor) -> Tensor:
    """Normalise the heads of Q and K, if there are weights for that, and rotate them.

    x: [num_tokens, num_heads + num_kv_heads, head_dim]; weights: those of Q's heads,
    [num_heads, head_dim], and those of K's; cos, sin: [num_tokens, 1, head_dim].
    The two halves of a head, x1 and x2, become x1 cos - x2 sin and x2 cos + x1 sin. The
    angles grow with the position (RoFormer).
    """
    if weights:
        x = F.rms_norm(x, x.shape[-1:], None, eps) * torch.cat(weights)
    return torch.addcmul(x * cos, rotate_half(x), sin)


class Linear(nn.Linear):
    """y = x W^T + b, where W may stack several matrices of the checkpoint.

    parts: their names, and how many rows each of them has. One product for Q, K and V
        reads x once, so it is faster than three small ones.
    divided: the dimension of each of them that the ranks divide: 0 for the rows (a rank
        computes a part of y), 1 for the columns (a rank has a part of x, and the ranks'
        results are added up). None means that every rank has all of it.
    """

    def __init__(self, in_features: int, bias: bool = False,
                 divided: int | None = None, **parts: int) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts, self.divided = parts, divided


def pack(linear: nn.Linear) -> None:
    """On CPUs with bfloat16 instructions, reorder W for oneDNN, which makes the
    product 1.3 to 2.7 times as fast.

    torch.compile uses these operators, too. They are private to torch, so they appear
    only here. Where they are missing, nothing changes.
    """
    reorder = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
    is_bfloat16 = linear.weight.is_cpu and linear.weight.dtype == torch.bfloat16
    if reorder and is_bfloat16 and torch.cpu._is_avx512_bf16_supported():
        linear.weight = nn.Parameter(reorder(linear.weight, None), False)
        linear.forward = partial(  # type: ignore[method-assign]
            packed_product, weight=linear.weight, bias=linear.bias)


def packed_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of a weight that `pack` has reordered.

    Without AMX, which is Intel's unit for matrices, one to three rows take longer than
    six: one row takes 1.25 times as long, measured on an EPYC. So rows of zeros are
    added.
    """
    num_rows = len(x)
    if num_rows < 4 and not torch.cpu._is_amx_tile_supported():
        x = F.pad(x, (0, 0, 0, 6 - num_rows))
    product = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product[:num_rows]  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self, config: Any, backend: Any) -> None:
        super().__init__()
        self.backend = backend
        self.eps = config.rms_norm_eps
        size, head_dim = config.hidden_size, config.head_dim
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
        has_bias = getattr(config, "attention_bias", False)
        # Qwen2 always has biases for Q, K and V, and its config does not mention them.
        self.qkv_proj = Linear(
            size, has_bias or config.model_type == "qwen2", divided=0,
            q_proj=q_size, k_proj=kv_size, v_proj=kv_size)
        self.o_proj = Linear(q_size, has_bias, divided=1, o_proj=size)
        self.norm_weights: list[Tensor] = []
        if config.model_type == "qwen3":  # it normalises the heads of Q and K
            self.q_norm, self.k_norm = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)
            # These views, one row for each head, reflect the weights loaded later.
            self.norm_weights = [self.q_norm.weight.expand(num_heads, -1),
                                 self.k_norm.weight.expand(num_kv_heads, -1)]

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], kv_cache: Tensor,
                metadata: Any) -> Tensor:
        """x: [num_tokens, hidden_size]; kv_cache and metadata: see `attention.py`."""
        num_kv_heads = self.backend.num_kv_heads
        qkv = self.qkv_proj(x).view(len(x), -1, self.backend.head_dim)
        qk, v = qkv.tensor_split([-num_kv_heads], dim=1)
        qk = norm_rotate(qk, self.norm_weights, self.eps, *rotation)
        q, k = qk.tensor_split([-num_kv_heads], dim=1)
        self.backend.store(k, v, kv_cache, metadata.slots)
        attended = self.backend.attend(q, kv_cache, metadata)
        return self.o_proj(attended)  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        has_bias = getattr(config, "mlp_bias", False)
        self.gate_up_proj = Linear(
            size, has_bias, divided=0, gate_proj=inner, up_proj=inner)
        self.down_proj = Linear(inner, has_bias, divided=1, down_proj=size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_mul(self.gate_up_proj(x)))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """The weights of a layer. `CausalLM.forward` runs it, because the sums and norms of
    neighbouring layers are computed together.
    """

    def __init__(self, config: Any, backend: Any) -> None:
        super().__init__()
        self.self_attn = Attention(config, backend)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size)


class CausalLM(nn.Module):
    """The decoder and its output head. Its config has the sizes of a rank's share.

    The ranks do not divide the vocabulary: each has all embeddings and the whole head.
    """

    def __init__(self, config: Any, backend: Any, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.eps = config.rms_norm_eps
        vocab_size, size = config.vocab_size, config.hidden_size
        self.model: Any = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocab_size, size)
        self.model.layers = nn.ModuleList(
            DecoderLayer(config, backend) for _ in range(config.num_hidden_layers))
        self.model.norm = nn.RMSNorm(size, self.eps)
        self.model.rotary_emb = LlamaRotaryEmbedding(config)
        self.lm_head = Linear(size, lm_head=vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, token_ids: Tensor, kv_caches: Tensor, metadata: Any) -> Tensor:
        """One pass over a flat batch: [num_tokens] -> [num_tokens, hidden_size].

        kv_caches has one cache for each layer. Between two layers the state is
        x + residual, and the kernel that normalises the sum also computes it. Attention
        and MLP compute this rank's part of their results; `all_reduce` adds up the
        parts of all ranks.
        """
        x: Tensor = self.model.embed_tokens(token_ids)
        residual = torch.zeros_like(x)
        # The cosines and sines of the angles: [num_tokens, 1, head_dim] each.
        rotation = self.model.rotary_emb(x, metadata.positions[:, None])
        for layer, kv_cache in zip(self.model.layers, kv_caches, strict=True):
            x, residual = add_norm(x, residual, layer.input_layernorm.weight, self.eps)
            x = self.ranks.all_reduce(layer.self_attn(x, rotation, kv_cache, metadata))
            x, residual = add_norm(
                x, residual, layer.post_attention_layernorm.weight, self.eps)
            x = self.ranks.all_reduce(layer.mlp(x))
        return x + residual

    def head(self, x: Tensor) -> Tensor:
        """Logits: [num_samples, hidden_size] -> [num_samples, vocab_size]."""
        return self.lm_head(self.model.norm(x))  # type: ignore[no-any-return]
