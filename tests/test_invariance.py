"""With `batch_invariant`, not a bit of an answer depends on the rest of the batch.

The sizes are odd, and K of one product is larger than 2,048: there oneDNN adds up a
single row in another way.
"""

import random
from types import SimpleNamespace

import pytest
import torch

from helpers import message_of, same_bits
from nanopaged import LLM, SamplingParams, fused
from tools.models import shape

pytest.importorskip("numba", reason="pip install numba")

from nanopaged.cpu import norms, products  # noqa: E402

RNG = random.Random(5)
LENGTHS = [1, 3, 9, 17, 40, 90, 150, 1, 17, 40]
PROMPTS = [[RNG.randrange(4, 160) for _ in range(length)] for length in LENGTHS]
PROMPTS += [PROMPTS[0] + [7, 8], PROMPTS[5] + [9]]
PARAMS = [SamplingParams(max_tokens=9, ignore_eos=True, logprobs=3, seed=seed, **fields)
          for seed, fields in enumerate([
              {"temperature": 0}, {"temperature": 1}, {"presence_penalty": 0.5},
              {"temperature": 0.7, "top_p": 0.9, "n": 2}] * 3)]
# What may change the batch in which a token is computed, and the size of the pool.
WAYS = {
    "together": {}, "reversed": {}, "one step ahead": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "chunks of 100": {"max_num_batched_tokens": 100},
    "recompute": {"max_num_batched_tokens": 64},
    "swap": {"max_num_batched_tokens": 64, "preemption_mode": "swap"},
    "no cache": {"enable_prefix_caching": False}}


@pytest.fixture(autouse=True)
def lone_rows_differ(monkeypatch, cpu):
    """As oneDNN on some processors, give a row other bits when it is alone."""
    if not same_bits()["batch_invariant"]:
        pytest.skip("it is refused: bits depend on the batch here")
    real = torch.ops.mkldnn

    def product(x, *others):
        out = real._linear_pointwise.default(x, *others)
        return out * (1 + 2**-22) if x.shape[:-1].numel() == 1 else out

    operators = {name: getattr(real, name, None)
                 for name in ("_reorder_linear_weight", "data_ptr")}
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(
        **operators, _linear_pointwise=SimpleNamespace(default=product)))


@pytest.fixture
def answers(make_model):
    """`answers(way, **options)`: the tokens and log-probabilities of all prompts."""
    path = make_model("qwen3", seed=7, **shape(
        (4, 2, 10), 48, 160, intermediate_size=2601))

    def answer(way, change=lambda runner: None, block_size=16, **options):
        is_tight = way in ("recompute", "swap")
        options = WAYS.get(way, {}) | options
        with LLM(path, block_size=block_size, device="cpu", **{
                "num_blocks": -(-(240 if is_tight else 4000) // block_size),
                "max_num_batched_tokens": 2048, **options}) as llm:
            llm.engine.steps_ahead = int(way == "one step ahead")
            change(llm.engine.runner)
            order = range(12)[:: -1 if way == "reversed" else 1]
            outputs = {}
            for some in [[i] for i in order] if way == "alone" else [order]:
                found = llm.generate([PROMPTS[i] for i in some],
                                     [PARAMS[i] for i in some], use_tqdm=False)
                outputs |= zip(some, found, strict=True)
            stats = llm.stats()
            preempted = stats.preemptions_recompute + stats.preemptions_swap
            assert bool(preempted) == is_tight
        return [[(each.token_ids, each.logprobs) for each in outputs[i].outputs]
                for i in range(12)]

    return answer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [16, pytest.param(4, marks=pytest.mark.slow)])
def test_answers_are_the_same_to_the_bit_in_every_batch(answers, dtype, block_size):
    options = {"dtype": dtype, "block_size": block_size, "batch_invariant": True}
    alone = answers("alone", **options)
    for way in WAYS:
        assert answers(way, **options) == alone, way


def unchanged(runner):
    """Without the option, nothing of it holds."""


def torch_for_chunks(runner):
    del runner.backend.min_queries


def products_as_always(runner):
    for module in runner.model.modules():
        if keywords := getattr(getattr(module, "forward", None), "keywords", None):
            keywords["batch_invariant"] = False


@pytest.mark.parametrize("change", [unchanged, torch_for_chunks, products_as_always])
def test_without_one_of_its_lines_bits_depend_on_the_batch(answers, change):
    options = {"dtype": "float32", "batch_invariant": change is not unchanged}
    alone = answers("alone", change, **options)
    assert any(answers(way, change, **options) != alone
               for way in ("together", "chunks of 7", "chunks of 100"))


@pytest.mark.parametrize("options", [
    {"attention_backend": "torch"}, {"dtype": "float16"},
    {"model_impl": "transformers"}], ids=str)
def test_where_it_cannot_hold_it_is_refused(llama, options):
    assert message_of(lambda: LLM(llama, batch_invariant=True, **options), ValueError
                      ).startswith("batch_invariant must be False (it needs our ")


def test_no_thread_border_within_a_row_changes_its_bits():
    """Torch puts some there, so this test would notice its own."""
    num_threads, x = torch.get_num_threads(), torch.randn(150, 2002)
    try:
        torch.set_num_threads(2)
        alone = torch.cat([norms.silu_mul(row[None]) for row in x])
        found, others = (
            [torch.equal(function(x[:count]), alone[:count]) for count in range(1, 150)]
            for function in (norms.silu_mul, fused.silu_mul))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(num_threads)
    assert all(found) and not all(others)


def test_a_packed_product_gives_a_row_the_same_bits_in_any_company():
    """With weights that are large enough for oneDNN's and our own kernels to divide."""
    for dtype in (torch.float32, torch.bfloat16):
        for num_outputs, size in ((64, 2048), (300, 513), (7, 30), (1024, 3072)):
            linear = torch.nn.Linear(size, num_outputs).requires_grad_(False).to(dtype)
            products.pack(linear, batch_invariant=True)
            compute_dtype = products.compute_dtype(dtype, torch.device("cpu"))
            x = torch.randn(300, size, dtype=compute_dtype)
            alone = torch.cat([linear(row[None]) for row in x[:20]])
            for first, last in ((0, 20), (0, 33), (0, 300), (3, 5), (7, 100)):
                common = alone[first:last]
                assert torch.equal(linear(x[first:last])[: len(common)], common)
