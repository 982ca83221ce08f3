"""The fixtures: tiny models, transformers as the oracle, and engines checked for leaks.

The models' weights have a large variance. With the default initialisation a tiny tied
model repeats one token forever, and any engine agrees with it. Prompts whose reference
generation comes close to a tie are not used: there the order of a float32 sum decides,
not the engine. Plain functions that hold no state are in helpers.py.
"""

import json
import os
import random
from collections import namedtuple
from importlib.util import find_spec

import pytest

# Before anything imports torch or Triton. The tests never see a GPU: what needs one is
# in gpu/run.py, which takes the models and the reference from here, without pytest.
if "PYTEST_VERSION" in os.environ:
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from nanopaged import LLM

logging.set_verbosity_error()
logging.disable_progress_bar()
torch.set_num_threads(1)
pytest.register_assert_rewrite("helpers")


def mend_interpreter():
    """Let the interpreter of Triton before 3.7 run with numpy 2.4 or later: it takes an
    array of one number for a number, which numpy no longer allows.
    """
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor, *scope):
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch


if find_spec("triton"):
    mend_interpreter()


# -- Models ----------------------------------------------------------------------------

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


@pytest.fixture(scope="session")
def make_model(tmp_path_factory):
    """`make_model(family, **fields)`: a directory, made once for the same arguments."""
    made = {}

    def make(family, **fields):
        key = json.dumps([family, fields], sort_keys=True)
        if key not in made:
            made[key] = write_model(family, tmp_path_factory.mktemp(family), **fields)
        return made[key]

    return make


Variant = namedtuple("Variant", "name index path vocab_size")


@pytest.fixture(scope="session", params=VARIANTS)
def variant(request, make_model):
    """Each of the variants in turn."""
    family, fields, max_shard_size = VARIANTS[request.param]
    index = list(VARIANTS).index(request.param)
    path = make_model(family, max_shard_size=max_shard_size, seed=index, **fields)
    return Variant(request.param, index, path, fields["vocab_size"])


@pytest.fixture(scope="session")
def llama(make_model):
    """A plain Llama, for any test: 160 tokens, several EOS ids, no tokenizer."""
    return make_model("llama", seed=11)


@pytest.fixture(scope="session")
def edit_model(tmp_path_factory):
    """`edit_model(path, config, weights)`: a copy, edited by these two functions."""

    def edit(path, config=None, weights=None):
        copy = tmp_path_factory.mktemp("edited")
        for file in path.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        if config is not None:
            fields = json.loads((copy / "config.json").read_text())
            config(fields)
            (copy / "config.json").write_text(json.dumps(fields))
        if weights is not None:
            tensors = load_file(copy / "model.safetensors")
            weights(tensors)
            save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        return copy

    return edit


# -- Transformers, and the engine ------------------------------------------------------


class Reference:
    """Transformers in float32, one prompt at a time, unpadded; answers are cached."""

    eos_ids = EOS_IDS
    near_tie = 1e-3  # closer than this, the order of a float32 sum could decide

    def __init__(self):
        self.models = {}
        self.known = {}

    def model(self, path):
        if path not in self.models:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
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


@pytest.fixture(scope="session")
def reference():
    return Reference()


@pytest.fixture(scope="session")
def draw_prompts(reference):
    """`draw_prompts(path, lengths, count)`: prompts with that many clear tokens."""

    def draw(path, lengths, count, seed=0, prefix=()):
        rng = random.Random(seed)
        vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]
        prompts = []
        for length in lengths:
            for _ in range(50):
                body = [rng.randrange(vocab_size) for _ in range(length - len(prefix))]
                if reference.is_clear(path, [*prefix, *body], count):
                    break
            else:
                raise AssertionError(f"no clear prompt of length {length} for {path}")
            prompts.append([*prefix, *body])
        return prompts

    return draw


@pytest.fixture(params=[False, True], ids=["in turn", "one step ahead"])
def ahead(request):
    """Whether a step is launched before the last one is read, as on a GPU."""
    return request.param


@pytest.fixture(params=["recompute", "swap"])
def mode(request):
    """Both modes of preemption; with `ahead`, all four ways to run an engine."""
    return request.param


@pytest.fixture
def engine():
    """`engine(path, **options)`: a float32 `LLM` on the CPU that may leak no block."""
    engines = []

    def make(path, **options):
        defaults = {"dtype": "float32", "device": "cpu", "block_size": 4,
                    "num_blocks": 64, "max_model_len": 96}
        llm = LLM(path, **(defaults | options))
        engines.append(llm)
        return llm

    yield make
    try:
        for llm in engines:
            assert not llm.has_unfinished_requests(), "the test left requests behind"
            used = llm.stats().blocks_used
            assert used == 0, f"{used} blocks leaked"
            manager = llm.engine.block_manager
            num_swap_blocks = len(manager.ref_counts) - manager.num_blocks
            assert len(manager.free_swap_blocks) == num_swap_blocks, "a leak on the CPU"
    finally:
        for llm in engines:
            llm.shutdown()


# -- Text ------------------------------------------------------------------------------

CORPUS = (
    "the block table of a sequence maps logical blocks to physical blocks. "
    "a block that nobody refers to is free and still cached. "
    "first come, first served: the youngest sequence gives way and comes back later. "
) * 4
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}")


@pytest.fixture(scope="session")
def tokenizer():
    """A byte-level BPE tokenizer: a model can emit any bytes, even half a character."""
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator([CORPUS], trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|bos|>", "<|end|>"], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    raw.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<|bos|>", eos_token="<|end|>",
        chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False)


@pytest.fixture(scope="session")
def sentencepiece_tokenizer():
    """Like the first Llama's: spaces are marked, the first is cut, bytes are tokens."""
    from tokenizers import decoders, models, normalizers

    words = ["▁block", "▁table", "▁of", "▁the", "s"]
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab += sorted(set("".join(words)))
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            merges.append((word[: end - 1], word[end - 1]))
            vocab += [word[:end]] if word[:end] not in vocab else []

    ids = {token: i for i, token in enumerate(vocab)}
    raw = Tokenizer(models.BPE(ids, list(dict.fromkeys(merges)), byte_fallback=True))
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    raw.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>",
        clean_up_tokenization_spaces=False)


@pytest.fixture(scope="session")
def text_model(tokenizer, tmp_path_factory):
    """A random model with a tokenizer; it emits arbitrary bytes."""
    path = tmp_path_factory.mktemp("text")
    eos = [tokenizer.eos_token_id]
    write_model("llama", path, eos=eos, seed=5, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def make_scripted_model(tokenizer, tmp_path_factory):
    """`make_scripted_model(tokens)`: a Llama that repeats exactly these tokens.

    Attention and MLP add nothing, embeddings are one-hot, and the head maps each token
    to its successor.
    """

    def make(tokens, tokenizer=tokenizer):
        assert len(set(tokens)) == len(tokens), "a token with two successors"
        path = tmp_path_factory.mktemp("scripted")
        size, eos = len(tokenizer), tokenizer.eos_token_id
        fields = shape((4, 2, 8), -(-size // 8) * 8, size, eos_token_id=eos)
        config = AutoConfig.for_model("llama", **(fields | {"num_hidden_layers": 1}))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, weight in model.named_parameters():
            weight.data.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight.data.fill_diagonal_(1.0)
        for token, successor in zip(tokens, [*tokens[1:], tokens[0]], strict=True):
            model.lm_head.weight.data[successor, token] = 1.0
        model.generation_config = GenerationConfig(eos_token_id=eos)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        return path

    return make
