"""The recorder of the tour: it keeps what the engine held, and only looks."""

import random
import re
from collections import Counter

import pytest

import nanopaged.tour.recorder
import nanopaged.tour.state
from helpers import ROOT, drain, draw_requests, greedy, serve, swap_space, waiting
from nanopaged import LLM, BeamSearchParams, SamplingParams
from nanopaged.tour import trace
from nanopaged.tour.kinds import KINDS, Kind, explain
from nanopaged.tour.observers import observers
from nanopaged.tour.recorder import unpack
from nanopaged.tour.state import token_texts

HOSTILE = ("</script><script>alert(1)</script><img src=x onerror=alert(2)><!-- \"'&amp;"
           " \u202ekcab \u2066x \u65e5\u672c\u8a9e \U0001f600\u0301")
SOFT = "ROMEO:\nBut, soft! what light through yonder"
JULIET = "JULIET:\nO Romeo, Romeo! wherefore art thou Romeo?"


def showcase():
    """A run in which everything happens. The pool is too small for its four requests.

    Groups are swapped out as long as there is room in CPU memory, and then recomputed.
    """
    llm = LLM(device="cpu", dtype="float32", block_size=4, num_blocks=22,
              max_model_len=64, max_num_seqs=8, max_num_batched_tokens=12,
              swap_space=0.00025, preemption_mode="swap", attention_backend="torch")
    with llm, trace(llm, title="Four requests in a pool that is too small") as run:
        llm.add_request(JULIET, greedy(12))
        samples = SamplingParams(n=3, temperature=0.8, max_tokens=9, seed=5)
        llm.add_request(SOFT, samples)
        for _ in range(4):
            llm.step()
        llm.add_request(SOFT, BeamSearchParams(beam_width=3, max_tokens=7))
        llm.add_request(SOFT + " window", greedy(12))
        drain(llm)
    return run


@pytest.fixture(scope="module")
def shown():
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
    return [text for frame in run.frames for name, text in frame["events"]
            if name == kind]


def kinds_of(run):
    """How often each kind of event happened."""
    return Counter(kind for frame in run.frames for kind, _ in frame["events"])


def random_requests(seed, count):
    """Greedy, sampled and beams, for the tiny model, which has no tokenizer."""
    return list(draw_requests(seed, count, vocab_size=160, lengths=range(1, 24), most=3,
                              max_tokens=16, stop=()))


# -- The state of every frame is the engine's ------------------------------------------


def read_engine(llm):
    """What the engine holds, read here without the recorder's own functions."""
    manager, scheduler = llm.engine.block_manager, llm.engine.scheduler
    seqs, filled = {}, set()
    for request_id, group in scheduler.unfinished.items():
        for i, seq in enumerate(group.sequences):
            texts = [f" {token}" for token in seq.token_ids[group.num_prompt_tokens :]]
            seqs[f"{request_id}.{i}"] = (
                texts, list(seq.block_table), seq.num_computed_tokens)
            filled |= {(seq.block_table[position // 4], position % 4)
                       for position in range(seq.num_computed_tokens)}
    free = list(manager.free_blocks)
    cached = {content.block_id
              for content in manager.prefix_cache.published.values()}
    return {
        "running": list(scheduler.running), "waiting": list(waiting(scheduler)),
        "seqs": seqs, "cached": sorted(cached),
        "refs": {i: n for i, n in enumerate(manager.ref_counts) if n},
        "ranks": {id: free.index(id) + 1 for id in cached.intersection(free)},
        "filled": [slot for slot in filled if slot[0] < manager.num_blocks]}


def read_state(state):
    """The same, read from a state of the trace."""
    blocks = {int(block_id): block for block_id, block in state["blocks"].items()}
    return {
        "running": state["running"], "waiting": state["waiting"],
        "seqs": {key: (seq["tokens"], seq["table"], seq["computed"])
                 for key, seq in state["seqs"].items()
                 if key.split(".")[0] not in state["finished"]},
        "cached": sorted(id for id, block in blocks.items() if block["cached"]),
        "refs": {id: block["refs"] for id, block in blocks.items() if block["refs"]},
        "ranks": {id: block["rank"] for id, block in blocks.items() if "rank" in block}}


def record(llm, requests, seed):
    """Serve requests, a few at a time, and abort some. Returns the trace, and after
    every phase: the number of its frame, what the engine held, and the batch.
    """
    rng = random.Random(seed)
    phases, under_way = [], []

    def note(phase, batch):
        if phase != "executed":
            phases.append((len(run.frames) - 1, read_engine(llm),
                           batch if phase == "scheduled" else None))

    with trace(llm) as run:
        observers(llm).append(note)
        while requests or llm.has_unfinished_requests():
            while requests and rng.random() < 0.4:
                under_way.append(llm.add_request(*requests.pop()))
            if under_way and rng.random() < 0.05:
                llm.abort_request(rng.choice(under_way))
            llm.step()
        observers(llm).remove(note)
    return run, phases


@pytest.mark.parametrize("options", [
    {}, {"preemption_mode": "swap"}, {"enable_prefix_caching": False}], ids=str)
def test_the_state_of_every_frame_is_the_engines(small, options, ahead):
    llm = small(**options)
    llm.engine.steps_ahead = ahead
    seed = len(options) + ahead
    run, phases = record(llm, random_requests(seed, 60), seed)
    states = run.states()
    for number, held, batch in phases:
        state = states[number]
        assert read_state(state) == {key: held[key] for key in read_state(state)}
        if batch:
            entries = [(seq["now"], seq["computed"])
                       for seq in state["seqs"].values() if seq["now"]]
            assert sorted(entries) == sorted(zip(batch.counts, batch.ends, strict=True))
            assert state["total"] == sum(batch.counts)
    kinds, stats = kinds_of(run), llm.stats()
    assert len(phases) > 270 and {"fork", "copy", "grow", "finish"} <= kinds.keys()
    assert kinds["recompute"] == stats.preemptions_recompute
    assert kinds["swap_out"] == stats.preemptions_swap


# -- It only looks ---------------------------------------------------------------------


@pytest.mark.parametrize("count", [24, pytest.param(600, marks=pytest.mark.slow)])
def test_tracing_changes_no_token(small, count):
    requests = random_requests(seed=3, count=count)
    llm = small()
    with trace(llm):
        traced = serve(llm, requests)
    assert traced == serve(small(), requests)


def test_after_an_error_in_a_step_the_trace_goes_on_and_then_nothing_is_left_of_it(
        llama, engine, monkeypatch):
    llm = engine(llama)
    llm.add_request([1, 2, 3], greedy(8))
    llm.step()
    with trace(llm) as run:
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(llm.engine.runner, "execute", lambda batch: 1 / 0)
            llm.step()
        drain(llm)
        llm.generate([[4, 5, 6]], greedy(2), use_tqdm=False)
    assert (kinds_of(run)["abort"], kinds_of(run)["finish"]) == (2, 1)
    last = run.states()[-1]
    assert last["seqs"]["0.0"]["table"] == [] and last["finished"] == ["0", "1"]
    steps = [frame["step"] for frame in run.frames]
    assert steps == sorted(steps) and observers(llm) == []
    for owner in (llm.engine.scheduler, llm.engine.block_manager):
        assert not any(map(callable, vars(owner).values()))


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


def test_a_fork_and_its_copies_name_the_blocks(llama, engine):
    with trace(engine(llama)) as run:
        params = SamplingParams(n=3, max_tokens=2, seed=1, ignore_eos=True)
        run.llm.generate([list(range(1, 7))], params, use_tqdm=False)
    assert events_of(run, "fork") == [
        "@0.0 computes the end of the prompt. It shares its blocks with @0.1 and @0.2 "
        "now, and no K or V is copied."]
    assert events_of(run, "copy") == [
        f"@0.{i} is about to write into #1, which others hold too. It gets a copy, "
        f"#{i + 2}, to write into." for i in range(2)]


def test_a_beam_event_says_whose_continuations_are_the_new_beams(llama, engine):
    llm = engine(llama)
    seen = [[]]
    observers(llm).append(lambda phase, batch: phase == "updated" and seen.append([
        seq.token_ids for group in llm.engine.scheduler.running.values()
        for seq in group.sequences]))
    with trace(llm) as run:
        params = BeamSearchParams(3, 12, ignore_eos=True)
        llm.generate([[5, 6, 7, 8]], params, use_tqdm=False)
    parents = [[old.index(tokens[:-1]) for tokens in new]
               for old, new in zip(seen[1:], seen[2:-1], strict=False)]
    told = [[int(parent) for parent in re.findall(r"old @0\.(\d)", text)]
            for text in events_of(run, "beam")]
    assert told == [[0, 0, 0], *parents]
    assert any(beams != [0, 1, 2] for beams in parents)


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
    assert free.endswith(
        "which nobody held any more, but whose K and V were still there.")


@pytest.mark.parametrize("budget, kind, sentence", [
    (7, "wait", "There is no room yet for request 1: it needs up to 7 blocks, and 0 "
     "are free."),
    (4, "budget", "The budget is used up, so @0.4 and @0.5 must wait for the next "
     "step.")], ids=["no room", "no budget"])
def test_it_says_why_something_waits(llama, engine, budget, kind, sentence):
    llm = engine(llama, num_blocks=12, max_num_batched_tokens=budget)
    with trace(llm) as run:
        llm.add_request([1, 2, 3], SamplingParams(n=6, max_tokens=5, ignore_eos=True))
        llm.step()
        llm.step()
        llm.add_request([4] * 28, greedy(2))
        drain(llm)
    assert events_of(run, kind)[0] == sentence


@pytest.mark.upstream
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_happens_and_points_at_a_line_of_the_source(name, shown):
    told = explain(KINDS[name])
    assert KINDS[name].line in told["lines"][told["at"]]
    assert told["lines"][0].startswith("def ") and (ROOT / told["file"]).is_file()
    assert name == "abort" or kinds_of(shown)[name]


@pytest.mark.parametrize("symbol", ["scheduler.Scheduler.finish", "scheduler.Gone"])
def test_a_line_that_is_gone_is_shown_alone(symbol):
    told = explain(Kind("end", symbol, "goto 10", "4.3"))
    assert (told["name"], told["lines"], told["at"]) == (symbol, ["goto 10"], 0)


# -- The page --------------------------------------------------------------------------


def data_of(page):
    """The lines of the trace in a page."""
    return unpack(re.search('<script type="text/plain"[^>]*>([^<]*)</script>', page)[1])


def test_the_page_has_the_whole_trace_and_loads_nothing(shown, tmp_path):
    shown.save(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text(encoding="ascii")
    *states, header = data_of(page)
    assert states == shown.states() and len(header["frames"]) == len(states)
    for word in ("src=", "@import", "url(", "fetch(", '<link rel="style'):
        assert word not in page, word
    markup = shown._repr_html_()  # in a notebook
    assert markup.startswith("<iframe srcdoc=") and markup.count("<") == 2


def test_a_prompt_cannot_leave_the_data(text_model, engine):
    llm = engine(text_model, block_size=16, max_model_len=160)
    with trace(llm, title=HOSTILE) as run:
        llm.generate([HOSTILE], greedy(2), use_tqdm=False)
    run.groups["0"]["prompt"] += ["\udc00"]  # half of a surrogate pair
    page = run.html()
    assert page.count("</script") == 2 and "alert(1)</script>" not in page
    header = data_of(page)[-1]
    assert "".join(header["groups"]["0"]["prompt"]).endswith(HOSTILE + "\udc00")


def test_tokens_have_their_text_with_spaces_and_whole_characters(
        tokenizer, sentencepiece_tokenizer):
    for each in (tokenizer, sentencepiece_tokenizer):
        ids = each("the table of the block", add_special_tokens=False).input_ids
        texts = token_texts(each, ids)
        assert "".join(texts).strip() == "the table of the block" and len(texts) > 4
    assert token_texts(None, [12]) == [" 12"]
    ids = tokenizer("a\U0001f600b", add_special_tokens=False).input_ids
    assert token_texts(tokenizer, ids) == ["a", "", "", "", "\U0001f600", "b"]
    assert token_texts(tokenizer, ids[:3]) == ["a", "", ""]


def test_a_token_without_a_name_and_what_an_error_leaves(
        text_model, engine, monkeypatch):
    """A vocabulary may have more ids than the tokenizer has names."""
    llm = engine(text_model)
    monkeypatch.setattr(type(llm.tokenizer), "convert_ids_to_tokens", lambda *_: None)
    for module in (nanopaged.tour.state, nanopaged.frontend.detokenizer):
        monkeypatch.setattr(module, "token_bytes", lambda *_: (b"", b""))
    with trace(llm) as run:
        llm.generate([[5, 6]], greedy(2), use_tqdm=False)
    assert next(iter(run.groups.values()))["prompt"][0] == "<5>"
    llm.add_request([5, 6], greedy(3))
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(nanopaged.tour.recorder, "group_state", lambda *_: 1 / 0)
        with trace(llm):
            raise AssertionError("the trace has not begun")
    assert observers(llm) == [] and len(drain(llm)) == 1


def test_a_long_run_keeps_its_beginning_and_its_end(llama, engine, monkeypatch):
    monkeypatch.setattr("nanopaged.tour.recorder.MOST_CHARACTERS", 5000)
    llm = engine(llama)
    with trace(llm) as run:
        for _ in range(4):
            llm.generate([[1, 2, 3]], greedy(12), use_tqdm=False)
    frames, states = run.frames, run.states()
    assert frames[-1]["phase"] == "end" and len(frames) == len(states) < 30
    # Each of the four runs: three phases in each of twelve steps.
    assert len(frames) - 2 + run.num_left_out == pytest.approx(4 * 36, abs=20)
    held, state = read_engine(llm), read_state(states[-1])
    assert state == {key: held[key] for key in state}
