"""Reinforcement learning with rollouts from the engine: python rollouts.py [plot.svg]

The bundled model learns to write lines of five syllables. In each update the engine
samples eight answers to each of eight prompts (the answers to a prompt share its
blocks), and every answer gets a reward. What scored above the average of its prompt
becomes more likely: GRPO (Shao et al. 2024) without a limit on the change, which
is not needed if each answer is used once. Then the engine gets the new weights.
"""

import re
import sys
from pathlib import Path
from statistics import mean

import torch
from transformers import AutoModelForCausalLM

from nanopaged import LLM, SamplingParams
from nanopaged.loading.checkpoint import BUNDLED

NAMES = ["ROMEO", "JULIET", "KING", "QUEEN", "LUCIO", "ANGELO", "PETRUCHIO", "CLAUDIO"]
PROMPTS = [f"{name}:\n" for name in NAMES]


def reward(text):
    """From 0 to 1: how close the lines are to five syllables (groups of vowels)."""
    lines = [line for line in text.split("\n")[:-1] if line]  # the last one is cut off
    counts = [len(re.findall("[aeiouy]+", line.lower())) for line in lines]
    return mean(max(0, 1 - abs(count - 5) / 5) for count in counts) if counts else 0


def train(num_updates=40, seed=0, learning_rate=3e-5):
    """The mean reward of each update."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0)
    params = SamplingParams(n=8, max_tokens=64, ignore_eos=True)
    history = []
    with LLM(dtype="float32", seed=seed) as llm:
        for update in range(num_updates):
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            rewards = torch.tensor([[reward(answer.text) for answer in output.outputs]
                                    for output in outputs])
            history.append(rewards.mean().item())
            print(f"update {update}: reward {history[-1]:.3f}", flush=True)
            spread = rewards.std(1, keepdim=True) + 1e-3
            advantages = (rewards - rewards.mean(1, keepdim=True)) / spread
            optimizer.zero_grad()
            for output, advantage in zip(outputs, advantages, strict=True):
                answers = torch.tensor([answer.token_ids for answer in output.outputs])
                prompt = torch.tensor(output.prompt_token_ids).expand(len(answers), -1)
                logits = model(torch.cat((prompt, answers), 1)).logits
                logits = logits[:, prompt.shape[1] - 1 : -1].log_softmax(-1)
                logprobs = logits.gather(2, answers[..., None]).squeeze(2)
                loss = -(advantage[:, None] * logprobs).mean() / len(outputs)
                loss.backward()
            optimizer.step()
            llm.load_weights(model.state_dict().items())
    return history


def plot(history, path):
    """The reward by update, as an SVG."""
    width = 520 / max(1, len(history) - 1)
    points = " ".join(f"{60 + width * i:.0f},{250 - 230 * y:.0f}"
                      for i, y in enumerate(history))
    labels = "".join(f'<text x="30" y="{255 - 230 * y:.0f}">{y}</text>'
                     for y in (0, 0.5, 1))
    path.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 290" font-size="13">'
        '<rect width="600" height="290" fill="white"/><text x="60" y="14">mean reward '
        f'of 64 answers</text>{labels}<text x="290" y="280">update</text>'
        f'<polyline points="{points}" fill="none" stroke="#06c"/></svg>')


if __name__ == "__main__":
    plot(train(), Path(*sys.argv[1:2] or ["rewards.svg"]))
