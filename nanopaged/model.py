"""One decoder for Llama, Mistral, Qwen2 and Qwen3: the config says how they differ.

It sees a flat batch of tokens and hands Q, K and V to the attention backend; it does
not know what a sequence is. Modules have the names of the checkpoints, except where
several matrices are stacked into one: `Linear.parts` has their names.
"""

from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanopaged.parallel import Ranks


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """On a GPU, compile `function` into one kernel at its first use.

    Between the matrix products every operation is a launch, and a pass over memory. On
    a CPU they cost little, and `function` runs as it is written. Weights are arguments,
    so that all layers share one kernel.
    """

    @cache
    def compiled() -> Callable[..., Any]:
        # Each model compiles three kernels: for its first batch size, for any other,
        # and for a single token. Past torch's limit of compilations, 8 by default,
        # functions would silently run uncompiled.
        limit = max(torch._dynamo.config.recompile_limit, 64)
        torch._dynamo.config.recompile_limit = limit
        return torch.compile(function)

    @wraps(function)
    def run(x: Tensor, *arguments: Any) -> Any:
        return (compiled() if x.is_cuda else function)(x, *arguments)

    return run


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


class Linear(nn.Linear):
    """y = x W^T + b, where W stacks the matrices `parts` of the checkpoint: name ->
    rows.

    One product for Q, K and V reads x once, and is faster than three small ones.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int],
                 bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = dict(parts)
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
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.packed, self.bias, "none", [], "")
        return product


class Attention(nn.Module):
    def __init__(self, config: Any, backend: Any, ranks: Ranks) -> None:
        super().__init__()
        self.backend = backend
        self.ranks = ranks
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        q_size = config.num_attention_heads * self.head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = Linear(config.hidden_size, parts, config.qkv_bias)
        # The results of the ranks are added up, so only rank 0 adds the bias.
        o_bias = config.o_bias and ranks.rank == 0
        self.o_proj = Linear(q_size, {"o_proj": config.hidden_size}, o_bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(self.head_dim)
            self.k_norm = nn.RMSNorm(self.head_dim)
        self.has_norms = config.qk_norm

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], kv_cache: Tensor,
                metadata: Any) -> Tensor:
        """x: [num_tokens, hidden_size]; kv_cache and metadata: see `attention.py`."""
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        weights = []
        if self.has_norms:
            weights = [self.q_norm.weight, self.k_norm.weight]
        q = self.backend.rotate_and_store(
            qkv, weights, self.eps, rotation, kv_cache, metadata)
        attended = self.backend.attend(q, kv_cache, metadata)
        return self.ranks.all_reduce(self.o_proj(attended))


class MLP(nn.Module):
    def __init__(self, config: Any, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        size, inner = config.hidden_size, config.intermediate_size
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = Linear(size, parts, config.mlp_bias)
        down_bias = config.mlp_bias and ranks.rank == 0
        self.down_proj = Linear(inner, {"down_proj": size}, down_bias)

    def forward(self, x: Tensor) -> Tensor:
        x = silu_mul(self.gate_up_proj(x))
        return self.ranks.all_reduce(self.down_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: Any, backend: Any, ranks: Ranks) -> None:
        super().__init__()
        self.self_attn = Attention(config, backend, ranks)
        self.mlp = MLP(config, ranks)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)

    def forward(self, x: Tensor, residual: Tensor, rotation: tuple[Tensor, Tensor],
                kv_cache: Tensor, metadata: Any) -> tuple[Tensor, Tensor]:
        """The layer's input is x + residual. The kernel that normalises it makes the
        sum.

        Returns such a pair for the next layer.
        """
        norm = self.input_layernorm
        x, residual = add_norm(x, residual, norm.weight, norm.eps)
        x = self.self_attn(x, rotation, kv_cache, metadata)
        norm = self.post_attention_layernorm
        x, residual = add_norm(x, residual, norm.weight, norm.eps)
        return self.mlp(x), residual


class CausalLM(nn.Module):
    """The decoder and its output head; config: that of a rank's share (`Ranks.share`).

    The vocabulary is divided among the ranks, too: embeddings, and columns of logits.
    """

    def __init__(self, config: Any, backend: Any, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        vocab_size, size = config.vocab_size, config.hidden_size
        layers = [DecoderLayer(config, backend, ranks)
                  for _ in range(config.num_hidden_layers)]
        weight = torch.empty(vocab_size, size)  # loaded later
        embed_tokens = nn.Embedding(vocab_size, size, _weight=weight)
        self.model: Any = nn.ModuleDict({
            "embed_tokens": embed_tokens,
            "layers": nn.ModuleList(layers),
            "norm": nn.RMSNorm(size, config.rms_norm_eps),
            "rotary_emb": LlamaRotaryEmbedding(config),
        })
        self.lm_head = Linear(size, {"lm_head": vocab_size})
        if config.tie_word_embeddings:
            self.lm_head.weight = embed_tokens.weight
        self.requires_grad_(False)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, sampling_indices: Tensor, kv_caches: Tensor,
                metadata: Any) -> Tensor:
        """One pass over a flat batch; returns logits [num_samples, vocab_size].

        token_ids: [num_tokens]; sampling_indices: [num_samples], the tokens after which
        one is sampled; kv_caches: the caches of all layers, stacked.
        """
        return self.head(self.last_states(
            token_ids, sampling_indices, kv_caches, metadata))

    @torch.inference_mode()
    def head(self, x: Tensor) -> Tensor:
        """[num_samples, hidden_size] -> [num_samples, vocab_size]"""
        return self.ranks.gather(self.lm_head(x))

    def last_states(self, token_ids: Tensor, sampling_indices: Tensor,
                    kv_caches: Tensor, metadata: Any) -> Tensor:
        """All but the head: [num_samples, hidden_size]."""
        x = self.embed(token_ids)
        residual = torch.zeros_like(x)
        # cos and sin of the angles, [num_tokens, 1, head_dim]
        cos, sin = self.model.rotary_emb(x, metadata.positions[None])
        rotation = (cos.transpose(0, 1), sin.transpose(0, 1))

        for layer, kv_cache in zip(self.model.layers, kv_caches, strict=True):
            x, residual = layer(x, residual, rotation, kv_cache, metadata)

        states: Tensor = self.model.norm((x + residual)[sampling_indices])
        return states

    def embed(self, token_ids: Tensor) -> Tensor:
        """[num_tokens, hidden_size]; a rank without a token's embedding adds zeros."""
        table = self.model.embed_tokens
        if self.ranks.size == 1:
            return F.embedding(token_ids, table.weight)
        ids = token_ids - self.ranks.rank * table.num_embeddings
        is_mine = (ids >= 0) & (ids < table.num_embeddings)
        return self.ranks.all_reduce(table(ids * is_mine) * is_mine[:, None])
