"""Weights in int8: exact products, small errors, and the same tokens in any batch.

    python int8_weights.py [number of random runs]
    python int8_weights.py measure [threads]     # how long products take, as a ratio
"""

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from moe import SHAPE, VOCAB, check_tokens, write_model
from torch import nn
from transformers import AutoModelForCausalLM

import nanopaged
from nanopaged import LLM, SamplingParams
from nanopaged.cpu import products

ENGINE = {"device": "cpu", "attention_backend": "torch", "quantization": "int8"}
TEXT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak.\n"


def packed(weight, bias=None, batch_invariant=False, quantization="int8"):
    linear = nn.Linear(*weight.shape[::-1], bias=bias is not None, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
        if bias is not None:
            linear.bias.copy_(bias)
    products.pack(linear, batch_invariant, quantization)
    return linear.requires_grad_(False)


def dequantised(weight):
    """What int8 with a scale for each row makes of it."""
    scales = weight.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return (weight / scales).round() * scales


@torch.inference_mode()
def check_products():
    """Sums of whole numbers are exact in float32, so nothing may differ."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 64), (130, 33), (1, 7), (6, 256), (67, 1024)]
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for num_outputs, size in shapes:
            numbers = torch.randint(
                -127, 128, (num_outputs, size), generator=generator).float()
            numbers[:, 0] = 127
            scales = 2.0 ** torch.randint(-9, 0, (num_outputs, 1), generator=generator)
            scales[0] = 0  # a row of zeros
            bias = torch.randn(num_outputs, generator=generator)
            for is_invariant in (False, True):
                linear = packed(numbers * scales, bias, is_invariant)
                for shape in [(1, size), (2, size), (1, 2, size), (9, size)]:
                    x = torch.randint(-8, 9, shape, generator=generator).float()
                    wanted = x @ (numbers * scales).T + bias
                    got = linear.forward(x)
                    assert torch.equal(got, wanted), (num_outputs, size, shape)
    torch.set_num_threads(1)


@torch.inference_mode()
def check_rows():
    """A row gets the same weights, whether few or many rows come with it. A scale for
    each row of the weight: one that is large must not spoil the others.
    """
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 128, generator=generator)
    weight[5] *= 1000
    x = torch.randn(40, 128, generator=generator)
    linear = packed(weight)
    wanted = x.double() @ dequantised(weight).double().T
    for few in (1, 2, 3, 40):
        got = linear.forward(x[:few]).double()
        error = (got - wanted[:few]).norm(dim=0) / wanted[:few].norm(dim=0)
        assert error.max() < 1e-5, (few, error.max())
    exact = x.double() @ weight.double().T
    error = (wanted - exact).norm(dim=0) / exact.norm(dim=0)
    assert 0.002 < error.max() < 0.02, error
    invariant = packed(weight, batch_invariant=True)
    alone = torch.cat([invariant.forward(row[None]) for row in x])
    assert torch.equal(invariant.forward(x), alone)


def score(quantization):
    """The log-probability of each token of a text, by the bundled model in float32."""
    with LLM(None, **ENGINE | {"quantization": quantization}, dtype="float32",
             num_blocks=64) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        output = llm.generate(TEXT, params, use_tqdm=False)[0]
    ids = output.prompt_token_ids
    pairs = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
    return ids, torch.tensor([entry[token].logprob for token, entry in pairs])


@torch.inference_mode()
def check_error():
    """Beside what bfloat16 rounds if everything is computed in it. Both are small."""
    ids, exact = score(None)
    folder = Path(nanopaged.__file__).parent / "shakespeare"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    bfloat16 = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    errors = [(each - exact).square().mean().sqrt().item()
              for each in (score("int8")[1], bfloat16)]
    assert 0 < errors[0] < 2 * errors[1], errors
    return errors


def check_run(folder, model, seed):
    """Tokens of transformers, with the same rounded weights. Returns the number of
    preemptions.
    """
    rng = random.Random(seed)
    prompts = [[*range(rng.choice([0, 6])),
                *rng.choices(range(VOCAB), k=rng.randint(1, 9))] for _ in range(12)]
    params = [SamplingParams(temperature=0, ignore_eos=True, n=rng.choice([1, 1, 3]),
                             max_tokens=rng.randint(1, 16)) for _ in prompts]
    with LLM(folder, **ENGINE, dtype="float32", block_size=2, num_blocks=45,
             max_model_len=32, max_num_seqs=rng.choice([4, 16]),
             max_num_batched_tokens=rng.choice([3, 9, 64]),
             preemption_mode=["recompute", "swap"][seed % 2]) as llm:
        assert hasattr(llm.engine.runner.model.lm_head.forward, "func")
        if seed % 4 == 0:  # new weights are quantised, too
            llm.load_weights(model.originals)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats()
    for prompt, output in zip(prompts, outputs, strict=True):
        for answer in output.outputs:
            check_tokens(model, prompt, answer.token_ids)
    return stats.preemptions_recompute + stats.preemptions_swap


@torch.inference_mode()
def check_new_weights(folder, model):
    """Of both dtypes, because only some are packed by oneDNN."""
    for dtype in ("float32", "bfloat16"):
        with LLM(folder, **ENGINE, dtype=dtype, num_blocks=64) as llm:
            head = llm.engine.runner.model.lm_head
            x = torch.ones(1, SHAPE["hidden_size"])
            before = head.forward(x)
            negated = {name: -weight for name, weight in model.originals.items()}
            llm.load_weights(negated)
            assert torch.equal(head.forward(x), -before), dtype


def check_refusal(folder):
    for wrong in ("int4", 8):
        try:
            LLM(folder, **ENGINE | {"quantization": wrong})
        except (TypeError, ValueError) as error:
            assert "quantization" in str(error), error
        else:
            raise AssertionError(f"{wrong!r} should have been refused")


@torch.inference_mode()
def measure(num_threads=1, num_layers=14):
    """The int8 loop beside what the engine does without it, layers in turn, so that no
    cache holds them all. Medians of seven passes.
    """
    torch.set_num_threads(num_threads)
    products.FEW = 99
    shapes = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]  # Qwen3-0.6B
    weights = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    pairs = [[packed(weight, quantization=kind) for _ in range(num_layers)
              for weight in weights] for kind in (None, "int8")]
    dtype = products.compute_dtype(torch.bfloat16, torch.device("cpu"))
    for num_rows in (1, 2, 4, 8):
        times = [[], []]
        for _ in range(7):
            for found, linears in zip(times, pairs, strict=True):
                start = time.perf_counter()
                for linear in linears:
                    linear.forward(torch.ones(
                        num_rows, linear.in_features, dtype=dtype))
                found.append(time.perf_counter() - start)
        plain, int8 = map(statistics.median, times)
        print(f"{num_rows} rows: bfloat16 {1000 * plain:.1f} ms, int8 "
              f"{1000 * int8:.1f} ms, {plain / int8:.2f}x")


def main(num_runs=12):
    check_products()
    check_rows()
    error, bfloat16 = check_error()
    preemptions = 0
    for tied in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            model = write_model(folder, "qwen3", head_dim=16, tie_word_embeddings=tied,
                                **SHAPE)
            model.originals = {
                name: weight.clone() for name, weight in model.state_dict().items()}
            if tied:  # the head is rounded, and the embeddings are not
                model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
            for name, weight in model.named_parameters():
                if weight.ndim == 2 and "embed_tokens" not in name:
                    weight.data = dequantised(weight.data)
            check_refusal(folder)
            check_new_weights(folder, model)
            preemptions += sum(
                check_run(folder, model, seed) for seed in range(tied, num_runs, 2))
    assert num_runs < 8 or preemptions, "the pool is too large"
    print(f"int8_weights: products are exact, {num_runs} random runs gave the tokens "
          f"of the rounded weights ({preemptions} preemptions), and log-probabilities "
          f"differ by {error:.4f} (rms), and those of bfloat16 by {bfloat16:.4f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(*map(int, sys.argv[2:]))
    else:
        main(*map(int, sys.argv[1:]))
