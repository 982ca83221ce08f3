"""How tokens are drawn, and which may be drawn: what top_k, top_p and min_p leave.

A token is drawn in two stages. The vocabulary is cut into buckets of 128 tokens, and
one random number picks a bucket, then another one picks a token in it. For example, if
a bucket had two tokens:

    probabilities      0.1  0.4 | 0.2  0.3
    of the buckets          0.5 | 0.5       first number 0.7: the second bucket
    within that one               0.4  0.6  second number 0.3: its first token

Why not draw from all tokens at once? Sums over a vocabulary of 150,000 tokens need
float64, which takes 300 MB for 256 rows, and a GPU takes several kernels to sum up a
row that long. Here the longest sum is over the buckets. Why two numbers? If one
number decided both, few of its bits would be left for a token in an unlikely bucket.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanopaged.batch import Batch
from nanopaged.fused import fused
from nanopaged.outputs import Logprob, Logprobs

BUCKET_SIZE = 128
NO_TOP_K = 2**31
# Random numbers are k * 2^-32, and below 1. That is much coarser than the rounding of
# float64, so the last running sum exceeds them all. (A bucket, or a token within its
# bucket, that is less likely than this may never be drawn.)
RESOLUTION = 2.0**-32


def to_device(rows: list[Any], device: torch.device) -> Tensor:
    """Rows of numbers as a tensor. For a GPU they go through pinned memory, because
    otherwise the host would wait for the copy.
    """
    tensor = torch.from_numpy(np.array(rows))
    tensor = tensor.pin_memory() if device.type == "cuda" else tensor
    return tensor.to(device, non_blocking=True)


@fused
def draw_tokens(logits: Tensor, temperature: Tensor, first: Tensor,
                second: Tensor) -> Tensor:
    """Draw a token for each row, by its two random numbers: [num_samples].

    logits: [num_samples, vocab_size]; the others: [num_samples, 1].
    """
    padding = -logits.shape[1] % BUCKET_SIZE
    scaled = F.pad(logits.float(), (0, padding), value=-torch.inf) / temperature
    buckets = scaled.unflatten(1, (-1, BUCKET_SIZE))  # [.., num_buckets, BUCKET_SIZE]
    bucket = draw(buckets.logsumexp(-1), first)  # [num_samples, 1]
    at = bucket[..., None].expand(-1, -1, BUCKET_SIZE)
    token = draw(buckets.gather(1, at).squeeze(1), second)
    return (bucket * BUCKET_SIZE + token).squeeze(1)


def draw(logits: Tensor, numbers: Tensor) -> Tensor:
    """The first index at which the sum of the probabilities exceeds the number:
    [num_samples, 1].

    logits: [num_samples, num_logits]; numbers: [num_samples, 1]. A GPU adds in parallel
    and rounds each sum differently, so a sum may seem to grow where the probability is
    0: such an index is never chosen.
    """
    probs = logits.softmax(-1, dtype=torch.float64)
    is_above = (probs.cumsum(-1) > numbers) & (probs > 0)
    return is_above.byte().argmax(-1, keepdim=True)  # the first one


def keep_likely(logits: Tensor, top_ks: list[int], temperature: Tensor, top_k: Tensor,
                top_p: Tensor, min_p: Tensor) -> Tensor:
    """The logits, with -inf for each token that must not be drawn.

    top_ks: of the requests that draw, 0 for none; the others are as in `lowest_kept`.
    """
    if not all(top_ks):  # some rows have no top_k: all their tokens count
        lowest = lowest_kept(logits, temperature, top_k, top_p, min_p)
    if any(top_ks):
        # The others need only the most likely tokens (at least 2 of them, because torch
        # would compile a size of 1 separately).
        most = min(max(2, *top_ks), logits.shape[1])
        likely = logits.topk(most).values
        bounds = lowest_kept(likely, temperature, top_k, top_p, min_p)
        lowest = bounds if all(top_ks) else bounds.where(top_k < NO_TOP_K, lowest)
    return logits.masked_fill(logits < lowest, -torch.inf)


@fused
def lowest_kept(values: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor,
                min_p: Tensor) -> Tensor:
    """The lowest logit of the tokens that may be drawn: [num_samples, 1].

    values: [num_samples, num_values], logits, the highest first if any row has a top_k;
    the others: [num_samples, 1]. The limits:

        top_k   the k most likely tokens stay
        top_p   of these the most likely ones stay, up to and including the one that
                brings the sum of their probabilities to top_p
        min_p   of these, the tokens stay if they are at least min_p times as likely
                as the most likely one

    The result is one of the values, so that tied tokens stay or go together.
    """
    is_out = torch.arange(values.shape[1], device=values.device) >= top_k
    values = values.float().masked_fill(is_out, -torch.inf)
    scaled = (values - values.amax(-1, keepdim=True)) / temperature
    weights = scaled.exp()  # probabilities, up to a common factor
    enough = top_p * weights.sum(-1, keepdim=True)
    # A token is out if the tokens above it are already enough. Sorting all tokens would
    # take too long, so bisection looks for the cut. `scaled` is 0 for the most likely
    # token and negative for the others, and what is above `low` stays. At first `low`
    # is -128, where weights are 0. Before round i, the tokens above `low` are enough,
    # and those above low + 128 / 2**i are not. After 32 rounds, float32 cannot tell the
    # weights in between apart. (With a top_p of 2 not even all tokens are enough, so
    # `low` never moves.)
    low = torch.full_like(enough, -128)
    for i in range(32):
        middle = low + 64 / 2**i
        above = (weights * (scaled > middle)).sum(-1, keepdim=True)
        low = torch.where(above < enough, low, middle)
    is_out = (scaled <= low) | (scaled < min_p.log())
    return values.masked_fill(is_out, torch.inf).amin(-1, keepdim=True)


def report_logprobs(logits: Tensor, token: int, count: int) -> Logprobs:
    """The token's log-probability, then those of the `count` most likely ones.

    logits: [vocab_size]
    """
    logprobs = logits.float().log_softmax(-1)
    likely = logprobs.topk(min(count, len(logprobs))).indices
    tokens = [token, *likely.tolist()]
    ranks = [1 + int((logprobs > logprobs[token]).sum()), *range(1, len(tokens))]
    found = map(Logprob, logprobs[tokens].tolist(), ranks)
    return dict(zip(tokens, found, strict=True))


def score_prompts(head: Any, states: Tensor, batch: Batch) -> None:
    """Report the log-probabilities of prompt tokens, each from the state before it.

    states: [num_tokens, hidden_size]. All their logits at once could take gigabytes.
    """
    if all(group.params.prompt_logprobs is None for group in batch.groups):
        return
    entries = states[: sum(batch.counts)].split(batch.counts)
    for group, entry, end in zip(batch.groups, entries, batch.ends, strict=False):
        if (count := group.params.prompt_logprobs) is None:
            continue
        first = end - len(entry)
        tokens = group.prompt_token_ids[first + 1 : end + 1]
        for start in range(0, len(tokens), 256):
            logits = head(entry[start : start + 256])
            for i, (row, token) in enumerate(zip(logits, tokens[start:], strict=False)):
                position = first + start + i + 1
                group.prompt_logprobs[position] = report_logprobs(row, token, count)
