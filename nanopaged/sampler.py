"""From logits to tokens: greedy or drawn, with seeds, and with log-probabilities.

A sampled token depends on the logits, the seed of its request and its position, and on
nothing else in the batch. One random number decides (inverse-transform sampling): it
takes the first token at which the cumulative probability exceeds it. A row of logits
that has NaN gives some token, and changes no other row's.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor

from nanopaged.attention import to_device
from nanopaged.model import fused
from nanopaged.outputs import Logprob, Logprobs
from nanopaged.sequence import Sequence

GREEDY = 1e-5  # lower temperatures are greedy: a division by them would overflow
SUMMED = 128  # probabilities that are summed up before any is looked at
# A random number is a multiple of this, and below 1. Tokens that are less likely may
# never be drawn. Sums in float64 are more exact than that, even of a whole vocabulary.
RESOLUTION = 2.0**-32


@dataclass
class SamplerOutput:
    """The tokens of a step; until they are read, only the device knows them."""

    token_ids: Tensor  # [num_samples]
    logprobs: dict[int, Logprobs]  # by sample, of those that ask for them

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


def sample(logits: Tensor, seqs: list[Sequence]) -> SamplerOutput:
    """One token for each row of logits, [num_samples, vocab_size]; seqs: those that get
    the tokens.
    """
    raw, device = logits, logits.device
    params = [seq.group.params for seq in seqs]
    too_short = [(i, token) for i, seq in enumerate(seqs)
                 if seq.num_computed_tokens < seq.group.min_len
                 for token in seq.group.stop_token_ids]
    if too_short:
        at = to_device(np.array(too_short), device).unbind(1)
        logits = logits.index_put(at, logits.new_full((), -torch.inf))

    tokens = logits.max(-1).indices  # as argmax, in a third of the time
    if any(p.temperature >= GREEDY for p in params):
        # [num_samples, 1] each, in a single copy
        table = to_device(np.array([draw_params(seq) for seq in seqs]), device)
        temperature, numbers, *limits = table.split(1, dim=1)
        divisor = temperature.float().clamp(min=GREEDY)
        if any(p.top_k or p.top_p < 1 or p.min_p for p in params):
            most = max(p.top_k or logits.shape[1] for p in params)
            lowest = lowest_kept(logits, most, divisor, *limits)
            logits = logits.masked_fill(logits < lowest, -torch.inf)
        drawn = draw_tokens(logits, divisor, numbers)
        tokens = torch.where(temperature[:, 0] < GREEDY, tokens, drawn)

    logprobs = {i: report_logprobs(raw[i], int(tokens[i]), p.logprobs)
                for i, p in enumerate(params) if p.logprobs is not None}
    return SamplerOutput(tokens, logprobs)


def report_logprobs(logits: Tensor, token: int, count: int) -> Logprobs:
    """The sampled token's log-probability, then those of the `count` most likely.

    logits: [vocab_size]
    """
    logprobs = logits.float().log_softmax(-1)
    own = Logprob(float(logprobs[token]), 1 + int((logprobs > logprobs[token]).sum()))
    values, ids = logprobs.topk(min(count, len(logprobs)))
    likely = map(Logprob, values.tolist(), itertools.count(1))
    return {token: own} | dict(zip(ids.tolist(), likely, strict=True))


def draw_params(seq: Sequence) -> list[float]:
    """Temperature, random number, top-k, top-p and min-p."""
    params = seq.group.params
    seed = (seq.group.seed << 20) + seq.index  # of the sequence
    position = seq.num_computed_tokens  # of the new token, one step ahead of the host
    bits = xxhash.xxh3_64_intdigest(seed.to_bytes(16, "little"), seed=position) >> 32
    return [params.temperature, bits * RESOLUTION, params.top_k or 2**31, params.top_p,
            params.min_p]


@fused
def draw_tokens(logits: Tensor, temperature: Tensor, numbers: Tensor) -> Tensor:
    """Draw a token for each row, by its number in [0, 1): [num_samples].

    logits: [num_samples, vocab_size]; the others: [num_samples, 1]. Sums of 128 tokens
    each say in which of these groups the token is, and only that group is looked at
    then. So the logits are read once.
    """
    padding = -logits.shape[1] % SUMMED
    groups = F.pad(logits.float(), (0, padding), value=-torch.inf) / temperature
    groups = groups.unflatten(1, (-1, SUMMED))  # [num_samples, num_groups, SUMMED]
    highest = groups.amax(-1, keepdim=True)
    highest = highest.clamp(min=-1e30)  # not -inf: that minus itself is not a number
    sums = (groups - highest).exp().sum(-1)
    highest = highest.squeeze(-1)
    weights = sums * (highest - highest.amax(-1, keepdim=True)).exp()

    group, rest = find(weights, numbers)
    logits = groups.gather(1, group[..., None].expand(-1, -1, SUMMED)).squeeze(1)
    token, _ = find((logits - logits.amax(-1, keepdim=True)).exp(), rest)
    return (group * SUMMED + token).squeeze(1)


def find(weights: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The first weight with which the sum exceeds the number's part of the whole sum,
    and how far into this weight that is, from 0 to below 1.

    weights: [num_samples, num_weights]; the others: [num_samples, 1]. On a GPU the sums
    are made in parallel, and each is rounded in its own way, so one may seem to grow at
    a weight of 0: such a weight is never chosen.
    """
    sums = weights.cumsum(-1, dtype=torch.float64)
    goal = numbers * weights.sum(-1, keepdim=True, dtype=torch.float64)
    is_found = (sums > goal) & (weights > 0)
    index = is_found.byte().argmax(-1, keepdim=True)  # the first one
    weight = weights.gather(1, index)
    rest = (goal - sums.gather(1, index) + weight) / weight
    return index, rest.clamp(0, 1 - RESOLUTION)


def lowest_kept(logits: Tensor, most: int, temperature: Tensor, top_k: Tensor,
                top_p: Tensor, min_p: Tensor) -> Tensor:
    """The lowest logit of the tokens that may be drawn: [num_samples, 1].

    logits: [num_samples, vocab_size]; temperature, top_k, top_p, min_p: [num_samples,
    1]; `most` is the largest top_k, known to the host. Three limits, one by one:

        top_k   the k most likely tokens stay
        top_p   of these the most likely ones stay, up to and with the one that brings
                the sum of their probabilities to top_p
        min_p   of these those stay that have at least min_p times the highest
                probability

    The result is a logit, so that tied tokens stay or go together.
    """
    values = logits.topk(min(most, logits.shape[1]), dim=-1).values  # sorted
    in_top_k = torch.arange(values.shape[1], device=logits.device) < top_k
    probs = (values / temperature).masked_fill(~in_top_k, -torch.inf).softmax(-1)
    in_top_p = (probs.cumsum(-1) - probs < top_p) | (top_p >= 1)
    is_kept = in_top_k & in_top_p & (probs >= min_p * probs[:, :1])
    return values.masked_fill(~is_kept, torch.inf).amin(-1, keepdim=True)
