"""A server under load, simulated: the engine's own scheduler, and a modelled GPU.

Requests come at random. The engine's scheduler and block manager serve them, or the
same scheduler with contiguous memory, as before paging. There is no language model:
every sampled token is token 0. A clock says how long each step would take OPT-13B on an
A100 with 40 GB, the smallest of the paper's experiments:

    max(weights / bandwidth, operations / rate) + K and V / bandwidth + 2 ms

For example, 30 sequences that have 460 tokens each decode one more: 26 GB of weights
take 21 ms, and 11 GB of K and V take 9 ms, so the step takes 32 ms.

So all systems have the same kernels, the same GPU and the same budget of tokens, and
only their memory differs. Copies of blocks take no time, and 2 ms is all that a step
costs the host. No figure depends on the machine that runs this.
"""

import random
from collections.abc import Callable
from functools import cache
from math import log
from statistics import mean
from types import SimpleNamespace
from typing import Any, NamedTuple

from nanopaged import LLM, BeamSearchParams, SamplingParams
from nanopaged.batch import Batch
from nanopaged.block_manager import BlockManager
from nanopaged.config import EngineConfig
from nanopaged.paper.contiguous import POLICIES, ContiguousScheduler, power_of_two
from nanopaged.paper.workloads import Lengths, arrivals
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Logprobs, SequenceGroup
from nanopaged.tour.guide.paper import LIMIT, OVERLOAD, RATE_STEP
from nanopaged.tour.kv import BANDWIDTH, LONGEST, MODELS, PARAMETERS, RATE, SLOTS

HOST_S = 2e-3
TOKEN_BYTES = MODELS["OPT-13B"].bytes_per_token
BUDGET = 2560  # tokens per step

SYSTEMS = ("nanopaged", *POLICIES)


class Workload(NamedTuple):
    lengths: Lengths
    prefix: int = 0  # tokens that all prompts begin with, and that are cached
    width: int = 1  # samples per request, or beams
    # For beams: a model's likely next tokens at some positions. A beam gets those of a
    # random one.
    likely: list[Logprobs] | None = None


class Run(NamedTuple):
    latency: float  # s: mean over requests, from arrival to end, per generated token
    usage: dict[str, float]  # mean over steps, see `usage`


after_simulation: list[Callable[[], object]] = []  # called by `simulate`


# -- One run ---------------------------------------------------------------------------


def simulate(system: str, workload: Workload, rate: float, seconds: float,
             block_size: int = 16) -> Run:
    """Serve `rate` requests per second for some seconds.

    What has not ended by then counts with its latency so far. Usage is measured from
    the first third on, when the server has filled up.
    """
    scheduler = make_scheduler(system, block_size, caching=workload.prefix > 0)
    coming = arrivals(workload.lengths, rate)
    arrival, *lengths = next(coming)
    rng = random.Random(0)
    requests: list[tuple[float, SequenceGroup]] = []
    ends: dict[str, float] = {}  # by request id
    usages = []
    now = 0.0
    while now < seconds:
        while arrival <= now:
            group = make_group(workload, len(requests), *lengths)
            requests.append((arrival, group))
            scheduler.unfinished[group.request_id] = group
            arrival, *lengths = next(coming)
        if not scheduler.unfinished:
            now = arrival
            continue

        batch = scheduler.schedule()
        now += step_seconds(batch)
        if now > seconds / 3 and scheduler.stats.steps % 8 == 0:
            usages.append(usage(scheduler))
        num_samples = len(batch.receivers)
        likely = workload.likely
        logprobs = enumerate(rng.choices(likely, k=num_samples)) if likely else ()
        output: Any = SimpleNamespace(
            read=([0] * num_samples).copy, logprobs=dict(logprobs))
        scheduler.update(batch, output)
        ends |= {seq.group.request_id: now for seq in batch.receivers
                 if not seq.group.live}

    latencies = []
    for arrival, group in requests:
        waited = ends.get(group.request_id, now) - arrival
        latencies.append(waited / (group.max_len - group.num_prompt_tokens))
    for call in after_simulation:
        call()
    return Run(mean(latencies), {
        name: mean(values[name] for values in usages) for name in usages[0]})


def make_scheduler(system: str, block_size: int, caching: bool) -> Scheduler:
    config = EngineConfig(max_num_seqs=4096, max_num_batched_tokens=BUDGET)
    if system in POLICIES:
        return ContiguousScheduler(config, SLOTS, POLICIES[system])
    manager = BlockManager(SLOTS // block_size, block_size, caching)
    return Scheduler(config, manager)


def make_group(workload: Workload, number: int, prompt: int, output: int
               ) -> SequenceGroup:
    """A request that runs to its full length. No two prompts go on alike."""
    params, search = make_params(workload.width, output)
    if not workload.likely:
        search = None
    token_ids = [0] * workload.prefix + [1 + number] * prompt
    group = SequenceGroup(token_ids, params, [], LONGEST, search)
    group.request_id = str(number)
    return group


@cache  # they are checked when they are made, which takes as long as a step
def make_params(width: int, output: int
                ) -> tuple[SamplingParams, BeamSearchParams | None]:
    return (SamplingParams(n=width, max_tokens=output, ignore_eos=True),
            BeamSearchParams(width, output, ignore_eos=True))


def step_seconds(batch: Batch) -> float:
    weights_s = 2 * PARAMETERS / BANDWIDTH
    operations_s = 2 * PARAMETERS * len(batch.token_ids) / RATE
    kv_s = TOKEN_BYTES * sum(batch.ends) / BANDWIDTH
    return max(weights_s, operations_s) + kv_s + HOST_S


def usage(scheduler: Scheduler) -> dict[str, float]:
    """Where the slots are, in percent of all; requests; percent of blocks saved.

    What is reserved will hold a token. What is internal never will.
    """
    manager = scheduler.block_manager
    tokens = final = reserved = taken = entries = 0
    for group in scheduler.running.values():
        for seq in group.live:
            room = piece = len(seq.block_table) * manager.block_size
            if isinstance(scheduler, ContiguousScheduler):
                room = scheduler.reserved(group)
                piece = power_of_two(room)
            tokens += seq.num_computed_tokens
            final += min(room, group.max_len)
            reserved += room
            taken += piece
            entries += len(seq.block_table)
    parts = {
        "tokens": tokens, "reserved": final - tokens, "internal": reserved - final,
        "rounding": taken - reserved, "free": SLOTS - taken}
    percent = {name: 100 * part / SLOTS for name, part in parts.items()}
    used = manager.num_blocks - len(manager.free_blocks)
    percent["saved"] = 100 * (1 - used / max(1, entries))
    return percent | {"running": len(scheduler.running)}


# -- Many runs -------------------------------------------------------------------------


def latencies(system: str, workload: Workload, first_rate: float, seconds: float
              ) -> dict[float, float]:
    """Latency by request rate, from `first_rate` to the first that overloads.

    Give a server some minutes: it is not overloaded before its queue has grown.
    """
    curve: dict[float, float] = {}
    for i in range(16):
        rate = first_rate * RATE_STEP**i
        curve[rate] = simulate(system, workload, rate, seconds).latency
        if curve[rate] > OVERLOAD:
            break
    return curve


def sustained(curve: dict[float, float]) -> float:
    """The highest request rate whose latency is within the limit.

    It is interpolated between the two rates around it, on logarithmic scales.
    """
    rates, values = list(curve), list(curve.values())
    above = next(i for i, latency in enumerate(values) if latency > LIMIT)
    share = log(LIMIT / values[above - 1]) / log(values[above] / values[above - 1])
    return float(rates[above - 1] * RATE_STEP**share)


@cache
def likely_tokens(width: int) -> list[Logprobs]:
    """What the bundled model finds likely at some positions, for `width` beams."""
    params = SamplingParams(max_tokens=64, seed=0, logprobs=2 * width)
    with LLM(num_blocks=64) as llm:
        outputs = llm.generate(["ROMEO:\n", "JULIET:\n"], params, use_tqdm=False)
    rows = [row for output in outputs for row in output.outputs[0].logprobs or ()]
    return [dict(list(row.items())[: 2 * width]) for row in rows]
