"""Solutions of the tour's exercises, as edits of the engine.

They show that the exercises' tests can be passed. The tests apply them to a copy.
"""

from nanopaged.tour.guide.mutants import Edit

LOGIT_BIAS = [
    Edit(
        "config.py",
        '    logit_bias: None = only(None, reason="it is an exercise of the tour")',
        "    logit_bias: dict[int, float] | None = option(\n"
        "        None, check_type, kind=dict, optional=True)",
    ),
    Edit(
        "llm.py",
        "        if params.stop and self.tokenizer is None:\n",
        '        check_token_ids("logit_bias", params.logit_bias or {}, vocab_size)\n'
        "        if params.stop and self.tokenizer is None:\n",
    ),
    Edit(
        "sampler.py",
        '("stop_token_ids", "O"),',
        '("stop_token_ids", "O"), ("logit_bias", "O"),',
    ),
    Edit(
        "sampler.py",
        "sorted(group.stop_token_ids), num_logprobs)",
        "sorted(group.stop_token_ids), params.logit_bias, num_logprobs)",
    ),
    Edit(
        "sampler.py",
        "        if plan.temperature is None:\n",
        '        for i, bias in enumerate(params["logit_bias"]):\n'
        "            if bias:\n"
        "                values = logits.new_tensor(list(bias.values()))\n"
        "                logits[i, list(bias)] += values\n\n"
        "        if plan.temperature is None:\n",
    ),
]

REPETITION_PENALTY = [
    Edit(
        "config.py",
        "    repetition_penalty: float = only(1.0, reason=EXERCISE)",
        "    repetition_penalty: float = option(\n"
        "        1.0, check_float, low=1e-6, high=1e9)",
    ),
    Edit(
        "sampler.py",
        '("stop_token_ids", "O"),',
        '("stop_token_ids", "O"), ("seq", "O"),',
    ),
    Edit(
        "sampler.py",
        "sorted(group.stop_token_ids), num_logprobs)",
        "sorted(group.stop_token_ids), seq, num_logprobs)",
    ),
    Edit(
        "sampler.py",
        "        if plan.temperature is None:\n",
        '        for i, seq in enumerate(params["seq"]):\n'
        "            if seq and seq.group.params.repetition_penalty != 1:\n"
        "                penalty = seq.group.params.repetition_penalty\n"
        "                seen = sorted(set(seq.token_ids))\n"
        "                old = logits[i, seen]\n"
        "                new = torch.where(old > 0, old / penalty, old * penalty)\n"
        "                logits[i, seen] = new\n\n"
        "        if plan.temperature is None:\n",
    ),
]

PROMPT_LOGPROBS = [
    Edit(
        "config.py",
        '    prompt_logprobs: None = '
        'only(None, reason="it is an exercise of the tour")',
        "    prompt_logprobs: bool = option(False, check_type, kind=bool)",
    ),
    Edit(
        "outputs.py",
        "    prompt_logprobs: None = None  # not supported\n",
        "    prompt_logprobs: list[float | None] | None = None\n",
    ),
    Edit(
        "sequence.py",
        "        self.num_cached_tokens = 0\n",
        "        self.num_cached_tokens = 0\n"
        "        self.prompt_logprobs: dict[int, float] = {}  # by position\n",
    ),
    Edit(
        "scheduler.py",
        "    # Blocks are moved in this order before the model runs.\n",
        "    # Tokens of the flat batch, and the prompt tokens that follow them.\n"
        "    scored: list[tuple[int, int]] = field(default_factory=list)\n"
        "    # Blocks are moved in this order before the model runs.\n",
    ),
    Edit(
        "scheduler.py",
        "    # Sequences that got a row in this step.\n",
        "    scored: list[tuple[SequenceGroup, int]] = field(default_factory=list)\n"
        "    # Sequences that got a row in this step.\n",
    ),
    Edit(
        "scheduler.py",
        "        message.counts.append(count)\n",
        "        last = group.num_prompt_tokens - 1\n"
        "        if group.params.prompt_logprobs:\n"
        "            for position in range(end - count, min(end, last)):\n"
        "                index = len(message.token_ids) - end + position\n"
        "                token = group.prompt_token_ids[position + 1]\n"
        "                message.scored.append((index, token))\n"
        "                batch.scored.append((group, position + 1))\n"
        "        message.counts.append(count)\n",
    ),
    Edit(
        "scheduler.py",
        "            prefix = manager.match_prefix(leader)\n",
        "            wants_all = group.params.prompt_logprobs\n"
        "            prefix = [] if wants_all else manager.match_prefix(leader)\n",
    ),
    Edit(
        "model_runner.py",
        "        last_indices = (np.cumsum(counts) - 1)[message.samples]\n",
        "        last_indices = (np.cumsum(counts) - 1)[message.samples]\n"
        "        scored = [index for index, _ in message.scored]\n"
        "        last_indices = np.array([*last_indices, *scored], np.int64)\n",
    ),
    Edit(
        "model_runner.py",
        "        if len(message.token_ids) > num_seqs or not all_sample:\n",
        "        if message.scored:\n"
        "            return 0\n"
        "        if len(message.token_ids) > num_seqs or not all_sample:\n",
    ),
    Edit(
        "model_runner.py",
        "        output = self.sampler.sample(logits, plan)\n",
        "        output = self.sampler.sample(logits[: len(rows)], plan)\n"
        "        scores = logits[len(rows) :].float().log_softmax(-1).cpu()\n"
        "        tokens_after = [token for _, token in message.scored]\n"
        "        output.prompt_logprobs = [\n"
        "            float(row[token])\n"
        "            for row, token in zip(scores, tokens_after, strict=True)]\n",
    ),
    Edit(
        "sampler.py",
        "    def __post_init__(self) -> None:\n",
        "    prompt_logprobs: list[float] = field(default_factory=list)\n\n"
        "    def __post_init__(self) -> None:\n",
    ),
    Edit(
        "llm.py",
        "            self.scheduler.update(batch, sampled.read(), sampled.logprobs)\n",
        "            self.scheduler.update(batch, sampled.read(), sampled.logprobs)\n"
        "            found = zip(batch.scored, sampled.prompt_logprobs, strict=True)\n"
        "            for (group, position), logprob in found:\n"
        "                group.prompt_logprobs[position] = logprob\n",
    ),
    Edit(
        "llm.py",
        "        return RequestOutput(\n            group.request_id,",
        "        prompt_logprobs = None\n"
        "        if group.params.prompt_logprobs:\n"
        "            prompt_logprobs = [None, *group.prompt_logprobs.values()]\n"
        "        return RequestOutput(\n            group.request_id,",
    ),
    Edit(
        "llm.py",
        "metrics=group.metrics, sequences=self._beams(group))\n",
        "metrics=group.metrics, sequences=self._beams(group),\n"
        "            prompt_logprobs=prompt_logprobs)\n",
    ),
]

SOLUTIONS = {
    "logit_bias": LOGIT_BIAS,
    "repetition_penalty": REPETITION_PENALTY,
    "prompt_logprobs": PROMPT_LOGPROBS,
}
