"""Threads on one engine: whoever calls, everybody gets their own right answer.

`generate`, `stream`, `step` and `abort_request` from four threads at once share steps
and change nobody's tokens, and the prefix cache is right afterwards: each test compares
with what a fresh engine says. A thread that is interrupted ends its own requests. Every
join has a timeout, so that a deadlock is a failure and not a hang.
"""

import ctypes
import os
import random
import signal
import sys
import threading
import time
from contextlib import closing
from functools import partial

import pytest

import helpers
from helpers import tokens_of

COUNT = 16
TIMEOUT = 120  # seconds after which a thread is called stuck
greedy = partial(helpers.greedy, max_tokens=COUNT)


@pytest.fixture(autouse=True)
def frequent_switches():
    """Threads change places a hundred times as often as they usually do."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="session")
def thread_work(llama, draw_prompts):
    """Twelve prompts, half of them with a common beginning, and what a fresh engine
    answers.
    """
    from nanopaged import LLM

    prefix = draw_prompts(llama, [10], 2, seed=60)[0]
    prompts = [
        *draw_prompts(llama, [5, 9, 12, 16, 7, 21], COUNT, seed=61),
        *draw_prompts(llama, [11, 14, 18, 12, 23, 15], COUNT, seed=62, prefix=prefix),
    ]
    options = {"dtype": "float32", "device": "cpu", "block_size": 4, "num_blocks": 64}
    with LLM(str(llama), max_model_len=96, **options) as llm:
        outputs = llm.generate(prompts, greedy(), use_tqdm=False)
    return prompts, [tokens_of(output) for output in outputs]


@pytest.fixture
def shared(llama, engine, thread_work):
    """One engine for all threads, small enough to preempt; its cache must be right at
    the end.
    """
    llm = engine(llama, num_blocks=30, max_model_len=64, max_num_seqs=8)
    yield llm
    check_cache(llm, thread_work)


@pytest.fixture
def roomy(llama, engine, thread_work):
    """The same for requests that are far longer than all the others together."""
    llm = engine(llama, num_blocks=300, max_model_len=256, max_num_seqs=8)
    yield llm
    check_cache(llm, thread_work)


def check_cache(llm, thread_work):
    prompts, expected = thread_work
    for _ in range(2):
        outputs = llm.generate(prompts, greedy(), use_tqdm=False)
        assert [tokens_of(output) for output in outputs] == expected, (
            "the cache is wrong"
        )
    while llm.has_unfinished_requests():  # what others aborted and nobody fetched
        llm.step()


def run_together(*functions):
    """Run each function in a thread of its own, all from the same moment; raise what
    they raise.
    """
    barrier = threading.Barrier(len(functions))
    errors = []

    def run(function):
        try:
            barrier.wait(TIMEOUT)
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    stuck = [thread.name for thread in threads if thread.is_alive()]
    assert not stuck, f"deadlock: {stuck} after {TIMEOUT} s"
    if errors:
        raise errors[0]


def patience():
    """Goes on, with short pauses, until a thread would be called stuck."""
    until = time.monotonic() + TIMEOUT
    while time.monotonic() < until:
        yield
        time.sleep(0)
    raise AssertionError(f"no end in sight after {TIMEOUT} s")


class Caller:
    """One thread's way of asking; what it got is compared with what it must get."""

    def __init__(self, llm, work, seed, rounds=3):
        self.llm = llm
        self.prompts, self.expected = work
        self.random = random.Random(seed)
        self.rounds = rounds
        self.asked = 0

    def choose(self):
        """Some prompts: their numbers."""
        return self.random.sample(range(len(self.prompts)), 3)

    def generates(self):
        for _ in range(self.rounds):
            some = self.choose()
            outputs = self.llm.generate(
                [self.prompts[i] for i in some], greedy(), use_tqdm=False
            )
            assert [tokens_of(output) for output in outputs] == [
                self.expected[i] for i in some
            ]
            assert all(output.finished for output in outputs)
            self.asked += len(some)

    def streams(self):
        for _ in range(self.rounds):
            some = self.choose()
            seen = {}
            for output in self.llm.stream([self.prompts[i] for i in some], greedy()):
                tokens = tokens_of(output)
                before = seen.get(output.request_id, [])
                assert tokens[: len(before)] == before and len(tokens) >= len(before)
                seen[output.request_id] = tokens
            ends = [seen[request] for request in sorted(seen, key=int)]
            assert ends == [self.expected[i] for i in some]
            self.asked += len(some)

    def leaves_early(self):
        """Streams that are closed after a few tokens."""
        for _ in range(self.rounds):
            some = self.choose()
            with closing(
                self.llm.stream([self.prompts[i] for i in some], greedy())
            ) as stream:
                for _ in range(self.random.randrange(1, 9)):
                    # Steps of other threads count: an output may have several new
                    # tokens.
                    output = next(stream, None)
                    assert output is None or any(
                        tokens_of(output) == self.expected[i][: len(tokens_of(output))]
                        for i in some
                    )
            self.asked += len(some)

    def steps(self):
        """What `step` returns belongs to the requests of `add_request` alone."""
        for _ in range(self.rounds):
            some = self.choose()
            mine = {self.llm.add_request(self.prompts[i], greedy()): i for i in some}
            last = {}
            for _ in patience():
                for output in self.llm.step():
                    assert output.request_id in mine, "somebody else's request"
                    last[output.request_id] = output
                if all(i in last and last[i].finished for i in mine):
                    break
            for request, i in mine.items():
                assert tokens_of(last[request]) == self.expected[i]
            self.asked += len(some)


def test_four_threads_that_generate(shared, thread_work):
    callers = [Caller(shared, thread_work, seed) for seed in range(4)]
    run_together(*(caller.generates for caller in callers))
    assert sum(caller.asked for caller in callers) == 36


def test_threads_share_steps(llama, engine, thread_work):
    """Whoever waits is served by whoever steps, so there are fewer steps."""
    prompts, expected = thread_work
    llm = engine(llama, num_blocks=200)

    def asks(i):
        outputs = llm.generate([prompts[i]] * 4, greedy(max_tokens=40), use_tqdm=False)
        assert [tokens_of(output)[:COUNT] for output in outputs] == [expected[i]] * 4

    run_together(*(lambda i=i: asks(i) for i in range(4)))
    assert llm.stats().steps < 3 * 40, "each call alone takes 40"


@pytest.mark.parametrize(
    "ways",
    [
        ["streams"] * 4,
        ["generates", "generates", "streams", "streams"],
        ["generates", "streams", "steps", "leaves_early"],
        ["leaves_early", "leaves_early", "streams", "generates"],
    ],
    ids="-".join,
)
def test_four_threads_in_different_ways(ways, shared, thread_work):
    callers = [Caller(shared, thread_work, 10 + seed) for seed in range(4)]
    run_together(*(getattr(c, way) for c, way in zip(callers, ways, strict=True)))
    assert all(caller.asked == 9 for caller in callers)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_twenty_runs_of_everything_mixed_with_aborts(seed, shared, thread_work):
    """`generate`, `stream`, `step` and aborts, each twice as long as above."""
    callers = [Caller(shared, thread_work, 100 * seed + i, rounds=6) for i in range(4)]
    ways = ["generates", "streams", "steps", "leaves_early"]
    aborting = threading.Event()
    rng = random.Random(seed)

    def aborts():
        while not aborting.wait(rng.random() / 200):
            shared.abort_request("no such request")
            shared.stats()
            shared.has_unfinished_requests()

    helper = threading.Thread(target=aborts, daemon=True)
    helper.start()
    try:
        run_together(*(getattr(c, way) for c, way in zip(callers, ways, strict=True)))
    finally:
        aborting.set()
        helper.join(TIMEOUT)
    assert not helper.is_alive()


def test_abort_from_another_thread_ends_that_request_alone(roomy, thread_work):
    """While two others generate, and a third steps.

    The threads that generate need about 60 steps each. So the requests to be aborted
    are still running, however long the aborting thread has to wait.
    """
    prompts, expected = thread_work
    requests = [
        roomy.add_request(prompts[i], greedy(max_tokens=length))
        for i, length in enumerate([40, 220, 40, 220])
    ]
    last = {}
    started = threading.Event()
    aborted = threading.Event()

    def steps():
        for _ in patience():
            for output in roomy.step():
                last[output.request_id] = output
            started.set()
            assert aborted.wait(TIMEOUT)
            if all(i in last and last[i].finished for i in requests):
                break

    def aborts():
        assert started.wait(TIMEOUT)
        roomy.abort_request(requests[1])
        roomy.abort_request(requests[3])
        aborted.set()

    callers = [Caller(roomy, thread_work, seed) for seed in (31, 32)]
    run_together(steps, aborts, *(caller.generates for caller in callers))
    reasons = [last[i].outputs[0].finish_reason for i in requests]
    assert reasons == ["length", "abort", "length", "abort"]
    for i, request in enumerate(requests):
        tokens = tokens_of(last[request])
        common = min(len(tokens), COUNT)
        assert tokens[:common] == expected[i][:common]


def test_generate_ends_when_another_thread_aborts_its_request(shared, thread_work):
    """It returns what there is, with finish_reason "abort"."""
    prompts, expected = thread_work
    outputs = []

    def generates():
        outputs.extend(
            shared.generate(prompts[:2], greedy(max_tokens=40), use_tqdm=False)
        )

    def aborts():
        for _ in patience():
            if outputs or shared.stats().output_tokens > 4:
                break
        for request in ("0", "1"):  # the first ids that this engine gives
            shared.abort_request(request)

    run_together(generates, aborts)
    assert [output.finished for output in outputs] == [True, True]
    assert {output.outputs[0].finish_reason for output in outputs} <= {
        "abort",
        "length",
    }
    for output, tokens in zip(outputs, expected[:2], strict=True):
        common = min(COUNT, len(tokens_of(output)))
        assert tokens_of(output)[:common] == tokens[:common]


def interrupt_main(delay, heard):
    """Press Ctrl-C, and once more where a finalizer may have swallowed the first."""
    while not heard.wait(delay):
        os.kill(os.getpid(), signal.SIGINT)
        delay = 20


@pytest.mark.parametrize("delay", [0.02, 0.1, 0.3])
def test_ctrl_c_in_one_thread(delay, llama, thread_work):
    """It raises in the main thread; whoever else asks gets right answers, an abort or
    an error.

    And the engine serves as a fresh one does afterwards, or says that it is shut down.
    """
    from nanopaged import LLM

    prompts, expected = thread_work
    options = {"dtype": "float32", "device": "cpu", "block_size": 4, "num_blocks": 30}
    with LLM(str(llama), max_model_len=64, max_num_seqs=8, **options) as llm:
        stop = threading.Event()
        told = []

        def generates(i):
            for _ in patience():
                if stop.is_set():
                    return
                try:
                    output = llm.generate(prompts[i], greedy(), use_tqdm=False)[0]
                except Exception as error:
                    told.append((i, error))
                    return
                told.append((i, output))

        threads = [
            threading.Thread(target=generates, args=(i,), daemon=True) for i in range(3)
        ]
        for thread in threads:
            thread.start()
        presses = threading.Thread(target=interrupt_main, args=(delay, stop))
        presses.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                for _ in patience():
                    llm.generate(prompts[3:7], greedy(), use_tqdm=False)
        finally:
            stop.set()
            for thread in (presses, *threads):
                thread.join(TIMEOUT)
        assert not any(thread.is_alive() for thread in threads), "deadlock"
        for i, result in told:
            if isinstance(result, RuntimeError):
                assert "shut down" in str(result)
            else:
                tokens = tokens_of(result)
                reason = result.outputs[0].finish_reason
                assert tokens == (
                    expected[i][: len(tokens)] if reason == "abort" else expected[i]
                )
        try:
            outputs = llm.generate(prompts, greedy(), use_tqdm=False)
        except RuntimeError as error:
            assert "shut down" in str(error)
        else:
            assert [tokens_of(output) for output in outputs] == expected


class Interrupt(BaseException):
    """What a debugger, or a thread pool that is shut down, throws into a thread."""


def test_an_exception_thrown_into_one_thread_leaves_the_others_right(
    shared, thread_work
):
    """The lock is given back wherever the exception strikes."""
    callers = [Caller(shared, thread_work, seed, rounds=4) for seed in (41, 42, 43)]
    victims = []
    over = threading.Event()

    def victim():
        victims.append(threading.get_ident())
        try:
            for _ in patience():
                shared.generate([thread_work[0][0]] * 2, greedy(), use_tqdm=False)
        except Interrupt:
            pass
        finally:
            over.set()

    def throws():
        for _ in patience():
            if victims and shared.stats().steps > 20:
                break
        while not over.wait(0.5):  # once more, should a finalizer have swallowed it
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(victims[0]), ctypes.py_object(Interrupt)
            )

    def or_aborted(caller):
        """Who shares the step that breaks is aborted with it, and told so."""
        try:
            caller.generates()
        except AssertionError:
            if shared.has_unfinished_requests():
                raise
        except RuntimeError as error:
            assert "shut down" in str(error)

    run_together(victim, throws, *(lambda c=c: or_aborted(c) for c in callers))


def test_shutdown_while_others_generate_ends_them(llama, thread_work):
    from nanopaged import LLM

    prompts, expected = thread_work
    options = {"dtype": "float32", "device": "cpu", "block_size": 4, "num_blocks": 30}
    llm = LLM(str(llama), max_model_len=64, max_num_seqs=8, **options)
    ends = []

    def generates(i):
        try:
            for _ in patience():
                output = llm.generate(prompts[i], greedy(), use_tqdm=False)[0]
                if output.outputs[0].finish_reason == "abort":
                    break
                assert tokens_of(output) == expected[i]
        except RuntimeError as error:
            assert "shut down" in str(error)
        ends.append(i)

    def shuts_down():
        for _ in patience():
            if llm.stats().steps > 30:
                break
        llm.shutdown()

    run_together(shuts_down, *(lambda i=i: generates(i) for i in range(3)))
    assert sorted(ends) == [0, 1, 2]
