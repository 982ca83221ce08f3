"""From logits to tokens: greedy, temperature, top-k, top-p, min-p, seeds, log-probabilities.

A sampled token depends on the logits, the request's seed and the position, never on who else is in
the batch. One uniform number a row decides (inverse-transform sampling): the first token at which
the cumulative probability exceeds it.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanopaged.attention import Ints, to_device
from nanopaged.sequence import Sequence

GREEDY = 1e-5  # temperatures below are greedy: dividing by them would overflow
ROW = [("seed", "u8"), ("temperature", "f4"), ("top_k", "i8"), ("top_p", "f4"), ("min_p", "f4"),
       ("min_len", "i8"), ("stops", "O"), ("logprobs", "i8")]


@dataclass
class SamplerOutput:
    token_ids: Tensor  # [num_rows], still on the device
    logprobs: dict[int, dict[int, float]] = field(default_factory=dict)  # of the rows that asked

    def __post_init__(self) -> None:
        # Queued behind this step and before the next one, so that `read` waits for this one alone.
        self.host_ids = self.token_ids.to("cpu", non_blocking=True)
        self.sent = torch.cuda.current_stream().record_event() if self.token_ids.is_cuda else None

    def read(self) -> list[int]:
        """Wait for the tokens."""
        if self.sent is not None:
            self.sent.synchronize()
        return self.host_ids.tolist()


def uniform(seeds: NDArray[np.uint64], positions: Ints) -> NDArray[np.float32]:
    """Numbers in [0, 1), one for every (seed, position): splitmix64 (Steele et al., OOPSLA 2014).

    They have 23 bits, so that a float32 product with a sum is always below that sum.
    """
    x = seeds + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits: NDArray[np.uint64] = (x ^ (x >> np.uint64(31))) >> np.uint64(41)
    return bits.astype(np.float32) * np.float32(2.0**-23)


def restrict(logits: Tensor, most: int, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Logits with -inf for all but the likely tokens; top_k, top_p, min_p are [num_rows, 1].

    The k most likely of all, of these the fewest whose probabilities reach top_p (the one that
    crosses it included), of these the ones with at least min_p times the highest probability.
    The cut is a value, so that tied tokens stay or go together, however many rows share the call.
    `most` is the largest top_k, or the number of tokens, so that the device need not be asked.
    """
    top_k = torch.where(top_k > 0, top_k, logits.shape[1]).clamp(max=logits.shape[1])
    values = logits.topk(min(most, logits.shape[1]), dim=-1).values  # sorted: [num_rows, most]
    weights = (values - values[:, :1]).exp()  # probabilities, in units of the highest
    sums = weights.cumsum(-1)
    goal = torch.where(top_p < 1, top_p * sums.gather(1, top_k - 1), torch.inf)
    rank = torch.arange(values.shape[1], device=logits.device)
    kept = (rank < top_k) & (sums - weights < goal) & (weights >= min_p)
    lowest = values.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
    return logits.masked_fill(logits < lowest, -torch.inf)


class Sampler:
    """Holds the parameters of the sequence in every row, so that a step only has to index them."""

    def __init__(self, max_num_seqs: int) -> None:
        self.params = np.zeros(max_num_seqs, ROW)

    def set_row(self, seq: Sequence) -> None:
        group, p = seq.group, seq.group.params
        seed = (group.seed + seq.index * 0xD1B54A32D192ED03) % 2**64  # n=1 draws what index 0 does
        logprobs = 0 if p.logprobs is None else p.logprobs + 1  # 0: none are wanted
        self.params[seq.row] = (seed, p.temperature, p.top_k, p.top_p, p.min_p,
                                group.min_len, sorted(group.stop_token_ids), logprobs)

    def sample(self, logits: Tensor, rows: Ints, positions: Ints) -> SamplerOutput:
        """logits: [num_rows, vocab_size]; rows: whose they are; positions: of the new tokens."""
        params = self.params[rows]
        asked = np.flatnonzero(params["logprobs"])
        logprobs = logits[to_device(asked, logits.device)].float().log_softmax(-1)
        for i in np.flatnonzero(positions < params["min_len"]).tolist():
            logits[i, params["stops"][i]] = -torch.inf
        drawn = params["temperature"] >= GREEDY
        # The indices of max are argmax's, the first of equals, in a third of its time.
        tokens = self.draw(logits, params, positions) if drawn.any() else logits.max(-1).indices
        if drawn.any() and not drawn.all():
            tokens = torch.where(to_device(drawn, logits.device), tokens, logits.max(-1).indices)
        output = SamplerOutput(tokens)
        for i, row in zip(asked.tolist(), logprobs, strict=True):
            top = row.topk(int(params["logprobs"][i]) - 1).indices
            chosen = torch.cat((top, tokens[i : i + 1]))
            output.logprobs[i] = dict(zip(chosen.tolist(), row[chosen].tolist(), strict=True))
        return output

    def draw(self, logits: Tensor, params: Any, positions: Ints) -> Tensor:
        temperature = to_device(np.maximum(params["temperature"], GREEDY), logits.device)
        logits = logits / temperature[:, None]  # [num_rows, vocab_size], float32 from here on
        restricted = (params["top_k"] > 0) | (params["top_p"] < 1) | (params["min_p"] > 0)
        some = np.flatnonzero(restricted)
        if some.size:
            rows, top_k = to_device(some, logits.device), params["top_k"][some]
            most = int(top_k.max()) if top_k.min() > 0 else logits.shape[1]
            limits = (to_device(params[name][some, None], logits.device)
                      for name in ("top_k", "top_p", "min_p"))
            logits[rows] = restrict(logits[rows], most, *limits)
        cumulative = logits.softmax(-1).cumsum_(-1)  # in place: fresh pages cost more than sums
        numbers = to_device(uniform(params["seed"], positions), logits.device)[:, None]
        return torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)[:, 0]
