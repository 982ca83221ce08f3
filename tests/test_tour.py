"""The recorder of the tour: what it keeps is what the engine held, and it only looks.

The state that a trace unfolds to is compared with the engine, field by field, after
every phase of random workloads; and the same requests give the same tokens without it.
"""

import json
import random
from collections import Counter
from xml.etree import ElementTree

import pytest

from helpers import (
    CPU,
    ROOT,
    drain_checked,
    draw_requests,
    greedy,
    run_python,
    serve,
    swap_space,
)
from nanopaged import LLM, BeamSearchParams, SamplingParams
from nanopaged.tour import picture, trace
from nanopaged.tour.kinds import KINDS
from nanopaged.tour.pieces import Pieces
from nanopaged.tour.recorder import MANY_FRAMES
from nanopaged.tour.showcase import FEATURES, showcase
from nanopaged.tour.source import excerpt, find, source_lines
from nanopaged.tour.state import diff, fold, pack, unpack

HOSTILE = "</script><script>alert(1)</script><!-- \"'&amp; \u202ekcab \U0001f600\u0301"


@pytest.fixture(scope="module")
def shown():
    """The run in which everything happens."""
    return showcase()


def kinds_of(run):
    """How often each kind of event happened."""
    return Counter(kind for f in run.data()["frames"] for kind, _ in f["events"])


# --- the state of every frame is the engine's ---


def read_engine(llm):
    """What the engine holds, read here without the recorder's own functions."""
    manager, scheduler = llm.block_manager, llm.scheduler
    groups = [*scheduler.running, *scheduler.waiting]
    free = {b: place for place, b in enumerate(manager.free_blocks)}
    return {
        "waiting": [group.request_id for group in scheduler.waiting],
        "running": [group.request_id for group in scheduler.running],
        "tokens": {
            (group.request_id, i): seq.token_ids[:]
            for group in groups
            for i, seq in enumerate(group.sequences)
        },
        "places": {
            (group.request_id, i): (
                seq.block_table[:],
                seq.num_computed_tokens,
                seq.row,
            )
            for group in groups
            for i, seq in enumerate(group.sequences)
        },
        "refs": [block.ref_count for block in manager.blocks],
        "cached": sorted(manager.published.values()),
        "order": sorted(free, key=free.__getitem__),
        "swap": list(manager.free_swap_blocks),
        "used": manager.num_blocks - len(manager.free_blocks),
    }


def read_state(state):
    """The same, read from a state of the trace."""
    num_blocks = state["num_blocks"] + state["num_swap_blocks"]
    unfinished = {*state["running"], *state["waiting"]}
    tokens, places = {}, {}
    for key, seq in state["seqs"].items():
        request_id, index = key.split(".")
        if request_id in unfinished:
            prompt = state["groups"][request_id]["prompt_tokens"]
            tokens[request_id, int(index)] = prompt + seq["tokens"]
            place = (seq["table"], seq["computed"], seq["row"])
            places[request_id, int(index)] = place
    blocks = state["blocks"]
    return {
        "waiting": state["waiting"],
        "running": state["running"],
        "tokens": tokens,
        "places": places,
        "refs": [blocks.get(str(b), {"refs": 0})["refs"] for b in range(num_blocks)],
        "cached": sorted(int(b) for b in blocks if blocks[b].get("cached")),
        "order": state["free"],
        "swap": state["free_swap"],
        "used": state["stats"]["blocks_used"],
    }


class Comparison:
    """An observer that folds the frames so far, and compares with the engine."""

    def __init__(self, llm, run):
        self.llm = llm
        self.run = run
        self.state = {}
        self.num_folded = 0
        self.num_phases = 0

    def __call__(self, phase, batch):
        for frame in self.run.frames[self.num_folded :]:
            fold(self.state, json.loads(frame)["delta"])
        self.num_folded = len(self.run.frames)
        self.num_phases += 1
        assert read_state(self.state) == read_engine(self.llm), phase
        if phase == "scheduled":
            rows = {s["row"]: s["now"] for s in self.state["seqs"].values() if s["now"]}
            message = batch.message
            assert rows == dict(zip(message.rows, message.counts, strict=True))


def random_requests(seed, count):
    """Greedy, sampled and beams, for the tiny model, which has no tokenizer."""
    limits = {"vocab_size": 160, "lengths": range(1, 24), "most": 3, "max_tokens": 16}
    return list(draw_requests(seed, count, **limits, stop=()))


def run_random_workload(llm, seed, count):
    """Serve random requests, a few at a time, and abort some; returns steps and run."""
    rng = random.Random(seed)
    requests = random_requests(seed, count)
    under_way = []
    with trace(llm) as run:
        comparison = Comparison(llm, run)
        llm.observers.append(comparison)
        while requests or llm.has_unfinished_requests():
            while requests and rng.random() < 0.4:
                under_way.append(llm.add_request(*requests.pop()))
            if under_way and rng.random() < 0.05:
                llm.abort_request(rng.choice(under_way))
            llm.step()
        llm.observers.remove(comparison)
    assert read_state(run.states()[-1]) == read_engine(llm)
    return comparison.num_phases // 4, run


def small_engine(engine, path, **options):
    defaults = {
        "num_blocks": 28,
        "max_model_len": 64,
        "max_num_seqs": 10,
        "max_num_batched_tokens": 24,
        "swap_space": swap_space(path, 16, 4),
    }
    return engine(path, **(defaults | options))


@pytest.mark.parametrize(
    "seed, options",
    [
        (0, {}),
        (1, {"preemption_mode": "swap"}),
        (2, {"preemption_mode": "recompute", "enable_prefix_caching": False}),
    ],
)
def test_the_fold_is_the_engines_state_after_every_phase(llama, engine, seed, options):
    llm = small_engine(engine, llama, **options)
    num_steps, run = run_random_workload(llm, seed, count=60)
    assert num_steps > 100
    assert {"fork", "copy", "beam", "grow", "finish", "admit"} <= kinds_of(run).keys()


@pytest.mark.slow
def test_the_fold_is_the_engines_state_over_2000_steps(llama, engine):
    kinds = Counter()
    num_steps = seed = 0
    while num_steps < 2000:
        mode = random.Random(seed).choice(["auto", "swap", "recompute"])
        llm = small_engine(engine, llama, preemption_mode=mode)
        steps, run = run_random_workload(llm, seed=100 + seed, count=40)
        kinds += kinds_of(run)
        num_steps += steps
        seed += 1
    assert kinds.keys() == KINDS.keys()


def test_the_fold_is_the_engines_state_one_step_ahead(llama, engine):
    """As on a GPU: the tokens of a step are read when the next one is launched."""
    llm = small_engine(engine, llama)
    llm.steps_ahead = 1
    num_steps, run = run_random_workload(llm, seed=7, count=20)
    assert num_steps > 50
    assert kinds_of(run)["copy"] > 0


def test_a_delta_turns_one_list_into_another():
    rng = random.Random(0)
    for _ in range(500):
        size = rng.randrange(12)
        old = rng.sample(range(30), size)
        new = [item for item in old if rng.random() < 0.8]
        new = rng.sample(range(30, 50), rng.randrange(4)) + new
        new += [rng.randrange(60) for _ in range(rng.randrange(5))]
        state = {"list": old[:]}
        fold(state, json.loads(json.dumps(diff({"list": old}, {"list": new}))))
        assert state == {"list": new}


def test_a_free_list_costs_a_delta_what_has_changed():
    old = list(range(1000))
    new = [5000, *range(3, 500), *range(501, 1000), 1]
    (change,) = diff({"free": old}, {"free": new}).values()
    assert change == [[1000, 0, [1]], [500, 1, []], [0, 3, [5000]]]
    assert pack(old) == [[0, 999]] and unpack([[0, 999]]) == old


# --- it only looks ---


def test_tracing_changes_no_token(llama, engine):
    requests = random_requests(seed=3, count=24)
    plain = serve(small_engine(engine, llama), requests)
    llm = small_engine(engine, llama)
    with trace(llm):
        traced = serve(llm, requests)
    assert traced == plain


@pytest.mark.slow
def test_tracing_changes_no_token_of_1000_random_requests(llama, engine):
    requests = random_requests(seed=4, count=1000)
    plain = serve(small_engine(engine, llama), requests)
    llm = small_engine(engine, llama)
    with trace(llm) as run:
        traced = serve(llm, requests)
    assert traced == plain
    assert len(run.frames) > MANY_FRAMES
    assert {"swap_in", "recompute"} <= kinds_of(run).keys()


def test_the_observer_is_gone_when_the_block_ends_even_by_an_error(llama, engine):
    llm = engine(llama)
    with pytest.raises(ZeroDivisionError), trace(llm) as run:
        llm.generate([[1, 2, 3]], greedy(2), use_tqdm=False)
        raise ZeroDivisionError
    assert llm.observers == []
    num_frames = len(run.frames)
    llm.generate([[1, 2, 3]], greedy(2), use_tqdm=False)
    assert len(run.frames) == num_frames


def test_an_error_in_a_step_ends_the_requests_in_the_trace_too(llama, engine):
    llm = engine(llama)

    def fail(batch):
        raise RuntimeError("out of memory")

    with trace(llm) as run:
        llm.add_request([1, 2, 3], greedy(8))
        llm.step()
        llm.runner.execute, execute = fail, llm.runner.execute
        with pytest.raises(RuntimeError):
            llm.step()
        llm.runner.execute = execute
        drain_checked(llm)
    assert kinds_of(run)["abort"] == 1
    assert run.states()[-1]["blocks"] == {}


def test_a_trace_may_begin_and_end_in_the_middle_of_requests(llama, engine):
    llm = engine(llama)
    llm.add_request([1, 2, 3, 4, 5], greedy(8, n=2, temperature=1.0, seed=1))
    llm.step()
    with trace(llm) as run:
        llm.step()
        llm.step()
    assert [frame["step"] for frame in run.data()["frames"]][:3] == [0, 1, 1]
    assert read_state(run.states()[0])["running"] == ["0"]
    assert read_state(run.states()[-1]) == read_engine(llm)
    drain_checked(llm)


def test_arrivals_and_aborts_between_steps_are_seen(llama, engine):
    llm = engine(llama)
    with trace(llm) as run:
        first = llm.add_request([1, 2, 3, 4, 5], greedy(8))
        llm.step()
        llm.abort_request(first)
        llm.add_request([1, 2], greedy(1))
        drain_checked(llm)
    begin = [f for f in run.data()["frames"] if f["phase"] == "begin"]
    assert [kind for kind, _ in begin[1]["events"]] == ["arrive", "abort"]


# --- what happened, in sentences ---


def test_the_showcase_has_everything(shown):
    assert kinds_of(shown).keys() >= set(FEATURES)


def test_events_count_what_the_engine_counts(shown):
    stats = shown.states()[-1]["stats"]
    kinds = kinds_of(shown)
    assert kinds["recompute"] == stats["preemptions_recompute"] > 0
    assert kinds["swap_out"] == stats["preemptions_swap"] == kinds["swap_in"] > 0
    assert kinds["finish"] == 4


def test_a_fork_and_its_copies_name_the_blocks(llama, engine):
    llm = engine(llama)
    with trace(llm) as run:
        params = SamplingParams(n=3, max_tokens=2, seed=1, ignore_eos=True)
        llm.generate([list(range(1, 7))], params, use_tqdm=False)
    sentences = {kind: text for f in run.data()["frames"] for kind, text in f["events"]}
    assert sentences["fork"] == (
        "@0.0 computes the end of the prompt, and @0.1 and @0.2 fork from it: they "
        "share #0 and #1, and no K or V is copied."
    )
    assert sentences["copy"] == (
        "@0.0 and @0.1 are about to write into #1, which others hold too. They get "
        "copies to write into, #2 and #3."
    )


def test_a_prefix_hit_names_blocks_that_nobody_held(llama, engine):
    llm = engine(llama)
    prompt = list(range(1, 11))
    with trace(llm) as run:
        llm.add_request(prompt, greedy(20))
        llm.step()
        llm.add_request(prompt, greedy(1))
        drain_checked(llm)
        llm.add_request(prompt, greedy(1))
        drain_checked(llm)
    held, free = (
        text
        for f in run.data()["frames"]
        for kind, text in f["events"]
        if kind == "prefix"
    )
    assert held.endswith("they are in #0 and #1, which others hold.")
    assert free.endswith("which nobody held, but whose K and V were still there.")


def test_a_block_freed_by_a_preemption_and_taken_at_once_is_evicted(llama, engine):
    options = {"num_blocks": 6, "max_model_len": 24, "preemption_mode": "recompute"}
    llm = engine(llama, block_size=4, **options)
    with trace(llm) as run:
        llm.generate([list(range(1, 5)), list(range(5, 9))], greedy(16), use_tqdm=False)
    frames = run.data()["frames"]
    events = next(
        f["events"] for f in frames if f["events"] and f["events"][0][0] == "recompute"
    )
    assert [kind for kind, _ in events[1:3]] == ["evict", "grow"]
    assert events[1][1] == (
        "#5 was free and still cached, and is taken again: what it held can no longer "
        "be found."
    )


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_points_at_a_line_of_the_source(name):
    kind = KINDS[name]
    shown = excerpt(kind.symbol, kind.line)
    assert kind.line in shown["lines"][shown["at"]]
    assert shown["lines"][0].startswith("def ")
    assert (ROOT / shown["file"]).is_file()
    assert callable(find(kind.symbol))


def test_an_excerpt_of_a_line_that_is_gone_is_an_error():
    with pytest.raises(ValueError, match="has no line with 'goto 10'"):
        excerpt("block_manager:BlockManager.grow", "goto 10")
    with pytest.raises(AttributeError):
        source_lines("block_manager:BlockManager.shrink")


# --- the page ---


def data_of(page):
    """The trace in a page, read as a browser does: up to the first "</script"."""
    start = page.index('<script type="application/json">') + 32
    return json.loads(page[start : page.index("</script", start)])


def test_the_page_has_the_whole_trace_and_loads_nothing(shown, tmp_path):
    shown.save(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert data_of(page) == json.loads(json.dumps(shown.data()))
    for word in ("src=", "@import", "url(", "fetch(", '<link rel="style'):
        assert word not in page, word


def test_a_prompt_cannot_leave_the_data(text_model, engine):
    llm = engine(text_model, block_size=16)
    with trace(llm, title=HOSTILE) as run:
        llm.generate([HOSTILE], greedy(2), use_tqdm=False)
    page = run.html()
    assert page.count("</script") == 2 and "alert(1)</script>" not in page
    group = data_of(page)["frames"][1]["delta"]["groups"]["0"]
    assert group["prompt"] == HOSTILE
    page.encode("utf-8")


def test_a_page_with_half_of_a_surrogate_pair_can_be_written(llama, engine, tmp_path):
    llm = engine(llama)
    with trace(llm, tmp_path / "run.html", title="\ud83d half") as run:
        llm.generate([[1, 2, 3]], greedy(1), use_tqdm=False)
    run.pieces.texts[1] = "\udc00"
    run.save(tmp_path / "run.html")
    assert (
        data_of((tmp_path / "run.html").read_text("utf-8"))["pieces"]["1"] == "\udc00"
    )


def test_a_notebook_shows_the_page_in_a_frame(shown):
    markup = shown._repr_html_()
    assert markup.startswith("<iframe srcdoc=") and markup.count("<") == 2
    assert "&lt;section" in markup


def test_a_token_has_its_text_with_the_space_before_it(
    tokenizer, sentencepiece_tokenizer
):
    for each in (tokenizer, sentencepiece_tokenizer):
        ids = each("the table of the block", add_special_tokens=False).input_ids
        pieces = Pieces(each)
        pieces.add(ids)
        text = "".join(pieces.texts[token] for token in ids)
        assert text.strip() == "the table of the block"
    assert Pieces(None).text(12) == " 12"


def test_tokens_that_make_up_one_character_have_a_text_together(tokenizer):
    pieces = Pieces(tokenizer)
    ids = tokenizer("a\U0001f600b", add_special_tokens=False).input_ids
    pieces.add(ids)
    assert len(ids) == 6
    assert pieces.texts[",".join(map(str, ids[1:5]))] == "\U0001f600"


# --- the README's picture ---


def test_the_readmes_picture_is_the_one_that_is_made_from_a_run(tmp_path):
    path = picture.write(tmp_path)
    committed = ROOT / ".github" / "assets" / path.name
    assert path.read_bytes() == committed.read_bytes(), (
        "run `python -m nanopaged.tour picture`"
    )


def test_the_picture_escapes_text_and_describes_itself():
    run = picture.record()
    state = run.states()[-1]
    pieces = dict.fromkeys(run.pieces.texts, "<&")
    root = ElementTree.fromstring(picture.draw(state, pieces))
    texts = [element.text for element in root.iter() if element.text]
    assert "<&" in texts
    (description,) = (text for text in texts if text.startswith("Sequence 1.0 has"))
    for seq in state["seqs"].values():
        assert ", ".join(map(str, seq["table"])) in description


# --- size ---


def test_the_run_that_shows_everything_is_under_200_kb(shown):
    assert len(shown.html().encode()) < 200_000


def traced_page(llm, num_requests, num_tokens):
    rng = random.Random(0)
    prompts = [
        [rng.randrange(160) for _ in range(rng.randrange(5, 40))]
        for _ in range(num_requests)
    ]
    with trace(llm) as run:
        llm.generate(prompts, greedy(num_tokens), use_tqdm=False)
    return run


def test_32_requests_of_200_tokens_are_under_1_mb(llama, engine):
    llm = engine(llama, block_size=16, num_blocks=600, max_model_len=256)
    run = traced_page(llm, 32, 200)
    assert run.left_out == 0
    assert len(run.html().encode()) < 1_000_000


@pytest.mark.slow
def test_1000_requests_of_100_tokens_are_bounded(llama, engine):
    llm = engine(llama, block_size=16, num_blocks=2000, max_model_len=256)
    run = traced_page(llm, 1000, 100)
    assert run.left_out > 0
    assert len(run.html().encode()) < 5_000_000
    assert read_state(run.states()[-1]) == read_engine(llm)


def test_a_long_run_keeps_frames_with_events_and_counts_the_others(
    llama, engine, monkeypatch
):
    monkeypatch.setattr("nanopaged.tour.recorder.MANY_FRAMES", 20)
    monkeypatch.setattr("nanopaged.tour.recorder.MOST_FRAMES", 24)
    llm = engine(llama)
    with trace(llm) as run:
        for _ in range(4):
            llm.generate([[1, 2, 3]], greedy(12), use_tqdm=False)
    phases = [f["phase"] for f in run.data()["frames"]]
    assert len(phases) == 25 and phases[-1] == "end"
    # Each of the four runs: one phase "begin", and two for each of twelve steps.
    assert len(phases) - 2 + run.left_out == 4 * 25
    for frame in run.data()["frames"][20:24]:
        assert any(not KINDS[kind].is_minor for kind, _ in frame["events"])
    assert run.data()["left_out"] == run.left_out
    assert read_state(run.states()[-1]) == read_engine(llm)


# --- threads, and several ranks ---


def test_it_works_while_threads_share_the_engine(llama, engine):
    from concurrent.futures import ThreadPoolExecutor

    llm = small_engine(engine, llama)

    def work(number):
        params = [greedy(6), BeamSearchParams(2, 6, ignore_eos=True), greedy(6)]
        llm.generate([[number, 2, 3]] * 3, params, use_tqdm=False)

    with trace(llm) as run, ThreadPoolExecutor(4) as pool:
        comparison = Comparison(llm, run)
        llm.observers.append(comparison)
        list(pool.map(work, range(8)))
    llm.observers.remove(comparison)
    assert comparison.num_phases > 40
    assert kinds_of(run)["finish"] == 24


@pytest.mark.slow
def test_it_works_with_two_ranks(llama, tmp_path):
    code = (
        "import sys\nfrom nanopaged import LLM, SamplingParams\n"
        "from nanopaged.tour import trace\n"
        "if __name__ == '__main__':\n"
        f"    with LLM({str(llama)!r}, tensor_parallel_size=2, num_blocks=16,\n"
        "             block_size=4, max_model_len=32, device='cpu') as llm:\n"
        f"        with trace(llm, {str(tmp_path / 'run.html')!r}) as run:\n"
        "            llm.generate([[1, 2, 3]], SamplingParams(), use_tqdm=False)\n"
        "        print(len(run.frames) > 5)\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    assert run_python(script).strip().endswith("True")
    assert data_of((tmp_path / "run.html").read_text(encoding="utf-8"))["frames"]


def test_importing_the_tour_leaves_the_engine_alone():
    """`python -m nanopaged.tour kv` is an answer at once: no torch is loaded for it."""
    code = "import sys, nanopaged.tour; print('torch' in sys.modules)"
    assert run_python("-c", code).strip() == "False"


def test_the_bundled_model_is_traced_with_its_text():
    with LLM(**CPU, num_blocks=16) as llm, trace(llm) as run:
        llm.generate(["ROMEO:"], greedy(1), use_tqdm=False)
    data = run.data()
    tokens = run.states()[1]["groups"]["0"]["prompt_tokens"]
    pieces = {int(token): text for token, text in data["pieces"].items()}
    assert "".join(pieces[token] for token in tokens) == "ROMEO:"
