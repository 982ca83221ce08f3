"""Train the bundled model: a small Qwen3 that writes pseudo-Shakespeare.

    python nanopaged/shakespeare/train.py --text tinyshakespeare.txt --out nanopaged/shakespeare

The text is split as in nanoGPT: the first nine tenths train (tokenizer included), the last tenth
is held out. The module names below are those of transformers' `Qwen3ForCausalLM`, so that its
`state_dict` is the checkpoint. A million characters is little for five million parameters; three
things keep the model from learning the text by heart: dropout, BPE dropout (Provilkov et al., arXiv
1910.13267: every pass over the text sees it cut into other tokens), and averaged weights (EMA).
Matrices are trained by Muon (Jordan et al., 2024), the rest by AdamW.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

EOS = "<|endoftext|>"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "attention_bias": False,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0, "dtype": "bfloat16",
    "use_cache": True, "initializer_range": 0.02, "attention_dropout": 0.0,
}  # fmt: skip
CHAT_TEMPLATE = (  # a conversation is a play: the role is the speaker
    "{% for m in messages %}{{ m['role'] | upper }}:\n{{ m['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:\n{% endif %}"
)


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, eps=1e-6)
        self.k_norm = nn.RMSNorm(head_dim, eps=1e-6)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, -1, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, -1, self.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: dict, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c["hidden_size"], eps=1e-6)
        self.self_attn = Attention(
            c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        )
        self.post_attention_layernorm = nn.RMSNorm(c["hidden_size"], eps=1e-6)
        self.mlp = MLP(c["hidden_size"], c["intermediate_size"])
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    def __init__(self, c: dict, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c, dropout) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.RMSNorm(c["hidden_size"], eps=1e-6)


class Model(nn.Module):
    def __init__(self, c: dict, dropout: float) -> None:
        super().__init__()
        self.model = Decoder(c, dropout)
        self.dropout = nn.Dropout(dropout)
        half = torch.arange(0, c["head_dim"], 2) / c["head_dim"]
        freqs = c["rope_parameters"]["rope_theta"] ** -half
        angles = torch.outer(torch.arange(c["max_position_embeddings"]).float(), freqs)
        self.cos, self.sin = angles.cos(), angles.sin()
        for name, p in self.named_parameters():
            if p.ndim == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 0.02 / math.sqrt(2 * c["num_hidden_layers"]) if residual else 0.02
                nn.init.normal_(p, std=scale)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """ids, targets: [batch, length]; returns the loss of every token, [batch, length]."""
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = self.dropout(self.model.embed_tokens(ids))
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        logits = F.linear(self.model.norm(x), self.model.embed_tokens.weight).float()
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view_as(ids)


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))  # fmt: skip
    return tokenizer


def encode(tokenizer: Tokenizer, text: str, dropout: float | None = None) -> Tensor:
    tokenizer.model.dropout = dropout
    ids = tokenizer.encode(text).ids
    tokenizer.model.dropout = None
    return torch.tensor(ids)


@torch.no_grad()
def nats_per_char(model: nn.Module, ids: Tensor, chars: int, window: int, stride: int) -> float:
    """Sliding windows: each token is predicted once, from at least `window - stride` before it."""
    model.eval()
    total = 0.0
    for start in range(0, len(ids) - 1, stride):
        begin = max(0, start + stride - window)
        end = min(start + stride, len(ids) - 1)
        losses = model(ids[None, begin:end], ids[None, begin + 1 : end + 1])[0]
        total += losses[start - begin :].sum().item()
    model.train()
    return total / chars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--init", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--long", type=float, default=0.2, help="share of steps on long windows")
    parser.add_argument("--batch", type=int, default=32, help="short windows a step")
    parser.add_argument("--window", type=int, default=256, help="tokens in a short window")
    parser.add_argument("--dropout", type=float, default=0.15)
    parser.add_argument("--bpe-dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=0.02, help="of Muon; AdamW takes a tenth")
    parser.add_argument("--ema", type=float, default=0.99)
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    started = time.time()

    text = args.text.read_text()
    split = int(0.9 * len(text))
    train_text, held_out = text[:split], text[split:]
    tokenizer = train_tokenizer(train_text, CONFIG["vocab_size"])
    train_ids, held_out_ids = encode(tokenizer, train_text), encode(tokenizer, held_out)
    print(f"{len(train_ids):,} training tokens, {split / len(train_ids):.2f} characters each")

    model = Model(CONFIG, args.dropout)
    if args.init:
        model.load_state_dict(load_file(args.init / "model.safetensors"))
    ema = copy.deepcopy(model)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.1, momentum=0.95),
        torch.optim.AdamW(others, lr=args.lr / 10, betas=(0.9, 0.95), weight_decay=0.01),
    ]
    peaks = [group["lr"] for o in optimizers for group in o.param_groups]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")

    forward = torch.compile(model, dynamic=False)
    long = CONFIG["max_position_embeddings"]
    for step in range(args.steps):
        if step % 40 == 0:  # about a pass over the text: cut it anew
            ids = encode(tokenizer, train_text, args.bpe_dropout)
        scale = min(1.0, (step + 1) / 50, (args.steps - step) / (0.7 * args.steps))
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * scale
        short = step < (1 - args.long) * args.steps
        window = args.window if short else long
        count = args.batch if short else args.batch * args.window // long
        starts = torch.randint(len(ids) - window - 1, (count,)).tolist()
        batch = torch.stack([ids[s : s + window + 1] for s in starts])
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(batch[:, :-1], batch[:, 1:]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            decay = min(args.ema, (step + 1) / (step + 20))
            for average, p in zip(ema.parameters(), model.parameters(), strict=True):
                average.lerp_(p, 1 - decay)
        if (step + 1) % args.eval_every == 0:
            sample = held_out_ids[:16384]
            chars = len(tokenizer.decode(sample.tolist()))
            score = nats_per_char(ema, sample, chars, window, window // 2)
            print(f"step {step + 1}: train {loss.item():.3f} nats/token, held out (first part) "
                  f"{score:.4f} nats/char, {time.time() - started:.0f} s", flush=True)  # fmt: skip
            save(ema, tokenizer, args.out)
    save(ema, tokenizer, args.out)
    for p in ema.parameters():  # what was saved is what is measured
        p.data = p.data.bfloat16().float()
    score = nats_per_char(ema, held_out_ids, len(held_out), long, long // 2)
    print(f"held out: {score:.4f} nats/char after {time.time() - started:.0f} s")


def save(model: Model, tokenizer: Tokenizer, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    state = {n: p.detach().to(torch.bfloat16).contiguous() for n, p in model.state_dict().items()}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    write = lambda name, data: (out / name).write_text(json.dumps(data, indent=2) + "\n")  # noqa: E731
    write("config.json", CONFIG)
    write("generation_config.json", {"eos_token_id": 0, "pad_token_id": 0})
    write("tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "pad_token": EOS,
        "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
        "model_max_length": CONFIG["max_position_embeddings"]})  # fmt: skip


if __name__ == "__main__":
    main()
