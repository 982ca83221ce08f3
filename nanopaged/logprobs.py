"""Log-probabilities: of sampled tokens, and of the tokens of a prompt."""

from typing import Any

import torch
from torch import Tensor

from nanopaged.batch import MODEL_FAILED, Batch, failure
from nanopaged.sequence import Logprob, Logprobs

ROWS = 64  # at most this many rows of a prompt's logits are in memory at once


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
    # tokens share a rank. `searchsorted` needs ascending values, hence negative ones.
    num_higher = torch.searchsorted(-likely.values, -likely.values)
    ids = torch.cat((tokens[:, None], likely.indices), 1).tolist()
    values = torch.cat((own, likely.values), 1).tolist()
    ranks = torch.cat((own_ranks, 1 + num_higher), 1).tolist()
    reports = []
    for row, count in enumerate(counts):
        entries = zip(ids[row], map(Logprob, values[row], ranks[row]), strict=True)
        # The sampled token comes first, and may come again among the most likely ones.
        reports.append(dict([*entries][: 1 + count]))
    return reports


def score_prompts(head: Any, hidden: Tensor, batch: Batch) -> None:
    """Report the log-probabilities of prompt tokens, each from what precedes it.

    hidden: [num_tokens, hidden_size]; the row of a token at position p scores the token
    at p + 1. For example, with chunks of 4, the first chunk of a prompt scores its
    tokens at positions 1 to 4, the next one those at 5 to 8.
    """
    if all(seq.group.params.prompt_logprobs is None for seq in batch.seqs):
        return
    # A recorded step has rows of padding after these.
    entries = hidden[: sum(batch.counts)].split(batch.counts)
    for seq, entry, end in zip(batch.seqs, entries, batch.ends, strict=True):
        group, count = seq.group, seq.group.params.prompt_logprobs
        # The position that the first row scores: 1 if this is the prompt's first chunk.
        first = end - len(entry) + 1
        if count is None or first >= group.num_prompt_tokens:
            continue
        # The row of the prompt's last token scores none.
        tokens = torch.tensor(group.prompt_token_ids[first : end + 1])
        # All logits at once could take gigabytes.
        for start in range(0, len(tokens), ROWS):
            piece = tokens[start : start + ROWS].to(hidden.device)
            logits = head(entry[start : start + len(piece)])
            if not logits.amax(-1).isfinite().all():
                group.errors = [failure(MODEL_FAILED)]
            reports = report_logprobs(logits, piece, [count] * len(piece))
            group.prompt_logprobs.update(enumerate(reports, first + start))
