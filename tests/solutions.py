"""Solutions of the tour's exercises, as edits of the engine.

They show that the exercises' tests can be passed. The tests apply them to a copy.
"""

from nanopaged.tour.guide.mutants import Edit


def add(file, after, lines):
    return Edit(file, after, after + lines)


LAST_PARAMETER = "    cache_salt: str | None = None\n"
RAW = "    raw, device = logits, logits.device\n"

SOLUTIONS = {
    "logit_bias": [
        add("config.py", LAST_PARAMETER, "    logit_bias: dict | None = None\n"),
        add("llm.py", "        last = self.model_config.vocab_size - 1\n", """\
        bias = list(params.logit_bias or {})
        check(all(0 <= token <= last for token in bias), "logit_bias", last, bias)
"""),
        add("sampler.py", RAW, """\
    logits = logits.clone()
    for i, seq in enumerate(seqs):
        bias = seq.group.params.logit_bias or {}
        logits[i, list(bias)] += logits.new_tensor(list(bias.values()))
"""),
    ],
    "repetition_penalty": [
        add("config.py", LAST_PARAMETER,
            "    repetition_penalty: float = within(1e-6, 1e9, default=1.0)\n"),
        add("sampler.py", RAW, """\
    logits = logits.clone()
    for i, seq in enumerate(seqs):
        penalty = seq.group.params.repetition_penalty
        if penalty != 1:
            seen = sorted(set(seq.token_ids))
            old = logits[i, seen]
            logits[i, seen] = torch.where(old > 0, old / penalty, old * penalty)
"""),
    ],
    "prompt_logprobs": [
        add("config.py", LAST_PARAMETER, "    prompt_logprobs: bool = False\n"),
        add("outputs.py", "    metrics: RequestMetrics\n",
            "    prompt_logprobs: list[float | None] | None = None\n"),
        add("sequence.py", "        self.num_cached_tokens = 0\n",
            "        self.prompt_logprobs: dict[int, float] = {}  # by position\n"),
        Edit("sequence.py", "metrics=self.metrics)", """metrics=self.metrics,
            prompt_logprobs=[None, *self.prompt_logprobs.values()]
            if self.params.prompt_logprobs else None)"""),
        # Tokens of the flat batch; and only on rank 0: of each the group, and the
        # position of the token that follows; and how likely that was.
        Edit("scheduler.py", "    # Only on rank 0: who gets the sampled", """\
    scored: list[int] = field(default_factory=list)
    scored_for: list[tuple[SequenceGroup, int]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    # Only on rank 0: who gets the sampled"""),
        Edit("parallel.py", 'if field.name != "sampled"]',
             'if field.name not in ("sampled", "scored_for", "scores")]'),
        add("scheduler.py", "        manager.advance(seq, count)\n", """\
        if group.params.prompt_logprobs:
            for position in range(first, min(end, group.num_prompt_tokens - 1)):
                batch.scored.append(len(batch.token_ids) - first + position)
                batch.scored_for.append((group, position + 1))
"""),
        Edit("scheduler.py", "prefix = [] if is_swapped else",
             "prefix = [] if is_swapped or group.params.prompt_logprobs else"),
        add("scheduler.py", '        self._notify("executed", batch)\n', """\
        for (group, position), score in zip(
                batch.scored_for, batch.scores, strict=True):
            group.prompt_logprobs[position] = score
"""),
        Edit("model_runner.py", "            output = sample(", """\
            if batch.scored:
                scores = self.model.head(states[batch.scored]).float().log_softmax(-1)
                tokens = [group.prompt_token_ids[position]
                          for group, position in batch.scored_for]
                batch.scores = scores[range(len(tokens)), tokens].tolist()
            output = sample("""),
    ],
}
