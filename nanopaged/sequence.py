"""A request and its sequences: the tokens so far, and where their K and V are.

Terms that smallest.py has, too:

    token        an id from the vocabulary
    step         one forward pass over the tokens of many sequences, in one flat batch
    budget       how many tokens one step may compute
    block        room for the K and V of block_size tokens. A sequence counts its
                 logical blocks from 0; a physical block is a place in the pool
    pool         the memory for all blocks: the KV cache
    block table  the physical block of each logical block of a sequence
    publish      to list a full block in the prefix cache, so that others can find it
    preempt      to take a request off the device because the pool is full
    computed     a token is computed when its K and V are in the pool. The engine counts
                 it as computed as soon as its step is scheduled; smallest.py does so
                 after the step

What is new:

    sequence     one continuation of a prompt. It is live until it has finished
    group        the sequences of one request, admitted and preempted as a whole
    leader       the first live sequence of a group. Until the group forks, the leader
                 computes the prompt for all of them
    fork         to let another sequence share the blocks that a sequence has so far
    swap         to move blocks between the device's pool and the CPU's
    entry        the part of a batch that belongs to one sequence
    decode       an entry with only the newest token of an answer
    chunk        any other entry: a part of a prompt, or of what is computed again after
                 a preemption
    slot         a token's place in the pool: physical block * block_size + offset
    state        what layers without K and V, as in Mamba, remember of the text so far
    host         the CPU, which runs Python; the device is the GPU, if there is one
    pending      a sampled token is pending until the host has read it: on a CPU only
                 within its step, on a GPU also while the next step is scheduled
    rank         one of several processes that compute the model together; if there is
                 only one, it is rank 0
"""

from array import array
from typing import Any, NamedTuple

from nanopaged.config import BeamSearchParams, SamplingParams


class Logprob(NamedTuple):
    """The log-probability of a token, before any option changes it, and the token's
    rank among all tokens: 1 is the most likely one.
    """

    logprob: float
    rank: int = 1


# By token id: first the sampled token, then the most likely ones.
Logprobs = dict[int, Logprob]
# Two dicts with the state of each layer, by its number: `before` the sequence's newest
# step, and `after` it. The step reads `before`, and fills `after`, which is empty until
# then. When the next step is scheduled, `after` becomes `before` (`mark_computed`). As
# nobody writes into `before`, sequences that fork can share it.
States = tuple[dict[int, Any] | None, dict[int, Any] | None]
NO_STATES: States = (None, None)  # before the first token


class Sequence:
    """One continuation of a prompt.

    The files that follow tell the story of two requests, A and B, with block_size=4. A
    has a prompt of 6 tokens. After the step that computed the prompt and sampled the
    first token t0, A's sequence has

        token_ids = [p0, p1, p2, p3, p4, p5, t0]
        num_computed_tokens = 6
        block_table = [0, 1]

    So block 0 is full, and block 1 holds p4 and p5. The K and V of t0 are not in the
    cache yet. The next step computes them, stores them in block 1, and samples t1.
    """

    def __init__(self, group: "SequenceGroup", index: int) -> None:
        self.group = group
        self.index = index  # a part of the seed with which this sequence draws
        self.token_ids = list(group.prompt_token_ids)  # only methods here change it
        # Only the block manager changes these three.
        self.block_table = array("q")  # 64-bit integers
        self.num_computed_tokens = 0
        self.states = NO_STATES
        # Stand-ins for pending tokens, the oldest first: -1 - j stands for sample j of
        # its step. There can be two, of the step that runs and of the one that is being
        # scheduled.
        self.pending: list[int] = []

        self.logprobs: list[Logprobs] = []
        self.cumulative_logprob = 0.0
        self.candidates: Logprobs = {}  # of a beam: its most likely next tokens
        self.finish_reason: str | None = None

    @property
    def is_prompt(self) -> bool:
        """Whether its prompt, or a part of it, is still to be computed."""
        return self.num_computed_tokens < self.group.num_prompt_tokens

    @property
    def computable_end(self) -> int:
        """The position before which all tokens can be computed now. Once they are, the
        next token is sampled.

        While the leader computes the prompt for several sequences, this is the end of
        the prompt, where they fork. Otherwise it is the end of all tokens, pending ones
        included: after a preemption, of the prompt and the answer. It is at most
        max_len - 1: nothing follows the last token, so nobody needs its K and V.
        """
        group = self.group
        num_tokens = group.num_prompt_tokens
        if self.num_computed_tokens >= num_tokens or len(group.live) == 1:
            num_tokens = len(self.token_ids) + len(self.pending)
        most = group.max_len - 1
        return num_tokens if num_tokens < most else most  # faster than `min`

    def append(self, token: int, logprobs: Logprobs | None) -> None:
        self.token_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[token].logprob

    @property
    def ended_by_token(self) -> bool:
        """Whether the last token is EOS or a stop token of the request."""
        return self.token_ids[-1] in self.group.stop_token_ids

    def end_reason(self) -> str | None:
        """Why the sequence ends with its last token, or None if it goes on."""
        if self.ended_by_token:
            return "stop"
        return "length" if len(self.token_ids) >= self.group.max_len else None

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: all but what another engine computes again."""
        return vars(self) | {"block_table": array("q"), "num_computed_tokens": 0,
                             "states": NO_STATES, "pending": []}


class SequenceGroup:
    """One request: its parameters, and the sequences that answer it.

    All begin with the same prompt. Until it is computed, only the leader runs. Then the
    group forks: the others share the leader's blocks, and each goes its own way.

    A request is plain data, and can be pickled. It knows nothing of text: the front end
    keeps the prompt's text, turns tokens into text, and finds stop strings.
    """

    def __init__(self, prompt_token_ids: list[int], params: SamplingParams,
                 eos_token_ids: list[int], max_model_len: int,
                 beam_params: BeamSearchParams | None = None) -> None:
        # `Engine.add` gives it an id, and a seed if it has none.
        self.request_id = ""
        self.seed: int | str | None = params.seed
        self.prompt_token_ids = prompt_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.beam_params = beam_params  # None: this is not a beam search
        # `min_tokens` bans EOS tokens even with `ignore_eos`.
        own = set(params.stop_token_ids or [])
        self.banned_token_ids = own | set(eos_token_ids)
        self.stop_token_ids = own if params.ignore_eos else self.banned_token_ids
        self.min_len = self.num_prompt_tokens + params.min_tokens
        max_tokens = params.max_tokens or max_model_len
        self.max_len = min(self.num_prompt_tokens + max_tokens, max_model_len)
        # A beam search and logits processors need the last tokens on the host, so their
        # group waits while these are pending, and does not run ahead.
        self.needs_last_token = bool(beam_params or params.logits_processors)
        self.has_started = False  # whether it has ever run
        self.is_awaited = True  # whether its caller sees each token as it comes
        # With prompt_logprobs, the whole prompt must be computed, so its group takes no
        # blocks from the prefix cache. To keep it simple, it publishes none either.
        self.uses_prefix_cache = params.prompt_logprobs is None
        self.num_cached_tokens = 0  # of the prompt: found in the prefix cache
        self.prompt_logprobs: dict[int, Logprobs] = {}  # by position
        self.errors: list[Exception] = []  # why it ends early

        self.sequences = [Sequence(self, index) for index in range(params.n)]
        self.live = list(self.sequences)  # those that have not finished
        self.complete_beams: list[Sequence] = []  # the best so far, best first

    @property
    def forked(self) -> bool:
        """Whether each sequence goes its own way: only one is live, or the leader has
        given its blocks to all siblings. The last one gets them last, so it is checked.
        """
        return len(self.live) == 1 or self.live[-1].num_computed_tokens > 0

    @property
    def next_sequences(self) -> list[Sequence]:
        """The sequences whose tokens are computed next: the leader, until the fork."""
        if self.needs_last_token and any(seq.pending for seq in self.live):
            return []  # the group waits for its last token
        return self.live if self.forked else self.live[:1]
