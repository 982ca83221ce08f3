"""What several test files share: requests, answers, invariants, running an engine.

These are plain functions to import. Whatever holds state (models, reference answers,
engines that must be shut down) is a fixture in conftest.py.
"""

import ast
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tokenize
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import nanopaged
from nanopaged import BeamSearchParams, SamplingParams
from nanopaged.batch import Batch
from nanopaged.fused import Ops, add_norm, norm_rotate, silu_mul
from nanopaged.loading.weights import products
from nanopaged.logits import TokenCounts, fill_pending, mark, penalize
from nanopaged.sampler import draw, lowest_kept, sample
from nanopaged.sequence import SequenceGroup

ROOT = Path(nanopaged.__file__).parent.parent
SOLUTIONS = Path(__file__).parent / "solutions"
CPU = {"dtype": "float32", "device": "cpu"}
HALF = "\ufffd"  # what a decoder puts in place of an incomplete character
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT,
          tokenize.DEDENT, tokenize.ENDMARKER}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)


# -- Requests --------------------------------------------------------------------------


def greedy(max_tokens=16, **more):
    """Greedy decoding that runs on past EOS."""
    defaults = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return SamplingParams(**(defaults | more))


class Column:
    """A sequence by `__len__` and `__getitem__` only, as the columns of a data set."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def draw_requests(seed, count=12, *, vocab_size=500, lengths=range(1, 40), most=5,
                  max_tokens=24, stop=("e", "th"), more=lambda rng: {}):
    """Random prompts and parameters: greedy, sampled (up to `most` each) and beams.

    `more` draws further parameters of those that are not beams.
    """
    rng = random.Random(seed)
    for _ in range(count):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.choice(lengths))]
        if rng.random() < 0.25:
            width = min(most, rng.randrange(1, 5))
            yield prompt, BeamSearchParams(width, rng.randrange(1, min(20, max_tokens)))
            continue
        yield prompt, SamplingParams(
            n=rng.randrange(1, most + 1), max_tokens=rng.randrange(1, max_tokens + 1),
            seed=rng.randrange(99), min_tokens=rng.choice([0, 1]),
            logprobs=rng.choice([None, 2]), temperature=rng.choice([0, 0.7]),
            stop=rng.choice([None, *stop]),
            stop_token_ids=rng.choice([None, list(range(0, vocab_size, 17))]),
            **more(rng))


def add_all(llm, prompts, params):
    """Add a request for each prompt; `params` is one for all of them, or a list."""
    params = params if isinstance(params, list) else [params] * len(prompts)
    return [llm.add_request(*pair) for pair in zip(prompts, params, strict=True)]


def new_group(tokens, params=None, stop=(), max_model_len=10**6):
    """A request as the scheduler sees it, outside any engine."""
    params = params or SamplingParams(max_tokens=None)
    return SequenceGroup(list(tokens), params, set(stop), max_model_len)


OPS = Ops(add_norm, norm_rotate, silu_mul, draw, fill_pending, mark, penalize,
          lowest_kept)


def sample_for(logits, seqs):
    """What is sampled if row i of the logits follows all computed tokens of seqs[i]."""
    batch = Batch()
    for seq in seqs:
        batch.add_entry(seq, seq.num_computed_tokens, seq.block_table)
        batch.add_sample(seq)
        seq.pending.clear()
    draws = torch.tensor(batch.draws, dtype=torch.double, device=logits.device)
    draws = draws.view(-1, 8).T
    last_tokens = draws.new_zeros(len(seqs), dtype=torch.int64)
    counts = TokenCounts(last_tokens, logits.shape[1])
    return sample(batch, counts, OPS, logits, draws)


def same_bits():
    """The option that gives an answer the same bits alone and in a batch, where it can
    be had. Without it, the last bit of a logit may decide a draw.
    """
    linear = torch.nn.Linear(30, 7)
    try:
        products.pack(linear, batch_invariant=True)
    except (AttributeError, ValueError):  # without Numba, or with other bits
        return {"batch_invariant": False}
    return {"batch_invariant": True}


# -- Answers ---------------------------------------------------------------------------


def tokens_of(output):
    """The token ids of a request's first completion, often its only one."""
    return output.outputs[0].token_ids


def first_tokens_of(outputs):
    return [tokens_of(output) for output in outputs]


def all_tokens_of(output):
    """The token ids of each of a request's completions."""
    return [completion.token_ids for completion in output.outputs]


def generate(llm, prompts, params):
    """The token ids of all completions of all prompts."""
    return list(map(all_tokens_of, llm.generate(prompts, params, use_tqdm=False)))


def complete(llm, prompt, params):
    """The first completion of one prompt."""
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]


def serve(llm, requests):
    """For every completion: its tokens, text, finish reason and number of logprobs."""
    prompts, params = zip(*requests, strict=True)
    outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    return [[(c.token_ids, c.text, c.finish_reason, c.logprobs and len(c.logprobs))
             for c in output.outputs] for output in outputs]


def floats(logprobs):
    """{token id: log-probability} of one position."""
    return {token: entry.logprob for token, entry in logprobs.items()}


def message_of(call, kinds=(ValueError, TypeError)):
    """The message of the error that the call must raise."""
    with pytest.raises(kinds) as caught:
        call()
    return str(caught.value)


# -- Running an engine -----------------------------------------------------------------


def counters(llm):
    """All of `llm.stats()`, as a dict."""
    return asdict(llm.stats())


def swap_space(path, num_blocks, block_size):
    """The swap space, in GiB, that holds this many float32 blocks of a model."""
    fields = json.loads((path / "config.json").read_text())
    head_dim = fields.get("head_dim")
    head_dim = head_dim or fields["hidden_size"] // fields["num_attention_heads"]
    numbers = 2 * fields["num_hidden_layers"] * fields["num_key_value_heads"] * head_dim
    return num_blocks * block_size * numbers * 4 / 2**30


def drain(llm, limit=5000):
    """Step until nothing is left, and check the books after every step.

    Returns the last output of each request. A step may return nothing (a chunk of a
    prompt), but thousands of them without an end are a deadlock.
    """
    last = {}
    while llm.has_unfinished_requests():
        assert limit > 0, "no end in sight"
        limit -= 1
        last.update((output.request_id, output) for output in llm.step())
        check_invariants(llm)
    return last


def watch(llm, look):
    """Have `look(phase, batch)` called in every step: "begin" (without a batch),
    "scheduled", "executed" (the tokens are known) and "updated" (sequences have them).
    """
    scheduler = llm.engine.scheduler
    schedule, update = scheduler.schedule, scheduler.update

    def watched_schedule():
        look("begin", None)
        batch = schedule()
        look("scheduled", batch)
        return batch

    def watched_update(batch, output):
        output.read()
        look("executed", batch)
        update(batch, output)
        look("updated", batch)

    scheduler.schedule, scheduler.update = watched_schedule, watched_update


def waiting(scheduler):
    """The groups that do not run, by request id."""
    return {request_id: group for request_id, group in scheduler.unfinished.items()
            if request_id not in scheduler.running}


def is_swapped(group):
    """True for a waiting group whose blocks are in CPU memory."""
    return any(seq.block_table for seq in group.live)


def check_invariants(llm):
    check_books(llm.engine.scheduler, llm.engine.block_manager)


def check_books(scheduler, manager):
    """Every block is held by exactly the tables that name it, in its own pool.

    This holds between any two steps: groups are in order of arrival, and each of them
    as a whole is either on the device, or in the swap pool, or nowhere. A published
    block holds the tokens of every sequence that has it.
    """
    device, references = manager.num_blocks, Counter()
    for request_id, group in scheduler.unfinished.items():
        where = f"request {request_id}"
        assert group.live and group.request_id == request_id, where
        tables = [seq.block_table for seq in group.live]
        holders, held = sum(map(bool, tables)), {id for t in tables for id in t}
        assert holders in (0, 1, len(tables)), f"{where}: a part of it has blocks"
        if request_id in scheduler.running:
            assert holders and max(held) < device, f"{where} runs with {held}"
        else:
            assert not held or min(held) >= device, f"{where} waits with {held}"
        for seq in group.sequences:
            check_sequence(seq, manager, where)
            references.update(seq.block_table)
        assert all(seq in group.live or not seq.block_table
                   for seq in group.sequences), f"{where}: blocks after its end"

    num_running = sum(len(group.live) for group in scheduler.running.values())
    assert num_running <= scheduler.config.max_num_seqs, f"{num_running} sequences run"
    assert {i: n for i, n in enumerate(manager.ref_counts) if n} == dict(references)
    unheld = set(range(len(manager.ref_counts))) - references.keys()
    assert set(manager.free_blocks) == {i for i in unheld if i < device}
    assert set(manager.free_swap_blocks) == {i for i in unheld if i >= device}
    for key, content in manager.prefix_cache.published.items():
        assert (content.before, content.token_ids) == key and content.block_id < device

    oldest = list(scheduler.unfinished)[: len(scheduler.running)]
    assert list(scheduler.running) == oldest, "not first come, first served"


def check_sequence(seq, manager, where):
    size, table = manager.block_size, seq.block_table
    assert len(set(table)) == len(table), f"{where}: a block twice in {table}"
    assert seq.num_computed_tokens <= len(table) * size, f"{where}: K and V nowhere"
    for index, block_id in enumerate(table):
        content = manager.prefix_cache.contents[block_id]
        tokens = list(seq.token_ids[index * size : (index + 1) * size])
        is_right = content is None or list(content.token_ids) == tokens
        assert is_right, f"{where}: block {block_id} holds {content}"


# -- Numbers, and other processes ------------------------------------------------------


def chi_square(counts, probs, total=None):
    """Pearson's statistic over possible outcomes; an impossible one must not occur."""
    counts = torch.as_tensor(counts, dtype=torch.float64)
    probs = torch.as_tensor(probs, dtype=torch.float64)
    expected = probs * (counts.sum() if total is None else total)
    possible = expected > 0
    assert not counts[~possible].any(), "an impossible outcome"
    return ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()


def code_lines(source):
    """The numbers of the lines that are not blank, comment or docstring."""
    code, docstrings = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    return code - docstrings


def copy_package(folder, *more):
    """Copy the engine, with what is compiled, without the tour and the simulation."""
    ignored = shutil.ignore_patterns("tour", "paper", *more)
    return shutil.copytree(ROOT / "nanopaged", folder / "nanopaged", ignore=ignored)


def apply_patch(name, folder):
    """Apply a patch of solutions/ to a copy of the package in this folder."""
    result = subprocess.run(
        ["git", "apply", "-C1", SOLUTIONS / f"{name}.patch"],  # one line of context
        cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def run_python(*arguments, cwd=ROOT, timeout=600, **env):
    """The standard output of a fresh interpreter, which must succeed.

    It can import the package from any directory. A variable given as None is unset.
    """
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"} | env
    result = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, timeout=timeout, capture_output=True,
        env={name: value for name, value in env.items() if value is not None},
        encoding="utf-8")
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
