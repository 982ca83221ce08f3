"""Look inside: hidden states are those of transformers, whatever happens to a request.

    python look_inside.py [number of random runs]
"""

import random
import sys
import tempfile

import torch
from moe import SHAPE, VOCAB, write_model

from nanopaged import LLM, BeamSearchParams, SamplingParams

# All but one of them run in our own decoder.
FAMILIES = {
    "llama": {}, "qwen3": {"head_dim": 16}, "olmo2": {},
    "qwen2": {"num_hidden_layers": 3}}
ENGINE = {"device": "cpu", "dtype": "float32", "block_size": 2, "max_model_len": 40,
          "attention_backend": "torch"}


def draw_request(rng, num_layers):
    """Half of the prompts begin alike; a third of the requests want no states."""
    prompt = [*range(rng.choice([0, 8]))]
    prompt += rng.choices(range(VOCAB), k=rng.randint(1, 12))
    if rng.random() < 0.1:
        return prompt, BeamSearchParams(2, 6)
    layers = rng.sample(range(num_layers + 1), rng.choice([0, 1, 2]))
    wanted = {layer: rng.choice(["all", rng.sample(range(40), 9)]) for layer in layers}
    return prompt, SamplingParams(
        n=rng.choice([1, 1, 3]), seed=rng.randrange(99), max_tokens=rng.randint(1, 16),
        temperature=rng.choice([0, 1]), hidden_states=wanted or None,
        prompt_logprobs=rng.choice([None, None, 1]))


@torch.inference_mode()
def check_states(model, prompt, params, answer):
    """Exactly what was asked for is there, and is what transformers computes."""
    wanted = getattr(params, "hidden_states", None)
    if wanted is None:
        assert answer.hidden_states is None
        return 0
    tokens = prompt + answer.token_ids
    known = range(len(tokens) - 1)  # nothing follows the last token
    places = [(layer, position) for layer in sorted(wanted) for position in known
              if wanted[layer] == "all" or position in wanted[layer]]
    assert [*answer.hidden_states] == places, (places, [*answer.hidden_states])
    states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    for (layer, position), state in answer.hidden_states.items():
        torch.testing.assert_close(
            state, states[layer][0, position], rtol=1e-3, atol=1e-3)
        assert state.untyped_storage().nbytes() == state.nbytes, "it holds more memory"
    return len(places)


def check_run(folder, model, seed):
    """Thirty requests in a pool that is too small. Returns numbers of states, and of
    preemptions, and of tokens found in the prefix cache.
    """
    rng = random.Random(seed)
    num_layers = model.config.num_hidden_layers
    requests = [draw_request(rng, num_layers) for _ in range(30)]
    mode = ["recompute", "swap"][seed % 2]
    with LLM(folder, **ENGINE, num_blocks=rng.randint(60, 70), preemption_mode=mode,
             max_num_batched_tokens=rng.choice([5, 16, 64])) as llm:
        llm.engine.steps_ahead = rng.choice([0, 1])  # 1, as on a GPU
        outputs = llm.generate(*map(list, zip(*requests, strict=True)), use_tqdm=False)
        stats = llm.stats()
    count = sum(check_states(model, *request, answer)
                for request, output in zip(requests, outputs, strict=True)
                for answer in output.outputs)
    assert stats.blocks_used == 0
    return (count, stats.preemptions_recompute, stats.preemptions_swap,
            stats.prefix_hit_tokens)


def check_refusals(folder):
    wrong = [{5: "all"}, {-1: [0]}, {0: "some"}, {0: 3}, ["all"]]
    with LLM(folder, **ENGINE, num_blocks=64) as llm:
        for hidden_states in wrong:
            try:
                llm.generate([[1]], SamplingParams(hidden_states=hidden_states))
            except (ValueError, TypeError) as error:
                assert "hidden_states" in str(error), error
            else:
                raise AssertionError(f"{hidden_states} should have been refused")


def main(num_runs=12):
    torch.set_num_threads(1)
    families = list(FAMILIES)
    models, totals = {}, [0, 0, 0, 0]
    with tempfile.TemporaryDirectory() as place:
        for family, fields in FAMILIES.items():
            folder = f"{place}/{family}"
            models[family] = folder, write_model(folder, family, **SHAPE | fields)
        check_refusals(models["llama"][0])
        for seed in range(num_runs):
            found = check_run(*models[families[seed // 2 % len(families)]], seed)
            totals = [*map(sum, zip(totals, found, strict=True))]
    states, recomputed, swapped, hits = totals
    assert num_runs < 8 or (recomputed and swapped and hits), totals
    print(f"look_inside: {states} states of {num_runs} random runs are those of "
          f"transformers ({recomputed + swapped} preemptions)")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
