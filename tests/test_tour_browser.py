"""The player in a real browser, with real clicks and keys.

Without a Chromium these tests are skipped.
"""

import json
import os
import re
import subprocess
import sys

import pytest
from markupsafe import Markup

from helpers import find_browser, greedy, swap_space
from nanopaged.tour import trace
from nanopaged.tour.guide import blockwise
from nanopaged.tour.guide.lab import SPEECH, engine, others
from nanopaged.tour.page import TEMPLATES, page
from test_tour import random_requests, record, showcase

pytestmark = pytest.mark.browser

SIZES = {"laptop": (1280, 720), "tablet": (768, 1024), "phone": (420, 844)}
# What one may click on in a player.
PLACES = [".np-title", ".np-where", ".np-button", ".np-key", "input",
          ".np-text", ".np-panel", ".np-tables", ".np-entry", ".np-pools", ".np-cell",
          ".np-sentences", ".np-event", ".np-kind", ".np-source", "pre"]
HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)> \"'&amp; "
    "\u202ekcab \u2066x \U0001f600 \u65e5\u672c\u8a9e")


class Browser:
    """A page in a headless Chromium, driven through its debugging pipe."""

    def __init__(self, page, profile, fragment="", size=SIZES["laptop"]):
        read_end, self.to_browser = os.pipe()
        self.from_browser, write_end = os.pipe()
        options = ["headless", "no-sandbox", "disable-gpu", "remote-debugging-pipe",
                   "disable-background-networking", f"user-data-dir={profile}"]
        # The browser reads from its file 3, and writes to its file 4.
        start = (f"import os, sys; os.dup2({read_end}, 3); os.dup2({write_end}, 4); "
                 "os.execv(sys.argv[1], sys.argv[1:])")
        self.process = subprocess.Popen(
            [sys.executable, "-c", start, find_browser(),
             *(f"--{option}" for option in options)],
            pass_fds=(read_end, write_end), stderr=subprocess.DEVNULL)
        os.close(read_end)
        os.close(write_end)
        self.received, self.session, self.last_id = b"", {}, 0
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.call(
            "Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        self.call("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1],
                  deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setTouchEmulationEnabled",
                  enabled=size != SIZES["laptop"])
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=page.resolve().as_uri() + fragment)
        while not self.seen("Page.loadEventFired"):
            self.read()
        self.run("await npPlayers")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
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
        if "method" in message:
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
        return [event["params"] for event in self.events if event["method"] == method]

    def run(self, script):
        """What the script returns, through JSON."""
        answer = self.call("Runtime.evaluate", returnByValue=True, awaitPromise=True,
                           expression=f"(async () => {{ {script} }})()")
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, *keys):
        for key in keys:
            for kind in ("keyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def click(self, player, selector):
        """Click into the first such element of a player; False if there is none."""
        place = self.run(
            f"const found = document.querySelector('#{player} {selector}');"
            "if (!found?.checkVisibility()) return null;"
            "found.scrollIntoView({block: 'center', inline: 'center'});"
            "const {x, y, width, height} = found.getBoundingClientRect();"
            "return [x + Math.min(width / 2, 40), y + Math.min(height / 2, 200)]")
        for kind in ("mousePressed", "mouseReleased") if place else ():
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1],
                      button="left", clickCount=1)
        return place is not None

    def want_no_motion(self):
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-reduced-motion", "value": "reduce"}])

    def tap(self, selector):
        """Touch the middle of an element."""
        x, y = self.run(
            f"const found = document.querySelector('{selector}');"
            "found.scrollIntoView({block: 'center'});"
            "const {x, y, width, height} = found.getBoundingClientRect();"
            "return [x + width / 2, y + height / 2]")
        for kind, points in (("touchStart", [{"x": x, "y": y}]), ("touchEnd", [])):
            self.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)

    def text(self, selector):
        return self.run(f"return document.querySelector('{selector}').textContent")

    def check_is_quiet(self):
        """There was no error, and nothing but the page was requested."""
        assert self.seen("Runtime.exceptionThrown") == []
        urls = [params["request"]["url"]
                for params in self.seen("Network.requestWillBeSent")]
        assert [url for url in urls if not url.startswith("data:")] == urls[:1]


def check_all_players(browser):
    """Every player steps by keys, wherever one clicks into it, and fits on the screen.
    """
    players = browser.run("return [...document.querySelectorAll('.np-player')]"
                          ".map(player => player.id)")
    for player in players:
        clicked = 0
        for place in PLACES:
            if browser.click(player, place):
                clicked += 1
                browser.press("Home", "ArrowRight", "ArrowRight", "ArrowLeft")
                frame = f"return document.querySelector('#{player} input').value"
                assert browser.run(frame) == "1", f"a click on {place} in {player}"
        assert clicked >= len(PLACES) - 3  # some places are empty in some runs
        keys = browser.text(f"#{player} .np-keys")
        assert all(key in keys for key in ("\u2190 \u2192", "space", "Home", "End"))
    wide = browser.run("return document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0
    browser.check_is_quiet()
    return players


@pytest.fixture
def open_page(tmp_path):
    opened = []

    def open_page(page, fragment="", size=SIZES["laptop"]):
        profile = tmp_path / f"profile-{len(opened)}"
        opened.append(Browser(page, profile, fragment, size).__enter__())
        return opened[-1]

    yield open_page
    for browser in opened:
        browser.__exit__()


def two_players(run):
    """A page with two players of a run."""
    both = run.player("one") + run.player("two", opens_at=3)
    TEMPLATES.globals["both"] = Markup(both)
    template = TEMPLATES.from_string(
        '{% extends "run.html" %}{% block body %}<body>{{ both }}'
        '<p class="np-answers"></p></body>{% endblock %}')
    return page(template, title="Two players")


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A page with two players of the run in which everything happens."""
    run = showcase()
    run.ask(1, "Where does it open?", {"here": "It asks.", "later": "No."}, "here")
    run.ask(5, "Which block?", {"#1": "It is <b>held</b>. " * 9, "#2": "Free."}, "#2")
    path = tmp_path_factory.mktemp("tour") / "shown.html"
    path.write_text(two_players(run), "utf-8")
    return path


@pytest.mark.parametrize("size", [SIZES["laptop"], SIZES["phone"]])
def test_keys_step_after_a_click_anywhere_in_a_player(shown, open_page, size):
    assert check_all_players(open_page(shown, size=size)) == ["one", "two"]


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


@pytest.mark.parametrize("seed", [1, 2])
def test_every_frame_shows_what_the_engine_holds(llama, engine, tmp_path, open_page,
                                                 seed):
    llm = engine(llama, num_blocks=28, max_model_len=64, max_num_seqs=10,
                 max_num_batched_tokens=24, swap_space=swap_space(llama, 16, 4),
                 preemption_mode="swap")
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
    TEMPLATES.globals["players"] = Markup(runs["four"].player(
        "run", setting="four", others={"one": runs["one"]}))
    template = TEMPLATES.from_string(
        '{% extends "run.html" %}{% block body %}<body>{{ players }}'
        '</body>{% endblock %}')
    (tmp_path / "runs.html").write_text(page(template, title="Settings"), "utf-8")
    browser = open_page(tmp_path / "runs.html", "#run=3")
    assert browser.text("#run .np-settings .np-note") == ""
    for place, name in ((".np-setting:nth-of-type(2)", "one"),
                        (".np-setting:nth-of-type(1)", "four")):
        browser.click("run", place)
        state = browser.run("const [player] = await npPlayers; "
                            "return [player.state(player.frame), player.trace.title]")
        places = [(frame["step"], frame["phase"]) for frame in runs[name].frames]
        frame = places.index((3, "scheduled"))
        assert state == [runs[name].states()[frame], name]
        marked = browser.run("return [...document.querySelectorAll('#run mark')]"
                             ".map(mark => mark.textContent)")
        slots = sum(len(seq["table"]) for seq in state[0]["seqs"].values())
        assert (str(slots) in marked) == (name == "one")
    browser.click("run", ".np-setting:last-of-type")  # side by side
    browser.click("run", ".np-title")
    browser.press("ArrowRight")
    both = browser.run("""
        const all = (within, selector) => [...within.querySelectorAll(selector)];
        return all(document, ".np-tables").map(panel => all(panel, ".np-table").map(
          row => all(row, "[data-block]").map(entry => Number(entry.dataset.block))));
        """)
    for name, tables in zip(("four", "one"), both, strict=True):
        places = [(frame["step"], frame["phase"]) for frame in runs[name].frames]
        state = runs[name].states()[places.index((3, "updated"))]
        assert tables == [seq["table"] for seq in state["seqs"].values()]
    browser.click("run", ".np-setting:last-of-type")
    check_all_players(browser)
    title = "return (await npPlayers)[0].trace.title"
    for fragment, name in (("run=3-updated-1", "one"), ("run=3", "four")):
        browser.run(f"location.hash = '{fragment}'; await new Promise("
                    "done => addEventListener('hashchange', done, {once: true}))")
        assert browser.run(title) == name  # a link leads to its setting, too


def test_attention_to_play_with_is_that_of_the_engine(tmp_path, open_page):
    """In any order of the blocks; and one huge score overflows nothing."""
    with engine(block_size=16) as llm:
        example = blockwise.example(llm, SPEECH * 2)
    TEMPLATES.globals["softmax"] = Markup(
        TEMPLATES.get_template("softmax.html").render(example=example))
    template = TEMPLATES.from_string(
        '{% extends "run.html" %}{% block body %}<body>{{ softmax }}'
        '</body>{% endblock %}')
    (tmp_path / "softmax.html").write_text(page(template, title="Softmax"), "utf-8")
    browser = open_page(tmp_path / "softmax.html")
    click = "document.querySelectorAll('.np-softmax button')[{}].click();"
    browser.run(click.format(0) * len(example["blocks"]))
    for _ in range(5):
        said = browser.text(".np-softmax [aria-live]")
        ours, engines = re.findall(r"(?:=|gave) (-?\d+\.\d{3})\b", said)
        old, shrink, own, new = map(float, re.search(
            r"Denominator: (\S+) \u00d7 (\S+) \+ (\S+) = (\S+)\. ", said).groups())
        assert abs(old * shrink + own - new) < 2e-3
        assert ours == engines == f"{example['result']:.3f}"
        browser.run(click.format(2) + click.format(0) * len(example["blocks"]))
    browser.run(click.format(3) + click.format(0) * len(example["blocks"]))
    assert f"= {example['blocks'][1]['values'][0]:.3f}." in browser.text(
        ".np-softmax [aria-live]")
    assert "NaN" not in browser.text(".np-softmax")
    browser.check_is_quiet()


def test_players_of_a_page_move_on_their_own_and_links_lead_to_steps(
        shown, open_page):
    browser = open_page(shown, "#one=2")
    steps = ("return [...document.querySelectorAll('.np-where strong')]"
             ".map(one => one.textContent)")
    assert browser.run(steps) == ["Step 2", "Step 3"]
    browser.click("two", ".np-title")
    browser.press("Home", "ArrowRight", "ArrowRight")
    assert browser.run(steps) == ["Step 2", "Step 1"]
    browser.run("npPlayers.then(([one, two]) => { two.speed = 20; })")
    browser.press(" ")  # it plays until it comes to a question
    browser.run("const [one, two] = await npPlayers;"
                "while (!two.isAsking) await new Promise(requestAnimationFrame)")
    assert browser.run(steps) == ["Step 2", "Step 4"]
    assert browser.run("return (await npPlayers)[1].timer") is None
    assert browser.run("return location.hash").startswith("#two=")


def test_a_link_brings_its_player_onto_the_screen(shown, open_page):
    browser = open_page(shown, "#two=2")
    browser.want_no_motion()  # so that it has arrived when one clicks
    top = "return document.querySelector('#two').getBoundingClientRect().top"
    assert 0 <= browser.run(top) < 100
    browser.run("scrollTo(0, 0); location.hash = 'two=3-updated'; const y = () => {"
                f"{top} }}; while (y() > 100) await new Promise(requestAnimationFrame)")
    assert browser.text("#two .np-where").startswith("Step 3 of")
    assert browser.run("return location.hash") == "#two=3-updated"


def test_copied_blocks_move_unless_the_reader_wants_no_motion(shown, open_page):
    browser = open_page(shown)
    moved = ("const [one] = await npPlayers; const moved = new Set();"
             "for (let at = 0; at <= one.last; at += 1) { one.show(at);"
             "for (const each of document.getAnimations()) { if (each.effect"
             ".getKeyframes()[0].transform) moved.add(one.trace.frames[at].step);"
             "each.cancel(); }} return [...moved];")
    copies = ("const [one] = await npPlayers; return [...new Set(one.trace.frames"
              ".filter(({events}) => events.some(([kind]) => "
              "['copy', 'swap_in', 'swap_out'].includes(kind)))"
              ".map(({step}) => step))]")
    assert browser.run(moved) == browser.run(copies) != []
    browser.want_no_motion()
    assert browser.run(moved) == []


def test_a_finger_is_enough(shown, open_page):
    browser = open_page(shown, size=SIZES["phone"])
    browser.tap("#one .np-ask button")
    assert browser.text(".np-answers").startswith("1 of 4 questions answered")
    browser.tap('#one [aria-label^="Next"]')
    assert browser.text("#one .np-where").startswith("Step 1 of")
    browser.tap("#one .np-cell")
    assert browser.text("#one .np-detail").startswith("Block 0:")


def test_a_question_comes_before_the_step_that_answers_it(shown, open_page):
    browser = open_page(shown, "#one=4-begin")
    ask = "#one .np-ask"
    assert "Which block?" in browser.text(ask) and "held" not in browser.text(ask)
    height = "return document.querySelector('#one .np-main').offsetHeight"
    assert browser.text(".np-answers").startswith("0 of 4 questions answered, 0 r")
    before = browser.run(height)
    wrong = browser.run(f"return [...document.querySelectorAll('{ask} button')]"
                        ".findIndex(one => one.textContent === '#1')")
    browser.click("one", f".np-ask button:nth-child({1 + wrong})")
    assert "Not quite. It is <b>held</b>." in browser.text(ask)
    assert browser.run(height) == before  # there was room for it
    assert browser.text(".np-answers") == "1 of 4 questions answered, 0 right"
    browser.press("ArrowRight")
    assert browser.text("#one .np-where").startswith("Step 5")
    assert browser.text(ask) == ""


def test_a_player_opens_with_the_question_before_its_first_step(shown, open_page):
    browser = open_page(shown)
    assert "Where does it open?" in browser.text("#one .np-ask")
    assert browser.text("#two .np-ask") == ""  # the page asks for step 3


def test_on_a_phone_a_question_is_on_the_screen_when_it_is_asked(shown, open_page):
    browser = open_page(shown, "#one=3", SIZES["phone"])
    browser.run("scrollBy(0, 900); (await npPlayers)[0].go(1)")
    assert browser.run("return scrollY") > 500
    assert browser.run("const {y, bottom} = document.querySelector('#one .np-ask')"
                       ".getBoundingClientRect(); return 0 < y && bottom < innerHeight")


def test_on_a_phone_what_changes_in_the_blocks_is_on_the_screen(shown, open_page):
    """In every step, with the top of the player at the top of the screen."""
    browser = open_page(shown, "#one=1", (420, 860))
    seen = browser.run("""
        const [one] = await npPlayers, seen = [];
        one.root.scrollIntoView({behavior: "instant"});
        let before = new Map();
        for (let at = 0; at <= one.last; at += 1) {
          one.show(at);
          for (const cell of one.root.querySelectorAll(".np-large .np-cell")) {
            const {top, bottom} = cell.getBoundingClientRect();
            if (before.get(cell.dataset.block) !== cell.textContent && at > 0)
              seen.push(0 < top && bottom < innerHeight);
            before.set(cell.dataset.block, cell.textContent);
          }
        }
        return seen;""")
    assert len(seen) > 100 and all(seen)
    assert not browser.run("return document.querySelector('#one .np-source').open")


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_no_text_of_a_player_is_smaller_than_12_px(shown, open_page, size):
    browser = open_page(shown, "#one=5", size)
    small = browser.run(
        "return [...document.querySelectorAll('#one *')].filter("
        "one => one.textContent && parseFloat(getComputedStyle(one).fontSize) < 12)"
        ".map(one => one.className)")
    assert small == []


def test_blocks_light_up_wherever_they_are_and_events_have_their_source(
        shown, open_page):
    browser = open_page(shown, "#one=5")
    assert "nanopaged/" in browser.text(".np-source .np-file")
    lefts = browser.run(
        "return [...document.querySelectorAll('#one .np-source code > *')]"
        ".map(line => line.getBoundingClientRect().left)")
    assert len(lefts) > 4 and len(set(lefts)) == 1  # no two are on the same line
    assert browser.text("[aria-live]") == ""
    browser.click("one", '[data-block="7"].np-cell')
    lit = browser.run("return [...document.querySelectorAll('#one .np-lit')]"
                      ".map(one => one.dataset.block)")
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
    width = "return document.querySelector('.np-bar > *').getBoundingClientRect().width"
    assert browser.run(width) == 2  # pixels, for one token of 8,192
    expected = HOSTILE
    for code in ("202E", "2066"):
        expected = expected.replace(chr(int(code, 16)), f"\u2039U+{code}\u203a")
    assert browser.text(".np-title") == expected
    assert browser.text(".np-legend") == "end 1"  # and nothing that never happens
    browser.press("End")
    assert browser.text(".np-text").endswith(expected[-60:])
    assert browser.run("return document.images.length") == 0
    browser.check_is_quiet()
