"""The recorder of the tour: what it keeps is what the engine held, and it only looks.

The state that a trace unfolds to is compared with the engine, field by field, after
every phase of random workloads; and the same requests give the same tokens without it.
"""

import json
import random
from collections import Counter

import pytest

from helpers import ROOT, drain, draw_requests, greedy, serve, swap_space, waiting
from nanopaged import BeamSearchParams, SamplingParams
from nanopaged.tour import picture, trace
from nanopaged.tour.kinds import KINDS
from nanopaged.tour.observers import observers
from nanopaged.tour.pieces import Pieces
from nanopaged.tour.showcase import FEATURES, showcase
from nanopaged.tour.source import excerpt
from nanopaged.tour.state import diff, fold, utilisation

HOSTILE = "</script><script>alert(1)</script><!-- \"'&amp; \u202ekcab \U0001f600\u0301"


@pytest.fixture(scope="module")
def shown():
    """The run in which everything happens."""
    return showcase()


@pytest.fixture
def small(llama, engine):
    """`small(**options)`: an engine whose pool is too small for what it gets."""
    def make(**options):
        defaults = {"num_blocks": 28, "max_model_len": 64, "max_num_seqs": 10,
                    "max_num_batched_tokens": 24,
                    "swap_space": swap_space(llama, 16, 4)}
        return engine(llama, **(defaults | options))

    return make


def events_of(run, kind):
    return [text for frame in run.data()["frames"] for name, text in frame["events"]
            if name == kind]


def kinds_of(run):
    """How often each kind of event happened."""
    return Counter({kind: len(events_of(run, kind)) for kind in KINDS
                    if events_of(run, kind)})


def random_requests(seed, count):
    """Greedy, sampled and beams, for the tiny model, which has no tokenizer."""
    return list(draw_requests(seed, count, vocab_size=160, lengths=range(1, 24), most=3,
                              max_tokens=16, stop=()))


# -- The state of every frame is the engine's ------------------------------------------


def read_engine(llm):
    """What the engine holds, read here without the recorder's own functions."""
    manager, scheduler = llm.block_manager, llm.scheduler
    seqs = {f"{request_id}.{i}": seq
            for request_id, group in scheduler.unfinished.items()
            for i, seq in enumerate(group.sequences)}
    slots = {(seq.block_table[position // manager.block_size], position % 4)
             for request_id in scheduler.running
             for key, seq in seqs.items() if key.split(".")[0] == request_id
             for position in range(seq.num_computed_tokens)}
    num_used = manager.num_blocks - len(manager.free_blocks)
    return {
        "running": list(scheduler.running), "waiting": list(waiting(scheduler)),
        "seqs": {key: (seq.token_ids[:], list(seq.block_table), seq.num_computed_tokens)
                 for key, seq in seqs.items()},
        "refs": manager.ref_counts[:],
        "cached": sorted(content.block_id for content in manager.published.values()),
        "free": list(manager.free_blocks), "free_swap": list(manager.free_swap_blocks),
        "utilisation": round(len(slots) / (num_used * 4), 9) if num_used else 0.0,
    }


def read_state(state):
    """The same, read from a state of the trace."""
    blocks = state["blocks"]
    num_blocks = state["num_blocks"] + state["num_swap_blocks"]
    seqs = {}
    for key, seq in state["seqs"].items():
        request_id = key.split(".")[0]
        if request_id not in state["finished"]:
            tokens = state["groups"][request_id]["prompt_tokens"] + seq["tokens"]
            seqs[key] = (tokens, seq["table"], seq["computed"])
    return {
        "running": state["running"], "waiting": state["waiting"], "seqs": seqs,
        "refs": [blocks.get(str(b), {"refs": 0})["refs"] for b in range(num_blocks)],
        "cached": sorted(int(b) for b in blocks if blocks[b].get("cached")),
        "free": state["free"], "free_swap": state["free_swap"],
        "utilisation": round(utilisation(state), 9),
    }


class Comparison:
    """An observer that folds the frames so far, and compares with the engine."""

    def __init__(self, llm, run):
        self.llm, self.run = llm, run
        self.state = {}
        self.num_folded = self.num_phases = 0

    def __call__(self, phase, batch):
        for frame in self.run.frames[self.num_folded :]:
            fold(self.state, json.loads(frame)["delta"])
        self.num_folded = len(self.run.frames)
        self.num_phases += 1
        assert read_state(self.state) == read_engine(self.llm), phase
        if phase == "scheduled":
            entries = [(seq["now"], seq["computed"])
                       for seq in self.state["seqs"].values() if seq["now"]]
            assert sorted(entries) == sorted(zip(batch.counts, batch.ends, strict=True))


def compare(llm, seed, count):
    """Serve random requests, a few at a time, and abort some; returns steps and run."""
    rng = random.Random(seed)
    requests = random_requests(seed, count)
    under_way = []
    with trace(llm) as run:
        comparison = Comparison(llm, run)
        observers(llm).append(comparison)
        while requests or llm.has_unfinished_requests():
            while requests and rng.random() < 0.4:
                under_way.append(llm.add_request(*requests.pop()))
            if under_way and rng.random() < 0.05:
                llm.abort_request(rng.choice(under_way))
            llm.step()
        observers(llm).remove(comparison)
    assert read_state(run.states()[-1]) == read_engine(llm)
    return comparison.num_phases // 4, run


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("options", [
    {}, {"preemption_mode": "swap"}, {"enable_prefix_caching": False}], ids=str)
def test_the_fold_is_the_engines_state_after_every_phase(small, options, ahead):
    llm = small(**options)
    llm.runs_ahead = ahead
    num_steps, run = compare(llm, seed=len(options) + ahead, count=60)
    kinds, stats = kinds_of(run), llm.stats()
    assert num_steps > 90 and {"fork", "copy", "grow", "finish"} <= kinds.keys()
    assert kinds["recompute"] == stats.preemptions_recompute
    assert kinds["swap_out"] == stats.preemptions_swap


def test_a_delta_turns_one_list_into_another():
    rng = random.Random(0)
    for _ in range(500):
        old = rng.sample(range(30), rng.randrange(12))
        new = rng.sample(range(30, 50), rng.randrange(4))
        new += [item for item in old if rng.random() < 0.8]
        new += [rng.randrange(60) for _ in range(rng.randrange(5))]
        state = {"list": old[:]}
        fold(state, json.loads(json.dumps(diff({"list": old}, {"list": new}))))
        assert state == {"list": new}


# -- It only looks ---------------------------------------------------------------------


@pytest.mark.parametrize("count", [24, pytest.param(600, marks=pytest.mark.slow)])
def test_tracing_changes_no_token(small, count):
    requests = random_requests(seed=3, count=count)
    llm = small()
    with trace(llm):
        traced = serve(llm, requests)
    assert traced == serve(small(), requests)


def test_after_an_error_in_a_step_the_trace_goes_on_and_then_the_observer_is_gone(
        llama, engine, monkeypatch):
    llm = engine(llama)
    llm.add_request([1, 2, 3], greedy(8))
    llm.step()
    with trace(llm) as run:
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(llm.runner, "execute", lambda batch: 1 / 0)
            llm.step()
        drain(llm)
        llm.generate([[4, 5, 6]], greedy(2), use_tqdm=False)
    assert kinds_of(run)["abort"] == kinds_of(run)["finish"] == 1
    last = run.states()[-1]
    assert last["seqs"]["0.0"]["table"] == [] and last["finished"] == ["0", "1"]
    steps = [frame["step"] for frame in run.data()["frames"]]
    assert steps == sorted(steps) and observers(llm) == []


def test_a_place_that_cannot_be_written_is_refused_before_the_run(
        llama, engine, tmp_path):
    (tmp_path / "old.html").write_text("old")
    for path in (tmp_path, tmp_path / "none" / "run.html", tmp_path / "old.html" / "x"):
        with pytest.raises(ValueError, match=f"^{path} cannot be written: [^\n]+$"):
            trace(engine(llama), path)
    trace(engine(llama), tmp_path / "new.html")
    trace(engine(llama), tmp_path / "old.html")
    assert [file.name for file in tmp_path.iterdir()] == ["old.html"]
    assert (tmp_path / "old.html").read_text() == "old"


# -- What happened, in sentences -------------------------------------------------------


def test_the_showcase_has_everything(shown):
    assert kinds_of(shown).keys() >= set(FEATURES)
    assert len(shown.html().encode()) < 200_000


def test_a_fork_and_its_copies_name_the_blocks(llama, engine):
    with trace(engine(llama)) as run:
        params = SamplingParams(n=3, max_tokens=2, seed=1, ignore_eos=True)
        run.llm.generate([list(range(1, 7))], params, use_tqdm=False)
    assert events_of(run, "fork") == [
        "@0.0 computes the end of the prompt, and @0.1 and @0.2 fork from it: they "
        "share #0 and #1, and no K or V is copied."]
    assert events_of(run, "copy") == [
        "@0.0 and @0.1 are about to write into #1, which others hold too. They get "
        "copies to write into, #2 and #3."]


def test_a_beam_event_says_whose_continuations_are_the_new_beams(llama, engine):
    llm = engine(llama)
    seen = [[]]
    observers(llm).append(lambda phase, batch: phase == "updated" and seen.append([
        seq.token_ids for group in llm.scheduler.running.values()
        for seq in group.sequences]))
    with trace(llm) as run:
        params = BeamSearchParams(3, 12, ignore_eos=True)
        llm.generate([[5, 6, 7, 8]], params, use_tqdm=False)
    parents = [[old.index(tokens[:-1]) for tokens in new]
               for old, new in zip(seen[1:], seen[2:-1], strict=False)]
    texts = "".join(events_of(run, "beam"))
    assert texts.count("The best") == sum(beams != [0, 1, 2] for beams in parents) > 0
    assert "@0.0 and @0.1 from what was @0.0" in texts
    assert "Nothing goes on from @0." in texts


def test_a_prefix_hit_names_blocks_that_nobody_held(llama, engine):
    llm = engine(llama)
    prompt = list(range(1, 11))
    with trace(llm) as run:
        for max_tokens, num_steps in ((20, 1), (1, 30), (1, 30)):
            llm.add_request(prompt, greedy(max_tokens))
            for _ in range(num_steps):
                llm.step()
    held, free = events_of(run, "prefix")
    assert held.endswith("they are in #0 and #1, which others hold.")
    assert free.endswith("which nobody held, but whose K and V were still there.")


@pytest.mark.upstream
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_points_at_a_line_of_the_source(name):
    kind = KINDS[name]
    shown = excerpt(kind.symbol, kind.line)
    assert kind.line in shown["lines"][shown["at"]]
    assert shown["lines"][0].startswith("def ") and (ROOT / shown["file"]).is_file()


def test_a_quote_of_what_is_gone_is_an_error():
    with pytest.raises(ValueError, match="has no line with 'goto 10'"):
        excerpt("block_manager:BlockManager.grow", "goto 10")


# -- The page --------------------------------------------------------------------------


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
    markup = shown._repr_html_()  # in a notebook
    assert markup.startswith("<iframe srcdoc=") and markup.count("<") == 2


def test_a_prompt_cannot_leave_the_data(text_model, engine, tmp_path):
    llm = engine(text_model, block_size=16)
    with trace(llm, title=HOSTILE) as run:
        llm.generate([HOSTILE], greedy(2), use_tqdm=False)
    run.pieces.texts[1] = "\udc00"  # half of a surrogate pair
    run.save(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text("utf-8")
    assert page.count("</script") == 2 and "alert(1)</script>" not in page
    data = data_of(page)
    assert data["frames"][1]["delta"]["groups"]["0"]["prompt"] == HOSTILE
    assert data["pieces"]["1"] == "\udc00"


def test_tokens_have_their_text_with_spaces_and_whole_characters(
        tokenizer, sentencepiece_tokenizer):
    for each in (tokenizer, sentencepiece_tokenizer):
        pieces = Pieces(each)
        ids = each("the table of the block", add_special_tokens=False).input_ids
        pieces.add(ids)
        text = "".join(pieces.texts[token] for token in ids)
        assert text.strip() == "the table of the block"
    assert Pieces(None).text(12) == " 12"
    ids = tokenizer("a\U0001f600b", add_special_tokens=False).input_ids
    pieces = Pieces(tokenizer)
    pieces.add(ids)
    assert pieces.texts[",".join(map(str, ids[1:5]))] == "\U0001f600"


def test_a_long_run_keeps_frames_with_events_and_counts_the_others(
        llama, engine, monkeypatch):
    monkeypatch.setattr("nanopaged.tour.recorder.MANY_FRAMES", 20)
    monkeypatch.setattr("nanopaged.tour.recorder.MOST_FRAMES", 24)
    llm = engine(llama)
    with trace(llm) as run:
        for _ in range(4):
            llm.generate([[1, 2, 3]], greedy(12), use_tqdm=False)
    frames = run.data()["frames"]
    assert len(frames) == 25 and frames[-1]["phase"] == "end"
    # Each of the four runs: one phase "begin", and two for each of twelve steps.
    assert len(frames) - 2 + run.left_out == 4 * 25
    for frame in frames[20:24]:
        assert any(not KINDS[kind].is_minor for kind, _ in frame["events"])
    assert read_state(run.states()[-1]) == read_engine(llm)


# -- The README's picture --------------------------------------------------------------


@pytest.mark.upstream
def test_the_readmes_picture_is_the_one_that_is_made_from_a_run(tmp_path):
    path = picture.write(tmp_path)
    committed = ROOT / ".github" / "assets" / path.name
    assert path.read_bytes() == committed.read_bytes(), (
        "run `python -m nanopaged.tour picture .github/assets`")
