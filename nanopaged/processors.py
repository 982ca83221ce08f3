"""What changes logits before a token is chosen: hooks, biases, penalties, bans."""

from typing import Any

import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from nanopaged.config import SamplingParams
from nanopaged.drawing import to_device
from nanopaged.sequence import Sequence


def process(logits: Tensor, seqs: list[Sequence]) -> Tensor:
    """Apply what each request changes, to a copy of the logits.

    logits: [num_samples, vocab_size]
    """
    changed = [i for i, seq in enumerate(seqs) if seq.group.params.changes_logits]
    if changed:
        logits = logits.to(torch.float32, copy=True)
    for i in changed:
        group, params = seqs[i].group, seqs[i].group.params
        token_ids = torch.tensor([seqs[i].token_ids], device=logits.device)
        row = logits[i : i + 1]
        try:
            for function in params.logits_processors or []:
                row = function(token_ids, row)
            row = row.view(1, logits.shape[1])  # an error if its size is wrong
            logits[i] = penalize(params, group.num_prompt_tokens, token_ids, row)[0]
        except Exception as error:  # only this request ends: see `Scheduler.update`
            group.error = error
    banned = [(i, token) for i, seq in enumerate(seqs) for token in seq.banned_tokens]
    if banned:
        at = to_device(banned, logits.device).unbind(1)
        logits = logits.index_put(at, logits.new_full((), -torch.inf))
    return logits


def penalize(params: SamplingParams, num_prompt_tokens: int, token_ids: Tensor,
             logits: Tensor) -> Tensor:
    """Biases and penalties, as vLLM defines them: [1, vocab_size]."""
    bias: Any = params.logit_bias or {}
    ids = torch.tensor([*bias], dtype=torch.int64, device=logits.device)
    logits = logits.index_add(1, ids, logits.new_tensor([[*bias.values()]]))
    if params.repetition_penalty != 1:
        penalty = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))
        logits = penalty(token_ids, logits)
    answer = token_ids[0, num_prompt_tokens:]
    counts = answer.bincount(minlength=logits.shape[1])
    return (logits - params.presence_penalty * (counts > 0)
            - params.frequency_penalty * counts)
