"""One decoder for Llama, Mistral, Qwen2 and Qwen3; their configs say how they differ.

It computes a flat batch of tokens and hands Q, K and V to the attention backend. It
does not know what a sequence is. Modules are named as in the checkpoints, except where
one matrix stacks several of the checkpoint's: then `Linear.stacked` has their names.
Leave for the second reading: `fused.py`, whose functions do what their names say, and
`parallel.py`, which explains `Linear.divided` and `all_reduce`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanopaged import fused
from nanopaged.parallel import Ranks


class Linear(nn.Linear):
    """y = x W^T + b, where W may stack several matrices of the checkpoint.

    stacked: their names, and how many rows each of them has. One product for Q, K and V
        reads x once, so it is faster than three small ones.
    divided: the dimension that ranks divide: 0 for the rows (a rank computes some of
        y), 1 for the columns (a rank has some of x, and results are added up).
    """

    def __init__(self, in_features: int, bias: bool = False,
                 divided: int | None = None, **stacked: int) -> None:
        super().__init__(in_features, sum(stacked.values()), bias)
        self.stacked, self.divided = stacked, divided


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
            # These modules only hold the weights; `fused.norm_rotate` computes.
            self.q_norm, self.k_norm = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)
            # Q and K are normalised in one call, so there is a row for each head. These
            # are views, so they reflect the weights that are loaded later.
            self.norm_weights = [self.q_norm.weight.expand(num_heads, -1),
                                 self.k_norm.weight.expand(num_kv_heads, -1)]

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], kv_cache: Tensor,
                metadata: Any) -> Tensor:
        """x: [num_tokens, hidden_size]; kv_cache and metadata: see `attention.py`."""
        num_kv_heads = self.backend.num_kv_heads
        qkv = self.qkv_proj(x).view(len(x), -1, self.backend.head_dim)
        qk, v = qkv.tensor_split([-num_kv_heads], dim=1)
        qk = fused.norm_rotate(qk, self.norm_weights, self.eps, *rotation)
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
        return self.down_proj(fused.silu_mul(self.gate_up_proj(x)))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """A layer's weights. `CausalLM.forward` runs it, because the end of a layer and the
    beginning of the next are computed together.
    """

    def __init__(self, config: Any, backend: Any) -> None:
        super().__init__()
        self.self_attn = Attention(config, backend)
        self.mlp = MLP(config)
        # These modules only hold the weights; `fused.add_norm` computes.
        self.input_layernorm = nn.RMSNorm(config.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size)


class CausalLM(nn.Module):
    """The decoder and its output head."""

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

        kv_caches has one cache for each layer. `add_norm` returns the sum of its first
        two arguments, normalised, and the sum itself, which is the next residual.
        """
        x: Tensor = self.model.embed_tokens(token_ids).to(self.model.norm.weight.dtype)
        residual = torch.zeros_like(x)
        # The cosines and sines of the angles: [num_tokens, 1, head_dim] each.
        rotation = self.model.rotary_emb(x, metadata.positions[:, None])
        for layer, kv_cache in zip(self.model.layers, kv_caches, strict=True):
            norm, next_norm = layer.input_layernorm, layer.post_attention_layernorm
            x, residual = fused.add_norm(x, residual, norm.weight, self.eps)
            x = self.ranks.all_reduce(layer.self_attn(x, rotation, kv_cache, metadata))
            x, residual = fused.add_norm(x, residual, next_norm.weight, self.eps)
            x = self.ranks.all_reduce(layer.mlp(x))
        return x + residual  # `head` normalises it, for the tokens that are sampled

    def head(self, x: Tensor) -> Tensor:
        """Logits: [num_samples, hidden_size] -> [num_samples, vocab_size]."""
        return self.lm_head(self.model.norm(x))  # type: ignore[no-any-return]
