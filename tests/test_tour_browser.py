"""The player in a real browser, with real clicks and keys.

The page can also check itself: "#check" in its address makes every player step through
all frames, forward and back. Without a Chromium these tests are skipped.
"""

import json
import os
import subprocess
import sys

import pytest

from helpers import find_browser, greedy
from nanopaged.tour import trace
from nanopaged.tour.page import HEAD, assets
from nanopaged.tour.showcase import showcase

pytestmark = pytest.mark.browser

SIZES = {"laptop": (1280, 720), "phone": (420, 844)}
# What one may click on in a player.
PLACES = [".np-title", ".np-where", ".np-button", ".np-key:not([disabled])", "input",
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
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=page.resolve().as_uri() + fragment)
        while not self.seen("Page.loadEventFired"):
            self.read()

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


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A page with two players of the run in which everything happens."""
    run = showcase()
    players = run.player("one") + run.player("two", opens_at=3)
    page = tmp_path_factory.mktemp("tour") / "shown.html"
    head = HEAD.format(title="Two players") + assets()
    page.write_text(f"{head}</head><body>{players}</body>", "utf-8")
    return page


def check_itself(browser):
    found = json.loads(browser.text("#np-check"))
    assert found["errors"] == found["requests"] == []
    return found["players"]


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_keys_step_after_a_click_anywhere_in_a_player(shown, open_page, size):
    assert check_all_players(open_page(shown, size=size)) == ["one", "two"]


def test_every_frame_counts_right_and_folds_back(shown, open_page):
    wrong = shown.with_name("wrong.html")
    text = shown.read_text("utf-8").replace('"refs":3', '"refs":4', 1)
    wrong.write_text(text, "utf-8")
    right = [player["failures"] for player in check_itself(open_page(shown, "#check"))]
    assert right == [[], []]
    [failures, _] = [player["failures"] for player in check_itself(
        open_page(wrong, "#check"))]
    assert "references and has" in failures[0]


def test_players_of_a_page_move_on_their_own_and_links_lead_to_steps(
        shown, open_page):
    browser = open_page(shown, "#one=2")
    steps = ("return [...document.querySelectorAll('.np-where strong')]"
             ".map(one => one.textContent)")
    assert browser.run(steps) == ["Step 2", "Step 3"]
    browser.click("two", ".np-title")
    browser.press("Home")
    assert browser.run(steps) == ["Step 2", "Step 0"]
    browser.press(" ")  # it plays until one presses space again
    browser.run("await new Promise(done => setTimeout(done, 3000))")
    browser.press(" ")
    step, phase = browser.run("return location.hash").split("=")[1].split("-")
    assert int(step) > 0 and phase in ("scheduled", "updated")


def test_blocks_light_up_wherever_they_are_and_events_have_their_source(
        shown, open_page):
    browser = open_page(shown, "#one=5")
    assert "nanopaged/" in browser.text(".np-source .np-file")
    assert browser.text("[aria-live]") == ""
    browser.click("one", '[data-block="7"].np-cell')
    lit = browser.run("return [...document.querySelectorAll('#one .np-lit')]"
                      ".map(one => one.dataset.block)")
    assert len(lit) >= 8 and set(lit) == {"7"}
    assert browser.text(".np-detail").startswith("Block 7: 7 references, of 1.0, 1.1")
    browser.press("ArrowDown")
    assert browser.text(".np-detail").startswith("Block 8:")
    browser.press("ArrowRight")  # what happened is also said
    assert browser.text("[aria-live]").startswith("Step 5, updated.")


def test_hostile_text_is_shown_as_text(text_model, engine, tmp_path, open_page):
    llm = engine(text_model, block_size=16, max_model_len=160)
    page = tmp_path / "run.html"
    with trace(llm, page, title=HOSTILE):
        llm.generate([HOSTILE], greedy(8), use_tqdm=False)
    browser = open_page(page, "#check")
    [player] = check_itself(browser)
    assert player["failures"] == []
    expected = HOSTILE
    for code in ("202E", "2066"):
        expected = expected.replace(chr(int(code, 16)), f"\u2039U+{code}\u203a")
    assert browser.text(".np-title") == expected
    browser.press("End")
    assert browser.text(".np-text").endswith(expected[-60:])
    assert browser.run("return document.images.length") == 0
    browser.check_is_quiet()
