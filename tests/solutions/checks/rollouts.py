"""The recipe for rollouts: with new weights the engine answers as the trained model
does, and the reward rises.
"""

import sys
from pathlib import Path

import torch

from nanopaged import LLM, SamplingParams
from nanopaged.loading.checkpoint import BUNDLED

sys.path.insert(0, str(Path(__file__).parent.parent))
import rollouts
from transformers import AutoModelForCausalLM


def check_reward():
    assert rollouts.reward("Now go with me\nTo be or not\nthe last line is cut") == 0.8
    assert rollouts.reward("no line ends here") == 0
    assert rollouts.reward("a\n") < rollouts.reward("we all go to town\n") == 1


def check_weights():
    """Tokens after `load_weights` are those of transformers with the same weights."""
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with LLM(dtype="float32", device="cpu") as llm, torch.no_grad():
        ids = llm.tokenizer(rollouts.PROMPTS[0], return_tensors="pt").input_ids
        for _ in range(2):
            for weight in model.parameters():
                weight += 0.01 * torch.randn(weight.shape, generator=generator)
            llm.load_weights(model.state_dict().items())
            params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
            answer = llm.generate([ids[0].tolist()], params, use_tqdm=False)[0]
            expected = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False,
                min_new_tokens=24, max_new_tokens=24, pad_token_id=0)
            assert answer.num_cached_tokens == 0
            assert answer.outputs[0].token_ids == expected[0, ids.shape[1] :].tolist()


def check_training(num_updates, num_seeds):
    for seed in range(num_seeds):
        history = rollouts.train(num_updates, seed, learning_rate=1e-4)
        first, last = (sum(part) / 3 for part in (history[:3], history[-3:]))
        print(f"seed {seed}: reward {first:.2f} to {last:.2f}")
        assert last > first + 0.02


if __name__ == "__main__":
    torch.set_num_threads(1)
    check_reward()
    check_weights()
    check_training(*map(int, sys.argv[1:3] or (10, 1)))
    print("rollouts: ok")
