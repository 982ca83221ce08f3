"""From logits to tokens: greedy, or drawn with a seed.

A sampled token depends on its logits, on its request's parameters and seed, on its
position, and on which of the request's sequences it belongs to, but not on the rest of
the batch. A row of logits with a NaN yields an arbitrary token.

To draw is to compare the running sum of the probabilities with a random number from 0
to 1: the first token at which the sum exceeds the number is taken (inverse-transform
sampling). How that is done fast, and only among the tokens that top_k, top_p and min_p
leave, is left to `drawing.py`, in the second reading.
"""

import torch
import xxhash
from torch import Tensor

from nanopaged import drawing
from nanopaged.outputs import Logprobs
from nanopaged.processors import process
from nanopaged.sequence import Sequence

GREEDY = 1e-5  # lower temperatures are greedy: dividing by them would overflow


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
    """A token for each sequence, from its row of logits: [num_samples, vocab_size]."""
    raw, device = logits, logits.device
    params = [seq.group.params for seq in seqs]
    logits = process(logits, seqs)
    tokens = logits.max(-1).indices  # same as argmax, but three times as fast
    drawers = [p for p in params if p.temperature >= GREEDY]
    if drawers:
        # [num_samples, 1] each: two random numbers, the temperature, and three limits
        table = drawing.to_device([draw_params(seq) for seq in seqs], device)
        numbers = table[:, :2].split(1, dim=1)
        temperature, *limits = table[:, 2:].float().split(1, dim=1)
        if any(p.top_k or p.top_p < 1 or p.min_p for p in drawers):
            top_ks = [p.top_k for p in drawers]  # they say how many tokens to look at
            logits = drawing.keep_likely(logits, top_ks, temperature, *limits)
        drawn = drawing.draw_tokens(logits, temperature, *numbers)
        # What is drawn at temperature 0 is meaningless, and is discarded.
        tokens = torch.where(temperature[:, 0] < GREEDY, tokens, drawn)

    logprobs = {i: drawing.report_logprobs(raw[i], int(tokens[i]), p.logprobs)
                for i, p in enumerate(params) if p.logprobs is not None}
    return SamplerOutput(tokens, logprobs)


def draw_params(seq: Sequence) -> list[float]:
    """Two random numbers (for two stages: see `drawing.py`), temperature, limits."""
    params = seq.group.params
    # All tokens before the new one are computed, so their number is its position. The
    # host knows it even if it has not read them yet.
    source = f"{seq.group.seed} {seq.index} {seq.num_computed_tokens}".encode()
    first, second = divmod(xxhash.xxh3_64_intdigest(source), 2**32)
    # With a top_p of 1 all must stay. Rounded sums may reach 1 too early, but never 2.
    top_p = params.top_p if params.top_p < 1 else 2
    return [first * drawing.RESOLUTION, second * drawing.RESOLUTION,
            params.temperature, params.top_k or drawing.NO_TOP_K, top_p, params.min_p]
