"""The engine on a GPU: the CPU's answers, and no waiting.

Everything is compared in float32 with the torch backend on the CPU, which other tests
compare with transformers. Only the order of sums differs, so greedy prompts are clear
ones.
"""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map_only

from helpers import (
    CPU,
    all_tokens_of,
    counters,
    draw_requests,
    floats,
    generate,
    greedy,
    serve,
)
from nanopaged import LLM, BeamSearchParams, SamplingParams, model
from nanopaged.attention import to_device
from nanopaged.sampler import Sampler
from nanopaged.triton_attention import FlashAttention, FlashMetadata
from test_fusions import arguments
from test_kernels import TritonCase
from test_one_step_ahead import TIGHT

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
BUNDLED = {"block_size": 4, "max_model_len": 96}


# --- the same answers as on the CPU ---


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_greedy_tokens_of_every_model_match_the_cpu(
    variant, engine, on_gpu, draw_prompts, enforce_eager
):
    prompts = draw_prompts(variant.path, [1, 3, 8, 17, 40], 20, seed=variant.index)
    options = {"max_num_seqs": 6, "num_blocks": 128}
    expected = generate(engine(variant.path, **options), prompts, greedy(20))
    llm = on_gpu(variant.path, enforce_eager=enforce_eager, **options)

    assert llm.runner.attention == "triton"
    for _ in range(2):  # the second time prefixes are cached
        assert generate(llm, prompts, greedy(20)) == expected

    alone = [generate(llm, [prompt], greedy(20))[0] for prompt in prompts]
    assert alone == expected


@pytest.fixture(scope="module")
def expected():
    """Answers to mixed requests from a CPU with room for all of them."""
    with LLM(num_blocks=1000, **CPU, **BUNDLED) as llm:
        yield [serve(llm, draw_requests(seed)) for seed in range(2)]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_samples_beams_and_stop_strings_with_preemption(
    on_gpu, expected, enforce_eager, steps_ahead, mode
):
    llm = on_gpu(
        None,
        steps_ahead,
        num_blocks=50,
        enforce_eager=enforce_eager,
        preemption_mode=mode,
        **BUNDLED,
        **TIGHT,
    )

    for seed, wanted in enumerate(expected):
        assert serve(llm, draw_requests(seed)) == wanted
    assert counters(llm)[f"preemptions_{mode}"] > 0


def test_chunks_of_prompts_together_with_decodes(engine, on_gpu, llama, draw_prompts):
    prompts = draw_prompts(llama, [50, 3, 61, 20, 1, 33], 12)
    expected = generate(engine(llama, num_blocks=200), prompts, greedy(12))
    llm = on_gpu(llama, num_blocks=200, max_num_seqs=8, max_num_batched_tokens=9)
    assert generate(llm, prompts, greedy(12)) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "heads, block_size",
    [((4, 2, 64), 256), ((16, 8, 128), 512), ((6, 1, 96), 256)],
    ids=str,
)
def test_flash_attention_is_attention(heads, block_size, dtype):
    """The real kernel of flash-attn; test_flash.py uses a stand-in."""
    pytest.importorskip("flash_attn")
    case = TritonCase([(0, 300), (0, 7), (64, 40), (3, 1)], heads, block_size, dtype)
    backend = FlashAttention(*heads, block_size, dtype, DEVICE)
    assert isinstance(case.prepare(backend), FlashMetadata)
    case.check(backend)


def test_bfloat16_is_near_float32(engine, on_gpu):
    """All log-probabilities after some prompts, and of some decodes."""
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=512, ignore_eos=True)
    prompts = [
        "ROMEO:\n",
        "First Citizen:\nBefore we proceed any further, hear me",
        "O",
    ]

    def logprobs(llm):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        steps = [step for output in outputs for step in output.outputs[0].logprobs]
        first = [floats(output.outputs[0].logprobs[0]) for output in outputs]
        assert all(len(step) == 512 for step in steps)
        return torch.tensor([[step[token] for token in range(512)] for step in first])

    exact = logprobs(engine(None))
    torch.testing.assert_close(logprobs(on_gpu(None)), exact, rtol=0, atol=2e-3)

    for enforce_eager in (False, True):
        rough = logprobs(on_gpu(None, dtype="bfloat16", enforce_eager=enforce_eager))
        assert (rough - exact).abs().max() < 0.5
        assert (rough - exact).abs().mean() < 0.05


# --- sampling ---


def test_a_sample_depends_on_its_seed_and_position_alone(on_gpu, llama):
    llm = on_gpu(llama, max_num_seqs=16, num_blocks=200)
    rng = random.Random(0)
    prompts = [
        [rng.randrange(160) for _ in range(rng.randrange(1, 30))] for _ in range(16)
    ]
    params = [
        SamplingParams(
            temperature=1,
            seed=i,
            max_tokens=12,
            ignore_eos=True,
            top_k=[0, 5][i % 2],
            top_p=[1, 0.9][i // 2 % 2],
        )
        for i in range(16)
    ]
    together = generate(llm, prompts, params)

    assert generate(llm, prompts, params) == together
    for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        assert generate(llm, [prompt], own) == [together[i]]

    backwards = generate(llm, prompts[::-1], params[::-1])
    assert backwards[::-1] == together


def set_rows(sampler, top_k, top_p):
    for row in range(len(sampler.params)):
        sampler.params[row] = (row, 0.9, top_k, top_p, 0, 0, [], 0)
    return np.arange(len(sampler.params))


@pytest.mark.parametrize("top_k, top_p", [(0, 1), (3, 1), (0, 0.8), (40, 0.9)])
def test_samples_match_the_cpu_and_are_never_excluded_tokens(top_k, top_p):
    """Rounding in a parallel sum must not let a token of probability 0 through."""
    logits = 3 * torch.randn(256, 20000, generator=torch.Generator().manual_seed(0))
    best = logits.topk(top_k or 1).values[:, -1:]

    same = total = 0
    for position in range(10):
        drawn = []
        for device in (torch.device("cpu"), DEVICE):
            sampler = Sampler(256)
            rows = set_rows(sampler, top_k, top_p)
            plan = sampler.plan(
                rows, np.full(256, position), partial(to_device, device=device)
            )
            output = sampler.sample(logits.to(device, copy=True), plan)
            drawn.append(torch.tensor(output.read()))

        same += (drawn[0] == drawn[1]).sum().item()
        total += 256
        if top_k:
            assert (logits.gather(1, drawn[1][:, None]) >= best).all()

    assert same >= 0.995 * total  # the rest are within rounding of a boundary


# --- fusions ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["add_norm", "silu_mul"])
@torch.inference_mode()
def test_compiled_fusions_match_plain_torch(name, dtype):
    torch._dynamo.reset()  # other tests may have used up the recompile limit
    function = getattr(model, name)

    atol, rtol = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (6e-2, 2e-2)}[dtype]
    for size in (1, 2, 5, 64, 300):
        inputs = tree_map_only(
            torch.Tensor, lambda x: x.to(DEVICE, dtype), arguments(name, size)
        )
        fused = function(*inputs)
        plain = function.__wrapped__(*inputs)
        torch.testing.assert_close(fused, plain, atol=atol, rtol=rtol)


# --- only reading tokens waits for the GPU ---


def waves(llm, params, observer):
    """Add requests in waves; `observer` watches once everything is compiled."""
    rng = random.Random(0)

    outputs = []
    for wave in range(4):  # two warm up
        if wave == 2:
            llm.observers.append(observer)
        for _ in range(6):
            prompt = [rng.randrange(160) for _ in range(20)]
            llm.add_request(prompt, params)
        for _ in range(6):
            outputs += llm.step()
    while llm.has_unfinished_requests():
        outputs += llm.step()
    return outputs


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_no_call_of_a_step_synchronises(on_gpu, llama, enforce_eager, temperature):
    def forbid_waiting(phase, batch):
        mode = "error" if phase == "scheduled" else "default"
        torch.cuda.set_sync_debug_mode(mode)

    params = SamplingParams(
        temperature=temperature,
        seed=1,
        max_tokens=20,
        min_tokens=20,
        stop_token_ids=[3, 7],
        ignore_eos=True,
    )
    llm = on_gpu(llama, enforce_eager=enforce_eager, max_num_seqs=32, num_blocks=400)

    try:
        assert waves(llm, params, forbid_waiting)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_beams_and_logprobs_are_right_one_step_late(engine, on_gpu):
    """They wait, and may; what they read must still come from their own step."""
    params = [
        BeamSearchParams(3, 10),
        SamplingParams(temperature=0, logprobs=3, max_tokens=10),
    ]
    prompts = ["ROMEO:\n", "To be, or not"]

    def run(llm):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        logprobs = [
            list(floats(step).values()) for step in outputs[1].outputs[0].logprobs
        ]
        return [all_tokens_of(output) for output in outputs], torch.tensor(logprobs)

    (expected, exact), (ours, logprobs) = run(engine(None)), run(on_gpu(None))
    assert ours == expected
    torch.testing.assert_close(logprobs, exact, rtol=0, atol=2e-3)
