"""What strikes in the middle of a step: Ctrl-C, the garbage collector, other threads,
calls from observers and signal handlers, errors, numbers that are none.

An engine that was interrupted serves as a fresh one does, or says that it is shut down.
No request harms another one, and nothing of a request outlives it.

Where a moment matters, it is chosen by a trace function that counts the lines of the
package, so that it can be tried again. What has to end has a deadline.
"""

import gc
import linecache
import random
import signal
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from operator import methodcaller
from pathlib import Path

import pytest

import helpers
import nanopaged
from helpers import (
    CPU,
    add_all,
    all_tokens_of,
    drain,
    first_tokens_of,
    generate,
    greedy,
    tokens_of,
    watch,
)
from nanopaged import LLM, BeamSearchParams, model_runner
from nanopaged.sampler import sample
from nanopaged.sequence import SequenceGroup

COUNT = 10
SMALL = {"block_size": 4, "num_blocks": 26, "max_model_len": 64, "max_num_seqs": 8,
         "max_num_batched_tokens": 16, "swap_space": 0.001} | CPU


@pytest.fixture(scope="session")
def work(llama, reference, draw_prompts):
    """Prompts, two of which begin alike, and their tokens."""
    prompts = draw_prompts(llama, [6, 11, 17], COUNT, seed=123)
    prompts += draw_prompts(llama, [40], COUNT, seed=124, prefix=prompts[2][:14])
    return prompts, [reference.generate(llama, prompt, COUNT) for prompt in prompts]


@pytest.fixture(autouse=True)
def quick_collections(work):
    """The garbage collector looks only at what a test makes, when the test says so."""
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


@pytest.fixture(autouse=True)
def ctrl_c():
    """Python's own handler. A shell's background job starts without one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextmanager
def deadline(seconds=60):
    """Fail instead of hanging."""
    def ring(*_):
        raise TimeoutError(f"still busy after {seconds} seconds")

    if not hasattr(signal, "SIGALRM"):  # on Windows
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class AtLine:
    """Within `with`: a Ctrl-C, or another action, where the package's code comes to its
    n-th line. `line` is that line then, and None before.
    """

    folder = str(Path(nanopaged.__file__).parent)

    def __init__(self, moment, action=lambda: signal.raise_signal(signal.SIGINT)):
        self.left, self.action, self.line = moment, action, None

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, kind, *_):
        sys.settrace(self.before)
        return kind is KeyboardInterrupt

    def trace(self, frame, event, _):
        file, number = frame.f_code.co_filename, frame.f_lineno
        if not file.startswith(self.folder):
            return None
        # Python handles no signal at a bare `try:`, right after a lock was taken, or
        # before `with` ends. But it calls trace functions there.
        above, text = (linecache.getline(file, number - i).strip() for i in (1, 0))
        is_spared = text.startswith(("try:", "with ")) or "_lock" in above
        if event == "line" and not is_spared:
            self.left -= 1
            if self.left == 0:
                self.line = f"{number} of {file}: {text}"
                self.action()
        return self.trace


def is_sound(llm, work):
    """True if the engine answers rightly and holds nothing afterwards; False if it says
    that it is shut down.
    """
    try:
        with deadline(20):
            for _ in range(2):  # the second time from the cache
                assert generate(llm, work[0], greedy(COUNT)) == [[t] for t in work[1]]
            drain(llm)
    except RuntimeError as error:
        assert "shut down" in str(error)
        return False
    helpers.check_invariants(llm)  # nobody runs or waits, so all blocks are free
    gc.collect()
    assert SequenceGroup not in map(type, gc.get_objects()), "somebody holds a request"
    return True


# -- Ctrl-C ----------------------------------------------------------------------------


def ask_for_everything(llm, prompts):
    """Chunks of prompts, forks, copies, beams, preemption."""
    params = [greedy(20, n=3, temperature=1.0, seed=1), BeamSearchParams(3, 20),
              greedy(20), greedy(20, stop_token_ids=[5])]
    llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("count", [5, pytest.param(30, marks=pytest.mark.slow)])
def test_ctrl_c_at_a_random_line(count, ahead, mode, llama, work):
    rng = random.Random(count)
    with LLM(llama, preemption_mode=mode, **SMALL) as llm:
        llm.engine.steps_ahead = ahead
        ask_for_everything(llm, work[0])
        assert getattr(llm.stats(), f"preemptions_{mode}") > 0
        for _ in range(count):
            with AtLine(int(10 ** rng.uniform(0, 4))) as struck, deadline():
                ask_for_everything(llm, work[0])
            assert struck.line and is_sound(llm, work), struck.line


@pytest.mark.parametrize("stride", [13, pytest.param(3, marks=pytest.mark.slow)])
def test_a_second_ctrl_c_after_the_first(stride, llama, work):
    """While the first one ends the call, and while the next call starts anew."""
    def observer(phase, batch):
        is_late = len(llm.engine.scheduler.running) > 1
        if moments and is_late and phase == phases[moments[0] % 4]:
            struck.left = moments.pop()
            signal.raise_signal(signal.SIGINT)

    phases, moments = ["begin", "scheduled", "executed", "updated"], []
    with LLM(llama, **SMALL) as llm:
        watch(llm, observer)
        for moment in range(1, 110, stride):
            llm.add_request(work[0][0], greedy(n=2))
            moments.append(moment)
            with AtLine(0) as struck, deadline():
                with suppress(KeyboardInterrupt):
                    ask_for_everything(llm, work[0])
                llm.step()
            assert struck.line and is_sound(llm, work), struck.line


def close_a_stream(llm, prompts):
    stream = llm.stream(prompts, greedy(n=2))
    next(stream)
    return stream.close


def abort_two(llm, prompts):
    requests = add_all(llm, prompts[:3], greedy(n=2))
    llm.step()
    return lambda: [llm.abort_request(request) for request in requests[1:]]


def add_and_step(llm, prompts):
    return lambda: [llm.add_request(prompts[0], greedy()), llm.step()]


def shut_down(llm, prompts):
    add_all(llm, prompts, greedy(n=2))
    llm.step()
    return llm.shutdown


@pytest.mark.parametrize("growth", [1.7, pytest.param(1.1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("prepare", [
    close_a_stream, abort_two, add_and_step, shut_down])
def test_ctrl_c_while_requests_come_and_go(growth, prepare, llama, work):
    llm, moment, struck = LLM(llama, **SMALL), 1, True
    while struck:
        call = prepare(llm, work[0])
        with AtLine(moment) as at, deadline():
            call()
        struck = at.line
        if not is_sound(llm, work):
            assert prepare is shut_down
            llm = LLM(llama, **SMALL)
        moment = int(1 + growth * moment)
    llm.shutdown()


def test_ctrl_c_in_the_cpu_kernel(llama, monkeypatch):
    """Compiled code is not interrupted; Ctrl-C is seen as soon as it has returned."""
    from nanopaged.cpu import threads

    def struck(program, parallel):
        def strike(*arrays):  # from the signal on, no Python runs until the kernel does
            strikes = partial(signal.raise_signal, signal.SIGINT)
            calls = strikes, partial(kernel, *arrays)
            deque(map(methodcaller("__call__"), calls), 0)

        kernel = loop(program, parallel)
        return strike

    loop = threads.loop
    with LLM(llama, **CPU) as llm, deadline():
        answers = generate(llm, [[5, 6, 7]], greedy(3))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(threads, "loop", struck)
            generate(llm, [[5, 6, 7]], greedy(3))
        assert generate(llm, [[5, 6, 7]], greedy(3)) == answers


# -- Threads ---------------------------------------------------------------------------


def test_threads_get_their_own_answers_and_leave_nothing_behind(ahead, llama, work):
    def serve(index):
        pairs = list(zip(*work, strict=True))
        del pairs[index]
        for count in (1, COUNT, 3):
            outputs = llm.stream([prompt for prompt, _ in pairs], greedy(count))
            last = {len(o.prompt_token_ids): tokens_of(o) for o in outputs}
            assert last == {len(prompt): tokens[:count] for prompt, tokens in pairs}
        next(llm.stream(work[0], greedy(COUNT)))  # and nothing more of it

    with ThreadPoolExecutor(4) as threads, LLM(llama, **SMALL) as llm, deadline():
        llm.engine.steps_ahead = ahead
        list(threads.map(serve, range(4)))
        for _ in llm.stream(work[0], greedy(3)):
            assert llm.step() == []
        assert not llm.has_unfinished_requests() and is_sound(llm, work)


# -- Observers, signal handlers, errors ------------------------------------------------


@pytest.mark.parametrize("phase", ["begin", "scheduled", "executed", "updated"])
def test_what_needs_a_step_says_at_once_that_it_is_within_one(phase, llama, work):
    def observer(now, batch):
        if now == phase and llm.engine.scheduler.running:
            struck.append(now)
            for call in (llm.step, llm.shutdown, lambda: generate(llm, [[5]], greedy()),
                         lambda: next(llm.stream([5]))):
                with pytest.raises(RuntimeError, match="within a step"):
                    call()

    struck = []
    with LLM(llama, **SMALL) as llm, deadline():
        watch(llm, observer)
        assert is_sound(llm, work) and struck


@pytest.mark.parametrize("growth", [1.5, pytest.param(1.05, marks=pytest.mark.slow)])
def test_a_signal_handler_may_add_abort_and_close_at_any_line(growth, llama, work):
    """And so may the garbage collector, which closes a stream that is left."""
    def handler():
        llm.abort_request(victim)
        stream.close()
        llm.add_request(work[0][1], greedy(COUNT))
        with suppress(RuntimeError):  # between two steps it can do that
            assert generate(llm, work[0][:1], greedy(3)) == [[work[1][0][:3]]]

    moment, struck = 1, True
    with LLM(llama, **SMALL) as llm:
        while struck:
            victim = llm.add_request(work[0][0], greedy(40))
            stream = llm.stream(work[0][:2], greedy(20, n=2))
            next(stream)
            with deadline(), AtLine(moment, handler) as at:
                answers = generate(llm, work[0][2:], greedy(COUNT))
            struck, moment = at.line, int(1 + growth * moment)
            stream.close()
            assert answers == [[tokens] for tokens in work[1][2:]], struck
            (end, *added) = drain(llm).values()
            assert end.finished and len(added) == bool(struck), struck
            assert first_tokens_of(added) == work[1][1:2] * len(added), struck
        assert moment > 1000 and is_sound(llm, work)


@pytest.mark.parametrize("place", [
    "begin", "scheduled", "forward pass", "executed", "updated"])
def test_after_a_failed_step_the_next_call_begins_with_an_empty_cache(
        place, ahead, llama, work):
    def fail(now, *_):
        if now in places and len(llm.engine.block_manager.prefix_cache.published) > 3:
            raise ZeroDivisionError

    with LLM(llama, **SMALL) as llm, deadline():
        llm.engine.steps_ahead = ahead
        places = {llm.engine.runner.model if place == "forward pass" else place}
        llm.engine.runner.model.register_forward_pre_hook(fail)
        watch(llm, fail)
        waiting = llm.add_request(work[0][3], greedy(COUNT))
        with pytest.raises(ZeroDivisionError):
            generate(llm, work[0], greedy(n=2))
        places.clear()
        (end,) = llm.step()
        assert (end.request_id, end.outputs[0].finish_reason) == (waiting, "abort")
        assert not llm.engine.block_manager.prefix_cache.published
        assert llm.stats().steps == 0
        assert is_sound(llm, work)


def test_what_waits_costs_a_step_nothing_and_is_aborted_in_proportion(llama):
    """Lines of the package are counted, and comparisons of ids, which may be in C."""
    class Id(str):
        __hash__ = str.__hash__

        def __eq__(self, other):
            compared.append(other)
            return str.__eq__(self, other)

    costs = []
    with LLM(llama, **SMALL) as llm:
        for count in (100, 400):
            requests, compared = add_all(llm, [[5]] * count, greedy(9)), []
            llm.step()
            with AtLine(0) as step:
                llm.step()
            with AtLine(0) as aborts:
                for request in reversed(requests):
                    llm.abort_request(Id(request))
                assert len(llm.step()) == count
            costs.append((step.left, len(compared) - aborts.left))
    (step, few), (same, many) = costs
    assert step == same and many < 4.4 * few


# -- NaN -------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [
    greedy(9), greedy(9, n=2, temperature=0.7, top_p=0.9, logprobs=3),
    BeamSearchParams(3, 9)], ids=["greedy", "sampled", "beams"])
@pytest.mark.parametrize("bad", [*map(float, ["nan", "inf", "-inf"])])
def test_a_request_with_bad_logits_ends_and_changes_no_other(
        bad, victim, llama, work, monkeypatch):
    def spoil(batch, counts, ops, logits, draws):
        logits[[seq.group.params.max_tokens == 9 for seq in batch.receivers]] = bad
        return sample(batch, counts, ops, logits, draws)

    with LLM(llama, **SMALL) as llm, deadline():
        others = [greedy(COUNT, seed=1, **fields) for fields in (
            {}, {"temperature": 0.5, "logprobs": 2}, {"temperature": 1, "top_p": 0.9},
            {"temperature": 1, "top_k": 4, "top_p": 0.9})]
        expected = generate(llm, work[0], others)
        monkeypatch.setattr(model_runner, "sample", spoil)
        llm.add_request(work[0][0], victim)
        found = add_all(llm, work[0], others)
        with pytest.raises(RuntimeError, match="the model's own logits"):
            llm.step()
        last = drain(llm)
        assert [all_tokens_of(last[request]) for request in found] == expected
        assert is_sound(llm, work)
