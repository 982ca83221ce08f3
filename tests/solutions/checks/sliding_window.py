"""A window's blocks: transformers' tokens, and few blocks, however long a sequence is.

    python sliding_window.py [number of random runs]
"""

import random
import sys
import tempfile
from functools import cache

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    MistralConfig,
    Qwen2Config,
)
from transformers.utils import logging

from nanopaged import LLM, BeamSearchParams, SamplingParams
from nanopaged.batch import Batch

logging.disable_progress_bar()
WINDOW = 16
NEAR_TIE = 1e-3  # closer than this, the order of a float32 sum could decide


def write_model(folder, config_class=MistralConfig, **fields):
    """A random model, whose weights are so large that it does not repeat itself."""
    model = AutoModelForCausalLM.from_config(config_class(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=96,
        max_position_embeddings=256, sliding_window=WINDOW, eos_token_id=None,
        **fields))
    generator = torch.Generator().manual_seed(5)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.data = 0.2 * noise + (weight.ndim == 1)
    model.generation_config = GenerationConfig()
    model.save_pretrained(folder)
    return model.eval()


@cache
@torch.inference_mode()
def reference_tokens(model, prompt, count):
    """The tokens of transformers' `generate`, up to one that is nearly tied."""
    ids = torch.tensor([prompt])
    result = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
        pad_token_id=0, output_logits=True, return_dict_in_generate=True)
    best = torch.stack(result.logits)[:, 0].topk(2).values
    leads = (best[:, 0] - best[:, 1] < NEAR_TIE).tolist()
    num_clear = [*leads, True].index(True)
    return result.sequences[0, len(prompt) : len(prompt) + num_clear].tolist()


def engine(folder, **options):
    defaults = {"block_size": 4, "num_blocks": 300, "max_model_len": 200,
                "dtype": "float32", "device": "cpu", "attention_backend": "torch"}
    return LLM(folder, **defaults | options)


def check_tokens(folder, model, num_prompts):
    """Greedy tokens equal transformers', by both backends, and chunk by chunk."""
    rng = random.Random(1)
    prompts = [rng.choices(range(96), k=length)
               for length in (1, 15, 16, 17, 90, 130)[:num_prompts]]
    expected = [reference_tokens(model, (*prompt,), 60) for prompt in prompts]
    num_compared = sum(map(len, expected))
    assert num_compared > 30 * len(prompts)
    large = {"block_size": 2 * WINDOW}  # the window is within a block, or in two
    for options in ({}, {"max_num_batched_tokens": 11}, {"attention_backend": "numba"},
                    large, large | {"attention_backend": "numba"}):
        with engine(folder, **options) as llm:
            params = SamplingParams(temperature=0, max_tokens=60)
            outputs = llm.generate(prompts, params, use_tqdm=False)
        for output, tokens in zip(outputs, expected, strict=True):
            found = output.outputs[0].token_ids[: len(tokens)]
            assert found == tokens, (options, output.prompt_token_ids, found, tokens)
    return num_compared


def check_blocks(folder, model, model_impl):
    """A sequence that decodes holds a window. So a pool that has room for two of these
    sequences as a whole decodes ten of them, and preempts none.
    """
    llm = engine(folder, num_blocks=2 * 190 // 4, model_impl=model_impl)
    prompts = [random.Random(i).choices(range(96), k=20) for i in range(10)]
    params = SamplingParams(temperature=0, max_tokens=170)
    for prompt in prompts:
        llm.add_request(prompt, params)
    outputs, used = {}, []
    while llm.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.step()}
        used.append(llm.stats().blocks_used)
    for output in outputs.values():
        expected = reference_tokens(model, (*output.prompt_token_ids,), 170)
        assert output.outputs[0].token_ids[: len(expected)] == expected
    stats = llm.stats()
    assert (stats.preemptions_recompute, stats.blocks_used) == (0, 0), stats
    num_blocks = max(used) / len(prompts)
    assert num_blocks <= WINDOW // 4 + 3, used
    return num_blocks


def check_mixed():
    """If one layer has no window, it reads all blocks, so all of them stay."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(
            folder, Qwen2Config, use_sliding_window=True, max_window_layers=1)
        for model_impl in ("nanopaged", "transformers"):
            llm = engine(folder, model_impl=model_impl)
            prompt = random.Random(2).choices(range(96), k=20)
            params, used = SamplingParams(temperature=0, max_tokens=80), []
            llm.add_request(prompt, params)
            while llm.has_unfinished_requests():
                outputs = llm.step()
                used.append(llm.stats().blocks_used)
            expected = reference_tokens(model, (*prompt,), 80)
            found = outputs[0].outputs[0].token_ids[: len(expected)]
            assert found == expected, (model_impl, found, expected)
            assert max(used) == 25, (model_impl, used)


def check_cached(folder, model):
    """After a swap, blocks are published with their new ids. A request that begins as
    one that was swapped out then finds the right ones, or none.
    """
    llm = engine(folder, preemption_mode="swap")
    prompt = random.Random(3).choices(range(96), k=30)
    llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=40))
    for _ in range(30):
        llm.step()
    batch = Batch()
    llm.engine.scheduler._preempt(batch)
    llm.engine.runner.execute(batch)  # it only moves blocks
    assert batch.moves
    # Nothing that was there before is found any more.
    for _ in range(2):
        params = SamplingParams(temperature=0, max_tokens=8, cache_salt="other")
        llm.generate([[i] * 160 for i in range(9)], params, use_tqdm=False)
    while llm.has_unfinished_requests():
        llm.step()
    for length in (12, 14, 17, 29):
        params = SamplingParams(temperature=0, max_tokens=20)
        output = llm.generate(prompt[:length], params, use_tqdm=False)[0]
        expected = reference_tokens(model, (*prompt[:length],), 20)
        assert output.outputs[0].token_ids[: len(expected)] == expected, length


def width_of(params):
    return params.beam_width if isinstance(params, BeamSearchParams) else params.n


def check_run(folder, run, roomy):
    """Beams, several answers, preemption and swap in a pool that just has room for the
    largest request: as in a roomy one.
    """
    rng = random.Random(run)
    prompts = [rng.choices(range(96), k=length) for length in (3, 20, 59)]
    requests = [
        (rng.choice(prompts),
         BeamSearchParams(2, 36) if rng.random() < 0.2 else
         SamplingParams(temperature=rng.choice([0, 0.8]), n=rng.choice([1, 3]),
                        max_tokens=rng.randrange(1, 50), seed=run))
        for _ in range(rng.randrange(3, 7))]
    size = rng.choice([4, 4, 2 * WINDOW])
    largest = max(width_of(params) * (len(prompt) + params.max_tokens)
                  for prompt, params in requests)
    llm = engine(
        folder, block_size=size,
        num_blocks=largest // size + 3,  # each of its sequences may round up
        max_num_batched_tokens=rng.choice([5, 20, 200]), max_model_len=120,
        preemption_mode=rng.choice(["recompute", "swap"]))
    llm.engine.steps_ahead = rng.random() < 0.5
    prompts, params = map(list, zip(*requests, strict=True))
    answers = [[[c.token_ids for c in output.outputs]
                for output in served_by.generate(prompts, params, use_tqdm=False)]
               for served_by in (roomy, llm, llm)]  # then with what is cached
    assert answers[0] == answers[1] == answers[2], f"run {run}"
    stats, manager = llm.stats(), llm.engine.block_manager
    assert stats.blocks_used == 0
    assert not any(manager.ref_counts)
    num_swap_blocks = len(manager.ref_counts) - manager.num_blocks
    assert len(manager.free_swap_blocks) == num_swap_blocks
    return stats.preemptions_recompute + stats.preemptions_swap


def main(num_runs=8, num_prompts=6):
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(folder)
        num_tokens = check_tokens(folder, model, num_prompts)
        check_blocks(folder, model, "transformers")
        num_blocks = check_blocks(folder, model, "nanopaged")
        check_cached(folder, model)
        check_mixed()
        roomy = engine(folder, num_blocks=2000, enable_prefix_caching=False)
        total = sum(check_run(folder, run, roomy) for run in range(num_runs))
        assert total or num_runs < 8
    print(f"A window's blocks: {num_tokens} tokens of transformers, {num_blocks:.1f} "
          f"blocks for a sequence of 48, and {num_runs} random runs with {total} "
          "preemptions lost no token.")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
