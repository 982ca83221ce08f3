"""A page on this machine where one types prompts, and sees what the engine does.

A form asks for the prompts and the settings. All of them are in the page's address, so
a link leads to the same run. Each run has an engine of its own. Wrong input is answered
with a sentence.

Nobody else can reach the page, because the server listens on 127.0.0.1. It also refuses
requests for any other host: a page from elsewhere may make its own host name point to
this address, and would then be allowed to read the answers.
"""

import os
import sys
import threading
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlencode

import torch

from nanopaged import LLM, BeamSearchParams, SamplingParams
from nanopaged.checks import check
from nanopaged.tour.guide import lab
from nanopaged.tour.page import page

MOST_CHARACTERS, MOST_PROMPTS, MOST_STEPS = 4000, 8, 400
SWAP_SPACE = 0.0005  # GiB
NUMBERS: dict[str, tuple[Any, Any, Any]] = {  # what it is at first, the least, the most
    "n": (2, 1, 8), "temperature": (0.8, 0, 10), "seed": (0, 0, 9999),
    "max_tokens": (16, 1, 64), "steps_between": (0, 0, 50), "num_blocks": (24, 1, 1024),
    "max_num_batched_tokens": (16, 1, 512), "abort_after": (5, 0, MOST_STEPS)}
CHOICES = {
    "use_beam_search": ("no", "yes"), "block_size": ("1", "2", "4", "8", "16", "32"),
    "enable_prefix_caching": ("yes", "no"), "preemption_mode": ("recompute", "swap"),
    "abort_request": ("none", *map(str, range(MOST_PROMPTS)))}
FIELDS = {name: str(first) for name, (first, *_) in NUMBERS.items()} | {
    name: options[0] for name, options in CHOICES.items()} | {
    "block_size": "4",
    "prompts": "JULIET: O Romeo, Romeo! wherefore art thou Romeo?\n"
               "JULIET: O Romeo, Romeo! let me go\n"
               "ROMEO: But, soft! what light through yonder window"}
PRESETS: dict[str, dict[str, Any]] = {  # experiments: what each changes
    "blocks of one token": {"block_size": 1, "num_blocks": 96},
    "blocks of 32 tokens": {"block_size": 32, "num_blocks": 8},
    "a pool of ten blocks": {"num_blocks": 10, "n": 1, "max_tokens": 12},
    "four answers each": {"n": 4, "num_blocks": 48},
    "no prefix cache": {"enable_prefix_caching": "no"},
    "8 tokens a step": {"max_num_batched_tokens": 8},
    "stop a request": {"abort_request": 0, "abort_after": 4},
    "the same beginning": {"prompts": "ROMEO: But, soft!\nROMEO: But, soft! what"},
    "a beam search": {"use_beam_search": "yes", "n": 3}}
# The page loads nothing, and no other page may show it as a part of itself.
POLICY = ("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
          "img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'")


def number(name: str, text: str) -> Any:
    """The number in a field; ValueError if the text is none, or out of range."""
    first, low, high = NUMBERS[name]
    kind = type(first)
    try:
        value = kind(text)
    except ValueError:
        value = float("nan")
    expected = f"a {'whole ' * (kind is int)}number from {low} to {high}"
    check(low <= value <= high, name, expected, text)
    return value


def choice(name: str, text: str) -> str:
    check(text in CHOICES[name], name, f"one of {', '.join(CHOICES[name])}", text)
    return text


def read_prompts(text: str) -> list[str]:
    """One prompt for each line that is not empty; ValueError if there are none or too
    many.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    prompts = [line for line in lines if line.strip()]
    check(0 < len(prompts) <= MOST_PROMPTS, "the number of prompts",
          f"from 1 to {MOST_PROMPTS}", len(prompts))
    check(len(text) <= MOST_CHARACTERS, "the number of characters in all prompts",
          f"at most {MOST_CHARACTERS}", len(text))
    return prompts


def blocks_needed(llm: LLM, prompts: list[str], n: int, max_tokens: int) -> int:
    """How many blocks the largest request may take; ValueError if a prompt is too long.
    """
    lengths = [len(ids) for ids in llm.get_tokenizer()(prompts).input_ids]
    longest: int = llm.model_config.max_position_embeddings
    check(max(lengths) + max_tokens <= longest, "the number of tokens in a prompt",
          f"at most {longest - max_tokens} (with its answer: {longest})", max(lengths))
    return max(llm.engine.block_manager.max_blocks(length, [length + max_tokens] * n)
               for length in lengths)


def summary(run: lab.Run) -> str:
    """What a run took, in a few sentences."""
    stats = run.llm.stats()
    size = stats.blocks_total
    used = [sum(block["refs"] > 0 and int(id) < size
                for id, block in state["blocks"].items()) for state in run.states()]
    swapped = sum(max(move) >= size for move in run.moves)
    copied = len(run.moves) - swapped
    return (f"Steps: {stats.steps}. Tokens: {run.num_computed} computed, "
            f"{stats.prefix_hit_tokens} found in the prefix cache, "
            f"{stats.output_tokens} generated. Preemptions: "
            f"{stats.preemptions_recompute + stats.preemptions_swap}. Blocks: at most "
            f"{max(used)} of {size} in use, {copied} copied on write, "
            f"{swapped} swapped (out and in).")


class Handler(BaseHTTPRequestHandler):
    """Answers one request, in a thread of its own."""

    timeout = 10  # seconds in which the request has to arrive
    server: "Server"

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        address = f"127.0.0.1:{self.server.server_port}"
        own = (address, address.replace("127.0.0.1", "localhost"))
        if self.headers.get("Host", "").lower() not in own:
            self.answer(403, f"The live page is at http://{address} only.", "plain")
        elif self.command != "GET" or path != "/":
            self.answer(404, "There is only one page here, and it is at /.", "plain")
        else:
            self.answer(*self.server.respond(query))

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_GET

    def answer(self, status: int, text: str, kind: str = "html") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Log nothing: the prompts would be in it."""


class Server(ThreadingHTTPServer):
    """Serves the page. It makes one run at a time, and other requests wait."""

    # A port in use is an error. (On Windows, the second of these would share it.)
    allow_reuse_port, allow_reuse_address = False, os.name == "posix"
    is_ending = False

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.lock = threading.Lock()

    def respond(self, query: str) -> tuple[int, str]:
        """A status and the page. `query` is what comes after the "?" of an address."""
        fields, status, told = FIELDS.copy(), 200, ""
        runs: dict[str, str] = {}  # the data of this one, and of the one before
        try:
            fields |= parse_qsl(query, keep_blank_values=True, max_num_fields=50)
            before = dict(parse_qsl(fields.pop("before", ""), keep_blank_values=True))
            unknown = ", ".join(sorted((fields | before).keys() - FIELDS.keys()))
            check(not unknown, "the address", "made of the fields below", unknown)
            with self.lock:
                check(not self.is_ending, "the live page", "open", "one that ends")
                runs["this run"], told = self.record(fields)
                if before:
                    runs["the run before"], _ = self.record(FIELDS | before)
        except ValueError as refused:
            status, told = 400, f"This cannot run: {refused}."
        except Exception as failed:
            traceback.print_exc()
            status, told = 500, f"The run has failed: {failed!r}."
        before = {"before": urlencode(fields)} if runs else {}
        presets = {name: urlencode(FIELDS | changes | before)
                   for name, changes in PRESETS.items()}
        return status, page("live.html", title="nanopaged, live", runs=runs, told=told,
                            fields=fields, numbers=NUMBERS, choices=CHOICES,
                            presets=presets, before=before)

    def record(self, fields: dict[str, str]) -> tuple[str, str]:
        """Serve the prompts with a new engine. Returns the trace's data and a summary;
        ValueError if that cannot be done.
        """
        prompts = read_prompts(fields["prompts"])
        options: dict[str, Any] = {name: number(name, fields[name]) for name in NUMBERS}
        options |= {name: choice(name, fields[name]) for name in CHOICES}
        n, max_tokens, temperature, use_beam_search, *events = map(options.pop, (
            "n", "max_tokens", "temperature", "use_beam_search", "steps_between",
            "abort_request", "abort_after"))
        params: Any = BeamSearchParams(n, max_tokens) if use_beam_search == "yes" else (
            SamplingParams(n=n, temperature=temperature, max_tokens=max_tokens))
        options["block_size"] = int(options["block_size"])
        options["enable_prefix_caching"] = options["enable_prefix_caching"] == "yes"
        options |= {"max_num_seqs": 64, "swap_space": SWAP_SPACE}
        asked = options["num_blocks"]
        with lab.engine(**options) as llm:
            needed = blocks_needed(llm, prompts, n, max_tokens)
        options["num_blocks"] = number("num_blocks", str(max(asked, needed)))
        larger = "" if needed <= asked else (
            f" The pool has {needed} blocks, not {asked}, because the largest of these "
            "requests may need as many.")
        with lab.engine(**options) as llm:
            with lab.Run(llm, "Your run") as run:
                note = self.run(llm, prompts, params, *events)
            return run.data(), f"{summary(run)}{note}{larger}"

    def run(self, llm: LLM, prompts: list[str], params: Any, steps_between: int,
            abort_request: str, abort_after: int) -> str:
        """Let the requests arrive, and stop one. Returns what there is to say of it."""
        aborted = abort_request.replace("none", "")
        check(int(aborted or 0) < len(prompts), "abort_request", "the number of a "
              f"request, and the last one is {len(prompts) - 1}", aborted)
        coming = list(prompts)
        for step in range(MOST_STEPS + 1):
            while coming and (len(prompts) - len(coming)) * steps_between <= step:
                llm.add_request(coming.pop(0), params)
            if step >= abort_after and aborted in llm.engine.scheduler.unfinished:
                llm.abort_request(aborted)
                aborted = ""
            is_over = not coming and not llm.has_unfinished_requests()
            if is_over or self.is_ending:
                return aborted and (
                    f" Request {aborted} ended before it was to be stopped.")
            llm.step()
        raise ValueError(f"it takes more than {MOST_STEPS} steps (lower max_tokens, n "
                         "or steps_between, or raise max_num_batched_tokens)")

    def handle_error(self, *_: Any) -> None:
        """Say nothing about a reader who has left."""
        if not isinstance(sys.exc_info()[1], OSError):
            traceback.print_exc()


def serve(port: int) -> None:
    """Serve the page until Ctrl-C; OSError if the port cannot be used."""
    torch.set_num_threads(1)  # the model is small, and threads would wait for others
    with Server(port) as server:
        print(f"The live page is at http://127.0.0.1:{server.server_port}. Ctrl-C "
              "ends it.", flush=True)
        try:
            server.serve_forever(poll_interval=0.1)
        finally:
            server.is_ending = True
            server.lock.acquire()  # from now on, no thread is in the middle of a run
