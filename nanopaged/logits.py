"""What requests change in their logits before a token is chosen.

A request may bring logits processors, biases and penalties, and it may ban tokens.
"""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from nanopaged.batch import MODEL_FAILED, REQUEST_FAILED, Batch
from nanopaged.checks import check
from nanopaged.fused import Ops
from nanopaged.sequence import Sequence


def to_device(numbers: Any, device: torch.device, dtype: Any = torch.int64) -> Tensor:
    """Numbers, as a tensor. For a GPU they go through pinned memory, because otherwise
    the host would wait for the copy.
    """
    tensor = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)


def process(logits: Tensor, batch: Batch, draws: Tensor, counts: "TokenCounts",
            ops: Ops) -> Tensor:
    """The logits as the requests change them: first by their logits processors, then by
    biases and bans, then by penalties. If nothing changes them, it is the same tensor.

    logits: [num_samples, vocab_size]; draws: `Metadata.draws`
    """
    seqs = batch.receivers
    # What is added to the logits. Before `min_tokens`, no stop token may be sampled.
    edits = [(i, token, -torch.inf) for i, seq in enumerate(seqs)
             if batch.ends[batch.sample_entries[i]] < seq.group.min_len
             for token in seq.group.banned_token_ids]
    changing = {i: seq.group.params for i, seq in enumerate(seqs)
                if seq.group.params.changes_logits}
    if not (edits or changing):
        return logits
    edits += [(i, *pair) for i, each in changing.items() if each.logit_bias
              for pair in each.logit_bias.items()]
    logits = logits.to(torch.float32, copy=True)
    for i, each in changing.items():
        if each.logits_processors:
            call_processors(seqs[i], logits[i : i + 1])
    if edits:
        rows, ids, values = zip(*edits, strict=True)
        at = to_device((rows, ids), logits.device).unbind()
        added = to_device(values, logits.device, torch.float32)
        logits.index_put_(at, added, accumulate=True)
    if any(each.has_penalties for each in changing.values()):
        at_rows = to_device(counts.update(seqs, ops), logits.device)
        penalties = draws[-3:, :, None]  # the last three of `Draws`
        logits = ops.penalize(logits, counts.table, at_rows, *penalties)
    # A logits processor may force a token by +inf. Logits are cut, so that they can be
    # divided by any temperature.
    return logits.clamp_(max=1e30)


def call_processors(seq: Sequence, row: Tensor) -> None:
    """Let the functions of a request change its row of logits, [1, vocab_size]."""
    new = row.clone()  # a function may keep what it gets
    try:
        for function in seq.group.params.logits_processors or []:
            new = function(to_device([seq.token_ids], row.device), new)
        is_right = isinstance(new, Tensor) and new.is_floating_point()
        check(is_right and new.shape == row.shape, "what logits_processors return",
              f"{[*row.shape]} logits", new)
        # +inf for every token forces none of them. As NaN, the row ends the request.
        row.copy_(new.masked_fill(new.amin() == torch.inf, torch.nan))
    except Exception as error:  # only this request ends: see `Scheduler.update`
        seq.group.errors = [error]


class TokenCounts:
    """How often each token is in each sequence that has penalties. Each token is
    counted once, whatever the number of steps.
    """

    def __init__(self, last_tokens: Tensor, vocab_size: int) -> None:
        self.last_tokens = last_tokens  # one for each sequence that may run
        # Each sequence has a row: 2 * (how often a token is in its answer), plus 1 if
        # the token is in its prompt. The last row belongs to nobody.
        self.table = last_tokens.new_empty(
            len(last_tokens) + 1, vocab_size, dtype=torch.int32)
        # By request and index, the least recently used first: the row of a sequence,
        # and how many of its tokens have been counted.
        self.counted: OrderedDict[tuple[str, int], tuple[int, int]] = OrderedDict()

    def update(self, seqs: list[Sequence], ops: Ops) -> list[int]:
        """Count what is new in these sequences. Returns the row of each, or the last
        one for a sequence without penalties.
        """
        keys = [(seq.group.request_id, seq.index) for seq in seqs]
        for key in self.counted.keys() & keys:  # these keep their rows
            self.counted.move_to_end(key)
        unused, vocab_size = len(self.table) - 1, self.table.shape[1]
        found = [unused] * len(seqs)
        # Where rows start in the flat table, and tokens. The first two are in the
        # unused row, because torch.compile treats none or one as cases of their own.
        starts, ids = [unused * vocab_size] * 2, [0, 0]
        for i, (key, seq) in enumerate(zip(keys, seqs, strict=True)):
            if not seq.group.params.has_penalties:
                continue
            if key not in self.counted:
                # Count its prompt: in a row that is still free, or in that of the
                # sequence that was counted longest ago.
                row = len(self.counted)
                if row == unused:
                    _, (row, _) = self.counted.popitem(last=False)
                prompt = to_device(seq.group.prompt_token_ids, self.table.device)
                self.table[row].zero_().index_fill_(0, prompt, 1)
                self.counted[key] = row, len(prompt)
            found[i], start = self.counted[key]
            # The last pending token is the one to be sampled now. It does not count.
            new = seq.token_ids[start:] + seq.pending[:-1]
            starts += [found[i] * vocab_size] * len(new)
            ids += new
            self.counted[key] = found[i], start + len(new)
        at, tokens = to_device((starts, ids), self.table.device)
        at = at + ops.fill_pending(tokens, self.last_tokens)
        self.table.view(-1).scatter_(0, at, 2, reduce="add")
        return found


def fill_pending(token_ids: Tensor, last_tokens: Tensor) -> Tensor:
    """Replace pending tokens: -1 - i stands for sample i of the last step. For all
    other tokens, sample 0 is looked up, and not used. A sample that has failed counts
    as token 0: its request ends before anyone sees what follows.
    """
    pending = last_tokens[(-1 - token_ids).clamp(min=0)].clamp(min=0)
    return torch.where(token_ids < 0, pending, token_ids)


def mark(tokens: Tensor, raw: Tensor) -> Tensor:
    """Tokens that are chosen from changed logits: if none can be, say whether this is
    the request's fault, or the model's, whose own logits are `raw`.
    """
    tokens = tokens.where(tokens >= 0, REQUEST_FAILED)
    return tokens.where(raw.amax(-1).isfinite(), MODEL_FAILED)


def penalize(logits: Tensor, table: Tensor, rows: Tensor, repetition: Tensor,
             presence: Tensor, frequency: Tensor) -> Tensor:
    """Penalties, as vLLM defines them. The repetition penalty also looks at the prompt;
    the others only at what was sampled.

    logits: [num_samples, vocab_size]; table: see `TokenCounts`; rows: [num_samples], of
    the table; the penalties: [num_samples, 1] each
    """
    counts, repetition = table[rows], repetition.float()
    worse = torch.where(logits < 0, logits * repetition, logits / repetition)
    logits = torch.where(counts > 0, worse, logits)
    in_answer = counts // 2
    penalty = presence.float() * (in_answer > 0) + frequency.float() * in_answer
    return logits - penalty
