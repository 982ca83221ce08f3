"""Bad days: what broke under attack stays mended, and what is wrong is said in a
sentence.

The sections follow the fifteen defects of the attack on commit 2d4c193, worst first,
then the work that grew with the square, then the error messages. What they protect: no
request ever harms another one, an interrupted engine serves as a fresh one does or says
that it is closed, and nothing that a network or a file brings is executed.

Where a moment matters, it is chosen by a trace function that counts the lines of the
package, so that a moment can be tried again; growth is counted in decoded tokens and
hashed blocks, never in seconds. What has to end has a deadline.
"""

import ast
import gc
import json
import linecache
import math
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import helpers
from helpers import check_invariants, drain, first_tokens_of, message_of

ROOT = Path(__file__).parents[1]
PACKAGE = str(ROOT / "nanopaged")
LENGTHS = [
    6,
    11,
    17,
    40,
]  # the last prompt and its answer need every block of the small pool
COUNT = 24
greedy = partial(helpers.greedy, max_tokens=COUNT)


@contextmanager
def deadline(seconds):
    """Fail instead of hanging: the alarm interrupts Python code, wherever it is."""

    def ring(*_):
        raise TimeoutError(f"still busy after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def small_engine(path, **options):
    """An engine whose pool a single request can fill; unlike the fixture it may be
    closed.
    """
    from nanopaged import LLM

    defaults = {
        "block_size": 4,
        "num_blocks": 16,
        "max_model_len": 64,
        "max_num_seqs": 8,
    }
    fixed = {"dtype": "float32", "device": "cpu", "max_num_batched_tokens": 16}
    with LLM(str(path), **(fixed | defaults | options)) as llm:
        yield llm


@pytest.fixture(scope="session")
def work(llama, draw_prompts):
    """Four prompts and what a fresh engine answers."""
    prompts = draw_prompts(llama, LENGTHS, COUNT, seed=123)
    with small_engine(llama) as llm:
        return prompts, first_tokens_of(llm.generate(prompts, greedy(), use_tqdm=False))


class AtLine:
    """Within `with`: calls `action` where the package's code comes to its n-th line.

    `reached` says whether there was such a line.
    """

    def __init__(self, moment, action):
        self.left = moment
        self.action = action
        self.reached = False

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def trace(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        # Python handles no signal right after a lock was taken, right before it is
        # released, or at a bare `try:`. But it calls trace functions there.
        file = frame.f_code.co_filename
        before, line = (linecache.getline(file, frame.f_lineno - i) for i in (1, 0))
        spared = "with self._lock:" in before + line or line.strip() == "try:"
        if event == "line" and not spared:
            self.left -= 1
            if self.left == 0:
                self.reached = True
                self.action()
        return self.trace


def interrupt():
    raise KeyboardInterrupt


def serves_as_a_fresh_one(llm, work):
    """True if the engine goes on and answers rightly, False if it says that it is
    closed.
    """
    prompts, expected = work
    with deadline(60):
        for _ in range(2):  # the second time from the cache
            try:
                outputs = llm.generate(prompts, greedy(), use_tqdm=False)
            except RuntimeError as error:
                assert "shut down" in str(error)
                return False
            assert first_tokens_of(outputs) == expected
        while (
            llm.has_unfinished_requests()
        ):  # what was aborted is told by the next step
            llm.step()
    manager, scheduler = llm.block_manager, llm.scheduler
    assert sorted(manager.free_blocks) == list(range(manager.num_blocks))
    swapped = range(manager.num_blocks, len(manager.blocks))
    assert sorted(manager.free_swap_blocks) == list(swapped)
    assert sorted(scheduler.free_rows) == list(range(llm.config.max_num_seqs))
    assert not any(block.ref_count for block in manager.blocks)
    return True


def every_moment(path, work, attempt, moments, check=serves_as_a_fresh_one, **options):
    """Make `attempt(llm, moment)` at each moment, on engines that must stay sound or be
    closed.

    It returns whether the moment came. Returns how often the engine went on.
    """
    sound = 0
    moments = iter(moments)
    more = True
    while more:
        with small_engine(path, **options) as llm:
            usable = True
            while usable:
                moment = next(moments, None)
                more = moment is not None and attempt(llm, moment)
                if not more:
                    break
                usable = check(llm, work)
                sound += usable
    return sound


# --- 1: the ranks' messages ---


def listening_addresses(pids):
    """The local addresses on which these processes listen for TCP connections (Linux).
    """
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(descriptor)
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # 0A: it listens
                addresses.append(fields[1].split(":")[0])
    return addresses


def is_loopback(address):
    """address: as in /proc/net/tcp: 127.0.0.0/8, ::1, or the former written as the
    latter.
    """
    loopback = address.endswith("7F") and len(address) == 8
    mapped = address.startswith("0000000000000000FFFF0000") and address.endswith("7F")
    return loopback or mapped or address == "00000000000000000000000001000000"


def test_the_package_unpickles_and_evaluates_nothing():
    """Whatever comes over a socket or out of a file is data."""
    forbidden = {"pickle", "cPickle", "dill", "marshal", "shelve"}
    for file in sorted(Path(PACKAGE).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Name):
                names = [node.id]
            found = forbidden.intersection(names) | {"eval", "exec"}.intersection(names)
            assert not found, f"{file.name}:{node.lineno} uses {found}"
            torch_load = (
                isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load"
            )
            assert not torch_load, f"{file.name}:{node.lineno} unpickles tensors"
            broadcasts = isinstance(node, ast.Attribute) and node.attr.endswith(
                "object_list"
            )
            assert not broadcasts, f"{file.name}:{node.lineno} pickles: {node.attr}"


@pytest.fixture(scope="module")
def ranked(llama):
    """An engine of two ranks."""
    with small_engine(llama, tensor_parallel_size=2) as llm:
        yield llm


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's /proc")
def test_ranks_listen_on_the_loopback_alone(ranked, work):
    assert (
        first_tokens_of(ranked.generate(work[0], greedy(), use_tqdm=False)) == work[1]
    )
    pids = [os.getpid(), *(process.pid for process in ranked.ranks.workers.processes)]
    addresses = listening_addresses(pids)
    assert addresses, "nobody listens: how do the ranks meet?"
    assert all(map(is_loopback, addresses)), addresses


@pytest.mark.slow
def test_what_lies_in_the_store_is_not_executed(llama, tmp_path):
    """Where a stranger on this machine reaches the store, a rank may fail, but runs
    nothing.
    """
    with small_engine(llama, tensor_parallel_size=2) as llm:
        store = llm.ranks.store
        trap = tmp_path / "executed"
        next_step = llm.ranks.num_steps + 1
        for step in range(next_step, next_step + 30):
            store.set(f"step {step}", pickle.dumps(Evil(trap)))
        llm.ranks.workers.processes[0].join(20)  # it reads the next message, and fails
        assert not trap.exists(), "a rank ran what a stranger had put into the store"


# --- 3: a stream that nobody wants any more ---


def abandon_a_stream(llm, prompt, steps=2, **params):
    """Begin a stream and leave it in a reference cycle: only the garbage collector ends
    it.
    """
    stream = llm.stream(prompt, greedy(**params))
    for _ in range(steps):
        next(stream)
    cycle = [stream]
    cycle.append(cycle)


@contextmanager
def no_collection():
    """The garbage collector runs only when it is called, and looks at what is new
    alone.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()
        gc.unfreeze()


@pytest.mark.parametrize("place", ["match_prefix", "grow", "publish"])
def test_a_stream_that_is_collected_inside_a_step_harms_nobody(
    place,
    llama,
    work,
    engine,
    monkeypatch,
):
    """Its generator is closed in the middle of `schedule`, by the same thread."""
    from nanopaged.block_manager import BlockManager

    prompts, expected = work
    method = getattr(BlockManager, place)

    def collecting(self, *args, **options):
        gc.collect()
        result = method(self, *args, **options)
        gc.collect()
        return result

    llm = engine(llama, num_blocks=40, max_model_len=64, max_num_seqs=8)
    for first in range(4):
        order = [*range(first, 4), *range(first)]
        with no_collection():
            for index in order[:2]:
                abandon_a_stream(llm, prompts[index], steps=1 + first)
            with monkeypatch.context() as patch:
                patch.setattr(BlockManager, place, collecting)
                outputs = llm.generate(
                    [prompts[i] for i in order], greedy(), use_tqdm=False
                )
        assert first_tokens_of(outputs) == [expected[i] for i in order]
        check_invariants(llm)
        again = llm.generate(prompts, greedy(), use_tqdm=False)
        assert first_tokens_of(again) == expected, (
            "what they left in the cache is wrong"
        )
        assert llm.stats().blocks_used == 0, "the abandoned request was never ended"


def test_a_stream_that_is_collected_while_an_output_is_made_waits_for_no_lock(
    llama, work, engine, monkeypatch
):
    """The thread holds the engine's lock then, outside any step."""
    from nanopaged import LLM

    prompts, expected = work
    method = LLM._output

    def collecting(self, group):
        gc.collect()
        return method(self, group)

    llm = engine(llama, num_blocks=40, max_model_len=64)
    with no_collection():
        abandon_a_stream(llm, prompts[0])
        with monkeypatch.context() as patch, deadline(60):
            patch.setattr(LLM, "_output", collecting)
            *_, last = llm.stream(prompts[1], greedy())
    assert first_tokens_of([last]) == [expected[1]]


@pytest.mark.parametrize(
    "count", [12, pytest.param(1000, marks=pytest.mark.slow)], ids="{} moments".format
)
def test_the_garbage_collector_may_run_at_any_line(count, llama, work):
    """An abandoned stream, three prompts that share, and a collection at a random line.
    """
    prompts, expected = work
    rng = random.Random(7)

    def attempt(llm, moment):
        abandon_a_stream(
            llm, prompts[moment % 3], steps=1 + moment % 5, n=1 + moment % 2
        )
        with AtLine(moment, gc.collect), deadline(60):
            outputs = llm.generate(prompts[:3], greedy(), use_tqdm=False)
        assert first_tokens_of(outputs) == expected[:3]
        return True

    moments = (rng.randrange(1, 3000) for _ in range(count))
    with no_collection():
        assert every_moment(llama, work, attempt, moments, num_blocks=40) == count


def test_a_stream_that_is_closed_is_over_at_once_for_others(llama, work, engine):
    """Closing aborts: the blocks are free before, or with, the next step."""
    prompts, expected = work
    llm = engine(llama, num_blocks=16, max_model_len=64)
    with closing(llm.stream(prompts[3], greedy())) as stream:
        next(stream)
    with deadline(60):
        assert (
            first_tokens_of(llm.generate(prompts[3], greedy(), use_tqdm=False))
            == expected[3:]
        )
    assert not llm.has_unfinished_requests()
    assert llm.stats().blocks_used == 0


def test_a_stream_may_be_closed_from_inside_a_step(llama, work, engine, monkeypatch):
    """By a finalizer or a signal handler, say: the step goes on and the others are
    right.
    """
    from nanopaged.block_manager import BlockManager

    prompts, expected = work
    llm = engine(llama, num_blocks=40, max_model_len=64)
    stream = llm.stream(prompts[0], greedy())
    next(stream)
    method = BlockManager.match_prefix

    def closing_first(self, seq):
        stream.close()
        return method(self, seq)

    monkeypatch.setattr(BlockManager, "match_prefix", closing_first)
    outputs = llm.generate(prompts, greedy(), use_tqdm=False)
    assert first_tokens_of(outputs) == expected
    assert list(stream) == []


# --- 4: numbers that are none ---

POISON = 9  # the token whose K or V overflows


@pytest.fixture(scope="session", params=["k_proj", "v_proj"])
def poisoned(request, llama, edit_model):
    """A model in which one token, and no other, makes infinite K or V.

    Dimension 0 of the hidden states is the poison's own: nothing else ever writes to
    it.
    """

    def edit(weights):
        weights["model.embed_tokens.weight"][:, 0] = 0
        weights["model.embed_tokens.weight"][POISON, 0] = 1
        for name, weight in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight[0] = 0
            if name.endswith(f"layers.0.self_attn.{request.param}.weight"):
                weight[:, 0] = 3e38

    return edit_model(llama, weights=edit)


@pytest.fixture(scope="session")
def healthy(poisoned, reference):
    """Prompts without the poison, one block long and more, and their tokens by
    transformers.
    """
    rng = random.Random(3)
    prompts = []
    while len(prompts) < 5:
        length = [3, 5, 9, 14, 21][len(prompts)]
        prompt = [
            rng.choice([i for i in range(160) if i != POISON]) for _ in range(length)
        ]
        tokens = reference.generate(poisoned, prompt, 12)
        if POISON not in tokens and reference.is_clear(poisoned, prompt, 12):
            prompts.append(prompt)
    return prompts, [reference.generate(poisoned, prompt, 12) for prompt in prompts]


def test_the_poison_is_one(poisoned, healthy, reference):
    assert not reference.logits(poisoned, [4, POISON, 5])[1:].isfinite().all()
    assert reference.logits(poisoned, healthy[0][-1]).isfinite().all()


def finish(llm, requests):
    """Step until nothing is left; the tokens and finish reasons of the requests."""
    last = {}
    with deadline(60):
        while llm.has_unfinished_requests():
            last.update({output.request_id: output.outputs[0] for output in llm.step()})
    return [(list(last[i].token_ids), last[i].finish_reason) for i in requests]


@pytest.mark.parametrize("logprobs", [None, 2])
def test_infinite_keys_stay_with_the_request_that_made_them(
    poisoned, healthy, engine, logprobs
):
    """In one batch with others, in blocks that others get later, and in the cache."""
    prompts, expected = healthy
    llm = engine(poisoned, max_num_seqs=8, max_num_batched_tokens=64)
    params = greedy(max_tokens=12, logprobs=logprobs)
    for _ in range(2):
        # The poison comes first: it gets block 0, with which short block tables are
        # padded.
        bad = llm.add_request([POISON, 4, 5, POISON, 6, 7, 8], params)
        good = [llm.add_request(prompt, params) for prompt in prompts]
        results = finish(llm, [bad, *good])
        assert results[1:] == [(tokens, "length") for tokens in expected]
    again = llm.generate(prompts, greedy(max_tokens=12), use_tqdm=False)
    assert first_tokens_of(again) == expected, "and what is cached is right"


def test_infinite_keys_stay_behind_in_blocks_that_are_taken_again(
    poisoned, healthy, engine
):
    """A small pool: the next request gets the same blocks, and fills the last one half.
    """
    prompts, expected = healthy
    llm = engine(poisoned, num_blocks=12, max_model_len=48, max_num_batched_tokens=256)
    for prompt, tokens in zip(prompts, expected, strict=True):
        bad = llm.add_request([POISON] * 30, greedy(max_tokens=12))
        finish(llm, [bad])
        assert first_tokens_of(
            llm.generate(prompt, greedy(max_tokens=12), use_tqdm=False)
        ) == [tokens]


@pytest.mark.parametrize(
    "params", [{}, {"logprobs": 1}, {"temperature": 1.0, "top_k": 5}]
)
def test_logits_that_are_no_numbers_end_their_own_request_alone(
    params, poisoned, healthy, engine
):
    """With finish_reason "error", and no token that was never computed."""
    prompts, expected = healthy
    llm = engine(poisoned)
    bad = llm.add_request([4, POISON, 5, 6], greedy(max_tokens=12, **params))
    good = llm.add_request(prompts[0], greedy(max_tokens=12))
    bad_result, good_result = finish(llm, [bad, good])
    assert bad_result == ([], "error")
    assert good_result == (expected[0], "length")


def test_generate_returns_the_others_where_one_request_fails(poisoned, healthy, engine):
    prompts, expected = healthy
    llm = engine(poisoned)
    batch = [prompts[0], [4, POISON, 5, 6], prompts[1]]
    outputs = llm.generate(batch, greedy(max_tokens=12), use_tqdm=False)
    assert first_tokens_of(outputs) == [expected[0], [], expected[1]]
    assert [o.outputs[0].finish_reason for o in outputs] == [
        "length",
        "error",
        "length",
    ]
    assert all(output.finished for output in outputs)


# --- 5, 6, 7: interrupts ---


def interrupt_twice(llm, work, moment):
    """Ctrl-C in the forward pass, and once more at a line of what follows; did that
    come?
    """
    second = AtLine(moment, interrupt)

    def interrupted(_):
        vars(llm.runner).pop("execute")
        frame = sys._getframe(1)
        sys.settrace(second.trace)
        while (
            frame is not None
        ):  # those who are already running are not traced otherwise
            if frame.f_code.co_filename.startswith(PACKAGE):
                frame.f_trace = second.trace
            frame = frame.f_back
        raise KeyboardInterrupt

    llm.add_request(work[0][0], greedy())
    llm.step()
    llm.runner.execute = interrupted
    before = sys.gettrace()
    try:
        with pytest.raises(KeyboardInterrupt), deadline(60):
            llm.generate(work[0][:3], greedy(n=2), use_tqdm=False)
    finally:
        sys.settrace(before)
    return second.reached


@pytest.mark.parametrize("stride", [5, pytest.param(2, marks=pytest.mark.slow)])
def test_a_second_interrupt_while_the_first_is_handled(stride, llama, work):
    """At many lines of the recovery, one after the other."""
    moments = range(1, 2000, stride)
    every_moment(
        llama,
        work,
        lambda llm, moment: interrupt_twice(llm, work, moment),
        moments,
        swap_space=0.001,
        num_blocks=26,
    )


def interrupted_generate(llm, work, moment):
    """One Ctrl-C at a line of a run that forks, preempts and swaps."""
    params = [greedy(n=1 + i % 3, temperature=1.0, seed=i) for i in range(4)]
    with suppress(KeyboardInterrupt), AtLine(moment, interrupt), deadline(60):
        llm.generate([*work[0][:3], work[0][0]], params, use_tqdm=False)
    return True


@pytest.mark.parametrize("swap_space", [0, 0.001], ids=["recompute", "swap"])
@pytest.mark.parametrize(
    "count", [10, pytest.param(1000, marks=pytest.mark.slow)], ids="{} moments".format
)
def test_an_interrupt_at_a_random_line(count, swap_space, llama, work):
    """Inside `finish` and `free`, too, where references and rows are half given back.
    """
    rng = random.Random(11)
    moments = [rng.randrange(1, 6000) for _ in range(count)]
    options = {"swap_space": swap_space, "num_blocks": 26}
    every_moment(
        llama,
        work,
        lambda llm, moment: interrupted_generate(llm, work, moment),
        moments,
        **options,
    )


def interrupted_abort(llm, work, moment):
    """Ctrl-C inside `abort_request`, while two requests run and one waits; did it come?
    """
    requests = [llm.add_request(prompt, greedy(n=2)) for prompt in work[0][:3]]
    llm.step()
    llm.step()
    second = AtLine(moment, interrupt)
    with suppress(KeyboardInterrupt), second, deadline(60):
        llm.abort_request(requests[moment % 3])
    try:
        with deadline(60):
            while llm.has_unfinished_requests():
                llm.step()
    except RuntimeError as error:
        assert "shut down" in str(error)
    return second.reached


def interrupted_close(llm, work, moment):
    """The same inside a stream's `close`."""
    stream = llm.stream(work[0][:2], greedy(n=2))
    next(stream)
    second = AtLine(moment, interrupt)
    with suppress(KeyboardInterrupt), second, deadline(60):
        stream.close()
    return second.reached


@pytest.mark.parametrize("attempt", [interrupted_abort, interrupted_close])
@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupt_inside_abort_and_close(stride, attempt, llama, work):
    """At every line of theirs: nothing leaks, and nobody waits for blocks that never
    come.
    """
    moments = range(1, 500, stride)
    every_moment(
        llama,
        work,
        lambda llm, moment: attempt(llm, work, moment),
        moments,
        num_blocks=26,
    )


def test_a_leak_is_an_error_and_no_endless_loop(llama, work):
    """Where nothing runs and nobody can be admitted, no step will ever change that."""
    prompts, _ = work
    with small_engine(llama) as llm:
        llm.block_manager.free_blocks.popitem()
        with deadline(20), pytest.raises(RuntimeError):
            llm.generate(prompts[3], greedy(), use_tqdm=False)


def interrupted_queueing(llm, moment):
    """Ctrl-C before the first step of a call; did it come?"""
    steps = llm.stats().steps
    queueing = AtLine(moment, interrupt)
    with suppress(KeyboardInterrupt), queueing, deadline(60):
        next(llm.stream([[5], [6], [7]] * 5, greedy()))
    return queueing.reached and llm.stats().steps == steps


def tells_of_one_request_alone(llm, _):
    """False if the engine says that it is closed."""
    try:
        mine = llm.add_request([5, 6], greedy(max_tokens=2))
    except RuntimeError as error:
        assert "shut down" in str(error)
        return False
    with deadline(60):
        told = {output.request_id for _ in range(6) for output in llm.step()}
    assert told == {mine}
    assert not llm.has_unfinished_requests()
    return True


def test_an_interrupt_while_generate_queues_leaves_nothing_for_step(llama, work):
    """14: the next `step` returned a request with the id '' that nobody had made."""
    attempts = every_moment(
        llama,
        work,
        interrupted_queueing,
        range(3, 3000, 20),
        tells_of_one_request_alone,
    )
    assert attempts > 10, "so few lines between the call and the first step?"


# --- 8: one request ends all ---


@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_min_tokens_where_every_token_stops_is_refused(logprobs, llama, work, engine):
    prompts, expected = work
    llm = engine(llama, max_model_len=64)
    mine = llm.add_request(prompts[0], greedy())
    llm.step()
    params = greedy(min_tokens=2, stop_token_ids=list(range(160)), logprobs=logprobs)
    with pytest.raises(ValueError, match="min_tokens"):
        llm.add_request(prompts[1], params)
    assert list(drain(llm)[mine][-1].outputs[0].token_ids) == expected[0]


def test_all_stop_tokens_without_min_tokens_are_no_trouble(llama, work, engine):
    llm = engine(llama, max_model_len=64)
    params = greedy(stop_token_ids=list(range(160)))
    assert first_tokens_of(llm.generate(work[0], params, use_tqdm=False)) == [
        x[:1] for x in work[1]
    ]


def test_lists_are_copied_when_the_params_are_made(text_model, engine):
    """Whoever changes them afterwards changes nothing, and ends nobody's request."""
    llm = engine(text_model)
    strings, tokens = ["never to be said"], [3]
    params = greedy(stop=strings, stop_token_ids=tokens)
    expected = first_tokens_of(
        llm.generate([[5, 6]], greedy(stop_token_ids=[3]), use_tqdm=False)
    )
    mine = llm.add_request([5, 6], params)
    llm.step()
    strings[0] = 5
    tokens[:] = ["x"]
    assert list(drain(llm)[mine][-1].outputs[0].token_ids) == expected[0]
    assert first_tokens_of(llm.generate([[5, 6]], params, use_tqdm=False)) == expected


# --- 9: the tokenizer knows more than the model ---


@pytest.fixture
def wide_tokenizer_model(text_model, tmp_path):
    """Its tokenizer was given a token that the model has no embedding for."""
    from transformers import AutoTokenizer

    path = shutil.copytree(text_model, tmp_path / "wide")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(path)
    return path, len(tokenizer) - 1


def test_text_with_a_token_beyond_the_vocabulary_is_refused(
    wide_tokenizer_model, engine
):
    path, token = wide_tokenizer_model
    llm = engine(path)
    assert llm.tokenizer("<extra>").input_ids[-1] == token
    for call in (
        lambda: llm.generate("the <extra> block", greedy(), use_tqdm=False),
        lambda: llm.add_request({"prompt": "the <extra> block"}, greedy()),
        lambda: llm.chat(
            [{"role": "user", "content": "<extra>"}], greedy(), use_tqdm=False
        ),
    ):
        with pytest.raises(ValueError, match=str(token)):
            call()
    assert not llm.has_unfinished_requests()
    assert llm.generate("the block", greedy(), use_tqdm=False)[0].outputs[0].token_ids


# --- 10 and 15: ranks that are stuck, ranks that are forgotten ---

STUCK_RANK = """
import os, signal, sys, threading, time
from nanopaged import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM({path!r}, dtype="float32", device="cpu", num_blocks=64, max_model_len=64,
              tensor_parallel_size=2)
    params = SamplingParams(temperature=0, max_tokens=8)
    llm.generate([[5, 6, 7]], params, use_tqdm=False)
    os.kill(llm.ranks.workers.processes[0].pid, signal.SIGSTOP)
    threading.Timer(3, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    try:
        llm.generate([[5, 6, 8]], params, use_tqdm=False)
    except BaseException as error:
        print(type(error).__name__, round(time.monotonic() - started), flush=True)
    print("the end", flush=True)
"""


@pytest.mark.slow
def test_ctrl_c_is_heard_while_another_rank_is_stuck(llama, tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(STUCK_RANK.format(path=str(llama)))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        output = "it ignores Ctrl-C"
    finally:
        kill_group(process)
    name, seconds = output.split()[:2]
    assert name in ("KeyboardInterrupt", "RuntimeError")
    assert int(seconds) < 20
    assert "the end" in output


def kill_group(process):
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_an_engine_that_is_deleted_ends_its_ranks(llama):
    from nanopaged import LLM

    llm = LLM(
        str(llama),
        dtype="float32",
        device="cpu",
        num_blocks=16,
        max_model_len=64,
        tensor_parallel_size=2,
    )
    processes = list(llm.ranks.workers.processes)
    assert all(process.is_alive() for process in processes)
    del llm
    gc.collect()
    for process in processes:
        process.join(10)
    assert not any(process.is_alive() for process in processes)


# --- 11: the end of the text ---


def test_a_character_that_max_tokens_cuts_is_the_same_streamed_or_not(
    make_scripted_model, sentencepiece_tokenizer, engine
):
    """Bytes as tokens: whatever is shown for half a character, both show it."""
    script = sentencepiece_tokenizer.encode("the😀 blocks", add_special_tokens=False)
    llm = engine(make_scripted_model(script, sentencepiece_tokenizer))
    for count in range(1, 2 * len(script)):
        params = greedy(max_tokens=count)
        whole = llm.generate([script[-1:]], params, use_tqdm=False)[0].outputs[0]
        *_, last = llm.stream([script[-1:]], params)
        assert whole.text == last.outputs[0].text, f"after {count} tokens"
        assert whole.token_ids == last.outputs[0].token_ids


def test_text_that_really_ends_in_a_replacement_character_keeps_it(
    make_scripted_model, tokenizer, engine
):
    """U+FFFD can be said, too: three bytes that are whole."""
    script = tokenizer.encode("a\ufffd", add_special_tokens=False)
    assert len(set(script)) == len(script) == 4
    llm = engine(make_scripted_model(script))
    params = greedy(max_tokens=len(script))
    assert (
        llm.generate([script[-1:]], params, use_tqdm=False)[0].outputs[0].text
        == "a\ufffd"
    )
    *_, last = llm.stream([script[-1:]], params)
    assert last.outputs[0].text == "a\ufffd"


# --- 12: weights ---

HEAD, NORM = "lm_head.weight", "model.norm.weight"
UP = "model.layers.1.mlp.up_proj.weight"


def refused(path, *words):
    """`LLM(path)` raises, at once, and says these words, in a message that one can
    read.
    """
    from nanopaged import LLM

    with (
        deadline(60),
        pytest.raises((ValueError, TypeError, FileNotFoundError)) as caught,
    ):
        LLM(str(path), dtype="float32", device="cpu", num_blocks=16)
    message = str(caught.value)
    for word in words:
        assert re.search(word, message), f"{word!r} is not in {message!r}"
    assert len(message) < 2000
    return message


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.uint8, torch.bool, torch.int64, torch.float8_e4m3fn],
    ids=str,
)
def test_weights_that_are_no_floats_are_refused(dtype, llama, edit_model):
    """They are codes that somebody has to scale, not numbers to be cast."""
    path = edit_model(llama, weights=lambda t: t.update({UP: t[UP].to(dtype)}))
    refused(path, re.escape(UP), str(dtype).split(".")[1])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("name", [UP, NORM])
def test_weights_that_are_no_numbers_are_refused(name, value, llama, edit_model):
    def edit(weights):
        weights[name].view(-1)[-1] = value

    refused(edit_model(llama, weights=edit), re.escape(name))


def test_a_tied_checkpoint_with_another_head_is_refused(make_model, edit_model):
    """The same head is no trouble: some store what config.json implies."""
    from nanopaged import LLM

    tied = make_model("llama", seed=21, tie_word_embeddings=True)
    embedding = "model.embed_tokens.weight"
    path = edit_model(tied, weights=lambda t: t.update({HEAD: t[embedding].clone()}))
    LLM(str(path), dtype="float32", device="cpu", num_blocks=16).shutdown()
    path = edit_model(tied, weights=lambda t: t.update({HEAD: t[embedding].flip(0)}))
    refused(path, re.escape(HEAD), "tie")


def test_a_head_in_two_shards_is_refused(make_model, edit_model):
    """The second one was skipped in silence, right or wrong."""
    from safetensors.torch import load_file, save_file

    path = edit_model(make_model("llama", seed=12, max_shard_size="60KB"))
    index = json.loads((path / "model.safetensors.index.json").read_text())[
        "weight_map"
    ]
    other = next(
        path / shard for shard in sorted(index.values()) if shard != index[HEAD]
    )
    tensors = load_file(other)
    save_file(tensors | {HEAD: torch.ones(160, 64)}, other, metadata={"format": "pt"})
    refused(path, re.escape(HEAD))


@pytest.mark.parametrize(
    "outside", ["../elsewhere.safetensors", "{tmp}/elsewhere.safetensors"]
)
def test_an_index_names_files_of_its_own_folder_only(
    outside, llama, edit_model, tmp_path
):
    path = edit_model(llama)
    name = outside.format(tmp=tmp_path)
    shutil.copy(path / "model.safetensors", path / name)
    from safetensors.torch import load_file

    names = load_file(path / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, name)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "model.safetensors").unlink()
    refused(path, "elsewhere.safetensors")


def test_weights_that_are_a_pipe_are_refused_at_once(llama, edit_model):
    """Whoever opens it waits for somebody who writes; today that is for ever."""
    path = edit_model(llama)
    pipe = path / "model.safetensors"
    pipe.unlink()
    os.mkfifo(pipe)
    rescue = subprocess.Popen(["sh", "-c", f"sleep 4; exec 3<>'{pipe}'; sleep 1"])
    started = time.monotonic()
    try:
        refused(path, r"model\.safetensors")
        assert time.monotonic() - started < 3, "it waited for the pipe"
    finally:
        rescue.kill()
        rescue.wait()


def test_a_tokenizer_with_code_of_its_own_is_refused_without_a_question(
    text_model, edit_model, monkeypatch
):
    """It asked on stdin whether to run the code; a script has nobody to answer."""
    path = edit_model(text_model)
    executed = path / "executed"
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "MyTokenizer"
    settings["auto_map"] = {"AutoTokenizer": ["my_tokenizer.MyTokenizer", None]}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    code = f"open({str(executed)!r}, 'w').close()\nclass MyTokenizer: pass\n"
    (path / "my_tokenizer.py").write_text(code)
    questions = []
    monkeypatch.setattr("builtins.input", lambda *text: questions.append(text) or "y")
    try:
        refused(path, "trust_remote_code")
    finally:
        assert not questions, "it asked on stdin"
        assert not executed.exists(), "it ran the code"


# --- 13: beams and salts ---


def test_a_beam_search_has_a_cache_salt(llama, work, engine):
    from nanopaged import BeamSearchParams

    llm = engine(llama, max_model_len=64)
    prompt = work[0][2]
    plain = llm.beam_search(prompt, BeamSearchParams(2, 6))[0]
    salted = BeamSearchParams(beam_width=2, max_tokens=6, cache_salt="mine")
    first = llm.beam_search(prompt, salted)[0]
    second = llm.beam_search(prompt, salted)[0]
    other = llm.generate(prompt, greedy(cache_salt="yours"), use_tqdm=False)[0]
    assert [plain.num_cached_tokens, first.num_cached_tokens] == [0, 0]
    assert second.num_cached_tokens == 16
    assert other.num_cached_tokens == 0
    assert (
        first_tokens_of([plain])
        == first_tokens_of([first])
        == first_tokens_of([second])
    )


# --- 15: small ones ---


def test_an_error_does_not_quote_a_whole_prompt(text_model, engine):
    llm = engine(text_model)
    for prompt in (
        "the block " * 10**4,
        [7] * 10**5,
        {"text": "x" * 10**6},
        ["x" * 10**6, 5],
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            llm.add_request(prompt, greedy())
        assert len(str(caught.value)) < 1000
    for messages in (
        "x" * 10**5,
        ["x" * 10**5],
        [{"role": "user", "text": "x" * 10**5}],
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            llm.chat(messages, greedy(), use_tqdm=False)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("request_id", [3, None, 1.5, b"0"], ids=repr)
def test_an_id_that_is_none_is_not_aborted_in_silence(request_id, llama, work, engine):
    llm = engine(llama, max_model_len=64)
    mine = llm.add_request(work[0][0], greedy())
    with pytest.raises(TypeError, match="request_id"):
        llm.abort_request(request_id)
    assert list(drain(llm)[mine][-1].outputs[0].token_ids) == work[1][0]


def test_several_ids_are_aborted_at_once(llama, work, engine):
    llm = engine(llama, max_model_len=64)
    requests = [llm.add_request(prompt, greedy()) for prompt in work[0]]
    llm.abort_request(requests[1:])
    told = {i: outputs[-1].outputs[0] for i, outputs in drain(llm).items()}
    assert [told[i].finish_reason for i in requests] == [
        "length",
        "abort",
        "abort",
        "abort",
    ]
    assert list(told[requests[0]].token_ids) == work[1][0]


def test_more_beams_than_tokens_are_refused(llama, engine):
    from nanopaged import BeamSearchParams

    llm = engine(llama, max_num_seqs=200, num_blocks=400)
    with pytest.raises(ValueError, match=r"beam_width.*1[56]\d.*got 170"):
        llm.beam_search([5, 6, 7], BeamSearchParams(beam_width=170, max_tokens=2))


def set_rope(key, value):
    def edit(config):
        config.setdefault("rope_parameters", {"rope_type": "default"})[key] = value

    return edit


CONFIGS = {
    "rope_theta 0": (set_rope("rope_theta", 0), ["rope_theta"]),
    "rope_theta -1": (set_rope("rope_theta", -1), ["rope_theta", "-1"]),
    "rope_theta NaN": (set_rope("rope_theta", math.nan), ["rope_theta", "nan"]),
    "eps NaN": (lambda c: c.update(rms_norm_eps=math.nan), ["rms_norm_eps", "nan"]),
    "no heads": (lambda c: c.update(num_attention_heads=0), ["num_attention_heads"]),
    "no layers": (
        lambda c: c.update(num_hidden_layers=-1),
        ["num_hidden_layers", "-1"],
    ),
    "no vocabulary": (lambda c: c.update(vocab_size=0), ["vocab_size"]),
}

FILES = {
    "config.json is a list": ("config.json", "[1, 2]"),
    "config.json is too deep": ("config.json", "[" * 100_000),
    "config.json is no text": ("config.json", b"\xff\xfe\x00"),
    "generation_config.json is a list": ("generation_config.json", "[3]"),
    "generation_config.json is a number": ("generation_config.json", "3"),
    "the index is a list": ("model.safetensors.index.json", "[]"),
    "the index maps to numbers": (
        "model.safetensors.index.json",
        '{"weight_map": {"a": 1}}',
    ),
    "the index maps nothing": ("model.safetensors.index.json", '{"weight_map": [1]}'),
    "tokenizer.json is empty": ("tokenizer.json", "{}"),
    "tokenizer.json is a list": ("tokenizer.json", "[]"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_numbers_in_the_config_that_no_model_has_are_refused(name, llama, edit_model):
    edit, words = CONFIGS[name]
    refused(edit_model(llama, config=edit), *words)


@pytest.mark.parametrize("name", FILES)
def test_files_that_hold_something_else_are_named(name, text_model, edit_model):
    path = edit_model(text_model)
    file, content = FILES[name]
    (path / file).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )
    refused(path, "tokenizer" if file == "tokenizer.json" else re.escape(file))


@pytest.mark.parametrize("value", ["1", 1.5, ["1"], [True], {"id": 1}], ids=repr)
def test_an_eos_id_that_is_no_number_is_refused(value, llama, edit_model):
    path = edit_model(llama)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    refused(path, "eos_token_id")


# --- growth ---


def decoded_tokens(llm, monkeypatch, count):
    """How many tokens the tokenizer decodes while `count` are streamed."""
    prompt = llm.tokenizer.encode("a", add_special_tokens=False)
    work, kind = [0], type(llm.tokenizer)
    decode = kind.decode

    def counting(self, token_ids, *args, **options):
        work[0] += len(token_ids)
        return decode(self, token_ids, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "decode", counting)
        for _ in llm.stream([prompt], greedy(max_tokens=count)):
            pass
    return work[0]


def stuttering(make_scripted_model, prompt, token):
    """A model that answers the prompt's token, and its own, with one and the same
    token.
    """
    path = make_scripted_model([token])
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"][token, prompt] = 1.0
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("kind", ["end of sequence", "lone byte", "text"])
def test_decoding_work_grows_with_the_tokens(
    kind, make_scripted_model, tokenizer, engine, monkeypatch
):
    """Tokens that give no text were decoded again and again: 8 million decodes for
    4,000.
    """
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    first_byte = tokenizer.convert_tokens_to_ids("Ã")  # of a character of two bytes
    token = {
        "end of sequence": tokenizer.eos_token_id,
        "lone byte": first_byte,
        "text": a,
    }[kind]
    path = stuttering(make_scripted_model, a, token)
    llm = engine(path, max_model_len=256, num_blocks=64)
    short, long = (decoded_tokens(llm, monkeypatch, count) for count in (60, 240))
    assert long < 6 * short, f"{short} tokens decoded for 60, {long} for 240"
    assert long < 240 * 40


class CountingStr(str):
    """Counts the characters that are cut out of it or compared with its beginning."""

    work = 0

    def __getitem__(self, index):
        part = str.__getitem__(self, index)
        type(self).work += len(part)
        return part

    def startswith(self, prefix, *args):
        type(self).work += len(prefix)
        return str.startswith(self, prefix, *args)


def test_a_long_stop_string_costs_no_more_than_the_text_is_long(tokenizer):
    """What is held back cannot be longer than what has been said."""
    from nanopaged.detokenizer import Detokenizer

    ids = tokenizer.encode("the block table of a sequence", add_special_tokens=False)
    work = []
    for length in (16_000, 32_000):
        CountingStr.work = 0
        stop = CountingStr("sequence" * (length // 8))
        detokenizer = Detokenizer(tokenizer, [], [stop])
        detokenizer.update(ids)
        assert detokenizer.visible() == "the block table of a "
        work.append(CountingStr.work)
    assert work[1] < 1.5 * work[0] + 1000, work
    assert work[1] < 1_000_000, work


class CountingId(str):
    """Counts how often it is compared."""

    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        CountingId.comparisons += 1
        return str.__eq__(self, other)


def test_aborting_all_that_wait_takes_a_bounded_number_of_comparisons(
    llama, work, engine, monkeypatch
):
    """Each abort looked at every request, and moved every one behind it."""
    from nanopaged.sequence import SequenceGroup

    comparisons = [0]

    def counting(self, other):
        comparisons[0] += 1
        return self is other

    monkeypatch.setattr(SequenceGroup, "__eq__", counting)
    monkeypatch.setattr(SequenceGroup, "__hash__", object.__hash__)
    llm = engine(llama, max_model_len=64)
    counts = []
    for number in (100, 200):
        requests = [llm.add_request(work[0][0], greedy()) for _ in range(number)]
        random.Random(1).shuffle(requests)
        CountingId.comparisons, comparisons[0] = 0, 0
        for request in requests:
            llm.abort_request(CountingId(request))
        while llm.has_unfinished_requests():
            llm.step()
        counts.append(CountingId.comparisons + comparisons[0])
    assert counts[1] < 3 * counts[0] + 100, counts


def test_a_prompt_that_waits_is_not_hashed_again_in_every_step(llama, work, engine):
    """The head of the queue looks for its prefix when something has changed for it."""
    hashed = [0]
    llm = engine(llama, num_blocks=26, max_model_len=104)
    prompt = [(7 * i) % 160 for i in range(100)]
    llm.generate([prompt[:65]], greedy(max_tokens=1), use_tqdm=False)
    manager = llm.block_manager
    hash_function = manager.hash_function

    def counting(data):
        hashed[0] += 1
        return hash_function(data)

    manager.hash_function = counting
    llm.add_request(work[0][0], greedy(max_tokens=26))
    llm.step()
    # Its first 64 tokens are cached, but it needs the whole pool.
    waiting = llm.add_request(prompt, greedy(max_tokens=4))
    for _ in range(24):
        assert all(output.request_id != waiting for output in llm.step())
    assert hashed[0] < 4 * 25, f"{hashed[0]} blocks hashed in 24 steps"
    while llm.has_unfinished_requests():
        told = {output.request_id: output for output in llm.step()}
    assert told[waiting].num_cached_tokens == 64


def test_of_two_blocks_with_the_same_content_the_one_that_is_left_is_found(
    llama, engine
):
    """Point 5: where the first one is evicted, the second is alive and was not to be
    found.
    """
    llm = engine(llama, num_blocks=6, max_model_len=24)
    prompt = [11, 12, 13, 14, 15, 16, 17, 18]
    llm.generate([prompt], greedy(max_tokens=1), use_tqdm=False)
    # Of a cached prompt the last block is computed again, in a block of its own.
    mine = llm.add_request(prompt, greedy(max_tokens=12))
    llm.step()
    # This one takes whatever is free, the first copy of that block among it.
    other = llm.add_request([*range(40, 49)], greedy(max_tokens=3))
    told = {}
    while other not in told or not told[other].finished:
        told.update({output.request_id: output for output in llm.step()})
    assert mine not in told or not told[mine].finished
    third = llm.add_request([*prompt, 19], greedy(max_tokens=1))
    while llm.has_unfinished_requests():
        told.update({output.request_id: output for output in llm.step()})
    assert told[third].num_cached_tokens == 8


# --- errors, in sentences ---


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_the_wrong_one_of_many_prompts_is_named(method, llama, engine):
    llm = engine(llama)
    prompts = [[1, 2, 3]] * 20
    for bad, word in (
        ([5, 999], "999"),
        ([], "prompt"),
        ({"text": [5]}, "text"),
        (5.5, "5.5"),
    ):
        prompts[7] = bad
        message = message_of(lambda: getattr(llm, method)(prompts, greedy()))
        assert re.search(r"\b7\b", message), message
        assert word in message


def test_the_wrong_one_of_many_params_is_named(llama, engine):
    llm = engine(llama)
    params = [greedy() for _ in range(20)]
    for bad, word in (
        (greedy(n=200), "n"),
        ("greedy", "SamplingParams"),
        (None, "SamplingParams"),
    ):
        params[7] = bad
        message = message_of(
            lambda: llm.generate([[1, 2]] * 20, params, use_tqdm=False)
        )
        assert re.search(r"\b7\b", message), message
        assert word in message


def test_a_step_too_small_for_all_sequences_says_what_to_lower(llama):
    from nanopaged import LLM

    message = message_of(
        lambda: LLM(str(llama), max_num_batched_tokens=128, device="cpu")
    )
    for word in ("max_num_batched_tokens", "128", "max_num_seqs", "256", "lower"):
        assert word in message, message


def test_bounds_are_told_as_people_tell_them(llama, engine):
    """No "from -inf to 4", no "one of 2"."""
    from nanopaged import LLM, BeamSearchParams, SamplingParams

    llm = engine(llama, max_num_seqs=4)
    messages = [
        message_of(lambda: llm.add_request([1, 2], greedy(n=5))),
        message_of(lambda: llm.add_request([1, 2], greedy(logprobs=500))),
        message_of(lambda: llm.add_request([7] * 97, greedy())),
        message_of(lambda: llm.beam_search([1, 2], BeamSearchParams(5, 4))),
        message_of(lambda: llm.generate([[1, 2]] * 2, [greedy()] * 3, use_tqdm=False)),
        message_of(lambda: SamplingParams(n=0)),
        message_of(lambda: SamplingParams(max_tokens=0)),
        message_of(lambda: SamplingParams(min_tokens=20)),
        message_of(lambda: SamplingParams(temperature=math.nan)),
        message_of(lambda: SamplingParams(stop_token_ids=[-1])),
        message_of(lambda: LLM(str(llama), device="cpu", block_size=24)),
        message_of(lambda: LLM(str(llama), device="cpu", max_model_len=500)),
        message_of(lambda: LLM(str(llama), device="cpu", tensor_parallel_size=16)),
        message_of(
            lambda: LLM(str(llama), device="cpu", num_blocks=2, max_model_len=96)
        ),
    ]
    for message in messages:
        assert not re.search(r"\binf\b", message), message
        assert not re.search(r"one of \d+(, got|$)", message), message
    assert "2" in messages[4] and "3" in messages[4]


def test_a_message_without_content_is_refused(text_model, engine):
    llm = engine(text_model)
    conversation = [{"role": "user", "content": "Hello"}, {"role": "user"}]
    message = message_of(lambda: llm.chat(conversation, greedy(), use_tqdm=False))
    assert "content" in message and re.search(r"\b1\b", message), message
    message = message_of(
        lambda: llm.chat([{"content": "Hello"}], greedy(), use_tqdm=False)
    )
    assert "role" in message
    for content in (5, None, [5], [{"type": "text"}]):
        bad = [{"role": "user", "content": content}]
        assert "content" in message_of(
            lambda bad=bad: llm.chat(bad, greedy(), use_tqdm=False)
        )
    image = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    ]
    assert "image_url" in message_of(lambda: llm.chat(image, greedy(), use_tqdm=False))


def test_pickled_weights_alone_are_refused_by_name(llama, edit_model):
    path = edit_model(llama)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    refused(path, r"pytorch_model\.bin", "safetensors")


def test_a_base_model_without_head_is_called_one(llama, edit_model):
    """As `AutoModel(..).save_pretrained` leaves it: no head, and no `model.` before the
    names.
    """

    def edit(weights):
        weights.pop(HEAD)
        for name in list(weights):
            weights[name.removeprefix("model.")] = weights.pop(name)

    refused(edit_model(llama, weights=edit), r"lm_head\.weight", r"\bbase\b|\bhead\b")


# --- NumPy and friends (point 3) ---


@pytest.mark.parametrize(
    "kind", [np.int64, np.int32, np.uint8], ids=lambda kind: kind.__name__
)
def test_counts_of_numpy_types_are_taken(kind, llama, work, engine):
    from nanopaged import BeamSearchParams

    llm = engine(
        llama,
        block_size=kind(4),
        num_blocks=kind(64),
        max_model_len=kind(64),
        max_num_seqs=kind(8),
        max_num_batched_tokens=kind(32),
        seed=kind(0),
    )
    params = greedy(
        n=kind(1),
        max_tokens=kind(COUNT),
        min_tokens=kind(0),
        top_k=kind(3),
        seed=kind(5),
        logprobs=kind(1),
        stop_token_ids=(kind(250),) if kind is not np.uint8 else None,
    )
    outputs = llm.generate(work[0], greedy(max_tokens=kind(COUNT)), use_tqdm=False)
    assert first_tokens_of(outputs) == work[1]
    assert params.max_tokens == COUNT and params.logprobs == 1
    beams = llm.beam_search(work[0][0], BeamSearchParams(kind(2), kind(4)))[0]
    assert len(beams.outputs) == 2
    assert first_tokens_of(
        llm.generate([np.array(work[0][0], kind)], greedy(), use_tqdm=False)
    ) == [work[1][0]]


@pytest.mark.parametrize(
    "kind", [np.float64, np.float32, np.float16], ids=lambda k: k.__name__
)
def test_floats_of_numpy_types_are_taken(kind, llama, engine):
    from nanopaged import SamplingParams

    params = SamplingParams(
        temperature=kind(0.5), top_p=kind(0.5), min_p=kind(0.25), max_tokens=4, seed=1
    )
    plain = SamplingParams(temperature=0.5, top_p=0.5, min_p=0.25, max_tokens=4, seed=1)
    llm = engine(llama, gpu_memory_utilization=kind(0.5), swap_space=kind(0))
    outputs = llm.generate([[5, 6], [5, 6]], [params, plain], use_tqdm=False)
    assert first_tokens_of(outputs)[0] == first_tokens_of(outputs)[1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", np.bool_(True)),
        ("max_tokens", np.bool_(True)),
        ("max_tokens", np.float64(4)),
        ("temperature", np.bool_(True)),
        ("temperature", np.float32("nan")),
        ("temperature", True),
        ("top_p", np.float64("nan")),
        ("ignore_eos", np.int64(1)),
        ("seed", np.bool_(True)),
        ("stop_token_ids", [np.bool_(True)]),
        ("stop_token_ids", [np.float64(3)]),
        ("max_tokens", "4"),
        ("max_tokens", np.array([4])),
        ("stop", (5,)),
    ],
    ids=str,
)
def test_bools_and_nan_are_no_numbers_of_numpy_either(field, value):
    from nanopaged import SamplingParams

    assert field in message_of(lambda: SamplingParams(**{field: value}))


@pytest.mark.parametrize(
    "prompt",
    [
        np.array([True, False]),
        np.array([1.0, 2.0]),
        torch.tensor([True]),
        torch.tensor([1.5]),
        [np.bool_(True)],
        [np.float64(1)],
        np.array([-1]),
        np.array([160]),
        np.array(5),
        torch.tensor(5),
        np.zeros((2, 2, 2), int),
    ],
    ids=repr,
)
def test_arrays_of_something_else_are_no_prompts(prompt, llama, work, engine):
    llm = engine(llama)
    assert "prompt" in message_of(lambda: llm.add_request(prompt, greedy()))
    assert not llm.has_unfinished_requests()


def test_paths_and_tuples_are_taken(llama, text_model, work):
    from nanopaged import LLM, SamplingParams

    options = {
        "dtype": "float32",
        "device": "cpu",
        "num_blocks": 64,
        "max_model_len": 64,
    }
    with LLM(Path(llama), **options) as llm:
        assert (
            first_tokens_of(
                llm.generate(tuple(map(tuple, work[0])), greedy(), use_tqdm=False)
            )
            == (work[1])
        )
        request = llm.add_request(tuple(work[0][0]), greedy())
        assert [tokens for tokens, _ in finish(llm, [request])] == work[1][:1]
    with LLM(Path(text_model), **options) as llm:
        params = SamplingParams(stop=("x", "y"), stop_token_ids=(3, 4), max_tokens=4)
        outputs = llm.generate(
            ("the block", "a table"), (params, params), use_tqdm=False
        )
        assert [output.prompt for output in outputs] == ["the block", "a table"]
