"""From logits to tokens: greedy or drawn, with seeds, and with log-probabilities.

A sampled token depends on its logits, on its request's parameters and seed, on its
position, and on which of the request's sequences it belongs to. It does not depend on
what else is in the batch.

A token is drawn in two stages. The vocabulary is cut into buckets of 128 tokens, and
one random number picks a bucket, then another one picks a token in it. Each picks
the first one at which the running sum of the probabilities exceeds it
(inverse-transform sampling). For example, if a bucket had two tokens:

    probabilities      0.1  0.4 | 0.2  0.3
    of the buckets          0.5 | 0.5       first number 0.7: the second bucket
    within that one               0.4  0.6  second number 0.3: its first token

Why not draw from all tokens at once? Sums over a vocabulary of 150,000 tokens need
float64, which takes 300 MB for 256 rows, and a GPU takes several kernels to sum up a
row that long. Here the longest sum is over the buckets. Why two numbers? If one
number decided both, few of its bits would be left for a token in an unlikely bucket.

A row of logits with a NaN yields an arbitrary token, and affects no other row.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor

from nanopaged.model import fused
from nanopaged.outputs import Logprob, Logprobs
from nanopaged.sequence import Sequence

GREEDY = 1e-5  # lower temperatures are greedy: dividing by them would overflow
BUCKET_SIZE = 128
NO_TOP_K = 2**31
# Random numbers are multiples of this, and below 1. A bucket, or a token within its
# bucket, that is less likely than this may never be drawn. Sums in float64 are more
# precise than this, so the sum of all probabilities exceeds every random number.
RESOLUTION = 2.0**-32


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

        The host waits for the device only here, and for log-probabilities and swaps.
        """
        if self.token_ids.is_cuda:
            self.copied.synchronize()
        return self.host_ids.tolist()


def sample(logits: Tensor, seqs: list[Sequence]) -> SamplerOutput:
    """One token for each row of logits, [num_samples, vocab_size], and so for each of
    the sequences that receive them.
    """
    raw, device = logits, logits.device
    params = [seq.group.params for seq in seqs]
    banned = [(i, token) for i, seq in enumerate(seqs) for token in seq.banned_tokens]
    if banned:
        at = to_device(np.array(banned), device).unbind(1)
        logits = logits.index_put(at, logits.new_full((), -torch.inf))

    tokens = logits.max(-1).indices  # same as argmax, but three times as fast
    drawing = [p for p in params if p.temperature >= GREEDY]
    if drawing:
        # [num_samples, 1] each, in one transfer
        table = to_device(np.array([draw_params(seq) for seq in seqs]), device)
        numbers = table[:, :2].split(1, dim=1)
        temperature, *limits = table[:, 2:].float().split(1, dim=1)
        if any(p.top_k or p.top_p < 1 or p.min_p for p in drawing):
            # Rows with a top_k need only the most likely tokens (at least 2 of them,
            # because torch would compile a size of 1 separately). If there are other
            # rows, too, their bounds are then computed from all tokens.
            top_ks = [p.top_k for p in drawing]
            most = min(max(2, *top_ks), logits.shape[1])
            values = logits.topk(most).values if any(top_ks) else logits
            lowest = lowest_kept(values, temperature, *limits)
            if any(top_ks) and not all(top_ks):
                others = lowest_kept(logits, temperature, *limits)
                lowest = lowest.where(limits[0] < NO_TOP_K, others)
            logits = logits.masked_fill(logits < lowest, -torch.inf)
        drawn = draw_tokens(logits, temperature, *numbers)
        # What is drawn at temperature 0 is meaningless, and is discarded.
        tokens = torch.where(temperature[:, 0] < GREEDY, tokens, drawn)

    logprobs = {i: report_logprobs(raw[i], int(tokens[i]), p.logprobs)
                for i, p in enumerate(params) if p.logprobs is not None}
    return SamplerOutput(tokens, logprobs)


def to_device(values: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Copy an array to the device. For a GPU it goes through pinned memory, because
    otherwise the host would wait for the copy.
    """
    tensor = torch.from_numpy(values)
    tensor = tensor.pin_memory() if device.type == "cuda" else tensor
    return tensor.to(device, non_blocking=True)


def report_logprobs(logits: Tensor, token: int, count: int) -> Logprobs:
    """The sampled token's log-probability, then those of the `count` most likely.

    logits: [vocab_size]
    """
    logprobs = logits.float().log_softmax(-1)
    likely = logprobs.topk(min(count, len(logprobs))).indices
    tokens = [token, *likely.tolist()]
    return dict(zip(tokens, map(Logprob, logprobs[tokens].tolist()), strict=True))


def draw_params(seq: Sequence) -> list[float]:
    """Two random numbers, the temperature, and the limits: top-k, top-p and min-p."""
    params = seq.group.params
    # All tokens before the new one are computed, so their number is its position. The
    # host knows it even if it has not read them yet.
    source = f"{seq.group.seed} {seq.index} {seq.num_computed_tokens}".encode()
    first, second = divmod(xxhash.xxh3_64_intdigest(source), 2**32)
    # With a top_p of 1 all must stay. Rounded sums may reach 1 too early, but never 2.
    top_p = params.top_p if params.top_p < 1 else 2
    return [first * RESOLUTION, second * RESOLUTION, params.temperature,
            params.top_k or NO_TOP_K, top_p, params.min_p]


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
    # take too long, so bisection finds the bound. Tokens up to `low` are out, and the
    # bound is in a range above it. At first that is the range from -128, where weights
    # are 0, to 0. After 32 halvings, float32 cannot tell the weights in it apart.
    low = torch.full_like(enough, -128)
    for i in range(32):
        middle = low + 64 / 2**i
        above = (weights * (scaled > middle)).sum(-1, keepdim=True)
        low = torch.where(above < enough, low, middle)
    is_out = (scaled <= low) | (scaled < min_p.log())
    return values.masked_fill(is_out, torch.inf).amin(-1, keepdim=True)
