"""Requests with the lengths of the paper's data sets: ShareGPT and Alpaca.

The paper gives the mean lengths (its Figure 11). The shape is ours: log-normal.
"""

from statistics import NormalDist
from typing import NamedTuple, TypeAlias

import numpy as np


class LogNormal(NamedTuple):
    mean: float
    sigma: float


class DataSet(NamedTuple):
    prompt: LogNormal
    output: LogNormal


# The sigma of ShareGPT's outputs follows from the paper's Figure 2: with Orca (max),
# 20.4% of the slots hold tokens, in 7 requests. That makes 458 tokens each, 161 of them
# the prompt's, so 297 generated so far, on average over time. Outputs with a mean of
# 338 give that number if sigma is 0.8. We assume that prompts vary more, and Alpaca's
# less.
DATA_SETS = {
    "ShareGPT": DataSet(LogNormal(161.31, 1.25), LogNormal(337.99, 0.8)),
    "Alpaca": DataSet(LogNormal(19.31, 0.5), LogNormal(58.45, 0.8)),
}
LONGEST = 2048  # tokens in and out together: OPT's context
SLOTS = 12 * 2**30 // 819_200  # tokens whose K and V fit next to OPT-13B into 40 GB

Lengths: TypeAlias = list[tuple[int, int]]  # tokens in, tokens out


def draw_lengths(name: str, count: int, seed: int, longest: int = LONGEST) -> Lengths:
    """Draw `count` requests with the data set's mean lengths, at most `longest`
    together.

    The draws are evenly spaced quantiles, so that a few requests are like many. Their
    order is random, and short and long prompts meet short and long outputs alike (a
    golden ratio lattice).
    """
    prompt, output = DATA_SETS[name]
    quantiles = [(i + 0.5) / count for i in range(count)]
    normal = np.array([NormalDist().inv_cdf(quantile) for quantile in quantiles])
    by_prompt = np.random.default_rng(seed).permutation(count)
    by_output = np.argsort(np.argsort(by_prompt * 0.6180339887 % 1))

    prompt_scale = prompt.mean
    output_scale = output.mean
    for _ in range(50):  # until the means are right in spite of the cut at `longest`
        prompts = prompt_scale * np.exp(prompt.sigma * normal[by_prompt])
        prompts = np.clip(np.rint(prompts), 1, longest - 1)
        outputs = output_scale * np.exp(output.sigma * normal[by_output])
        outputs = np.clip(np.rint(outputs), 1, longest - prompts)
        prompt_scale *= prompt.mean / prompts.mean()
        output_scale *= output.mean / outputs.mean()
    return [(int(p), int(n)) for p, n in zip(prompts, outputs, strict=True)]
