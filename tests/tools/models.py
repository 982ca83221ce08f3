"""Tiny models with random weights, and transformers as their oracle.

The weights have a large variance. With the default initialisation a tiny tied model
repeats one token forever, and any engine agrees with it.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

# So many that a good part of the generations meets one.
EOS_IDS = [3, 17, 41, 77, 90, 101]
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32}


def shape(heads, hidden, vocab, **more):
    """Config fields; `heads` are query heads, KV heads and head_dim (0: not stated)."""
    query_heads, kv_heads, head_dim = heads
    fields = {
        "hidden_size": hidden, "intermediate_size": 2 * hidden + 8,
        "num_hidden_layers": 2, "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "max_position_embeddings": 256, "eos_token_id": EOS_IDS[0], "bos_token_id": 1,
        "pad_token_id": None}
    return ({"head_dim": head_dim} if head_dim else {}) | fields | more


# name: (family, fields, largest shard or None for one file). The sizes divide by the
# numbers of ranks in test_ranks.py, and by nothing that any code could rely on.
VARIANTS = {
    "llama": ("llama", shape((4, 2, 16), 64, 160), None),
    "llama-llama3-rope-tied-biases": ("llama", shape(
        (6, 3, 16), 48, 138, intermediate_size=102, rope_parameters=LLAMA3_ROPE,
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True), None),
    "llama-head-dim-80-one-kv-head": (
        "llama", shape((3, 1, 80), 42, 129, intermediate_size=93), "40KB"),
    "mistral-three-kv-heads": ("mistral", shape(
        (6, 3, 16), 48, 147, intermediate_size=105, sliding_window=None,
        rope_theta=500000.0), "50KB"),
    "qwen2-14-heads-tied": (
        "qwen2", shape((14, 2, 0), 112, 152, tie_word_embeddings=True), None),
    "qwen2-untied-sharded": ("qwen2", shape((4, 4, 0), 48, 177), "30KB"),
    "qwen3-tied": ("qwen3", shape((4, 2, 32), 64, 128, tie_word_embeddings=True), None),
    "qwen3-untied-biases": ("qwen3", shape(
        (5, 1, 16), 50, 165, intermediate_size=110, attention_bias=True), "30KB"),
    "qwen3-head-dim-96": ("qwen3", shape(
        (3, 3, 96), 36, 189, intermediate_size=81, rms_norm_eps=1e-5), None),
}


def write_model(family, path, *, eos=EOS_IDS, max_shard_size=None, seed=0, **fields):
    """Write a tiny random model to `path` in Hugging Face format; return the path."""
    if "hidden_size" not in fields:
        fields = shape((4, 2, 16), 64, 160) | fields
    config = AutoConfig.for_model(family, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.data = (0.05 if "embed_tokens" in name else 0.2) * noise
        if name.endswith("norm.weight"):
            weight.data += 1
    model.tie_weights()
    model.generation_config = GenerationConfig(eos_token_id=list(eos), bos_token_id=1)
    sharding = {"max_shard_size": max_shard_size} if max_shard_size else {}
    model.save_pretrained(path, **sharding)
    return path


# -- The oracle ------------------------------------------------------------------------


class Reference:
    """Transformers in float32, one prompt at a time, unpadded; answers are cached."""

    eos_ids = EOS_IDS
    near_tie = 1e-3  # closer than this, the order of a float32 sum could decide

    def __init__(self):
        self.models = {}
        self.known = {}

    def model(self, path):
        if path not in self.models:
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, trust_remote_code=False)
            model.generation_config = GenerationConfig()  # only the length stops it
            self.models[path] = model.eval()
        return self.models[path]

    @torch.inference_mode()
    def run(self, path, prompt, **options):
        """Call `generate`: new tokens, and each one's lead over the second choice."""
        defaults = {"do_sample": False, "pad_token_id": 0, "output_logits": True}
        ids = torch.tensor([list(prompt)])
        result = self.model(path).generate(
            ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True,
            generation_config=GenerationConfig(**(defaults | options)))
        top = torch.stack(result.logits)[:, 0].topk(2).values
        leads = (top[:, 0] - top[:, 1]).tolist()
        return result.sequences[0, len(prompt) :].tolist(), leads

    def endless(self, path, prompt, count):
        """Greedy tokens and their leads, ignoring EOS."""
        key = (path, tuple(prompt))
        if key not in self.known or len(self.known[key][0]) < count:
            self.known[key] = self.run(path, prompt, max_new_tokens=count)
        tokens, leads = self.known[key]
        return tokens[:count], leads[:count]

    def generate(self, path, prompt, max_new_tokens, eos=()):
        """Greedy tokens, up to and including the first of `eos`."""
        tokens, _ = self.endless(path, prompt, max_new_tokens)
        ends = [i for i, token in enumerate(tokens) if token in eos]
        return tokens[: ends[0] + 1] if ends else tokens

    def is_clear(self, path, prompt, count):
        """True if no step of the generation comes close to a tie."""
        return min(self.endless(path, prompt, count)[1]) > self.near_tie

    @torch.inference_mode()
    def logits(self, path, ids):
        """Raw logits after each of the tokens: [len(ids), vocab_size], float32."""
        return self.model(path)(torch.tensor([list(ids)])).logits[0].float()
