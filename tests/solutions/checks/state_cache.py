"""Prefix caching for families with states: the same tokens, hits, and few states.

    python state_cache.py [number of random runs]
"""

import gc
import random
import sys
import tempfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from nanopaged import LLM, BeamSearchParams, SamplingParams
from nanopaged.loading import start_up

logging.set_verbosity_error()
logging.disable_progress_bar()
VOCAB, SIZE = 96, 4  # tokens of the model, and of a block
NEAR_TIE = 1e-3  # closer than this, the order of a float32 sum could decide
FIELDS = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
NUM_STATEFUL = 2  # layers with a state


def write_model(folder):
    """A random model, whose weights are so large that it does not repeat itself."""
    config = AutoConfig.for_model("qwen3_5_text", **FIELDS)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        scale = 0.05 if "embed" in name else 0.2
        noise = torch.randn(weight.shape, generator=generator)
        weight.data = scale * noise + (weight.ndim == 1 and name.endswith("weight"))
    model.tie_weights()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


def engine(folder, **options):
    defaults = {"block_size": SIZE, "num_blocks": 300, "max_model_len": 160,
                "dtype": "float32", "device": "cpu", "attention_backend": "torch"}
    return LLM(folder, **defaults | options)


@torch.inference_mode()
def check_answer(model, output):
    """Each token is the one that transformers would choose, or ties with it."""
    prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
    logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
    logits = logits[len(prompt) - 1 : -1]
    behind = logits.amax(-1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert behind.max() < NEAR_TIE, (
        f"after {prompt}, of which {output.num_cached_tokens} tokens were cached, "
        f"{tokens} are not the tokens of transformers")


def ask(llm, model, *prompts, **params):
    """Serve these at once; returns how many of their tokens were cached."""
    params = SamplingParams(temperature=0, max_tokens=9, **params)
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    for output in outputs:
        check_answer(model, output)
    assert llm.stats().blocks_used == 0
    return [output.num_cached_tokens for output in outputs]


def whole_blocks(num_tokens):
    """The tokens in whole blocks before the last token."""
    return (num_tokens - 1) // SIZE * SIZE


def check_hits(folder, model):
    """Prompts that repeat others, go on after them, or leave them in the middle."""
    for options in ({}, {"max_num_batched_tokens": 7}, {"num_blocks": 40}):
        rng = random.Random(1)

        def draw(length, rng=rng):
            return rng.choices(range(VOCAB), k=length)

        llm = engine(folder, **options)
        for length in range(1, 2 * SIZE + 2):
            prompt = draw(length)
            assert ask(llm, model, prompt) == [0]
            for _ in range(2):
                assert ask(llm, model, prompt) == [whole_blocks(length)], options
        # A chat: its next turn goes on after the whole blocks of the last one.
        chat = draw(10)
        ask(llm, model, chat)
        for _ in range(4):
            longer = [*chat, *draw(7)]
            [found] = ask(llm, model, longer)
            assert whole_blocks(len(chat)) <= found <= whole_blocks(len(longer)), found
            chat = longer
        # Texts with a common beginning: the second one shows that it is common.
        beginning = draw(5 * SIZE + 2)
        found = [ask(llm, model, [*beginning, *draw(9)])[0] for _ in range(4)]
        assert found[0] == 0 and found[2:] == [5 * SIZE] * 2, found
        # What is cached is used under the same salt only, and not for scored prompts.
        ask(llm, model, chat)
        assert ask(llm, model, chat, cache_salt="other") == [0]
        assert ask(llm, model, chat, prompt_logprobs=1) == [0]
        assert ask(llm, model, chat) == [whole_blocks(len(chat))]


def check_same_step(folder, model):
    """Requests that arrive together: some begin where one of the same step has got to,
    and have one token left.
    """
    for last in (1, 2, SIZE, SIZE + 1):
        rng = random.Random(last)
        beginning = rng.choices(range(VOCAB), k=5 * SIZE)
        prompts = [[*beginning, *rng.choices(range(VOCAB), k=last)] for _ in range(6)]
        for order in (prompts, [*prompts[:2], beginning, *prompts[:2]]):
            ask(engine(folder), model, *order)
            ask(engine(folder, max_num_batched_tokens=23), model, *order)


def num_states():
    """How many states there are in the memory of this process."""
    gc.collect()
    filled = [each for each in gc.get_objects()
              if type(each).__name__ == "LinearAttentionLayer"
              and each.conv_states.get(0) is not None]
    return len(filled) / NUM_STATEFUL


def check_bound(folder, model):
    """When no request is left, the cache keeps at most `max_num_seqs` states: those
    that were used last. Chunks that end because of the budget leave none, scored
    prompts leave none, and a state is gone when its block is taken.
    """
    others = num_states()
    llm = engine(folder, max_num_seqs=3, max_num_batched_tokens=2 * SIZE)
    rng = random.Random(2)
    prompts = [rng.choices(range(VOCAB), k=30) for _ in range(9)]
    ask(llm, model, *prompts)
    for prompt in prompts:
        ask(llm, model, prompt)
        assert num_states() - others <= 3, f"{num_states() - others} states are kept"
    one, two, three, new = prompts[:4]
    for prompt in (one, two, three, one):
        ask(llm, model, prompt)
    ask(llm, model, prompts[5], prompt_logprobs=1)
    ask(llm, model, new)
    assert ask(llm, model, one) == ask(llm, model, three) == [28]
    assert ask(llm, model, two) == [0], "it was used least recently"

    others = num_states()
    small = engine(folder, num_blocks=10)
    ask(small, model, one)
    assert num_states() - others == 1
    ask(small, model, two, prompt_logprobs=1)
    assert num_states() == others, "a state whose block was taken is still there"


def check_memory(folder, model):
    """A state of each sequence may be in the cache, besides the old and the new one."""
    llm = engine(folder, enable_prefix_caching=False)
    prompt = [*range(9)]
    assert ask(llm, model, prompt) == ask(llm, model, prompt) == [0]
    free, available = start_up.free_bytes, 25 * llm.engine.runner.state_bytes
    start_up.free_bytes = lambda runner: available
    engine(folder, max_num_seqs=10, enable_prefix_caching=False)
    engine(folder, max_num_seqs=8)
    try:
        engine(folder, max_num_seqs=10)
        raise AssertionError("there is no memory for 30 states")
    except ValueError as error:
        assert "max_num_seqs must be at most 8" in str(error), error
    finally:
        start_up.free_bytes = free


def width_of(params):
    return params.beam_width if isinstance(params, BeamSearchParams) else params.n


def draw_requests(rng):
    """Prompts that begin alike, of which some are repeated; all kinds of answers."""
    heads = [rng.choices(range(VOCAB), k=length) for length in (23, 9, 0)]
    for i in range(rng.randrange(6, 10)):
        prompt = [*rng.choice(heads), *rng.choices(range(VOCAB), k=rng.choice([1, 6]))]
        params = SamplingParams(
            temperature=rng.choice([0, 0.8]), n=rng.choice([1, 3]), seed=i,
            max_tokens=rng.randrange(1, 30))
        if rng.random() < 0.2:
            params = BeamSearchParams(2, params.max_tokens)
        yield from [(prompt, params)] * rng.choice([1, 1, 2])


def check_run(folder, run, roomy):
    """Beams, several answers, preemption and swap, in a pool that just has room for the
    largest request: as without a cache. Returns preemptions and hits.
    """
    rng = random.Random(run)
    requests = list(draw_requests(rng))
    size = rng.choice([1, 2, 4, 8])
    largest = max(len(prompt) + width_of(params) * (params.max_tokens + size)
                  for prompt, params in requests)
    llm = engine(
        folder, block_size=size, num_blocks=largest // size + 4,
        max_num_batched_tokens=rng.choice([5, 20, 200]), max_model_len=60,
        max_num_seqs=rng.choice([4, 8]), swap_space=rng.choice([1e-4, 1]),
        preemption_mode=["recompute", "swap"][run % 2])
    llm.engine.steps_ahead = rng.randrange(2)
    prompts, params = map(list, zip(*requests, strict=True))
    answers = [[[c.token_ids for c in output.outputs]
                for output in served_by.generate(prompts, params, use_tqdm=False)]
               for served_by in (roomy, llm, llm)]  # then with what is cached
    assert answers[0] == answers[1] == answers[2], f"run {run}"
    stats, manager = llm.stats(), llm.engine.block_manager
    assert stats.blocks_used == 0 and not any(manager.ref_counts)
    return (stats.preemptions_recompute, stats.preemptions_swap,
            stats.prefix_hit_tokens)


def main(num_runs=10):
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(folder)
        check_hits(folder, model)
        if num_runs > 8:  # beside another patch, these have nothing to add
            check_bound(folder, model)
            check_memory(folder, model)
            check_same_step(folder, model)
        roomy = engine(folder, num_blocks=400, enable_prefix_caching=False)
        runs = [check_run(folder, run, roomy) for run in range(num_runs)]
    recomputed, swapped, hits = map(sum, zip(*runs, strict=True))
    assert num_runs < 10 or (recomputed and swapped and hits), runs
    print(f"Prefixes and states: {num_runs} random runs with {recomputed} preemptions "
          f"by recomputation, {swapped} by swap, and {hits} cached tokens have the "
          "tokens of an engine without a cache.")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
