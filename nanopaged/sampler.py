"""From logits to tokens: greedy, or drawn with a seed.

A sampled token depends on its logits, on its request's parameters and seed, on its
position, and on which of the request's sequences it belongs to, but not on the rest of
the batch. A row of logits with a NaN yields an arbitrary token.

A draw compares the running sum of the probabilities with a random number from 0 to 1:
the first token at which the sum exceeds the number is taken (inverse-transform
sampling). Only the tokens that top_k, top_p and min_p leave have a probability.
"""

import numpy as np
import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor

from nanopaged.batch import Batch
from nanopaged.config import SamplingParams
from nanopaged.fused import fused
from nanopaged.logits import process, report_logprobs, to_device
from nanopaged.sequence import Logprobs, Sequence

GREEDY = 1e-5  # lower temperatures are greedy: dividing by them would overflow
# Random numbers are k * 2^-32, and below 1. (A token that is less likely than this may
# never be drawn.)
RESOLUTION = 2.0**-32
PART = 512  # tokens in each part of the vocabulary: see `draw`


class SamplerOutput:
    """The tokens of a step; until they are read, only the device knows them."""

    def __init__(self, token_ids: Tensor, logprobs: dict[int, Logprobs]) -> None:
        self.token_ids = token_ids  # [num_samples]
        self.logprobs = logprobs  # by sample, for requests that want them
        # This copy is queued before the next step, so `read` waits for this step alone.
        self.host_ids = token_ids.to("cpu", non_blocking=True)
        if token_ids.is_cuda:
            self.copied = torch.cuda.current_stream().record_event()

    def read(self) -> list[int]:
        """Wait for the tokens.

        Apart from this, the host waits for the device only for log-probabilities, for
        swaps, and for requests that change logits.
        """
        if self.token_ids.is_cuda:
            self.copied.synchronize()
        return self.host_ids.tolist()


def draw_params(seq: Sequence, position: int) -> tuple[float, ...]:
    """How to draw the token of a sequence at this position: a random number from 0 to
    1, temperature, top_k (larger than any vocabulary if all may stay), top_p, min_p.
    """
    params = seq.group.params
    source = f"{seq.group.seed} {seq.index} {position}".encode()
    number = RESOLUTION * (xxhash.xxh3_64_intdigest(source) >> 32)
    # With a top_p of 1 all must stay. Rounded sums may reach 1, but not 2.
    top_p = params.top_p if params.top_p < 1 else 2
    return number, params.temperature, params.top_k or 2**31, top_p, params.min_p


def sample(raw: Tensor, batch: Batch) -> SamplerOutput:
    """A token for each sample of a step.

    raw: logits, [num_samples, vocab_size]. Other ranks know no receivers, so they take
    the most likely tokens, which those of rank 0 then replace.
    """
    seqs = batch.receivers
    params = [seq.group.params for seq in seqs]
    logits = process(raw, batch)
    drawing = [p for p in params if p.temperature >= GREEDY]
    if len(drawing) < len(seqs) or not seqs:  # (Other ranks have no sequences.)
        tokens = logits.max(-1).indices  # same as argmax, but three times as fast
    if drawing:
        # Greedy rows are drawn, too. They may become NaN, because their temperature may
        # be 0, and what is drawn for them is not used.
        table = to_device(map(draw_params, seqs, batch.sample_positions), logits.device)
        numbers, temperature, *limits = table.split(1, dim=1)  # [num_samples, 1] each
        if any(p.top_k or p.top_p < 1 or p.min_p for p in drawing):
            logits = keep_likely(logits, params, temperature, *limits)
        drawn = draw(logits, temperature, numbers)
        if len(drawing) < len(seqs):
            drawn = torch.where(temperature[:, 0] < GREEDY, tokens, drawn)
        tokens = drawn

    wanted = {i: p.logprobs for i, p in enumerate(params) if p.logprobs is not None}
    reports = report_logprobs(
        raw[[*wanted]], tokens[[*wanted]], [*wanted.values()]) if wanted else []
    return SamplerOutput(tokens, dict(zip(wanted, reports, strict=True)))


# -- Draws and limits ------------------------------------------------------------------

@fused
def draw(logits: Tensor, temperature: Tensor, numbers: Tensor) -> Tensor:
    """For each row, the first token at which the sum of the probabilities exceeds the
    row's random number: [num_samples].

    logits: [num_samples, vocab_size]; the others: [num_samples, 1]. The vocabulary is
    split into parts. Their totals tell which part holds that token, and only that part
    needs running sums. A GPU adds in parallel and rounds each sum differently, so a sum
    may seem to grow where the probability is 0: such a token is never chosen.
    """
    padded = F.pad(logits, (0, -logits.shape[1] % PART), value=-torch.inf)
    probs: Tensor = (padded / temperature.float()).softmax(-1).unflatten(1, (-1, PART))
    totals = probs.sum(-1, dtype=torch.float64)  # [num_samples, num_parts]
    sums = totals.cumsum(-1)
    # The last sum need not be exactly 1. A random number times that sum is below it.
    numbers = numbers * sums[:, -1:]
    # Of zeros and ones, argmax finds the first 1.
    part = ((sums > numbers) & (totals > 0)).byte().argmax(-1, keepdim=True)
    left = numbers - (sums - totals).gather(1, part)  # for the tokens of this part
    index = part.unsqueeze(1).expand(-1, 1, PART)
    in_part = probs.gather(1, index).squeeze(1).double()
    sums = in_part.cumsum(-1)
    # `left` may be rounded up to the last of these sums, which none exceeds.
    left = left.minimum(sums[:, -1:] * (1 - RESOLUTION))
    return part.squeeze(1) * PART + ((sums > left) & (in_part > 0)).byte().argmax(-1)


def keep_likely(logits: Tensor, params: list[SamplingParams], temperature: Tensor,
                top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The logits, with -inf for each token that must not be drawn. The limits:

        min_p   tokens stay if they are at least min_p times as likely as the most
                likely one
        top_k   of these the k most likely tokens stay
        top_p   of these the most likely ones stay, up to and including the one that
                brings the sum of their probabilities to top_p

    Each limit is a threshold on the logits, so tied tokens stay or go together.
    """
    # How far below the highest logit a token may be: 0 or negative; -inf without min_p.
    gap = temperature * min_p.log()
    lowest = logits.amax(-1, keepdim=True) + gap.float()
    # Only rows with top_k or top_p are sorted.
    top_ks = {i: p.top_k for i, p in enumerate(params) if p.top_k or p.top_p < 1}
    if top_ks:
        at = to_device([*top_ks], logits.device)
        # If each of them has a top_k, the largest one says how many logits are needed.
        most = max(k or logits.shape[1] for k in top_ks.values())
        highest = highest_logits(logits[at], most)
        rows = (each[at] for each in (lowest, temperature, top_k, top_p))
        lowest[at] = lowest_kept(highest, *rows).to(lowest.dtype)
    return logits.masked_fill(logits < lowest, -torch.inf)


def highest_logits(logits: Tensor, most: int) -> Tensor:
    """The highest logits of each row, in descending order: `most` of them, or all.

    On a CPU, NumPy sorts all of them sooner than torch finds the first thousand: it
    sorts values without their indices, by vector instructions.
    """
    if not logits.is_cuda:
        ascending = torch.from_numpy(np.sort(logits.float().numpy()))
        return ascending[:, -most:].flip(-1)
    if most < logits.shape[1]:
        return logits.topk(most).values
    return logits.sort(descending=True).values


def lowest_kept(values: Tensor, lowest: Tensor, temperature: Tensor, top_k: Tensor,
                top_p: Tensor) -> Tensor:
    """The lowest logit that top_k and top_p leave: [num_samples, 1].

    values: [num_samples, num_values], logits, the highest first; lowest: what min_p
    leaves, [num_samples, 1]
    """
    is_out = torch.arange(values.shape[1], device=values.device) >= top_k
    is_out |= values < lowest
    scaled = (values.float() - values[:, :1]) / temperature.float()
    probs = scaled.masked_fill(is_out, -torch.inf).softmax(-1)
    before = probs.cumsum(-1) - probs  # of the more likely tokens
    is_out |= before >= top_p
    return values.masked_fill(is_out, torch.inf).amin(-1, keepdim=True)
