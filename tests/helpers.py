"""What several test files share: requests, answers, block tables, running an engine.

These are plain functions to import. Whatever holds state (models, reference answers,
engines that must be shut down) is a fixture in conftest.py.
"""

import html
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch

import nanopaged
from nanopaged import BeamSearchParams, SamplingParams
from nanopaged.model_runner import Staging
from nanopaged.sequence import SequenceGroup

ROOT = Path(nanopaged.__file__).parent.parent
CPU = {"dtype": "float32", "device": "cpu"}
HALF = "\ufffd"  # what a decoder puts in place of an incomplete character

COUNTERS = (
    "blocks_total",
    "blocks_used",
    "blocks_cached",
    "tokens_held",
    "kv_utilisation",
    "prefix_hit_tokens",
    "prefix_query_tokens",
    "preemptions_recompute",
    "steps",
    "prompt_tokens",
    "output_tokens",
)
SHARING_COUNTERS = ("preemptions_swap", "blocks_copied", "blocks_swapped")  # if present


# --- requests ---


def greedy(max_tokens=16, **more):
    """Greedy decoding that runs on past EOS."""
    defaults = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return SamplingParams(**(defaults | more))


def draw_requests(
    seed,
    count=12,
    *,
    vocab_size=500,
    lengths=range(1, 40),
    most=5,
    max_tokens=24,
    stop=("e", "th"),
):
    """Random prompts and parameters: greedy, sampled (up to `most` each) and beams."""
    rng = random.Random(seed)
    for _ in range(count):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.choice(lengths))]

        if rng.random() < 0.25:
            width = min(most, rng.randrange(1, 5))
            yield prompt, BeamSearchParams(width, rng.randrange(1, min(20, max_tokens)))
            continue

        yield (
            prompt,
            SamplingParams(
                n=rng.randrange(1, most + 1),
                max_tokens=rng.randrange(1, max_tokens + 1),
                seed=rng.randrange(99),
                min_tokens=rng.choice([0, 1]),
                logprobs=rng.choice([None, 2]),
                temperature=rng.choice([0, 0.7]),
                stop=rng.choice([None, *stop]),
                stop_token_ids=rng.choice([None, list(range(0, vocab_size, 17))]),
            ),
        )


def add_all(llm, prompts, params):
    """Add a request for each prompt; `params` is one for all of them, or a list."""
    if not isinstance(params, list):
        params = [params] * len(prompts)
    return [llm.add_request(*pair) for pair in zip(prompts, params, strict=True)]


# --- answers ---


def tokens_of(output):
    """The token ids of a request's first completion, often its only one."""
    return list(output.outputs[0].token_ids)


def first_tokens_of(outputs):
    """The token ids of the first completion of each request."""
    return [tokens_of(output) for output in outputs]


def all_tokens_of(output):
    """The token ids of each of a request's completions."""
    return [list(completion.token_ids) for completion in output.outputs]


def generate(llm, prompts, params):
    """The token ids of all completions of all prompts."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [all_tokens_of(output) for output in outputs]


def complete(llm, prompt, params):
    """The first completion of one prompt."""
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]


def serve(llm, requests):
    """For every completion: its tokens, text, finish reason and number of logprobs."""
    prompts, params = zip(*requests, strict=True)
    outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    return [
        [
            (c.token_ids, c.text, c.finish_reason, c.logprobs and len(c.logprobs))
            for c in output.outputs
        ]
        for output in outputs
    ]


def floats(logprobs):
    """{token id: log-probability} of one position."""
    return {token: entry.logprob for token, entry in logprobs.items()}


def without_half_characters(text):
    return text.rstrip(HALF)


def message_of(call, kinds=(ValueError, TypeError)):
    """The message of the error that the call must raise."""
    with pytest.raises(kinds) as caught:
        call()
    return str(caught.value)


# --- running an engine ---


def counters(llm):
    """The fields of `llm.stats()` that do not depend on time."""
    stats = llm.stats()
    names = [*COUNTERS, *(name for name in SHARING_COUNTERS if hasattr(stats, name))]
    return {name: getattr(stats, name) for name in names}


def step(llm, count=1):
    """Take `count` steps; returns the last output of each request that had one."""
    last = {}
    for _ in range(count):
        last.update({output.request_id: output for output in llm.step()})
    return last


def drain(llm):
    """Step until nothing is left, and once more; returns all outputs by request id."""
    outputs = {}
    more = True
    while more:
        more = llm.has_unfinished_requests()
        for output in llm.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def drain_checked(llm, limit=5000):
    """Step to the end, checking invariants; returns each request's last output.

    A step may return nothing (a chunk of a prompt); thousands of steps are a deadlock.
    """
    last = {}
    for _ in range(limit):
        more = llm.has_unfinished_requests()
        last.update(step(llm))
        check_invariants(llm)
        if not more:
            break

    assert not llm.has_unfinished_requests(), "no end in sight"
    assert len(llm.block_manager.free_blocks) == llm.block_manager.num_blocks
    num_swap_blocks = len(llm.block_manager.blocks) - llm.block_manager.num_blocks
    assert len(llm.block_manager.free_swap_blocks) == num_swap_blocks
    return last


def step_until_swapped(llm):
    """Step until something is swapped out; returns the groups that are."""
    while not any(is_swapped(group) for group in llm.scheduler.waiting):
        assert llm.has_unfinished_requests(), "nothing was swapped"
        llm.step()
    return [group for group in llm.scheduler.waiting if is_swapped(group)]


def running_groups(llm):
    """The groups on the device that have not finished."""
    return [group for group in llm.scheduler.running if group.live]


def is_swapped(group):
    """True for a group that waits with its blocks in CPU memory."""
    return any(seq.row < 0 and seq.block_table for seq in group.live)


def check_invariants(llm):
    """Every block is held by exactly the tables that name it, in its own pool.

    This holds between any two steps: groups are in order of arrival, and each of them
    as a whole is either on the device, or in the swap pool, or nowhere.
    """
    manager = llm.block_manager
    scheduler = llm.scheduler
    running = list(scheduler.running)
    waiting = list(scheduler.waiting)
    device = manager.num_blocks
    size = manager.block_size

    references = Counter()
    rows = []
    for group in [*running, *waiting]:
        tables = [seq.block_table for seq in group.live]
        for seq in group.live:
            assert len(set(seq.block_table)) == len(seq.block_table), (
                "a block twice in a table"
            )
            assert seq.num_computed_tokens <= len(seq.block_table) * size, (
                "K and V nowhere"
            )
            references.update(seq.block_table)
            if seq.row >= 0:
                rows.append(seq.row)

        held = [block_id for table in tables for block_id in table]
        holders = sum(map(bool, tables))
        assert holders in (0, 1, len(tables)), "only a part of the group holds blocks"
        if group.live and group in running:
            assert holders and not is_swapped(group)
            assert all(block_id < device for block_id in held), (
                "it runs on a swap block"
            )
        elif group.live and is_swapped(group):
            assert holders and all(block_id >= device for block_id in held)
        elif group.live:
            assert not held and not any(seq.num_computed_tokens for seq in group.live)

        if group in waiting:
            assert all(seq.row == -1 for seq in group.live), (
                "a row for a waiting sequence"
            )
        over = [
            seq
            for seq in group.sequences
            if all(seq is not other for other in group.live)
        ]
        assert not any(seq.block_table for seq in over), (
            "a finished sequence holds blocks"
        )

    assert [block.ref_count for block in manager.blocks] == [
        references[block_id] for block_id in range(len(manager.blocks))
    ]
    unheld = set(range(len(manager.blocks))) - references.keys()
    assert set(manager.free_blocks) == {i for i in unheld if i < device}
    assert set(manager.free_swap_blocks) == {i for i in unheld if i >= device}
    assert all(block_id < device for block_id in manager.published.values())

    assert len(set(rows)) == len(rows) <= llm.config.max_num_seqs
    assert not set(rows) & set(scheduler.free_rows)

    arrivals = [int(group.request_id) for group in [*running, *waiting] if group.live]
    assert arrivals == sorted(arrivals), "not first come, first served"


def repeat_calls(run):
    """A stand-in for a CUDA graph: what repeats a call, and the tensor it writes to."""
    result = run()

    @torch.inference_mode()
    def replay():
        result.copy_(run())

    return replay, result


def record_calls(runner):
    """Let `capture_graphs` record plain calls in place of CUDA graphs.

    Returns a list that grows by the batch size of each call that is repeated.
    """
    replayed = []

    def record(run):
        replay, result = repeat_calls(run)

        def noted():
            replayed.append(len(result))
            replay()

        return noted, result

    # As on a GPU, where all steps use the same tensors.
    runner.staging = Staging(1 << 20, runner.device)
    runner.backend.to_device = runner.staging.add

    runner.capture_graphs(record)
    return replayed


# --- blocks ---


def swap_space(path, num_blocks, block_size):
    """The swap space, in GiB, that holds this many float32 blocks of a model."""
    fields = json.loads((path / "config.json").read_text())
    heads = fields["num_key_value_heads"]
    head_dim = fields.get("head_dim")
    head_dim = head_dim or fields["hidden_size"] // fields["num_attention_heads"]
    token_bytes = 2 * fields["num_hidden_layers"] * heads * head_dim * 4
    return num_blocks * block_size * token_bytes / 2**30


def most_blocks(length, n, count, block_size=4):
    """The most blocks a group can need: full prompt blocks once, the rest n times."""
    shared = length // block_size
    return shared + n * (-(-(length + count) // block_size) - shared)


def new_group(tokens, params=None, stop=()):
    """A request as the scheduler sees it, outside any engine."""
    params = params or SamplingParams(max_tokens=None)
    return SequenceGroup(None, list(tokens), params, set(stop), 10**6, None)


def allocate_if_fits(manager, seq, prefix, room, spare=0):
    """Allocate, as the scheduler does, if `room` blocks leave `spare` of them free."""
    fits = manager.can_allocate(prefix, room, spare)
    if fits:
        manager.allocate(seq, prefix)
    return fits


def allocate(manager, seq, spare=0):
    """Admit a sequence as the scheduler does: look up its prefix, then allocate."""
    room = manager.most_blocks(0, [seq.compute_end])
    return allocate_if_fits(manager, seq, manager.match_prefix(seq), room, spare)


def compute(manager, *sequences, until=None):
    """What a step does: compute tokens (`until`, or all) and publish full blocks."""
    for seq in sequences:
        seq.num_computed_tokens = seq.compute_end if until is None else until
        manager.publish(seq)


def forked_group(manager, tokens, n=2):
    """The sequences of a group that has just forked: they share the prompt's blocks."""
    leader, *others = new_group(tokens, SamplingParams(n=n, max_tokens=None)).sequences
    assert allocate(manager, leader)
    compute(manager, leader)
    for other in others:
        manager.fork(leader, other)
    leader.group.forked = True
    return [leader, *others]


def free(manager, seq):
    manager.free(seq)
    seq.num_computed_tokens = 0


def tables(*sequences):
    return [seq.block_table for seq in sequences]


def ref_counts(manager):
    return [block.ref_count for block in manager.blocks]


def block_state(manager, *sequences):
    """Everything that an operation on blocks may change."""
    return (
        list(manager.free_blocks),
        list(manager.free_swap_blocks),
        list(manager.published.items()),
        [(b.ref_count, b.hash, b.content, b.name) for b in manager.blocks],
        [
            (
                seq.token_ids[:],
                seq.block_table[:],
                seq.num_published_blocks,
                seq.num_computed_tokens,
                seq.num_sent_blocks,
            )
            for seq in sequences
        ],
    )


def constant_hash(data):
    """The worst hash function: all blocks collide."""
    return 7


# --- a browser ---


def find_browser():
    """The path of a Chromium, or None."""
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


def browse(page, fragment="", size=(1280, 720), *more):
    """Open a file in the browser; returns the page as it is after its scripts ran."""
    quiet = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--disable-sync",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
        "--hide-scrollbars",
    ]
    with tempfile.TemporaryDirectory() as profile:
        command = [
            find_browser(),
            *quiet,
            f"--user-data-dir={profile}",
            f"--window-size={size[0]},{size[1]}",
            "--virtual-time-budget=60000",
            *more,
            "--dump-dom",
            f"{Path(page).resolve().as_uri()}{fragment}",
        ]
        result = subprocess.run(
            command, capture_output=True, encoding="utf-8", timeout=300
        )
    assert result.returncode == 0, result.stderr
    return result.stdout


def text_of_element(dom, ident):
    """The text of the element with this id, which has no elements in it."""
    (text,) = re.findall(rf'<[^>]* id="{ident}"[^>]*>([^<]*)<', dom)
    return html.unescape(text)


# --- numbers, and other processes ---


def chi_square(counts, probs, total=None):
    """Pearson's statistic over possible outcomes; an impossible one must not occur."""
    counts = torch.as_tensor(counts, dtype=torch.float64)
    probs = torch.as_tensor(probs, dtype=torch.float64)
    expected = probs * (counts.sum() if total is None else total)
    possible = expected > 0
    assert not counts[~possible].any(), "an impossible outcome"
    return ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()


def run_python(*arguments, cwd=ROOT, timeout=600, **env):
    """The standard output of a fresh interpreter, which must succeed.

    It can import the package from any directory. A variable given as None is unset.
    """
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"} | env
    result = subprocess.run(
        [sys.executable, *arguments],
        env={name: value for name, value in env.items() if value is not None},
        cwd=cwd,
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
