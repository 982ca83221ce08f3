"""What changes logits before a token is chosen, and what is reported about them.

A request may bring logits processors, biases and penalties, and may ban tokens. It may
also ask for log-probabilities: of the sampled tokens, and of those of its prompt.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopaged.batch import Batch
from nanopaged.checks import check
from nanopaged.sequence import Logprob, Logprobs, Sequence

# Logits that requests have changed are cut to this, so that they can be divided by any
# temperature. (A logits processor may force a token by +inf.)
HIGHEST = 1e30
ROWS = 64  # at most this many rows of a prompt's logits are in memory at once


def to_device(numbers: Any, device: torch.device, dtype: Any = np.int64) -> Tensor:
    """Numbers, as a tensor. For a GPU they go through pinned memory, because otherwise
    the host would wait for the copy.
    """
    tensor = torch.from_numpy(np.array(numbers, dtype))
    tensor = tensor.pin_memory() if device.type == "cuda" else tensor
    return tensor.to(device, non_blocking=True)


def process(logits: Tensor, batch: Batch, last_tokens: Tensor, ops: Any) -> Tensor:
    """The logits as the requests change them: first by their logits processors, then by
    biases and bans, then by penalties. If nothing changes them, these are the same.

    logits: [num_samples, vocab_size]; last_tokens: see `fill_pending`
    """
    seqs, positions = batch.receivers, batch.sample_positions
    params = [seq.group.params for seq in seqs]
    # What is added to the logits. Before `min_tokens`, no stop token may be sampled.
    edits = [(i, token, -torch.inf) for i, seq in enumerate(seqs)
             if positions[i] < seq.group.min_len
             for token in seq.group.banned_token_ids]
    edits += [(i, *pair) for i, each in enumerate(params) if each.logit_bias
              for pair in each.logit_bias.items()]
    if not edits and not any(each.changes_logits for each in params):
        return logits
    logits = logits.to(torch.float32, copy=True)
    for i, seq in enumerate(seqs):
        if params[i].logits_processors:
            call_processors(seq, logits[i : i + 1])
    if edits:
        rows, ids, values = zip(*edits, strict=True)
        at = to_device((rows, ids), logits.device).unbind()
        added = to_device(values, logits.device, np.float32)
        logits.index_put_(at, added, accumulate=True)
    if any(each.has_penalties for each in params):
        factors = [each.penalties for each in params]
        logits = ops.penalize(
            logits, count_tokens(seqs, logits.shape[1], last_tokens, ops),
            to_device(factors, logits.device, np.float32))
    return logits.clamp_(max=HIGHEST)


def call_processors(seq: Sequence, row: Tensor) -> None:
    """Let the functions of a request change its row of logits, [1, vocab_size]."""
    new = row.clone()  # a function may keep what it gets
    try:
        for function in seq.group.params.logits_processors or []:
            new = function(to_device([seq.token_ids], row.device), new)
        is_right = isinstance(new, Tensor) and new.is_floating_point()
        check(is_right and new.shape == row.shape, "what logits_processors return",
              f"{[*row.shape]} logits", new)
        row.copy_(new)
    except Exception as error:  # only this request ends: see `Scheduler.update`
        seq.group.errors = [error]


def count_tokens(seqs: list[Sequence], vocab_size: int, last_tokens: Tensor, ops: Any
                 ) -> Tensor:
    """How often each token is in each sequence that has penalties: [num_samples,
    vocab_size]. Tokens of the answer are counted in whole numbers, and those of the
    prompt in a fraction that never adds up to 1. So `counts > 0` sees both, and rounded
    down they are the answer's alone (`penalize`).
    """
    # (The last pending token is the one to be sampled now.)
    rows = [[*seq.token_ids, *seq.pending[:-1]]
            if seq.group.params.has_penalties else [] for seq in seqs]
    shape = len(seqs), max(map(len, rows))
    ids, weights = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    for i, (seq, row) in enumerate(zip(seqs, rows, strict=True)):
        ids[i, : len(row)] = row
        weights[i, : len(row)] = 1
        weights[i, : seq.group.num_prompt_tokens] = 2.0**-24
    device = last_tokens.device
    known = ops.fill_pending(to_device(ids.ravel(), device), last_tokens).view(shape)
    added = to_device(weights, device, np.float32)
    return added.new_zeros(len(seqs), vocab_size).scatter_add_(1, known, added)


def fill_pending(token_ids: Tensor, last_tokens: Tensor) -> Tensor:
    """Replace pending tokens: -1 - i stands for sample i of the last step. (For all
    other tokens, sample 0 is looked up, and not used.)
    """
    pending = last_tokens[(-1 - token_ids).clamp(min=0)]
    return torch.where(token_ids < 0, pending, token_ids)


def mark(tokens: Tensor, logits: Tensor) -> Tensor:
    """The tokens, but -1 for each row of logits that has a NaN, nothing but -inf, or
    nothing but HIGHEST, which stands for +inf.
    """
    low, high = logits.aminmax(dim=-1)
    return tokens.where(high.isfinite() & (low < HIGHEST), -1)


def penalize(logits: Tensor, counts: Tensor, factors: Tensor) -> Tensor:
    """Penalties, as vLLM defines them. The repetition penalty also looks at the prompt;
    the others only at what was sampled.

    logits, counts: [num_samples, vocab_size]; factors: [num_samples, 3], `penalties`
    """
    repetition, presence, frequency = factors.split(1, dim=1)
    worse = torch.where(logits < 0, logits * repetition, logits / repetition)
    logits = torch.where(counts > 0, worse, logits)
    in_answer = counts.floor()
    penalty: Tensor = presence * (in_answer > 0) + frequency * in_answer
    return logits - penalty


# -- Log-probabilities -----------------------------------------------------------------


def report_logprobs(logits: Tensor, tokens: Tensor, counts: list[int]
                    ) -> list[Logprobs]:
    """For each row, the log-probability of its token, and then those of the most likely
    tokens: counts[i] of them in row i.

    logits: [num_rows, vocab_size]; tokens: [num_rows]
    """
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, tokens[:, None])
    own_ranks = 1 + (logprobs > own).sum(-1, keepdim=True)
    likely = logprobs.topk(min(max(counts, default=0), logprobs.shape[1]))
    # How many values are higher than each: logits 5, 3, 3, 1 give 0, 1, 1, 3, so tied
    # tokens share a rank. (`searchsorted` needs ascending values, hence negative ones.)
    num_higher = torch.searchsorted(-likely.values, -likely.values)
    ids = torch.cat((tokens[:, None], likely.indices), 1).tolist()
    values = torch.cat((own, likely.values), 1).tolist()
    ranks = torch.cat((own_ranks, 1 + num_higher), 1).tolist()
    reports = []
    for i, count in enumerate(counts):
        wanted = slice(count + 1)  # the row's own token comes first, and may come again
        entries = map(Logprob, values[i][wanted], ranks[i][wanted])
        reports.append(dict(zip(ids[i][wanted], entries, strict=True)))
    return reports


def score_prompts(head: Any, hidden: Tensor, batch: Batch) -> None:
    """Report the log-probabilities of prompt tokens, each from what precedes it.

    hidden: [num_tokens, hidden_size]; the row of a token at position p scores the token
    at p + 1. All logits at once could take gigabytes, so they are computed for a few
    rows at a time. (For example, in chunks of 4, the first rows of a prompt score its
    tokens at positions 1 to 4, the next those at 5 to 8.)
    """
    if all(seq.group.params.prompt_logprobs is None for seq in batch.seqs):
        return
    # (A recorded step has rows of padding after these.)
    entries = hidden[: sum(batch.counts)].split(batch.counts)
    for seq, entry, end in zip(batch.seqs, entries, batch.ends, strict=True):
        group = seq.group
        count = group.params.prompt_logprobs
        # The position that the first row scores: 1 if this is the prompt's first chunk.
        first = end - len(entry) + 1
        if count is None or first >= group.num_prompt_tokens:
            continue
        # (The row of the prompt's last token scores none.)
        tokens = torch.tensor(group.prompt_token_ids[first : end + 1])
        for start in range(0, len(tokens), ROWS):
            piece = tokens[start : start + ROWS].to(hidden.device)
            logits = head(entry[start : start + len(piece)])
            reports = report_logprobs(logits, piece, [count] * len(piece))
            group.prompt_logprobs.update(enumerate(reports, first + start))
