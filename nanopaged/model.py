"""One decoder for Llama, Mistral, Qwen2 and Qwen3: the config says how they differ.

It sees a flat batch of tokens and hands Q, K and V to the attention backend; it does
not know what a sequence is. Modules have the names of the checkpoints, except where
several matrices are stacked into one: `Linear.parts` has their names.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanopaged.parallel import Ranks

# Between the matrix products every operation is a launch, and a pass over memory. So on
# GPUs, such functions are compiled into one kernel each. Weights are arguments, so that
# all layers share one.
fused = torch.compile(dynamic=True, disable=not torch.cuda.is_available())


@fused
def add_norm(x: Tensor, residual: Tensor, weight: Tensor,
             eps: float) -> tuple[Tensor, Tensor]:
    """The sum, normalised (RMSNorm), and the sum itself: the next residual."""
    residual = x + residual
    return F.rms_norm(residual, weight.shape, weight, eps), residual


@fused
def silu_mul(gate_up: Tensor) -> Tensor:
    """[num_tokens, 2 * size] -> [num_tokens, size]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@fused
def norm_rotate(qkv: Tensor, num_kv_heads: int, weights: list[Tensor], eps: float,
                cos: Tensor, sin: Tensor) -> Tensor:
    """Normalise the heads of Q and K, if there are weights for it, then rotate them
    (RoFormer). V stays as it is.

    qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]; weights: those of Q's
    heads and K's, [head_dim] each; cos, sin: [num_tokens, 1, head_dim], of angles that
    grow with the position. The halves of a head turn like (x1, x2) -> (x1 cos - x2 sin,
    x2 cos + x1 sin).
    """
    x, v = qkv[:, :-num_kv_heads], qkv[:, -num_kv_heads:]
    if weights:
        num_heads = x.shape[1] - num_kv_heads
        scales = [weights[0].expand(num_heads, -1), weights[1].expand(num_kv_heads, -1)]
        x = F.rms_norm(x, x.shape[-1:], None, eps) * torch.cat(scales)
    x1, x2 = x.chunk(2, dim=-1)
    rotated = torch.addcmul(x * cos, torch.cat((-x2, x1), -1), sin)
    return torch.cat((rotated, v), 1)


class Linear(nn.Linear):
    """y = x W^T + b, where W stacks the matrices `parts` of the checkpoint: name ->
    rows.

    One product for Q, K and V reads x once, and is faster than three small ones.
    """

    def __init__(self, in_features: int, parts: dict[str, int],
                 bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = parts
        self.packed: Tensor | None = None

    def reset_parameters(self) -> None:
        """Draw no random weights: the checkpoint's are loaded."""

    def pack(self) -> None:
        """On CPUs with bfloat16 instructions, reorder W for oneDNN: 1.3x to 2.7x as
        fast.

        These operators are private to torch (torch.compile uses them), so nothing else
        here names them. Where they are missing, nothing changes.
        """
        reorder = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
        is_bfloat16 = self.weight.is_cpu and self.weight.dtype == torch.bfloat16
        if reorder and is_bfloat16 and torch.cpu._is_avx512_bf16_supported():
            self.packed = reorder(self.weight, None)
            self.weight = nn.Parameter(torch.empty(0), False)  # free the memory

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return super().forward(x)
        return torch.ops.mkldnn._linear_pointwise(  # type: ignore[no-any-return]
            x, self.packed, self.bias, "none", [], "")


class Attention(nn.Module):
    def __init__(self, config: Any, backend: Any, ranks: Ranks) -> None:
        super().__init__()
        self.backend = backend
        self.ranks = ranks
        self.eps = config.rms_norm_eps
        self.head_dim = config.head_dim
        self.num_kv_heads = config.num_key_value_heads
        q_size = config.num_attention_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        has_bias = getattr(config, "attention_bias", False)
        has_qkv_bias = has_bias or config.model_type == "qwen2"
        self.qkv_proj = Linear(config.hidden_size, parts, has_qkv_bias)
        self.o_proj = Linear(q_size, {"o_proj": config.hidden_size}, has_bias)
        self.norms: list[Any] = []
        if config.model_type == "qwen3":
            self.norms = [nn.RMSNorm(self.head_dim), nn.RMSNorm(self.head_dim)]
            self.q_norm, self.k_norm = self.norms

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], kv_cache: Tensor,
                metadata: Any) -> Tensor:
        """x: [num_tokens, hidden_size]; kv_cache and metadata: see `attention.py`."""
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        weights = [norm.weight for norm in self.norms]
        qkv = norm_rotate(qkv, self.num_kv_heads, weights, self.eps, *rotation)
        q, kv = qkv.tensor_split([-2 * self.num_kv_heads], dim=1)
        self.backend.store(kv, kv_cache, metadata.slots)
        attended = self.backend.attend(q, kv_cache, metadata)
        return self.ranks.all_reduce(self.o_proj(attended))


class MLP(nn.Module):
    def __init__(self, config: Any, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        size, inner = config.hidden_size, config.intermediate_size
        has_bias = getattr(config, "mlp_bias", False)
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = Linear(size, parts, has_bias)
        self.down_proj = Linear(inner, {"down_proj": size}, has_bias)

    def forward(self, x: Tensor) -> Tensor:
        x = silu_mul(self.gate_up_proj(x))
        return self.ranks.all_reduce(self.down_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: Any, backend: Any, ranks: Ranks) -> None:
        super().__init__()
        self.self_attn = Attention(config, backend, ranks)
        self.mlp = MLP(config, ranks)
        self.eps = config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(config.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size)

    def forward(self, x: Tensor, residual: Tensor, rotation: tuple[Tensor, Tensor],
                kv_cache: Tensor, metadata: Any) -> tuple[Tensor, Tensor]:
        """The layer's input is x + residual; returns such a pair for the next layer.

        The kernel that normalises the sum makes it, too.
        """
        norm, next_norm = self.input_layernorm, self.post_attention_layernorm
        x, residual = add_norm(x, residual, norm.weight, self.eps)
        x = self.self_attn(x, rotation, kv_cache, metadata)
        x, residual = add_norm(x, residual, next_norm.weight, self.eps)
        return self.mlp(x), residual


class CausalLM(nn.Module):
    """The decoder and its output head; config: that of a rank's share (`Ranks.share`).

    The vocabulary is divided among the ranks, too: embeddings, and columns of logits.
    """

    def __init__(self, config: Any, backend: Any, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        vocab_size, size = config.vocab_size, config.hidden_size
        weight = torch.empty(vocab_size, size)  # loaded later
        self.model: Any = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocab_size, size, _weight=weight)
        self.model.layers = nn.ModuleList(
            DecoderLayer(config, backend, ranks)
            for _ in range(config.num_hidden_layers))
        self.model.norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.model.rotary_emb = LlamaRotaryEmbedding(config)
        self.lm_head = Linear(size, {"lm_head": vocab_size})
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.requires_grad_(False)

    def forward(self, token_ids: Tensor, kv_caches: Tensor, metadata: Any) -> Tensor:
        """One pass over a flat batch: [num_tokens] -> [num_tokens, hidden_size].

        kv_caches: the caches of all layers, stacked.
        """
        x = self.embed(token_ids)
        residual = torch.zeros_like(x)
        # cos and sin of the angles, [num_tokens, 1, head_dim]
        cos, sin = self.model.rotary_emb(x, metadata.positions[None])
        rotation = (cos.transpose(0, 1), sin.transpose(0, 1))
        for layer, kv_cache in zip(self.model.layers, kv_caches, strict=True):
            x, residual = layer(x, residual, rotation, kv_cache, metadata)
        return x + residual

    def head(self, x: Tensor) -> Tensor:
        """Logits: [num_samples, hidden_size] -> [num_samples, vocab_size]."""
        return self.ranks.gather(self.lm_head(self.model.norm(x)))

    def embed(self, token_ids: Tensor) -> Tensor:
        """[num_tokens, hidden_size]; a rank without a token's embedding adds zeros."""
        table = self.model.embed_tokens
        ids = token_ids - self.ranks.rank * table.num_embeddings
        is_mine = (ids >= 0) & (ids < table.num_embeddings)
        return self.ranks.all_reduce(table(ids * is_mine) * is_mine[:, None])
