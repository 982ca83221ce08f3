"""The fixtures: tiny models, transformers as the oracle, and engines checked for leaks.

Prompts whose reference generation comes close to a tie are not used: there the order of
a float32 sum decides, not the engine. Plain functions that hold no state are in
helpers.py, and the models in tools/models.py.
"""

import json
import os
import random
from collections import namedtuple
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

# Before anything imports torch or Triton. The tests never see a GPU: what needs one is
# in gpu/run.py, which takes the models and the reference from here, without pytest.
if "PYTEST_VERSION" in os.environ:
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from nanopaged import LLM
from tools import cpus
from tools.models import VARIANTS, Reference, shape, write_model
from tools.warm import start

logging.set_verbosity_error()
logging.disable_progress_bar()
torch.set_num_threads(1)
pytest.register_assert_rewrite("helpers")


def mend_interpreter():
    """Let the interpreter of Triton before 3.7 run with numpy 2.4 or later: it takes an
    array of one number for a number, which numpy no longer allows. And let all of them
    be three times as fast: they compute whether integers overflow, and forget what they
    have found; they prepare Triton's modules for each call of a kernel's own functions,
    where once for a launch is enough; and they find out for each result what there is
    to know of its type.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor, patch_lang = interpreter._patch_lang_tensor, interpreter._patch_lang
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)

    def patch(tensor, *scope):
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    def patch_once(function):
        if not tl.core.is_builtin(tl.core.load):
            return SimpleNamespace(restore=lambda: None)
        modules = {"tl": tl, "core": tl.core}
        return patch_lang(SimpleNamespace(__globals__=modules))

    def make_once(kind, key):
        def init(self, first, second):
            name = key(first, second)
            if name not in known:
                make(self, first, second)
                known[name] = vars(self).copy()
            vars(self).update(known[name], handle=first)

        make, known, kind.__init__ = kind.__init__, {}, init

    make_once(tl.core.tensor, lambda _, kind: kind.name)
    make_once(tl.core.block_type, lambda kind, shape: (kind.name, *shape))
    numpy_type = cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda kind: numpy_type(
        tl.uint64 if kind.scalar.is_ptr() else kind.scalar)
    interpreter._patch_lang_tensor = patch
    interpreter._patch_lang = patch_once


if find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1":
    mend_interpreter()


def pytest_collection_modifyitems(items):
    """What a GPU runs takes longest to test, so it comes first: a process that began
    with it last would be alone in the end.
    """
    items.sort(key=lambda item: "test_gpu" not in item.nodeid)


def pytest_addoption(parser):
    parser.addoption("--cpu", choices=cpus.KINDS, help="pretend this one for all tests")


@pytest.fixture(autouse=True)
def cpu(request, monkeypatch):
    """The processor: that of EACH_CPU, or of `--cpu`, or else the machine's."""
    kind = getattr(request, "param", request.config.getoption("--cpu"))
    if kind:
        cpus.pretend(kind, monkeypatch)
    return kind


# -- Models ----------------------------------------------------------------------------

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
    from helpers import check_invariants

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
            check_invariants(llm)  # so all blocks are free
    finally:
        for llm in engines:
            llm.shutdown()


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """`warm(*arguments, cwd, **env)`: see tools/warm.py."""
    with start(tmp_path_factory.mktemp("warm") / "log") as run:
        yield run


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
    return transformers.PreTrainedTokenizerFast(
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
    return transformers.PreTrainedTokenizerFast(
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
