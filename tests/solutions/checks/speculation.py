"""Speculation by looking up n-grams: the same tokens, in fewer steps.

    python speculation.py [number of random runs [the first [their answers, as JSON]]]
"""

import json
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from nanopaged import LLM, BeamSearchParams, SamplingParams

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "vocab_size": 12, "max_position_embeddings": 128,
    "eos_token_id": 0}
SPEECH = "First Citizen:\nWe are accounted poor citizens, the patricians good.\n\n"


def engine(folder, **options):
    """A tiny model with few tokens, so that many guesses are right, and many wrong."""
    Path(folder, "config.json").write_text(json.dumps(CONFIG))
    defaults = {"block_size": 2, "num_blocks": 64, "dtype": "float32", "device": "cpu",
                "attention_backend": "torch", "load_format": "dummy",
                "max_model_len": 48}
    llm = LLM(folder, **defaults | options)
    for weight in llm.engine.runner.model.parameters():
        weight.mul_(8 if weight.ndim > 1 else 1)
    return llm


def prefer_another(token_ids, logits):
    """A processor that must know how many tokens there are."""
    return logits.roll(token_ids.shape[1] % 2)


def draw_requests(rng):
    """Prompts that begin alike, or repeat themselves; all kinds of parameters."""
    heads = [rng.choices(range(12), k=7), rng.choices(range(12), k=3) * 4, []]
    for _ in range(rng.randrange(2, 7)):
        prompt = [*rng.choice(heads), *rng.choices(range(12), k=rng.randrange(1, 6))]
        max_tokens = rng.randrange(1, 16)
        if rng.random() < 0.1:
            yield prompt, BeamSearchParams(2, max_tokens)
        else:
            yield prompt, SamplingParams(
                temperature=rng.choice([0, 0, 0.5]), max_tokens=max_tokens,
                min_tokens=rng.choice([0, max_tokens // 2]), n=rng.choice([1, 1, 2]),
                ignore_eos=rng.random() < 0.7, logprobs=rng.choice([None, 1]),
                stop_token_ids=rng.choice([None, [5]]), seed=rng.randrange(99),
                logits_processors=rng.choice([None, None, None, [prefer_another]]))


def width_of(params):
    return params.beam_width if isinstance(params, BeamSearchParams) else params.n


def check_tables(llm):
    """After a step no sequence holds blocks for tokens that were rejected."""
    for group in llm.engine.scheduler.running.values():
        for seq in group.live:
            num_tokens = len(seq.token_ids) + len(seq.pending)
            most = llm.engine.block_manager.num_blocks_for(num_tokens)
            assert len(seq.block_table) <= most, (
                f"{len(seq.block_table)} blocks for {len(seq.token_ids)} tokens")


def serve(llm, requests):
    ids = [llm.add_request(prompt, params) for prompt, params in requests]
    outputs, last = {}, llm.stats().steps + 5000
    while llm.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.step()}
        check_tables(llm)
        assert llm.stats().steps < last, (
            "5000 steps: does a sequence count more as computed than it has?")
    assert llm.stats().blocks_used == 0
    assert not any(llm.engine.block_manager.ref_counts)
    return [[[c.token_ids, c.finish_reason, c.logprobs and [*map(list, c.logprobs)]]
             for c in outputs[request_id].outputs] for request_id in ids]


def converse(llm, run):
    """Serve random requests, then each again with a part of its answer."""
    rng = random.Random(run)
    requests = list(draw_requests(rng))
    answers = serve(llm, requests)
    longer = [(prompt + answer[0][0][: rng.randrange(12)], params)
              for (prompt, params), answer in zip(requests, answers, strict=True)]
    return answers + serve(llm, longer)


def plain_answers(num_runs, first):
    """What an engine says that makes no guesses, or cannot make any."""
    with tempfile.TemporaryDirectory() as folder:
        llm = engine(folder, num_blocks=300)
        return [converse(llm, run) for run in range(first, first + num_runs)]


def check_tokens(folder, run, expected):
    """As small a pool as can be, and all kinds of limits: the same answers; returns
    how many preemptions it took.
    """
    most = max(len(prompt) + 12 + width_of(params) * params.max_tokens
               for prompt, params in draw_requests(random.Random(run)))
    rng = random.Random(-1 - run)
    block_size = rng.choice([1, 2, 4])
    options = dict(
        num_speculative_tokens=rng.randrange(1, 7), block_size=block_size,
        num_blocks=max(most, 48) // block_size + rng.randrange(2, 5),
        max_num_seqs=rng.choice([2, 3, 8]), swap_space=rng.choice([0, 1]),
        max_num_batched_tokens=rng.choice([4, 16, 256]),
        preemption_mode=rng.choice(["recompute", "swap"]),
        enable_prefix_caching=rng.random() < 0.8)
    llm = engine(folder, **options)
    llm.engine.steps_ahead = int(rng.random() < 0.3)
    requests = list(draw_requests(random.Random(run)))
    for (prompt, params), found, right in zip(
            requests * 2, converse(llm, run), expected, strict=True):
        assert found == right, (
            f"run {run}: {params} after {prompt}, or after that and a part of its "
            f"answer, with {options}: {found}, and without guesses {right}")
    stats = llm.stats()
    return stats.preemptions_recompute + stats.preemptions_swap


def count_steps(num_speculative_tokens):
    """How the model goes on with a text that repeats itself, how much of that is found
    in the cache then, the tokens up to a stop string, and the number of steps.
    """
    with LLM(dtype="float32", device="cpu", attention_backend="torch",
             num_speculative_tokens=num_speculative_tokens) as llm:
        params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
        output = llm.generate(SPEECH * 4, params, use_tqdm=False)[0]
        steps = llm.stats().steps
        token_ids = output.outputs[0].token_ids
        again = llm.generate(output.prompt_token_ids + token_ids, params, False)[0]
        params = replace(params, stop=output.outputs[0].text[30:32], logprobs=0)
        stopped = llm.generate(SPEECH * 4, params, use_tqdm=False)[0].outputs[0]
        assert len(stopped.logprobs) == len(stopped.token_ids) < len(token_ids)
        return token_ids, again.num_cached_tokens, stopped.token_ids, steps


def main(num_runs=30, first=0, answers=None):
    """`answers`: a file of those to expect. Without one they are made here, without
    speculation.
    """
    expected = json.loads(Path(answers).read_text()) if answers else plain_answers(
        num_runs, first)
    with tempfile.TemporaryDirectory() as folder:
        preemptions = sum(
            check_tokens(folder, *pair) for pair in enumerate(expected, first))
    *plain, num_steps = count_steps(0)
    *guessed, num_guessed_steps = count_steps(4)
    assert guessed == plain
    assert num_guessed_steps < 0.75 * num_steps, (num_guessed_steps, num_steps)
    print(f"Speculation: the same tokens in {len(expected)} random runs with "
          f"{preemptions} preemptions, and {num_guessed_steps} steps instead of "
          f"{num_steps} where text repeats itself.")


if __name__ == "__main__":
    main(*map(json.loads, sys.argv[1:]))
