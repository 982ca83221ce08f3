"""A draft model guesses: the same greedy tokens, and draws of the same probability.

    python draft.py
"""

import itertools
import json
import tempfile
from pathlib import Path

import torch

from nanopaged import LLM, SamplingParams, sampler
from nanopaged.batch import Batch, Draws

VOCAB, LENGTH, NUM_DRAWS = 5, 4, 128 * 64
CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 128,
    "eos_token_id": None}
PROMPT = [1, 3, 0, 2, 2, 4, 1]
TEMPERATURE = 1.5


def engine(folder, draft=True, second=3, **options):
    """A tiny model. Its draft has the first of its two layers; the larger the weights
    of the second, the more often it is wrong.
    """
    for name, layers in [("large", 2), ("small", 1)]:
        Path(folder, name).mkdir(exist_ok=True)
        config = json.dumps(CONFIG | {"num_hidden_layers": layers})
        Path(folder, name, "config.json").write_text(config)
    if draft:
        options |= {"draft_model": Path(folder, "small"), "num_speculative_tokens": 3}
    defaults = {"block_size": 2, "num_blocks": 4000, "dtype": "float32",
                "device": "cpu", "load_format": "dummy", "max_model_len": 64,
                "max_num_seqs": 1024}
    llm = LLM(Path(folder, "large"), **defaults | options)
    model = llm.engine.runner.model
    for name, weight in model.named_parameters():
        weight.mul_((second if "layers.1" in name else 8) if weight.ndim > 1 else 1)
    if draft:
        runner = llm.engine.scheduler.guess.__self__.engine.runner
        runner.model.load_state_dict(model.state_dict(), strict=False)
    return llm


def check_greedy(folder):
    """The tokens of the engine without a draft, in fewer steps, and in tiny pools."""
    prompts = [[(7 * i * j + j) % VOCAB for j in range(1 + i % 9)] for i in range(24)]
    params = [SamplingParams(temperature=0, max_tokens=20, n=1 + 2 * (i % 3 == 0))
              for i in range(24)]
    answers, steps, preemptions = [], [], 0
    for options in ({"draft": False}, {}, {"num_blocks": 60},
                    {"num_blocks": 60, "preemption_mode": "swap"}):
        llm = engine(folder, **options)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers.append([[c.token_ids for c in output.outputs] for output in outputs])
        stats = llm.stats()
        steps.append(stats.steps)
        preemptions += stats.preemptions_recompute + stats.preemptions_swap
        assert answers[-1] == answers[0], options
        assert stats.blocks_used == 0
    assert preemptions and steps[1] < steps[0], (steps, preemptions)
    return steps


def exact_probs(llm, limits):
    """The probability of all sequences of LENGTH tokens: [VOCAB**LENGTH]."""
    prefixes = [prefix for length in range(LENGTH)
                for prefix in itertools.product(range(VOCAB), repeat=length)]
    params = SamplingParams(max_tokens=1, logprobs=VOCAB)
    outputs = llm.generate([PROMPT + [*p] for p in prefixes], params, use_tqdm=False)
    probs = {(): 1.0}
    for prefix, output in zip(prefixes, outputs, strict=True):
        report = output.outputs[0].logprobs[0]
        logits = torch.tensor([report[token].logprob for token in range(VOCAB)])
        if limits.get("top_k"):
            logits[logits < logits.topk(limits["top_k"]).values[-1]] = -torch.inf
        for token, p in enumerate((logits.double() / TEMPERATURE).softmax(-1).tolist()):
            probs[(*prefix, token)] = probs[prefix] * p
    ids = itertools.product(range(VOCAB), repeat=LENGTH)
    return torch.tensor([probs[each] for each in ids], dtype=torch.float64)


def draw(llm, limits):
    """How often each sequence of LENGTH tokens was drawn: [VOCAB**LENGTH]."""
    params = [SamplingParams(n=128, temperature=TEMPERATURE, max_tokens=LENGTH + 1,
                             seed=seed, **limits) for seed in range(NUM_DRAWS // 128)]
    counts = torch.zeros(VOCAB**LENGTH, dtype=torch.float64)
    for each in params:
        for answer in llm.generate(PROMPT, each, use_tqdm=False)[0].outputs:
            place = 0
            for token in answer.token_ids[:LENGTH]:
                place = place * VOCAB + token
            counts[place] += 1
    return counts


def p_value(counts, probs):
    """Of Pearson's chi-square test; rare outcomes are one."""
    expected = probs * counts.sum()
    assert not counts[expected == 0].any(), "an impossible outcome"
    is_rare = expected < 5
    counts, expected = (torch.cat((each[~is_rare], each[is_rare].sum()[None]))
                        for each in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item()


def trust_all(judge):
    """Every guess is accepted."""
    return lambda logits, guesses, heat, numbers: judge(
        logits, guesses, heat, 0 * numbers)


def forget_the_draft(judge):
    """After a wrong guess the token is drawn as if nothing had been guessed."""
    def wrong(logits, guesses, *columns):
        judged = judge(logits, guesses, *columns)
        at = torch.tensor([*guesses])
        is_accepted = (judged[at] > -torch.inf).sum(1, keepdim=True) == 1
        judged[at] = torch.where(is_accepted, judged[at], logits[at])
        return judged
    return wrong


def draw_once(judge):
    """One random number decides about the guess, and draws the token after it."""
    add_sample = Batch.add_sample

    def add(batch, receiver):
        add_sample(batch, receiver)
        batch.acceptances[-1] = batch.draws[-len(Draws._fields)]

    Batch.add_sample = add
    return judge


def check_draws(folder):
    """The joint distribution of four tokens, also with limits; returns p-values."""
    plain, llm = engine(folder, draft=False, second=8), engine(folder, second=8)
    exact, limits = exact_probs(plain, {}), {"top_k": 3}
    values = [p_value(draw(llm, {}), exact),
              p_value(draw(llm, limits), exact_probs(plain, limits))]
    assert min(values) > 0.001, values
    judge, add_sample, wrong = sampler.judge, Batch.add_sample, []
    for sabotage in (trust_all, forget_the_draft, draw_once):
        sampler.judge = sabotage(judge)
        wrong.append(p_value(draw(llm, {}), exact))
    sampler.judge, Batch.add_sample = judge, add_sample
    assert max(wrong) < 1e-6, f"this test would not notice mistakes: {wrong}"
    return values, wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        steps = check_greedy(folder)
        values, wrong = check_draws(folder)
    print(f"Draft: the same greedy tokens in {steps[1]} steps instead of {steps[0]}; "
          f"draws with p-values {', '.join(f'{p:.3f}' for p in values)}, and "
          f"{', '.join(f'{p:.0e}' for p in wrong)} for versions with a mistake.")
