"""The player in a real browser, with real clicks and keys.

Without a Chromium these tests are skipped.
"""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from markupsafe import Markup

from helpers import greedy
from nanopaged.tour import trace
from nanopaged.tour.guide import blockwise
from nanopaged.tour.guide.lab import SPEECH, engine, others
from nanopaged.tour.page import TEMPLATES, page
from test_tour import HOSTILE, random_requests, record, showcase, small  # noqa: F401

pytestmark = pytest.mark.browser

# What one may click on in a player.
PLACES = [".np-title", ".np-where", ".np-button", ".np-key", "input",
          ".np-text", ".np-panel", ".np-tables", ".np-entry", ".np-pools", ".np-cell",
          ".np-sentences", ".np-event", ".np-kind", ".np-source", "pre"]


class Browser:
    """A headless Chromium, driven through its debugging pipe. It has one page."""

    def __init__(self, program, profile):
        read_end, self.to_browser = os.pipe()
        self.from_browser, write_end = os.pipe()
        options = ["headless", "no-sandbox", "disable-gpu", "remote-debugging-pipe",
                   "disable-background-networking", f"user-data-dir={profile}"]
        # The browser reads from its file 3, and writes to its file 4.
        start = (f"import os, sys; os.dup2({read_end}, 3); os.dup2({write_end}, 4); "
                 "os.execv(sys.argv[1], sys.argv[1:])")
        self.process = subprocess.Popen(
            [sys.executable, "-c", start, program,
             *(f"--{option}" for option in options)],
            pass_fds=(read_end, write_end), stderr=subprocess.DEVNULL)
        os.close(read_end)
        os.close(write_end)
        self.received, self.session, self.last_id = b"", {}, 0
        self.context = self.events = None

    def open(self, page, fragment="", size=(1280, 720)):
        """Open a page as if the browser were new, in place of the one before."""
        self.session, self.events = {}, []
        if self.context:
            self.call("Target.disposeBrowserContext", **self.context)
        self.context = self.call("Target.createBrowserContext")
        target = self.call("Target.createTarget", url="about:blank", **self.context)
        self.session = self.call("Target.attachToTarget", flatten=True, **target)
        self.resize(size)
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=page.resolve().as_uri() + fragment)
        while not self.seen("Page.loadEventFired"):
            self.read()
        self.run("await npPlayers")
        return self

    def resize(self, size):
        self.call("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1],
                  deviceScaleFactor=1, mobile=False)

    def end(self):
        for pipe in (self.to_browser, self.from_browser):
            os.close(pipe)
        self.process.kill()
        self.process.wait()

    def read(self):
        """The next message, which ends with a zero byte."""
        while b"\0" not in self.received:
            piece = os.read(self.from_browser, 1 << 16)
            assert piece, "the browser has ended"
            self.received += piece
        text, _, self.received = self.received.partition(b"\0")
        message = json.loads(text)
        if message.get("sessionId") == self.session.get("sessionId"):
            self.events.append(message)
        return message

    def call(self, method, **params):
        self.last_id += 1
        message = {"id": self.last_id, "method": method, "params": params}
        os.write(self.to_browser, json.dumps(message | self.session).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.last_id:
                return answer["result"]

    def seen(self, method):
        return [event["params"] for event in self.events
                if event.get("method") == method]

    def run(self, script):
        """What the script returns, through JSON."""
        answer = self.call("Runtime.evaluate", returnByValue=True, awaitPromise=True,
                           expression=f"(async () => {{ {script} }})()")
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def each(self, selector, value):
        """The value of an expression for each such element, which is called `one`."""
        return self.run(f"return [...document.querySelectorAll('{selector}')]"
                        f".map(one => {value})")

    def text(self, selector):
        return self.run(f"return document.querySelector('{selector}').textContent")

    def press(self, *keys):
        for key in keys:
            for kind in ("keyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def place_of(self, selector):
        """Bring the first such element onto the screen; None if none can be seen."""
        return self.run(
            f"const found = document.querySelector('{selector}');"
            "if (!found?.checkVisibility()) return null;"
            "found.scrollIntoView({block: 'center', inline: 'center'});"
            "const {x, y, width, height} = found.getBoundingClientRect();"
            "return [x + Math.min(width / 2, 40), y + Math.min(height / 2, 200)]")

    def click(self, selector):
        """False if there is nothing to click on."""
        place = self.place_of(selector)
        for kind in ("mousePressed", "mouseReleased") if place else ():
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1],
                      button="left", clickCount=1)
        return place is not None

    def want_no_motion(self):
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-reduced-motion", "value": "reduce"}])

    def check_is_quiet(self):
        """There was no error, and nothing but the page was requested."""
        assert self.seen("Runtime.exceptionThrown") == []
        urls = [params["request"]["url"]
                for params in self.seen("Network.requestWillBeSent")]
        assert [url for url in urls if not url.startswith("data:")] == urls[:1]


def check_all_players(browser):
    """Every player steps by keys, wherever one clicks into it, and fits on the screen.
    """
    players = browser.each(".np-player", "one.id")
    for player in players:
        clicked = 0
        for place in PLACES:
            if browser.click(f"#{player} {place}"):
                clicked += 1
                browser.press("Home", "ArrowRight", "ArrowRight", "ArrowLeft")
                (frame,) = browser.each(f"#{player} input", "one.value")
                assert frame == "1", f"a click on {place} in {player}"
        assert clicked >= len(PLACES) - 3  # some places are empty in some runs
        keys = browser.text(f"#{player} .np-keys")
        assert all(key in keys for key in ("\u2190 \u2192", "space", "Home", "End"))
    wide = browser.run("return document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0
    browser.check_is_quiet()
    return players


@pytest.fixture(scope="module")
def open_page(tmp_path_factory):
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip("no Chromium")
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser.open
    browser.end()


def write_page(path, markup):
    """A page with this in its body."""
    TEMPLATES.globals["markup"] = Markup(markup)
    template = TEMPLATES.from_string(
        '{% extends "run.html" %}{% block body %}<body>{{ markup }}'
        '<p class="np-answers"></p></body>{% endblock %}')
    path.write_text(page(template, title="A page"), "utf-8")
    return path


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A page with two players of the run in which everything happens."""
    run = showcase()
    run.ask(1, "Where does it open?", {"here": "It asks.", "later": "No."}, "here")
    run.ask(5, "Which block?", {"#1": "It is <b>held</b>. " * 9, "#2": "Free."}, "#2")
    return write_page(tmp_path_factory.mktemp("tour") / "shown.html",
                      run.player("one") + run.player("two", opens_at=3))


def test_keys_step_after_a_click_anywhere_in_a_player(shown, open_page):
    assert check_all_players(open_page(shown)) == ["one", "two"]


# What the player shows in every frame, read from the page.
READ = """
const [player] = await npPlayers;
const all = (within, selector, read) =>
  [...within.querySelectorAll(selector)].map(read);
const text = element => element?.textContent ?? "";
return player.states.map((_, frame) => {
  player.show(frame);
  return {
    percent: text(player.panels.pools[0]),
    counts: all(player.root, ".np-requests h4", text),
    tables: all(player.root, ".np-table", row => [
      text(row.querySelector("b")),
      all(row, "[data-block]", cell => +cell.dataset.block)]),
    texts: all(player.root, ".np-own", line => [
      text(line.querySelector("b")), all(line, "bdi", text).join("")]),
    cells: all(player.root, ".np-cell", cell => [
      +cell.dataset.block, +cell.dataset.refs, text(cell.querySelector("small"))]),
  };
});"""


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_frame_shows_what_the_engine_holds(
        small, tmp_path, open_page, seed):  # noqa: F811
    llm = small(preemption_mode="swap")
    run, phases = record(llm, random_requests(seed, 12), seed)
    run.save(tmp_path / "run.html")
    browser = open_page(tmp_path / "run.html")
    frames = browser.run(READ)
    assert len(frames) == len(run.frames) > 40
    for number, held, _ in phases:
        shown = frames[number]
        assert dict(shown["tables"]) == {
            key: table for key, (_, table, _) in held["seqs"].items() if table}
        texts = dict(shown["texts"])
        for key, (tokens, _, _) in held["seqs"].items():
            assert texts.get(key, "").removesuffix("?") == "".join(tokens)
        for queue in ("Running", "Waiting"):
            assert f"{queue}{len(held[queue.lower()])}" in shown["counts"]
        used = {block for block in held["refs"] if block < 28}
        percent = int(100 * len(held["filled"]) / (4 * len(used) or 1) + 0.5)
        assert shown["percent"] == f"{len(used)} of 28 blocks in use" + (
            f", {percent}% filled" if used else "")
        for block, refs, badge in shown["cells"]:
            assert refs == held["refs"].get(block, 0)
            rank = str(held["ranks"].get(block, ""))
            assert badge == f"\u00d7{refs}" if refs else badge[:-1] == rank
        assert {block for block, _, _ in shown["cells"]} >= held["refs"].keys()
    browser.check_is_quiet()


def test_settings_switch_between_real_runs_at_the_same_step(tmp_path, open_page):
    """And what differs from the first one is said."""
    requests = ["ROMEO:\n", SPEECH], greedy(8)
    runs = others({"four": {}, "one": {"block_size": 1, "num_blocks": 96}}, *requests)

    def state_of(name, phase):
        places = [(frame["step"], frame["phase"]) for frame in runs[name].frames]
        return runs[name].states()[places.index((3, phase))]

    browser = open_page(write_page(tmp_path / "runs.html", runs["four"].player(
        "run", setting="four", others={"one": runs["one"]})), "#run=3")
    assert browser.text("#run .np-settings + .np-note") == ""
    for number, name in ((2, "one"), (1, "four")):
        browser.click(f"#run .np-setting:nth-of-type({number})")
        state = browser.run("const [player] = await npPlayers; "
                            "return [player.state(player.frame), player.trace.title]")
        assert state == [state_of(name, "scheduled"), name]
        marked = browser.each("#run mark", "one.textContent")
        slots = sum(len(seq["table"]) for seq in state[0]["seqs"].values())
        assert (str(slots) in marked) == (name == "one")
    browser.click("#run .np-setting:last-of-type")  # side by side
    browser.click("#run .np-title")
    browser.press("ArrowRight")
    both = browser.each(".np-tables", """
        [...one.querySelectorAll(".np-table")].map(row =>
          [...row.querySelectorAll("[data-block]")].map(cell => +cell.dataset.block))
        """)
    assert both == [[seq["table"] for seq in state_of(name, "updated")["seqs"].values()]
                    for name in ("four", "one")]
    browser.click("#run .np-setting:last-of-type")
    title = "return (await npPlayers)[0].trace.title"
    for fragment, name in (("run=3-updated-1", "one"), ("run=3", "four")):
        browser.run(f"location.hash = '{fragment}'; await new Promise("
                    "done => addEventListener('hashchange', done, {once: true}))")
        assert browser.run(title) == name  # a link leads to its setting, too
    browser.check_is_quiet()


def test_attention_to_play_with_is_that_of_the_engine(tmp_path, open_page):
    """In any order of the blocks; and one huge score overflows nothing."""
    with engine(block_size=16) as llm:
        example = blockwise.example(llm, SPEECH * 2)
    browser = open_page(write_page(
        tmp_path / "softmax.html",
        TEMPLATES.get_template("softmax.html").render(example=example)))
    said = ".np-softmax [aria-live]"
    click = "document.querySelectorAll('.np-softmax button')[{}].click();"
    browser.run(click.format(0) * len(example["blocks"]))
    for _ in range(5):
        text = browser.text(said)
        ours, engines = re.findall(r"(?:=|gave) (-?\d+\.\d{3})\b", text)
        old, shrink, own, new = map(float, re.search(
            r"Denominator: (\S+) \u00d7 (\S+) \+ (\S+) = (\S+)\. ", text).groups())
        assert abs(old * shrink + own - new) < 2e-3
        assert ours == engines == f"{example['result']:.3f}"
        browser.run(click.format(2) + click.format(0) * len(example["blocks"]))
    browser.run(click.format(3) + click.format(0) * len(example["blocks"]))
    assert f"= {example['blocks'][1]['values'][0]:.3f}." in browser.text(said)
    assert "NaN" not in browser.text(".np-softmax")
    browser.check_is_quiet()


def test_players_of_a_page_move_on_their_own_and_links_lead_to_steps(
        shown, open_page):
    browser = open_page(shown, "#one=2")
    steps = ".np-where strong", "one.textContent"
    assert browser.each(*steps) == ["Step 2", "Step 3"]
    browser.click("#two .np-title")
    browser.press("Home", "ArrowRight", "ArrowRight")
    assert browser.each(*steps) == ["Step 2", "Step 1"]
    browser.run("npPlayers.then(([one, two]) => { two.speed = 20; })")
    browser.press(" ")  # it plays until it comes to a question
    browser.run("const [one, two] = await npPlayers;"
                "while (!two.isAsking) await new Promise(requestAnimationFrame)")
    assert browser.each(*steps) == ["Step 2", "Step 4"]
    assert browser.run("return (await npPlayers)[1].timer") is None
    assert browser.run("return location.hash").startswith("#two=")


def test_a_question_comes_before_the_step_that_answers_it(shown, open_page):
    browser = open_page(shown, "#one=4-begin")
    ask = "#one .np-ask"
    assert "Which block?" in browser.text(ask) and "held" not in browser.text(ask)
    assert browser.text(".np-answers").startswith("0 of 4 questions answered, 0 r")
    before = browser.each("#one .np-main", "one.offsetHeight")
    wrong = browser.each(f"{ask} button", "one.textContent").index("#1")
    browser.click(f"{ask} button:nth-child({1 + wrong})")
    assert "Not quite. It is <b>held</b>." in browser.text(ask)
    # There was room for it.
    assert browser.each("#one .np-main", "one.offsetHeight") == before
    assert browser.text(".np-answers") == "1 of 4 questions answered, 0 right"
    browser.press("ArrowRight")
    assert browser.text("#one .np-where").startswith("Step 5")
    assert browser.text(ask) == ""


def test_blocks_light_up_wherever_they_are_and_events_have_their_source(
        shown, open_page):
    browser = open_page(shown, "#one=5")
    assert "nanopaged/" in browser.text(".np-source .np-file")
    lefts = browser.each("#one .np-source code > *", "one.getBoundingClientRect().left")
    assert len(lefts) > 4 and len(set(lefts)) == 1  # no two are on the same line
    assert browser.text("[aria-live]") == ""
    browser.click('#one [data-block="7"].np-cell')
    lit = browser.each("#one .np-lit", "one.dataset.block")
    assert len(lit) >= 8 and set(lit) == {"7"}
    assert browser.text(".np-detail").startswith("Block 7: 7 references, from 1.0, 1.1")
    browser.press("ArrowDown")
    assert browser.text(".np-detail").startswith("Block 8:")
    browser.press("ArrowRight")  # what happened is also said, and the focus stays
    assert browser.text("[aria-live]").startswith("Step 5, updated.")
    assert browser.text(".np-detail").startswith("Block 8:")
    assert browser.run("return document.activeElement.dataset.block") == "8"


def test_hostile_text_is_shown_as_text(text_model, engine, tmp_path, open_page):
    llm = engine(text_model, block_size=16, max_model_len=160)
    path = tmp_path / "run.html"
    with trace(llm, path, title=HOSTILE):
        llm.generate([HOSTILE], greedy(8), use_tqdm=False)
    browser = open_page(path, "#step=2")
    widths = browser.each(".np-bar > *", "one.getBoundingClientRect().width")
    assert widths[0] == 2  # pixels, for one token of 8,192
    expected = HOSTILE
    for code in ("202E", "2066"):
        expected = expected.replace(chr(int(code, 16)), f"\u2039U+{code}\u203a")
    assert browser.text(".np-title") == expected
    assert browser.text(".np-legend") == "end 1"  # and nothing that never happens
    browser.press("End")
    assert browser.text(".np-text").endswith(expected[-60:])
    assert browser.run("return document.images.length") == 0
    browser.check_is_quiet()
