"""From logits to tokens: greedy, or drawn with a seed.

Given its logits, a sampled token depends on its request's parameters and seed, its
position and its sequence's index, and on nothing else in the batch.

A draw takes the first token at which the running sum of the probabilities exceeds a
random number from 0 to 1 (inverse-transform sampling). Only tokens that top_k, top_p
and min_p leave have a probability.
"""

import numpy as np
import torch
from torch import Tensor

from nanopaged.batch import MODEL_FAILED, RESOLUTION, Batch
from nanopaged.config import SamplingParams
from nanopaged.fused import Ops
from nanopaged.logits import TokenCounts, process, to_device
from nanopaged.logprobs import report_logprobs
from nanopaged.sequence import Logprobs

GREEDY = 1e-5  # lower temperatures are greedy: dividing by them would overflow
PART = 512  # tokens in each part of the vocabulary: see `search`


class SamplerOutput:
    """The tokens of a step; until they are read, only the device knows them."""

    def __init__(self, token_ids: Tensor, logprobs: dict[int, Logprobs]) -> None:
        # [num_samples]: tokens, or MODEL_FAILED or REQUEST_FAILED.
        self.token_ids = token_ids
        self.logprobs = logprobs  # by sample, for requests that want them
        # The copy is queued before the next step, so `read` waits for this step alone.
        self.host_ids = token_ids.to("cpu", non_blocking=True)
        if token_ids.is_cuda:
            self.copied = torch.cuda.current_stream().record_event()

    def read(self) -> list[int]:
        """Wait for the tokens."""
        if self.token_ids.is_cuda:
            self.copied.synchronize()
        return self.host_ids.tolist()


def sample(batch: Batch, counts: TokenCounts, ops: Ops, raw: Tensor, draws: Tensor,
           tokens: Tensor | None = None) -> SamplerOutput:
    """A token for each sample of a step. If no prompt is complete and nothing decodes,
    there is none, and these tensors have no rows.

    raw: the model's logits, [num_samples, vocab_size]; draws: `Metadata.draws`; tokens:
    what `choose` has made of both within a recorded step, if this is one
    """
    params = [seq.group.params for seq in batch.receivers]
    logits = changed = process(raw, batch, draws, counts, ops)
    drawing = [each for each in params if each.temperature >= GREEDY]
    if any(each.top_k or each.top_p < 1 or each.min_p for each in drawing):
        logits = keep_likely(logits, params, draws, ops)
    # `is not raw`: a request has changed the logits, or limited the draws. Then the
    # tokens that a recorded step has chosen from the raw logits do not count.
    if tokens is None or logits is not raw:
        any_greedy = len(drawing) < len(raw)
        tokens = choose(logits, draws, ops, any_greedy, bool(drawing))
    if changed is not raw:
        tokens = ops.mark(tokens, raw)

    wanted = {i: p.logprobs for i, p in enumerate(params) if p.logprobs is not None}
    rows = [*wanted]
    reports = report_logprobs(
        raw[rows], tokens[rows].clamp(min=0), [*wanted.values()]) if wanted else []
    return SamplerOutput(tokens, dict(zip(wanted, reports, strict=True)))


def choose(logits: Tensor, draws: Tensor, ops: Ops, any_greedy: bool = True,
           any_drawn: bool = True) -> Tensor:
    """A token for each row: the most likely one, or a drawn one. A row with a NaN or
    +inf, or with nothing but -inf, gets MODEL_FAILED.
    """
    if any_drawn:
        # Greedy rows are drawn, too, but not used: their probabilities may be NaN.
        uniform, temperature, *_ = draws[:, :, None]  # [num_samples, 1] each
        drawn: Tensor = ops.draw(logits, temperature, uniform)
        if not any_greedy:
            return drawn
    # The same as argmax, but three times as fast. A NaN counts as the highest value.
    highest, likely = logits.max(-1)
    likely = likely.where(highest.isfinite(), MODEL_FAILED)
    return drawn.where(draws[1] >= GREEDY, likely) if any_drawn else likely


# -- Draws and limits ------------------------------------------------------------------

def draw(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """A token for each row of logits, [num_samples, vocab_size] -> [num_samples]. The
    others are [num_samples, 1].
    """
    probs = (logits / temperature.float()).softmax(-1)  # all NaN in an unusable row
    tokens = search(probs, uniform)
    return tokens.where(probs.gather(1, tokens) >= 0, MODEL_FAILED).squeeze(1)


def search(probs: Tensor, numbers: Tensor) -> Tensor:
    """Where the running sum of each row of probabilities first exceeds its number:
    [num_rows, 1]. Because of rounding, a row may not add up to 1, so its number is
    multiplied by its sum.

    Running sums of a whole vocabulary would take long, so the totals of its parts come
    first. If they are 0.5, 0.3 and 0.2, the second part has the number 0.6, and 0.1 is
    left to search for in it.
    """
    padding = PART - probs.shape[1] % PART
    parts = torch.nn.functional.pad(probs, (0, padding)).unflatten(1, (-1, PART))
    totals = parts.sum(-1, dtype=torch.float64)  # [num_rows, num_parts]
    part, left = first_above(totals, numbers * totals.sum(-1, keepdim=True))
    index = part.unsqueeze(1).expand(-1, 1, PART)
    place, _ = first_above(parts.gather(1, index).squeeze(1).double(), left)
    return part * PART + place


def first_above(weights: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Where the running sum of each row first exceeds its number, and the number minus
    the sum before that place: [num_rows, 1] each.
    """
    sums = weights.cumsum(-1)
    # Numbers must stay below the last sum. Otherwise no sum would exceed them.
    numbers = numbers.minimum(sums[:, -1:] * (1 - RESOLUTION))
    # On a GPU, rounding may let the sum grow at a token of weight 0, which must not be
    # drawn. Of zeros and ones, argmax finds the first 1.
    place = ((sums > numbers) & (weights > 0)).byte().argmax(-1, keepdim=True)
    return place, numbers - (sums - weights).gather(1, place)


def keep_likely(logits: Tensor, params: list[SamplingParams], draws: Tensor, ops: Ops
                ) -> Tensor:
    """The logits, with -inf for each token that must not be drawn. The limits:
        min_p   tokens stay if they are at least min_p times as likely as the most
                likely one
        top_k   of these the k most likely tokens stay
        top_p   of these the most likely ones stay, up to and including the one that
                brings the sum of their probabilities to top_p

    Each limit is a threshold on the logits, so tied tokens stay or go together. For a
    new limit, add a field to `SamplingParams` and name it in `sample`. Add it to
    `draw_numbers` and to `Draws`, in the same place before the penalties. Use it here.
    """
    _, temperature, top_k, top_p, min_p, *_ = draws.unsqueeze(-1)
    # The lowest logit that min_p allows: -inf without min_p. In a greedy row it may be
    # 0 * -inf, a NaN, which masks nothing.
    lowest = logits.amax(-1, keepdim=True) + (temperature * min_p.log()).float()
    # Only rows with top_k or top_p are sorted.
    top_ks = {i: p.top_k for i, p in enumerate(params) if p.top_k or p.top_p < 1}
    if top_ks:
        at = to_device([*top_ks], logits.device)
        # If each has a top_k, the largest one says how many logits are needed. Take at
        # least two, because torch.compile treats a single one as a case of its own.
        most = max(2, *(k or logits.shape[1] for k in top_ks.values()))
        highest = highest_logits(logits[at], most)
        rows = (each[at] for each in (lowest, temperature, top_k, top_p))
        lowest[at] = ops.lowest_kept(highest, *rows).to(lowest.dtype)
    return logits.masked_fill(logits < lowest, -torch.inf)


def highest_logits(logits: Tensor, most: int) -> Tensor:
    """The highest logits of each row, in descending order: `most` of them, or all."""
    if not logits.is_cuda:  # NumPy is faster at this than torch
        most = min(most, logits.shape[1])
        likely = np.partition(logits.float().numpy(), -most)[:, -most:]
        return torch.from_numpy(np.sort(likely)).flip(-1)
    if most < logits.shape[1]:
        return logits.topk(most).values
    return logits.sort(descending=True).values


def lowest_kept(values: Tensor, lowest: Tensor, temperature: Tensor, top_k: Tensor,
                top_p: Tensor) -> Tensor:
    """The lowest logit that min_p, top_k and top_p leave: [num_samples, 1]. First drop
    what is below `lowest`, and all after the first top_k. Of the rest, keep the
    shortest beginning whose probabilities add up to top_p, and return its last logit.

    values: [num_samples, num_values], logits, the highest first; lowest: what min_p
    leaves, [num_samples, 1]
    """
    place = torch.arange(values.shape[1], device=values.device)
    is_out = (place >= top_k) | (values < lowest)
    scaled = (values.float() - values[:, :1]) / temperature.float()
    probs = scaled.masked_fill(is_out, -torch.inf).softmax(-1)
    last = search(probs, top_p * (1 - RESOLUTION))  # where the sum reaches top_p
    all_left = values.masked_fill(is_out, torch.inf).amin(-1, keepdim=True)
    return torch.where(top_p < 1, values.gather(1, last), all_left)
