"""From logits to tokens: greedy or drawn, with seeds, and with log-probabilities.

A sampled token depends on the logits, the seed of its request and its position, and on
nothing else in the batch. One uniform number decides (inverse-transform sampling): it
takes the first token at which the cumulative probability exceeds it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nanopaged.attention import Ints, to_device
from nanopaged.model import fused
from nanopaged.outputs import Logprob, Logprobs
from nanopaged.scheduler import FAILED
from nanopaged.sequence import Sequence

GREEDY = 1e-5  # lower temperatures are greedy: a division by them would overflow
SUMMED = 128  # probabilities that are summed up before any is looked at
ROW = np.dtype([
    ("seed", "u8"), ("temperature", "f4"), ("top_k", "i8"), ("top_p", "f4"),
    ("min_p", "f4"), ("min_len", "i8"), ("stop_token_ids", "O"),
    ("num_logprobs", "i8")])


@dataclass
class SamplerOutput:
    token_ids: Tensor  # [num_samples], still on the device; FAILED: there is none
    # By sample; FAILED tokens have none.
    logprobs: dict[int, Logprobs] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # This copy is queued before the next step, so `read` waits for this step alone.
        self.host_ids = self.token_ids.to("cpu", non_blocking=True)
        self.copied: Any = None
        if self.token_ids.is_cuda:
            self.copied = torch.cuda.current_stream().record_event()

    def read(self) -> list[int]:
        """Wait for the tokens.

        Nowhere else does the host wait for the device, except for log-probabilities.
        """
        if self.copied is not None:
            self.copied.synchronize()
        return self.host_ids.tolist()


@dataclass
class SamplingPlan:
    """What is known of a step's samples before their logits.

    Tensors are on the device; one that nothing needs is None.
    """

    params: Any  # [num_samples] of ROW
    is_drawn: Tensor | None = None  # [num_samples]; None: all are, or none
    temperature: Tensor | None = None  # [num_samples, 1]; None: all are greedy
    numbers: Tensor | None = None  # [num_samples, 1]: random, in [0, 1)
    restricted: Tensor | None = None  # [num_restricted]: samples with limits
    limits: list[Tensor] = field(default_factory=list)  # [num_restricted, 1] each
    most: int | None = None  # the largest top_k, if all have one
    # Samples, and tokens that they must not draw yet (min_tokens): [num_excluded] each
    excluded: tuple[Tensor, Tensor] | None = None


class Sampler:
    """Holds the parameters of every running sequence, by row."""

    def __init__(self, max_num_seqs: int) -> None:
        self.params = np.zeros(max_num_seqs, ROW)

    def set_row(self, seq: Sequence) -> None:
        group = seq.group
        params = group.params
        seed = (group.seed + seq.index * 0xD1B54A32D192ED03) % 2**64
        # One more than asked for: the sampled token is reported too. 0: nothing is.
        num_logprobs = 0 if params.logprobs is None else params.logprobs + 1
        self.params[seq.row] = (
            seed, params.temperature, params.top_k, params.top_p, params.min_p,
            group.min_len, sorted(group.stop_token_ids), num_logprobs)

    def plan(self, rows: Ints, positions: Ints,
             to_device: Callable[[NDArray[Any]], Tensor] = torch.from_numpy
             ) -> SamplingPlan:
        """What is known before there are logits.

        rows: of the sequences that get the tokens; positions: of the tokens.
        """
        params = self.params[rows]
        plan = SamplingPlan(params)
        too_short = np.flatnonzero(positions < params["min_len"])
        if too_short.size:
            pairs = [(i, token) for i in too_short.tolist()
                     for token in params["stop_token_ids"][i]]
            samples, tokens = np.array(pairs, np.int64).reshape(-1, 2).T.copy()
            plan.excluded = (to_device(samples), to_device(tokens))
        is_drawn = params["temperature"] >= GREEDY
        if not is_drawn.any():
            return plan

        if not is_drawn.all():
            plan.is_drawn = to_device(is_drawn)
        temperature = np.maximum(params["temperature"], GREEDY)[:, None]
        plan.temperature = to_device(temperature)
        plan.numbers = to_device(uniform(params["seed"], positions)[:, None])

        is_restricted = (
            params["top_k"] > 0) | (params["top_p"] < 1) | (params["min_p"] > 0)
        indices = np.flatnonzero(is_restricted)
        if indices.size:
            top_k = params["top_k"][indices]
            plan.most = int(top_k.max()) if top_k.min() > 0 else None
            plan.restricted = to_device(indices)
            plan.limits = [to_device(temperature[indices])]
            for name in ("top_k", "top_p", "min_p"):
                plan.limits.append(to_device(params[name][indices, None]))
        return plan

    def sample(self, logits: Tensor, plan: SamplingPlan) -> SamplerOutput:
        """One token for each row of logits, [num_samples, vocab_size]."""
        params = plan.params
        with_logprobs = np.flatnonzero(params["num_logprobs"])
        logprobs = torch.empty(0)
        if with_logprobs.size:
            indices = to_device(with_logprobs, logits.device)
            logprobs = logits[indices].float().log_softmax(-1)
        if plan.excluded is not None:
            logits.index_put_(plan.excluded, logits.new_full((), -torch.inf))

        if plan.temperature is None:
            tokens = most_likely(logits)
        else:
            tokens = draw(logits, plan)
            if plan.is_drawn is not None:
                tokens = torch.where(plan.is_drawn, tokens, most_likely(logits))

        output = SamplerOutput(tokens)
        for i, row in zip(with_logprobs.tolist(), logprobs, strict=True):
            token = int(tokens[i])
            if token != FAILED:
                count = int(params["num_logprobs"][i]) - 1
                output.logprobs[i] = report_logprobs(row, token, count)
        return output


def report_logprobs(logprobs: Tensor, token: int, count: int) -> Logprobs:
    """The sampled token's log-probability, then those of the `count` most likely.

    logprobs: [vocab_size]
    """
    rank = 1 + int((logprobs > logprobs[token]).sum())
    report = {token: Logprob(float(logprobs[token]), rank)}
    values, tokens = logprobs.topk(count)
    pairs = zip(tokens.tolist(), values.tolist(), strict=True)
    for rank, (other, value) in enumerate(pairs, start=1):
        report.setdefault(other, Logprob(value, rank))
    return report


def draw(logits: Tensor, plan: SamplingPlan) -> Tensor:
    """Draw a token for each row: [num_samples]."""
    lowest = None
    if plan.restricted is not None:
        lowest = logits.new_full((len(logits), 1), -torch.inf)
        lowest[plan.restricted] = lowest_kept(
            logits[plan.restricted], plan.most or logits.shape[1], *plan.limits)
    tokens: Tensor = draw_tokens(logits, lowest, plan.temperature, plan.numbers)
    return tokens


def most_likely(logits: Tensor) -> Tensor:
    """[num_samples, vocab_size] -> [num_samples]; of equal ones the first."""
    highest, tokens = logits.max(-1)  # as argmax, in a third of the time
    return torch.where(highest.isfinite(), tokens, FAILED)


@fused
def draw_tokens(logits: Tensor, lowest: Tensor | None, temperature: Tensor,
                numbers: Tensor) -> Tensor:
    """Draw a token for each row, by its number in [0, 1): [num_samples].

    logits: [num_samples, vocab_size]; the others: [num_samples, 1]. Logits below
    `lowest` are excluded. Sums of 128 tokens each say in which of these groups the
    token is, and only the sums within that group are needed then.
    """
    if lowest is not None:
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    probs = (logits / temperature).softmax(-1)  # float32; all NaN, if one of them is

    padding = -probs.shape[1] % SUMMED
    if padding:
        probs = F.pad(probs, (0, padding))
    probs = probs.view(len(probs), -1, SUMMED)  # [num_samples, num_groups, SUMMED]
    groups = probs.sum(-1).double()  # [num_samples, num_groups]
    total = groups.sum(-1, keepdim=True)
    goal = numbers * total.float()

    group, before = find(groups, goal)
    probs = probs.gather(1, group.unsqueeze(2).expand(-1, -1, SUMMED)).squeeze(1)
    token, _ = find(probs, goal, before)
    tokens = torch.where(total.isfinite(), group * SUMMED + token, FAILED)
    return tokens.squeeze(1)


def find(parts: Tensor, goal: Tensor,
         before: float | Tensor = 0) -> tuple[Tensor, Tensor]:
    """The first part with which the sum exceeds the goal, and the sum before it.

    parts: [num_samples, num_parts]; the others: [num_samples, 1]. On a GPU the sums are
    made in parallel, and each is rounded in its own way. So a sum may seem to grow at a
    part that is 0: such parts are never chosen. And the last sum may stay below the
    goal: then the last part that is not 0 is chosen.
    """
    sums = before + parts.cumsum(-1, dtype=torch.float64)
    index = torch.arange(parts.shape[1], device=parts.device)
    last = torch.where(parts > 0, index, 0).amax(-1, keepdim=True)
    exceeds = (parts > 0) & (sums.float() > goal)  # the goal is a float32, too
    # The lowest index that exceeds it. The others count as `last`, which is never lower
    # than one that does; if none does, it is found.
    found = torch.where(exceeds, index, last).amin(-1, keepdim=True)
    return found, (sums - parts).gather(1, found)


def lowest_kept(logits: Tensor, most: int, temperature: Tensor, top_k: Tensor,
                top_p: Tensor, min_p: Tensor) -> Tensor:
    """The lowest logit of the tokens that may be drawn: [num_samples, 1].

    logits: [num_samples, vocab_size]; temperature, top_k, top_p, min_p: [num_samples,
    1]. `most` is the largest top_k or the size of the vocabulary, known to the host, so
    that it need not wait for the device. Three limits, one after the other:

        top_k   the k most likely tokens stay
        top_p   of these the most likely ones stay, up to and with the one that brings
                the sum of their probabilities to top_p
        min_p   of these those stay that have at least min_p times the highest
                probability

    The result is a logit, so that tied tokens stay or go together.
    """
    vocab_size = logits.shape[1]
    top_k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    values = logits.topk(min(most, vocab_size), dim=-1).values  # sorted
    scaled = values / temperature
    weights = (scaled - scaled[:, :1]).exp()  # probabilities, relative to the highest
    sums = weights.cumsum(-1)  # sums - weights: the sums before each token
    goal = torch.where(top_p < 1, top_p * sums.gather(1, top_k - 1), torch.inf)
    rank = torch.arange(values.shape[1], device=logits.device)
    is_kept = (rank < top_k) & (sums - weights < goal) & (weights >= min_p)
    return values.masked_fill(~is_kept, torch.inf).amin(-1, keepdim=True)


def uniform(seeds: NDArray[np.uint64], positions: Ints) -> NDArray[np.float32]:
    """A number in [0, 1) for every seed and position: splitmix64 (Steele et al., OOPSLA
    2014).

    It has 23 bits, so that its float32 product with a sum is always below that sum.
    """
    x = seeds + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits: NDArray[np.uint64] = (x ^ (x >> np.uint64(31))) >> np.uint64(41)
    return bits.astype(np.float32) * np.float32(2.0**-23)
