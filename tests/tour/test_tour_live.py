"""The live page of the tour: real runs, a sentence for wrong input, this machine only.
"""

import html
import http.client
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from urllib.parse import urlencode

import pytest

from helpers import drain
from nanopaged import BeamSearchParams, SamplingParams
from nanopaged.tour import live, trace
from nanopaged.tour.__main__ import main
from nanopaged.tour.guide import lab
from nanopaged.tour.recorder import unpack
from test_tour import HOSTILE, data_of

SHORT = {"prompts": "ROMEO: Ay me\r\n\r\nROMEO: Ay", "n": "2", "max_tokens": "4"}


@pytest.fixture(scope="module")
def server():
    with live.Server(0) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server, path="/", method="GET", **headers):
    """The status and the text of an answer. `path` may be a dict of fields."""
    path = path if isinstance(path, str) else f"/?{urlencode(path)}"
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    return response.status, response.read().decode()


@pytest.fixture(scope="module")
def queries(server):
    """The experiments that the page offers: names, and what to ask for."""
    links = re.findall('<a href="(/[^"]*)#result">(.*?)</a>', get(server)[1])
    return {name: html.unescape(query) for query, name in links}


def said(page):
    return html.unescape(re.search('role="alert">([^<]*)</p>', page)[1])


@pytest.mark.parametrize("mode, beams", [("recompute", 0), ("swap", 1)])
def test_the_page_plays_the_run_that_the_engine_makes(server, mode, beams):
    options = {"num_blocks": 10, "max_num_batched_tokens": 6, "preemption_mode": mode,
               "seed": 3}
    status, page = get(server, SHORT | options | {
        "abort_request": 1, "abort_after": 3, "enable_prefix_caching": "no",
        "use_beam_search": ("no", "yes")[beams], "steps_between": 2})
    params = SamplingParams(n=2, temperature=0.8, max_tokens=4)
    params = BeamSearchParams(2, 4) if beams else params
    with lab.engine(max_num_seqs=64, enable_prefix_caching=False,
                    swap_space=live.SWAP_SPACE, **options) as llm, trace(llm) as run:
        for prompt, steps in (("ROMEO: Ay me", 2), ("ROMEO: Ay", 1)):
            last = llm.add_request(prompt, params)
            for _ in range(steps):
                llm.step()
        llm.abort_request(last)
        drain(llm)
    *states, header = data_of(page)
    assert status == 200 and states == run.states() and 'role="alert"' not in page
    assert len(header["frames"]) == len(run.frames) and run.num_left_out == 0
    assert f"Steps: {llm.stats().steps}." in page and "was to be" not in page


def test_a_pool_that_is_too_small_gets_the_least_that_works_and_a_late_stop_is_told(
        server):
    prompts = "Ay\nAy me\nROMEO: Ay me, ay me, ay me"
    fields = SHORT | {"prompts": prompts, "max_tokens": 9}
    _, page = get(server, fields | {"num_blocks": 1})
    room = re.search(r"The pool has (\d+) blocks, not 1, because", page)[1]
    with lab.engine(num_blocks=int(room) - 1) as llm, pytest.raises(
            ValueError, match=f"at least {room} for"):
        llm.generate(prompts.split("\n"), SamplingParams(n=2, max_tokens=9))
    status, page = get(server, fields | {
        "num_blocks": room, "abort_request": 2, "abort_after": 400})
    assert status == 200 and "Request 2 ended before it was to be stopped." in page
    assert "The pool has" not in page


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name != "stop a request"))
    for name in live.PRESETS])
def test_every_experiment_runs_as_it_is_called(server, queries, name):
    status, page = get(server, queries[name])
    assert status == 200 and "The pool has" not in page
    *states, header = data_of(page)
    kinds = {kind for frame in header["frames"] for kind, _ in frame["events"]}
    changes = live.PRESETS[name]
    assert header["block_size"] == changes.get("block_size", 4)
    assert header["num_blocks"] == changes.get("num_blocks", 24)
    assert ("abort" in kinds) == ("abort_after" in changes)
    assert ("beam" in kinds) == ("use_beam_search" in changes)
    assert ("prefix" in kinds) or name in ("no prefix cache", "blocks of 32 tokens")


def test_a_run_stands_beside_the_one_before_and_hostile_prompts_stay_text(server):
    hostile = SHORT | {"prompts": HOSTILE, "num_blocks": 200}
    _, first = get(server, hostile)
    assert first.count("</script") == 2 and "<script>alert" not in first
    assert "".join(data_of(first)[-1]["groups"]["0"]["prompt"]) == HOSTILE
    [before] = re.findall('name="before" value="([^"]*)"', first)
    status, page = get(server, hostile | {
        "block_size": 8, "before": html.unescape(before)})
    runs = re.findall('data-setting="(.*?)">([^<]*)<', page)
    sizes = [(name, unpack(data)[-1]["block_size"]) for name, data in runs]
    assert status == 200 and sizes == [("this run", 8), ("the run before", 4)]
    assert get(server, SHORT | {"before": "top_k=1"})[0] == 400


@pytest.mark.parametrize("wrong, sentence", [
    ({"n": "9"}, "n must be a whole number from 1 to 8, got '9'."),
    ({"temperature": "nan"}, "temperature must be a number from 0 to 10, got 'nan'."),
    ({"max_tokens": ""}, "max_tokens must be a whole number from 1 to 64, got ''."),
    ({"block_size": "3"}, "block_size must be one of 1, 2, 4, 8, 16, 32, got '3'."),
    ({"num_blocks": "0"}, "num_blocks must be a whole number from 1 to 1024, got '0'."),
    ({"n": "8", "block_size": "1", "prompts": "a" * 900, "max_tokens": "64"},
     r"num_blocks must be a whole number from 1 to 1024, got '1\d\d\d'."),
    ({"preemption_mode": HOSTILE}, "preemption_mode must be one of recompute, .*"),
    ({"prompts": " \n"}, "the number of prompts must be from 1 to 8, got 0."),
    ({"prompts": "\n\n\n" + "a\n" * 9}, "the number of prompts .*, got 9."),
    ({"prompts": "a" * 4001}, "the number of characters .*, got 4001."),
    ({"prompts": "a b" * 1000}, "the number of tokens in a prompt .*"),
    ({"abort_request": "2"}, "abort_request must be .* the last one is 1, got '2'."),
    ({"top_k": "1"}, "the address must be made of the fields below, got 'top_k'."),
    ({"max_num_batched_tokens": "1", "prompts": "abc " * 40, "num_blocks": "256"},
     "it takes more than 40 steps .*")], ids=lambda value: None)
def test_wrong_input_is_one_sentence_and_is_kept(server, wrong, sentence, monkeypatch):
    monkeypatch.setattr(live, "MOST_STEPS", 40)
    status, page = get(server, SHORT | {"prompts": f"{HOSTILE}\nx"} | wrong)
    assert status == 400 and re.fullmatch(f"This cannot run: {sentence}", said(page))
    kept = html.unescape(re.search(r"(?s)<textarea[^>]*>\n(.*?)</textarea>", page)[1])
    assert kept == wrong.get("prompts", f"{HOSTILE}\nx")
    focused = re.search(r'name="(\w+)"[^>]* autofocus', page)
    assert not focused or focused[1] in wrong or "'1\\d" in sentence
    assert focused or {"abort_request", "top_k"} & wrong.keys() or "steps" in sentence
    numbers = {"n", "temperature", "max_tokens", "num_blocks"} & wrong.keys()
    assert all(f'name="{name}" value="{wrong[name]}"' in page for name in numbers)
    assert page.count("</script") == 1


def test_only_this_page_and_only_by_its_own_name(server):
    port = server.server_port
    for host in ("evil.example", f"evil.example:{port}", "localhost", ""):
        assert get(server, Host=host)[0] == 403
    assert get(server, SHORT, Host=f"localhost:{port}")[0] == 200
    for path, method in (("/x", "GET"), ("/..", "GET"), ("/", "POST")):
        assert get(server, path, method)[0] == 404
    assert server.socket.getsockname()[0] == "127.0.0.1"
    with socket.socket() as other, pytest.raises(OSError):
        other.settimeout(5)
        other.connect(("127.0.0.2", port))


def test_requests_at_once_all_get_answers(server):
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(get, [server] * 4, [SHORT] * 4))
    assert [status for status, _ in answers] == [200] * 4 and len({*answers}) == 1


def test_an_error_is_told(server, monkeypatch, capsys):
    monkeypatch.setattr("nanopaged.tour.recorder.take_state", lambda *_: 1 / 0)
    status, page = get(server, SHORT)
    assert status == 500 and said(page).startswith("The run has failed: ZeroDivision")
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_port_in_use_is_one_sentence(server, capsys):
    for port in (server.server_port, 65536):
        with pytest.raises(SystemExit, match="2"):
            main(["--serve", "--port", str(port)])
        assert f"port {port} cannot be used" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_ctrl_c_ends_it():
    """In the middle of a run, and though a connection is open that never says a word.
    """
    code = """if True:
        import signal
        from nanopaged.tour import live
        from nanopaged.tour.__main__ import main

        def record(server, fields):
            signal.raise_signal(signal.SIGINT)
            return run(server, fields)

        signal.signal(signal.SIGINT, signal.default_int_handler)
        run, live.Server.record = live.Server.record, record
        live.Handler.timeout = None
        main(["--serve", "--port", "0"])"""
    process = subprocess.Popen([sys.executable, "-c", code], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    port = int(re.search(r":(\d+)\.", process.stdout.readline())[1])
    query = urlencode({"n": 8, "num_blocks": 256, "max_tokens": 64})
    request = f"GET /?{query} HTTP/1.0\r\nHost: localhost:{port}\r\n\r\n"
    with (socket.create_connection(("127.0.0.1", port)),
          socket.create_connection(("127.0.0.1", port)) as busy):
        busy.sendall(request.encode())
        out, err = process.communicate(timeout=600)
    assert (process.returncode, out, err) == (0, "\nThe live page has ended.\n", "")
