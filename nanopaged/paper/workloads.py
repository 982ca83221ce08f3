"""Requests like those of the paper's experiments: how long they are, when they come.

The paper gives the mean lengths of its data sets (its Figure 11). The shape of their
distributions is our assumption: log-normal.
"""

import random
from collections.abc import Iterator
from itertools import cycle
from statistics import NormalDist
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from nanopaged.tour.kv import LONGEST

Lengths: TypeAlias = list[tuple[int, int]]  # tokens in, tokens out


class DataSet(NamedTuple):
    """Means of the lengths, and sigmas: standard deviations of their logarithms."""

    mean_in: float
    sigma_in: float
    mean_out: float
    sigma_out: float


# The sigma of ShareGPT's outputs follows from the paper's Figure 2. With Orca (max),
# 20.4% of the slots hold tokens, in 7 requests. These are 458 tokens per request, of
# which 161 are the prompt's, so a running request has generated 297 tokens on average.
# Outputs with a mean of 338 give that number if sigma is 0.8. We assume that prompts
# vary more, and that Alpaca's vary less.
DATA_SETS = {
    "ShareGPT": DataSet(161.31, 1.25, 337.99, 0.8),
    "Alpaca": DataSet(19.31, 0.5, 58.45, 0.8),
    # Sentences of WMT16 and their translations. The paper does not say how long they
    # are, so all four numbers are assumptions.
    "WMT16": DataSet(32, 0.5, 36, 0.5),
}


def draw_lengths(name: str, number: int) -> Lengths:
    """Draw the lengths of `number` requests with the data set's means.

    They are evenly spaced quantiles in a random order, so a few are like many.
    """
    data = DATA_SETS[name]
    quantiles = [NormalDist().inv_cdf((i + 0.5) / number) for i in range(number)]
    rng = np.random.default_rng(0)
    prompts = fit(data.mean_in, data.sigma_in * rng.permutation(quantiles), LONGEST - 1)
    outputs = fit(
        data.mean_out, data.sigma_out * rng.permutation(quantiles), LONGEST - prompts)
    return [(int(p), int(n)) for p, n in zip(prompts, outputs, strict=True)]


def fit(mean: float, logs: Any, longest: Any) -> Any:
    """Whole numbers from 1 to `longest` with these logarithms, scaled to this mean."""
    lengths = np.exp(logs)
    scale = mean / lengths.mean()
    for _ in range(50):  # until the mean is right in spite of the cut at `longest`
        cut = np.clip(np.rint(scale * lengths), 1, longest)
        scale *= mean / cut.mean()
    return cut


def arrivals(lengths: Lengths, rate: float) -> Iterator[tuple[float, int, int]]:
    """Endless requests, `rate` of them per second on average (a Poisson process).

    Each is the time when it comes, its tokens in and its tokens out.
    """
    rng = random.Random(0)
    now = 0.0
    for prompt, output in cycle(lengths):
        now += rng.expovariate(rate)
        yield now, prompt, output
