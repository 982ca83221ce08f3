"""One decoder for Llama, Mistral, Qwen2 and Qwen3: the differences come from the config.

It sees a flat batch of tokens and hands Q, K and V to the attention backend; it does not know what
a sequence is. Modules carry the names of the checkpoints, except where several matrices are stacked
into one (`Linear.parts` has their names). `config` is what `loader.load_config` returns.
"""

from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanopaged.attention import AttentionMetadata, TorchAttention
from nanopaged.parallel import Ranks


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

    def __init__(self, in_features: int, parts: Mapping[str, int], bias: bool) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = dict(parts)

    def reset_parameters(self) -> None:
        """Weights are loaded: nothing is drawn for them."""

    def pack(self) -> None:
        """Reorder W once into oneDNN's own layout: 1.3 to 2.7 times as fast for few rows.

        On CPUs with instructions for bfloat16. These are the operators that torch.compile's
        freezing emits. They are private to torch, so nothing else here names them, and where they
        are missing all stays as it is.
        """
        reorder = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
        fits = self.weight.is_cpu and self.weight.dtype == torch.bfloat16
        if reorder and fits and torch.cpu._is_avx512_bf16_supported():
            ops, packed, bias = torch.ops.mkldnn, reorder(self.weight, None), self.bias
            self.weight = nn.Parameter(torch.empty(0), False)  # free the plain one
            self.forward = lambda x: ops._linear_pointwise(x, packed, bias, "none", [], "")  # type: ignore[assignment,method-assign]


@fused
def norm_rotate(x: Tensor, weights: list[Tensor], eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [num_tokens, heads of q and of k, head_dim]; cos, sin: [num_tokens, 1, head_dim].

    weights: [heads of q, head_dim], [heads of k, head_dim] for their norms; or none. Then the two
    halves of a head's vector turn by angles that grow with the position (RoFormer):
    (x1 cos - x2 sin, x2 cos + x1 sin) = [x1, x2] * [cos, cos] + [-x2, x1] * [sin, sin].
    """
    x = F.rms_norm(x, x.shape[-1:], None, eps) * torch.cat(weights) if weights else x
    x1, x2 = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((-x2, x1), -1), sin)


class DecoderLayer(nn.Module):
    def __init__(self, config: Any, backend: TorchAttention, ranks: Ranks) -> None:
        super().__init__()
        self.backend, self.ranks, self.eps = backend, ranks, config.rms_norm_eps
        self.heads = config.num_attention_heads, config.num_key_value_heads
        size, inner, self.head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_size, kv_size = (heads * self.head_dim for heads in self.heads)
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        # The ranks' results are added up, so the biases of o and down are rank 0's.
        self.self_attn: Any = nn.ModuleDict({
            "qkv_proj": Linear(size, parts, config.qkv_bias),
            "o_proj": Linear(q_size, {"o_proj": size}, config.o_bias and not ranks.rank)})
        self.qk_norms = ("q_norm", "k_norm") if config.qk_norm else ()  # applied by norm_rotate
        self.self_attn.update({name: nn.RMSNorm(self.head_dim) for name in self.qk_norms})
        self.mlp: Any = nn.ModuleDict({
            "gate_up_proj": Linear(size, {"gate_proj": inner, "up_proj": inner}, config.mlp_bias),
            "down_proj": Linear(inner, {"down_proj": size}, config.mlp_bias and not ranks.rank)})
        self.input_layernorm = nn.RMSNorm(size, self.eps)
        self.post_attention_layernorm = nn.RMSNorm(size, self.eps)

    def forward(self, x: Tensor, update: Tensor, rotation: tuple[Tensor, Tensor],
                kv_cache: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """x + update is the input: their sum is left to the kernel that also normalises it.

        Returns the next such pair.
        """
        attn, mlp, (heads, kv_heads) = self.self_attn, self.mlp, self.heads
        x, normed = add_norm(x, update, self.input_layernorm.weight, self.eps)
        qkv = attn.qkv_proj(normed).view(len(x), -1, self.head_dim)
        qk, v = qkv.split([heads + kv_heads, kv_heads], 1)  # [num_tokens, heads, head_dim]
        pairs = zip(self.qk_norms, self.heads, strict=False)  # none, or both
        weights = [attn[name].weight.expand(count, -1) for name, count in pairs]
        q, k = norm_rotate(qk, weights, self.eps, *rotation).split([heads, kv_heads], 1)
        self.backend.store(k, v, kv_cache, metadata)
        attended = self.ranks.all_reduce(attn.o_proj(self.backend.attend(q, kv_cache, metadata)))
        x, normed = add_norm(x, attended, self.post_attention_layernorm.weight, self.eps)
        return x, self.ranks.all_reduce(mlp.down_proj(silu_mul(mlp.gate_up_proj(normed))))


class CausalLM(nn.Module):
    """The decoder and its output head; the weights are what memory held until they are loaded.

    config: of this rank's share (`Ranks.share`). Tokens are split too: their embeddings, and the
    logits.
    """

    def __init__(self, config: Any, backend: TorchAttention, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, self.vocab = ranks, (config.starts["lm_head"], config.total_vocab_size)
        vocab_size, size = config.vocab_size, config.hidden_size  # of the vocabulary, a share
        embedding: Any = nn.Embedding(vocab_size, size, _weight=torch.empty(vocab_size, size))
        layers = (DecoderLayer(config, backend, ranks) for _ in range(config.num_hidden_layers))
        self.model: Any = nn.ModuleDict({
            "embed_tokens": embedding,
            "layers": nn.ModuleList(layers),
            "norm": nn.RMSNorm(size, config.rms_norm_eps),
            "rotary_emb": LlamaRotaryEmbedding(config)})
        self.lm_head: Any = Linear(size, {"lm_head": vocab_size}, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = embedding.weight
        self.requires_grad_(False)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, sampling_rows: Tensor, kv_caches: Tensor,
                metadata: AttentionMetadata) -> Tensor:
        """One pass over a flat batch; returns logits [num_rows, vocab_size] of `sampling_rows`.

        token_ids: [num_tokens]; sampling_rows: [num_rows], rows of the batch; kv_caches: every
        layer's cache, stacked.
        """
        embed_tokens, layers, norm, rotary_emb = self.model.values()
        # Other ranks' tokens look up row 0, and count as zero: the sum is the embedding.
        ids = token_ids - self.vocab[0]
        mine = (ids >= 0) & (ids < embed_tokens.num_embeddings)
        x = self.ranks.all_reduce(embed_tokens(ids * mine) * mine[:, None])
        # cos and sin of the angles, [num_tokens, 1, head_dim], scaled as long contexts need it
        cos, sin = (y.transpose(0, 1) for y in rotary_emb(x, metadata.positions[None]))
        update = torch.zeros_like(x)  # nothing yet
        for layer, kv_cache in zip(layers, kv_caches, strict=True):
            x, update = layer(x, update, (cos, sin), kv_cache, metadata)
        return self.ranks.gather(self.lm_head(norm((x + update)[sampling_rows])), *self.vocab)
