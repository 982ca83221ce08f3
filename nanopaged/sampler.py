"""From logits to tokens: greedy or drawn, with seeds, and with log-probabilities.

A sampled token depends on its logits, its request's parameters and seed, which of the
request's sequences it belongs to, and its position, and on nothing else in the batch.
Two random numbers decide, the first on a part of the vocabulary, the second on a token
in it: each picks the first one at which the cumulative probability exceeds the number
(inverse-transform sampling). A row of logits that has NaN gives some token, and changes
no other row's.
"""

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
PART_SIZE = 128  # tokens in a part of the vocabulary
# Random numbers are multiples of this, and below 1. A part, or a token within its part,
# that is less likely than this may never be drawn. Sums in float64 are more exact, so
# the whole sum exceeds every random number.
RESOLUTION = 2.0**-32


class SamplerOutput:
    """The tokens of a step; until they are read, only the device knows them."""

    def __init__(self, token_ids: Tensor, logprobs: dict[int, Logprobs]) -> None:
        self.token_ids = token_ids  # [num_samples]
        self.logprobs = logprobs  # by sample, of those that ask for them
        # This copy is queued before the next step, so `read` waits for this step alone.
        self.host_ids = token_ids.to("cpu", non_blocking=True)
        if token_ids.is_cuda:
            self.copied = torch.cuda.current_stream().record_event()

    def read(self) -> list[int]:
        """Wait for the tokens.

        Nowhere else does the host wait for the device, except for log-probabilities.
        """
        if self.token_ids.is_cuda:
            self.copied.synchronize()
        return self.host_ids.tolist()


def sample(logits: Tensor, seqs: list[Sequence]) -> SamplerOutput:
    """One token for each row of logits, [num_samples, vocab_size]; seqs: those that get
    the tokens.
    """
    raw, device = logits, logits.device
    params = [seq.group.params for seq in seqs]
    banned = [(i, token) for i, seq in enumerate(seqs) for token in seq.banned_tokens]
    if banned:
        at = to_device(np.array(banned), device).unbind(1)
        logits = logits.index_put(at, logits.new_full((), -torch.inf))

    tokens = logits.max(-1).indices  # as argmax, in a third of the time
    if any(p.temperature >= GREEDY for p in params):
        # [num_samples, 1] each, in a single copy
        table = to_device(np.array([draw_params(seq) for seq in seqs]), device)
        temperature, first, second, *limits = table.split(1, dim=1)
        if any(p.top_k or p.top_p < 1 for p in params):
            max_top_k = max(p.top_k or logits.shape[1] for p in params)
            lowest = lowest_kept(logits, max_top_k, temperature, *limits)
            logits = logits.masked_fill(logits < lowest, -torch.inf)
        drawn = draw_tokens(logits, temperature.float(), first, second)
        # What is drawn at temperature 0 means nothing, and is not taken.
        tokens = torch.where(temperature[:, 0] < GREEDY, tokens, drawn)

    logprobs = {i: report_logprobs(raw[i], int(tokens[i]), p.logprobs)
                for i, p in enumerate(params) if p.logprobs is not None}
    return SamplerOutput(tokens, logprobs)


def report_logprobs(logits: Tensor, token: int, count: int) -> Logprobs:
    """The sampled token's log-probability, then those of the `count` most likely.

    logits: [vocab_size]
    """
    logprobs = logits.float().log_softmax(-1)
    likely = logprobs.topk(min(count, len(logprobs))).indices
    tokens = [token, *likely.tolist()]
    return dict(zip(tokens, map(Logprob, logprobs[tokens].tolist()), strict=True))


def draw_params(seq: Sequence) -> list[float]:
    """Temperature, two random numbers, top-k and top-p."""
    params = seq.group.params
    # All tokens before the new one are computed: this is its position, which the host
    # knows even if it has not read them yet.
    source = f"{seq.group.seed} {seq.index} {seq.num_computed_tokens}".encode()
    first, second = divmod(xxhash.xxh3_64_intdigest(source), 2**32)
    return [params.temperature, first * RESOLUTION, second * RESOLUTION,
            params.top_k or 2**31, params.top_p]


@fused
def draw_tokens(logits: Tensor, temperature: Tensor, first: Tensor,
                second: Tensor) -> Tensor:
    """Draw a token for each row, by its numbers in [0, 1): [num_samples].

    logits: [num_samples, vocab_size]; the others: [num_samples, 1]. First a part of 128
    tokens is drawn, by the sum of their probabilities, then a token within it. So all
    logits are read once, and no cumulative sum is longer than a row has parts.
    """
    padding = -logits.shape[1] % PART_SIZE
    parts = F.pad(logits.float(), (0, padding), value=-torch.inf) / temperature
    parts = parts.unflatten(1, (-1, PART_SIZE))  # [num_samples, num_parts, PART_SIZE]
    part = draw(parts.logsumexp(-1), first)
    logits = parts.gather(1, part[..., None].expand(-1, -1, PART_SIZE)).squeeze(1)
    token = draw(logits, second)
    return (part * PART_SIZE + token).squeeze(1)


def draw(logits: Tensor, numbers: Tensor) -> Tensor:
    """The first index at which the sum of the probabilities exceeds the number.

    logits: [num_samples, num_logits]; the others: [num_samples, 1]. On a GPU the sums
    are made in parallel, and each is rounded in its own way, so one may seem to grow at
    a probability of 0: such an index is never chosen.
    """
    probs = logits.softmax(-1, dtype=torch.float64)
    is_above = (probs.cumsum(-1) > numbers) & (probs > 0)
    return is_above.byte().argmax(-1, keepdim=True)  # the first one


def lowest_kept(logits: Tensor, max_top_k: int, temperature: Tensor, top_k: Tensor,
                top_p: Tensor) -> Tensor:
    """The lowest logit of the tokens that may be drawn: [num_samples, 1].

    logits: [num_samples, vocab_size]; temperature, top_k, top_p: [num_samples, 1];
    max_top_k: the largest top_k, which the host knows. Two limits, one by one:

        top_k   the k most likely tokens stay
        top_p   of these the most likely ones stay, up to and with the one that brings
                the sum of their probabilities to top_p

    The result is a logit, so that tied tokens stay or go together.
    """
    values = logits.topk(min(max_top_k, logits.shape[1]), dim=-1).values  # sorted
    is_out = torch.arange(values.shape[1], device=logits.device) >= top_k
    probs = (values / temperature.float()).masked_fill(is_out, -torch.inf).softmax(-1)
    is_out |= (probs.cumsum(-1) - probs >= top_p) & (top_p < 1)
    return values.masked_fill(is_out, torch.inf).amin(-1, keepdim=True)
