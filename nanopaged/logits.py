"""What changes logits before a token is chosen, and what is reported about them.

A request may bring logits processors, biases and penalties, and may ban tokens. It may
also ask for log-probabilities: of the sampled tokens, and of those of its prompt.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from nanopaged.batch import Batch
from nanopaged.checks import check
from nanopaged.sequence import Logprob, Logprobs, Sequence

ROWS = 64  # at most this many rows of a prompt's logits are in memory at once


def to_device(rows: Any, device: torch.device) -> Tensor:
    """Rows of numbers, from any iterable, as a tensor. For a GPU they go through pinned
    memory, because otherwise the host would wait for the copy.
    """
    tensor = torch.from_numpy(np.array([*rows]))
    tensor = tensor.pin_memory() if device.type == "cuda" else tensor
    return tensor.to(device, non_blocking=True)


def process(logits: Tensor, batch: Batch) -> Tensor:
    """Apply the changes of each request to a copy of the logits.

    logits: [num_samples, vocab_size]
    """
    seqs = batch.receivers
    changed = [i for i, seq in enumerate(seqs) if seq.group.params.changes_logits]
    if changed:
        logits = logits.to(torch.float32, copy=True)
    for i in changed:
        group, params = seqs[i].group, seqs[i].group.params
        row = logits[i : i + 1]
        try:
            for function in params.logits_processors or []:
                token_ids = to_device([seqs[i].token_ids], logits.device)
                row = function(token_ids, row)
            check(getattr(row, "shape", None) == (1, logits.shape[1]), "what "
                  "logits_processors return", f"[1, {logits.shape[1]}] logits", row)
            row = penalize(seqs[i], row)
            check(bool(row.isfinite().any()), "logits after logits_processors",
                  "finite for at least one token", row)
            logits[i] = row[0]
        except Exception as error:  # only this request ends: see `Scheduler.update`
            group.errors = [error]
    # Before `min_tokens`, no stop token may be sampled.
    places = batch.sample_positions
    banned = [(i, token) for i, seq in enumerate(seqs) if places[i] < seq.group.min_len
              for token in seq.group.banned_token_ids]
    if banned:
        at = to_device(banned, logits.device).unbind(1)
        logits = logits.index_put(at, logits.new_full((), -torch.inf))
    return logits


def penalize(seq: Sequence, logits: Tensor) -> Tensor:
    """Biases and penalties, as vLLM defines them: [1, vocab_size]. The repetition
    penalty also looks at the prompt; the others only at what was sampled.
    """
    params = seq.group.params
    bias: Any = params.logit_bias or {}
    ids = torch.tensor([*bias], dtype=torch.int64, device=logits.device)
    logits = logits.index_add(1, ids, logits.new_tensor([[*bias.values()]]))
    if params.has_penalties:
        token_ids = to_device([seq.token_ids], logits.device)  # [1, num_tokens]
        penalty = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))
        logits = penalty(token_ids, logits)
        answer = token_ids[0, seq.group.num_prompt_tokens :]
        counts = answer.bincount(minlength=logits.shape[1])  # of each token
        logits = logits - (params.presence_penalty * (counts > 0)
                           + params.frequency_penalty * counts)
    return logits


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
    # For each value, how many are higher: its place among the negated values, which
    # ascend. Logits 5, 3, 3, 1 give 0, 1, 1, 3: tied tokens share a rank.
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
    rows at a time.
    """
    if all(group.params.prompt_logprobs is None for group in batch.groups):
        return
    # (A recorded step has rows of padding after these.)
    entries = hidden[: sum(batch.counts)].split(batch.counts)
    for group, entry, end in zip(batch.groups, entries, batch.ends, strict=True):
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
