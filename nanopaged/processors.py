"""What changes logits before a token is chosen: hooks, biases, penalties, bans."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from nanopaged.config import SamplingParams
from nanopaged.drawing import to_device
from nanopaged.sequence import Sequence


def process(logits: Tensor, seqs: list[Sequence]) -> Tensor:
    """The logits as each request wants them; the argument is not changed.

    logits: [num_samples, vocab_size]
    """
    if any(seq.group.params.change_logits for seq in seqs):
        logits = logits.to(torch.float32, copy=True)
    for i, seq in enumerate(seqs):
        group, params = seq.group, seq.group.params
        if not params.change_logits:
            continue
        token_ids = torch.tensor([seq.token_ids], device=logits.device)
        penalties = partial(penalize, params, group.num_prompt_tokens)
        try:
            for function in [*(params.logits_processors or []), penalties]:
                row = function(token_ids, logits[i : i + 1])
                logits[i] = row.view(logits.shape[1])  # an error if it is too short
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
    logits[:, [*bias]] += logits.new_tensor([*bias.values()])
    if params.repetition_penalty != 1:
        penalty = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))
        logits = penalty(token_ids, logits)
    answer = token_ids[0, num_prompt_tokens:]
    counts = answer.bincount(minlength=logits.shape[1])
    return (logits - params.presence_penalty * (counts > 0)
            - params.frequency_penalty * counts)
