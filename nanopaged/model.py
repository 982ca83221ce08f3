"""One decoder for Llama, Mistral, Qwen2 and Qwen3; their configs say how they differ.

`loading/checkpoint.py` decides which models come here.

The decoder computes a flat batch of tokens, and hands Q, K and V to the attention
backend. It does not know what a sequence is. Modules are named as in the checkpoints,
except where one matrix stacks several of the checkpoint's: then `Linear.stacked` has
their names. `ops` are the operations between the matrix products, as in `fused.py`, the
next file. `ranks.py` explains `all_reduce`; with one rank it does nothing.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanopaged.attention import Metadata, Scoring, TorchAttention
from nanopaged.fused import Ops
from nanopaged.ranks import Ranks


class Linear(nn.Linear):
    """y = x W^T + b, where W may stack several matrices of the checkpoint.

    stacked: their names (one or several), and how many rows each of them has. One
        product for Q, K and V reads x once, so it is faster than three small ones.
    divided: the dimension that ranks divide: 0 for the rows (a rank computes some of
        y), 1 for the columns (a rank has some of x, and results are added up).
    """

    def __init__(self, in_features: int, *, bias: bool = False,
                 divided: int | None = None, **stacked: int) -> None:
        super().__init__(in_features, sum(stacked.values()), bias)
        self.stacked, self.divided = stacked, divided


def window_of(config: Any, layer: int) -> int | None:
    """How many keys a query of this layer sees; None: all of them."""
    # Configs of these two families do not list the types of their layers. All layers of
    # Mistral have a window, if sliding_window is not None.
    types = {"llama": "full_attention", "mistral": "sliding_attention"}
    layer_type = types.get(config.model_type) or config.layer_types[layer]
    return config.sliding_window if layer_type == "sliding_attention" else None


class Attention(nn.Module):
    def __init__(self, config: Any, backend: TorchAttention, layer: int) -> None:
        super().__init__()
        self.backend, self.ops = backend, backend.ops
        self.scoring = Scoring(config.head_dim**-0.5, window_of(config, layer))
        self.eps = config.rms_norm_eps
        size, head_dim = config.hidden_size, config.head_dim
        q_size = config.num_attention_heads * head_dim
        kv_size = config.num_key_value_heads * head_dim
        # Only these families read attention_bias. Qwen2 always has one for Q, K and V.
        has_bias = bool(config.attention_bias) and config.model_type in (
            "llama", "qwen3")
        self.qkv_proj = Linear(
            size, bias=has_bias or config.model_type == "qwen2", divided=0,
            q_proj=q_size, k_proj=kv_size, v_proj=kv_size)
        # Ranks add up their results, so only rank 0 loads a bias here.
        self.o_proj = Linear(q_size, bias=has_bias, divided=1, o_proj=size)
        self.norms: list[nn.RMSNorm] = []
        if config.model_type == "qwen3":  # it normalises the heads of Q and K
            # These modules only hold the weights; `norm_rotate` computes.
            self.q_norm, self.k_norm = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)
            self.norms = [self.q_norm, self.k_norm]

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], kv_cache: Tensor,
                metadata: Metadata) -> Tensor:
        """x: [num_tokens, hidden_size]; kv_cache and metadata: see `attention.py`."""
        num_kv_heads = self.backend.num_kv_heads
        qkv = self.qkv_proj(x).view(len(x), -1, self.backend.head_dim)
        # The last num_kv_heads heads are V's, and the ones before them K's.
        qk, v = qkv.tensor_split([-num_kv_heads], dim=1)
        weights: list[Tensor] = [norm.weight for norm in self.norms]
        qk = self.ops.norm_rotate(qk, weights, num_kv_heads, self.eps, *rotation)
        q, k = qk.tensor_split([-num_kv_heads], dim=1)
        self.backend.store(k, v, kv_cache, metadata.slots)
        attended = self.backend.attend(q, kv_cache, metadata, self.scoring)
        return self.o_proj(attended)  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self, config: Any, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        size, inner = config.hidden_size, config.intermediate_size
        has_bias = bool(config.mlp_bias) and config.model_type == "llama"
        self.gate_up_proj = Linear(
            size, bias=has_bias, divided=0, gate_proj=inner, up_proj=inner)
        self.down_proj = Linear(inner, bias=has_bias, divided=1, down_proj=size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.ops.silu_mul(self.gate_up_proj(x)))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    def __init__(self, config: Any, backend: TorchAttention, ranks: Ranks, layer: int
                 ) -> None:
        super().__init__()
        self.ranks, self.ops = ranks, backend.ops
        self.self_attn = Attention(config, backend, layer)
        self.mlp = MLP(config, backend.ops)
        self.eps = config.rms_norm_eps
        # These, too, only hold weights.
        self.input_layernorm = nn.RMSNorm(config.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size)

    def forward(self, x: Tensor, residual: Tensor, rotation: tuple[Tensor, Tensor],
                kv_cache: Tensor, metadata: Metadata) -> tuple[Tensor, Tensor]:
        """The layer adds the output of attention to the residual, and then that of the
        MLP. Each sum is computed together with the norm that follows, so `x` is always
        the last output, not yet added to the residual.
        """
        norm, next_norm = self.input_layernorm, self.post_attention_layernorm
        x, residual = self.ops.add_norm(x, residual, norm.weight, self.eps)
        x = self.ranks.all_reduce(self.self_attn(x, rotation, kv_cache, metadata))
        x, residual = self.ops.add_norm(x, residual, next_norm.weight, self.eps)
        return self.ranks.all_reduce(self.mlp(x)), residual


class CausalLM(nn.Module):
    """The decoder and its output head.

    config: what `loading/checkpoint.py` has read, with the sizes of this rank's share
    """

    def __init__(self, config: Any, backend: TorchAttention, ranks: Ranks) -> None:
        super().__init__()
        vocab_size, size = config.vocab_size, config.hidden_size
        self.model: Any = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocab_size, size)
        self.model.layers = nn.ModuleList(
            DecoderLayer(config, backend, ranks, layer)
            for layer in range(config.num_hidden_layers))
        self.model.norm = nn.RMSNorm(size, config.rms_norm_eps)
        # Cosines and sines of the angles at each position, [num_positions, 1, head_dim]
        # each. Only the weight's dtype and device matter here.
        positions = torch.arange(config.longest_sequence)[:, None]
        self.rotations = LlamaRotaryEmbedding(config.hf_config)(
            self.model.norm.weight, positions)
        self.lm_head = Linear(size, lm_head=vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, token_ids: Tensor, kv_caches: Tensor, metadata: Metadata
                ) -> Tensor:
        """One pass over a flat batch: [num_tokens] -> [num_tokens, hidden_size].

        kv_caches has one cache for each layer.
        """
        # On a CPU, weights may be bfloat16 while all else is float32.
        x: Tensor = self.model.embed_tokens(token_ids).to(self.model.norm.weight.dtype)
        residual = torch.zeros_like(x)
        cos, sin = (table[metadata.positions] for table in self.rotations)
        for layer, kv_cache in zip(self.model.layers, kv_caches, strict=True):
            x, residual = layer(x, residual, (cos, sin), kv_cache, metadata)
        return x + residual  # `head` normalises it, for the tokens that are sampled

    def head(self, x: Tensor) -> Tensor:
        """Logits: [num_samples, hidden_size] -> [num_samples, vocab_size]."""
        return self.lm_head(self.model.norm(x))  # type: ignore[no-any-return]
