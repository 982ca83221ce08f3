"""Several processes, one engine: the same tokens, and nothing is left behind.

The tokens of 2 and 4 ranks are those of one rank and of transformers, in pools so tight
that requests are recomputed and swapped. Every rank holds its share of weights and
pool. However the engine ends (shut down, forgotten, interrupted, a rank or rank 0
killed), the caller gets an error that says what happened, and no process and no
listening port is left. In the workers that an engine starts itself, a test may run some
code first: see `in_workers`.
"""

import contextlib
import itertools
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import nanopaged
from helpers import all_tokens_of, generate, greedy, tokens_of
from nanopaged import (
    LLM,
    BeamSearchParams,
    EngineConfig,
    SamplingParams,
    loader,
    parallel,
)
from nanopaged.model_runner import ModelRunner
from nanopaged.parallel import Ranks
from nanopaged.scheduler import ControlMessage

ROOT = Path(nanopaged.__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
OPTIONS = {"dtype": "float32", "device": "cpu", "block_size": 4, "max_model_len": 96}
NEW_TOKENS = 20
MANY = 10**6
NOTICED = 10  # seconds within which the caller learns that a rank has ended
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


# --- which rank holds what ---


def sizes(heads=8, kv_heads=8, intermediate=1680, vocab=1680):
    """What a model's config says about its sizes; heads have 10 dimensions."""
    return SimpleNamespace(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=10,
        intermediate_size=intermediate,
        vocab_size=vocab,
    )


def as_rank(rank, size, config):
    """One of several ranks, without the others."""
    ranks = Ranks(EngineConfig(), config)
    ranks.rank = rank
    ranks.size = size
    ranks.share = parallel.share_of(config, size)
    return ranks


def heads_of(rank, size, heads, kv_heads):
    """A rank's query heads and its KV heads."""
    ranks = as_rank(rank, size, sizes(heads, kv_heads))
    num_heads = ranks.share.num_attention_heads
    num_kv_heads = ranks.share.num_key_value_heads
    q = ranks.start_of(num_heads * 10, heads * 10) // 10
    kv = ranks.start_of(num_kv_heads * 10, kv_heads * 10) // 10
    return range(q, q + num_heads), range(kv, kv + num_kv_heads)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 16])
def test_every_query_head_is_on_one_rank_next_to_its_own_kv_head(size):
    """Or else such a number of ranks is refused."""
    num_refused = 0
    for kv_heads, group in itertools.product(range(1, 18), range(1, 9)):
        heads = kv_heads * group
        if heads % size or (kv_heads % size and size % kv_heads):
            field = "num_attention_heads" if heads % size else "num_key_value_heads"
            with pytest.raises(ValueError, match=rf"{field}=\d+.*, got {size}$"):
                parallel.share_of(sizes(heads, kv_heads), size)
            num_refused += 1
            continue

        shares = [heads_of(rank, size, heads, kv_heads) for rank in range(size)]
        queries = [head for q, _ in shares for head in q]
        assert queries == list(range(heads)), "each once, in order"
        for q, kv in shares:
            assert {head // group for head in q} == {*kv}, "exactly its own KV heads"
            assert len(q) == heads // size
            assert len(kv) == max(1, kv_heads // size)

    assert (num_refused > 0) == (size > 1)
    assert num_refused < 17 * 8


def test_eight_heads_with_two_kv_heads_on_four_ranks():
    shares = [heads_of(rank, 4, 8, 2) for rank in range(4)]
    assert [q for q, _ in shares] == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert [kv for _, kv in shares] == [range(1), range(1), range(1, 2), range(1, 2)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("field", ["intermediate", "vocab"])
def test_even_splits_have_no_gap_or_overlap(field, size):
    """What does not divide is refused."""
    name = {"intermediate": "intermediate_size", "vocab": "vocab_size"}[field]
    heads = {"heads": 84, "kv_heads": 84}
    for total in [*range(1, 40), 151, 512, 151936]:
        config = sizes(**heads, **{field: total})
        if total % size:
            with pytest.raises(ValueError, match=f"divide {name}={total}, got {size}"):
                parallel.share_of(config, size)
            continue

        end = 0
        for rank in range(size):
            ranks = as_rank(rank, size, config)
            part = getattr(ranks.share, name)
            assert ranks.start_of(part, total) == end
            end += part
        assert end == total


def test_what_all_ranks_need_whole_is_not_cut():
    """A norm, for example: its target is as large as the tensor."""
    for rank in range(4):
        assert as_rank(rank, 4, sizes()).start_of(1680, 1680) == 0


class StubGroup:
    """Of NCCL: notes what it sends. All ranks have the same columns."""

    def __init__(self):
        self.calls = []

    def _allgather_base(self, gathered, x):
        self.calls.append(("gather", x.nbytes))
        size = len(gathered) // len(x)
        gathered.copy_(torch.cat([x + 10 * rank for rank in range(size)]))
        return self

    def abort(self):
        self.calls.append("abort")

    def get_future(self):
        future = torch.futures.Future()
        future.set_result(None)
        return future

    def wait(self):
        pass


def test_to_gather_columns_no_rank_sends_more_than_its_own():
    ranks = as_rank(1, 3, sizes(6, 3))
    ranks.group = StubGroup()
    x = torch.arange(4).view(2, 2)
    expected = [[0, 1, 10, 11, 20, 21], [2, 3, 12, 13, 22, 23]]
    assert ranks.gather(x).tolist() == expected
    assert ranks.group.calls == [("gather", x.nbytes)]


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_group_ends_without_waiting_for_recorded_graphs(monkeypatch, on_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    ranks = as_rank(0, 1, sizes())
    ranks.group = group = StubGroup()
    ranks.close()
    ranks.close()
    assert group.calls == ["abort"] * on_gpu
    assert ranks.group is None


@pytest.fixture
def runner_of(monkeypatch):
    """`runner_of(path, rank, size, **options)`: one rank's model and pool."""
    for name in ("all_reduce", "gather"):  # there are no other ranks to talk to
        monkeypatch.setattr(Ranks, name, lambda self, x, *args: x)

    def make(path, rank, size, **options):
        config = EngineConfig(str(path), **(OPTIONS | options))
        model_config = loader.load_config(path)
        ranks = as_rank(rank, size, model_config)
        return ModelRunner(config, model_config, path, ranks)

    return make


def num_bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("tied", [True, False])
def test_a_rank_of_two_holds_half_the_weights_and_half_the_pool(
    tied, make_model, runner_of
):
    """The embedding too: it is most of a small model."""
    path = make_model(
        "qwen3",
        seed=21,
        hidden_size=128,
        intermediate_size=256,
        head_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1002,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
    )
    runners = [runner_of(path, *who, num_blocks=64) for who in [(0, 1), (0, 2), (1, 2)]]
    whole, *halves = [num_bytes(runner.model.parameters()) for runner in runners]
    print(f"parameters: {whole:,} bytes on one rank, {halves} on two")

    assert all(abs(half / whole - 0.5) < 0.01 for half in halves)
    embedding = [runner.model.model.embed_tokens.weight for runner in runners]
    assert [len(weight) for weight in embedding] == [1002, 501, 501]

    for name in ("kv_caches", "swap_space"):
        whole, *halves = [num_bytes([getattr(runner, name)]) for runner in runners]
        assert halves == [whole // 2] * 2
    assert [runner.token_bytes for runner in runners] == [1024, 512, 512]


# --- the same tokens ---

# Variants of the four families (see conftest.py) and numbers of ranks that divide their
# sizes: among them one KV head that all ranks have, 14 query heads with 2 KV heads,
# biases, odd vocabularies, and more ranks than KV heads.
SPLITS = [
    ("mistral-tied", 2),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ("mistral-tied", 4),
            ("mistral-three-kv-heads", 3),
            ("qwen2-14-heads-tied", 2),
            ("llama", 2),
            ("llama", 4),
            ("llama-llama3-rope-tied-biases", 3),
            ("llama-multi-head", 5),
            ("llama-head-dim-80-one-kv-head", 3),
            ("qwen3-tied", 4),
            ("qwen3-untied-biases", 5),
            ("qwen3-head-dim-96", 3),
        ]
    ),
]
splits = pytest.mark.parametrize(
    ("variant", "size"), SPLITS, indirect=True, scope="session"
)
LENGTHS = [1, 4, 5, 15, 16, 17, 33, 48]


@pytest.fixture(scope="session")
def size(request):
    return request.param


@pytest.fixture(scope="module")
def split(variant, size):
    """An engine of several ranks with a small pool and small chunks."""
    with LLM(
        str(variant.path),
        tensor_parallel_size=size,
        # So few that some requests are recomputed and others swapped.
        num_blocks=33 if size == 5 else 36,
        max_num_seqs=16,
        max_num_batched_tokens=16,
        **OPTIONS,
    ) as llm:
        yield llm
        check_empty(llm)


def check_empty(llm):
    stats = llm.stats()
    assert (
        not llm.has_unfinished_requests()
        and stats.blocks_used == stats.tokens_held == 0
    )
    assert (
        len(llm.block_manager.free_swap_blocks)
        == len(llm.block_manager.blocks) - llm.block_manager.num_blocks
    )


@pytest.fixture(scope="module")
def requests(variant, draw_prompts):
    """Greedy requests, then beam searches, then several samples of a prompt."""
    prompts = draw_prompts(variant.path, LENGTHS, NEW_TOKENS, seed=variant.index)
    prompts += draw_prompts(
        variant.path, [40, 41], NEW_TOKENS, seed=1, prefix=prompts[-1][:32]
    )
    searches = draw_prompts(variant.path, [6, 8, 13], NEW_TOKENS, seed=2)
    params = [greedy(NEW_TOKENS, ignore_eos=bool(i % 2)) for i in range(len(prompts))]
    params += [BeamSearchParams(3, 10, ignore_eos=bool(i % 2)) for i in range(3)]
    params += [
        SamplingParams(n=3, temperature=0.8, max_tokens=16, seed=seed, ignore_eos=True)
        for seed in range(4)
    ]
    return [*prompts, *searches, *prompts[2:6]], params


@pytest.fixture(scope="module")
def expected(variant, requests, reference):
    """One rank's answers with room for all, the same as those of transformers."""
    with LLM(str(variant.path), num_blocks=800, **OPTIONS) as llm:
        answers = generate(llm, *requests)
        assert llm.stats().preemptions_recompute + llm.stats().preemptions_swap == 0
    assert len({token for answer in answers for one in answer for token in one}) > 50

    for prompt, params, answer in zip(*requests, answers, strict=True):
        eos = [] if params.ignore_eos else reference.eos_ids
        if isinstance(params, BeamSearchParams):
            best = {
                "max_new_tokens": params.max_tokens,
                "eos_token_id": eos or None,
                "num_beams": params.beam_width,
                "early_stopping": False,
            }
            found = reference.run(variant.path, prompt, **best)[0]
            ends = [i + 1 for i, token in enumerate(found) if token in eos]
            assert answer[0] == found[: ends[0] if ends else None]
        elif params.n == 1:
            assert answer == [reference.generate(variant.path, prompt, NEW_TOKENS, eos)]

    return answers


def answers_with_preemption(llm, requests, mode):
    """The requests' tokens; both kinds of preemption must have happened."""
    before = llm.stats()
    answers = generate(llm, *requests)
    after = llm.stats()
    assert after.preemptions_recompute > before.preemptions_recompute, (
        "none was recomputed"
    )
    assert after.preemptions_swap > before.preemptions_swap, "none was swapped"
    assert after.blocks_copied > before.blocks_copied, "no shared block was written"

    return answers


@splits
def test_tokens_are_those_of_one_rank_and_of_transformers(split, requests, expected):
    """With chunks, both preemptions, samples and beams; again with a warm cache."""
    assert split.ranks.size == split.config.tensor_parallel_size > 1
    assert answers_with_preemption(split, requests, "auto") == expected
    hits = split.stats().prefix_hit_tokens
    assert answers_with_preemption(split, requests, "auto") == expected
    assert split.stats().prefix_hit_tokens > hits


@splits
def test_one_step_ahead_the_tokens_are_the_same(split, requests, expected):
    """Every rank must know the tokens that rank 0 has not read yet."""
    split.steps_ahead = 1
    try:
        assert answers_with_preemption(split, requests, "auto") == expected
    finally:
        split.steps_ahead = 0


RECORDED = """
    from helpers import record_calls
    from nanopaged.model_runner import ModelRunner
    make = ModelRunner.__init__
    def make_with_graphs(self, *args):
        make(self, *args)
        self.replayed = record_calls(self)
    ModelRunner.__init__ = make_with_graphs
"""


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_recorded_steps_work_with_several_ranks(
    ahead, llama, mark, in_workers, monkeypatch, draw_prompts, engine
):
    """All ranks record the same steps, with collectives, and repeat them together."""
    pytest.importorskip("triton", reason="pip install triton")
    params = [
        greedy(9),
        SamplingParams(n=3, max_tokens=6, seed=1),
        greedy(12),
        greedy(4),
    ]
    prompts = draw_prompts(llama, [5, 9, 3, 7], 12)
    expected = generate(engine(llama), prompts, params)
    # RECORDED replaces it in this process, too: restore it afterwards.
    monkeypatch.setattr(ModelRunner, "__init__", ModelRunner.__init__)
    in_workers(RECORDED)
    exec(textwrap.dedent(RECORDED), {})

    with start(llama, attention_backend="triton", max_num_seqs=7, num_blocks=40) as llm:
        llm.steps_ahead = ahead
        assert generate(llm, prompts, params) == expected
        assert {2, 4, 7} & {*llm.runner.replayed}, "no step was a recorded one"


@pytest.mark.slow
@pytest.mark.parametrize("size", [3], indirect=True)
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("variant", ["mistral-three-kv-heads"], indirect=True)
def test_all_preempted_in_one_mode(variant, mode, size, requests, expected, engine):
    """With another block size, and without a prefix cache."""
    llm = engine(
        variant.path,
        tensor_parallel_size=size,
        num_blocks=18,
        block_size=8,
        preemption_mode=mode,
        max_num_seqs=16,
        max_num_batched_tokens=16,
        enable_prefix_caching=False,
    )

    assert generate(llm, *requests) == expected
    stats = llm.stats()
    assert (stats.preemptions_swap > 0) == (mode == "swap")
    assert (stats.preemptions_recompute > 0) == (mode == "recompute")


# --- the control message ---


def num_bytes_of(message):
    return len(json.dumps(vars(message)).encode())


def decode_messages(llm, monkeypatch, prompts, count):
    """The messages of steps in which all sequences decode, and all other messages."""
    sent = []
    monkeypatch.setattr(llm.ranks, "send", sent.append)
    llm.generate(prompts, greedy(count), use_tqdm=False)
    decodes = [m for m in sent if len(m.rows) == len(m.token_ids) == len(prompts)]
    assert decodes
    return decodes, [m for m in sent if not any(m is d for d in decodes)]


@pytest.mark.parametrize("ahead", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_message_of_256_decodes_is_small(ahead, engine, monkeypatch):
    """It contains only what changed, no whole block tables; large numbers fit too."""
    llm = engine(None, block_size=16, num_blocks=1600, max_num_seqs=256)
    llm.steps_ahead = ahead
    prompts = [[(i * 7 + k) % 500 for k in range(14)] for i in range(256)]
    decodes, _ = decode_messages(llm, monkeypatch, prompts, 24)
    counts = [num_bytes_of(message) for message in decodes]
    print(f"256 decodes: {min(counts):,} to {max(counts):,} bytes")

    assert any(len(message.table_updates) == 256 for message in decodes), (
        "all need a block at once"
    )
    assert max(counts) < 16 * 1024

    message = max(decodes, key=num_bytes_of)
    message.token_ids = [150_000 + i for i in range(256)]
    message.ends = [100_000 + i for i in range(256)]
    message.table_updates = [(i, 6000 + i, [90_000 + i]) for i in range(256)]
    print(f"with large numbers: {num_bytes_of(message):,} bytes")

    assert num_bytes_of(message) < 16 * 1024


def test_a_message_holds_plain_numbers_that_any_process_can_read(engine, monkeypatch):
    """No sequences or requests: they would carry their whole past along."""
    llm = engine(None, block_size=16, num_blocks=1600, max_num_seqs=256)
    decodes, others = decode_messages(llm, monkeypatch, [[5, 6, 7]] * 3, 4)
    for message in decodes + others:
        assert len(message.sampled_rows) == len(message.samples) == 3

        text = json.dumps(vars(message))
        assert set(re.sub(r'"\w+":', "", text)) <= set("0123456789-,[]{} ")
        read = ControlMessage(**json.loads(text))
        assert json.dumps(vars(read)) == text


class Booby:
    """Its pickle makes whoever reads it exit."""

    def __reduce__(self):
        return os._exit, (3,)


@pytest.mark.parametrize("data", [pickle.dumps(Booby()), b"", b"[1]", b'{"run": 1}'])
def test_a_rank_runs_nothing_that_is_in_a_message(data):
    """Whoever reaches the store can write to it: a message must be numbers alone."""
    ranks = as_rank(1, 2, sizes())
    ranks.store = SimpleNamespace(get=lambda key: data)
    with pytest.raises((ValueError, TypeError)):
        ranks.serve(lambda message: pytest.fail("it was run"))


# --- the two ranks of an engine, and two engines ---


@pytest.fixture(scope="module")
def pair(llama):
    """A roomy engine of two ranks."""
    with LLM(
        str(llama),
        tensor_parallel_size=2,
        num_blocks=8000,
        max_num_batched_tokens=30000,
        **OPTIONS,
    ) as llm:
        yield llm
        check_empty(llm)


@pytest.mark.slow
def test_a_step_may_be_of_any_size(pair, llama, monkeypatch, reference, draw_prompts):
    """There is no buffer of a fixed size: here is a message of over 64 KB."""
    (prompt,) = draw_prompts(llama, [90], 4)
    prompts = [[i % 160, i // 160, *prompt] for i in range(256)]
    counts = []
    send = pair.ranks.send

    def watched(message):
        counts.append(num_bytes_of(message))
        send(message)

    monkeypatch.setattr(pair.ranks, "send", watched)
    outputs = pair.generate([prompt, *prompts], greedy(4), use_tqdm=False)
    assert max(counts) > 1 << 16
    assert all_tokens_of(outputs[0]) == [reference.generate(llama, prompt, 4)]

    with LLM(str(llama), num_blocks=8000, **OPTIONS) as llm:
        assert [all_tokens_of(output) for output in outputs[1:]] == generate(
            llm, prompts, greedy(4)
        )


@pytest.mark.slow
def test_old_messages_are_deleted(pair):
    """An engine that runs for days must not keep every message."""
    pair.generate([5, 6, 7], greedy(60), use_tqdm=False)
    keys = pair.ranks.store.num_keys()
    pair.generate([5, 6, 7], greedy(60), use_tqdm=False)
    assert pair.ranks.store.num_keys() <= keys + 2


@pytest.mark.slow
def test_two_engines_side_by_side(
    pair, llama, make_model, reference, draw_prompts, engine
):
    """Other ports, processes and models: steps alternate, and one may end first."""
    other = make_model("qwen3", seed=3, tie_word_embeddings=True)
    second = engine(other, tensor_parallel_size=2)
    assert len({*pids_of(pair), *pids_of(second)}) == 2

    streams, wanted = [], []
    for llm, path in ((pair, llama), (second, other)):
        prompts = draw_prompts(path, [5, 20], NEW_TOKENS)
        streams.append(llm.stream(prompts, greedy(NEW_TOKENS)))
        wanted.append(
            [reference.generate(path, prompt, NEW_TOKENS) for prompt in prompts]
        )

    last = [{}, {}]
    for outputs in itertools.zip_longest(*streams):
        for tokens_by_id, output in zip(last, outputs, strict=True):
            if output:
                tokens_by_id[output.request_id] = tokens_of(output)
    assert [list(tokens_by_id.values()) for tokens_by_id in last] == wanted

    second.shutdown()
    assert generate(pair, prompts[:1], greedy(5))


# --- starting, ending, and what is left ---


def pids_of(llm):
    return llm.ranks.workers.pids()


def processes(mark):
    """The pids of processes with this in their environment, without zombies."""
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with contextlib.suppress(OSError):
                state = (directory / "stat").read_text().rpartition(")")[2].split()[0]
                marked = mark.encode() in (directory / "environ").read_bytes()
                # Python keeps one resource tracker after its first start of a process.
                tracks = b"resource_tracker" in (directory / "cmdline").read_bytes()
                if state != "Z" and marked and not tracks:
                    found.append(int(directory.name))
    return found


def listening(pid="self"):
    """A process's listening sockets: inode -> address, in hexadecimal."""
    addresses = {}
    for name in ("tcp", "tcp6"):
        file = Path(f"/proc/net/{name}")
        for line in file.read_text().splitlines()[1:] if file.exists() else ():
            fields = line.split()
            if fields[3] == "0A":  # LISTEN
                addresses[fields[9]] = fields[1].partition(":")[0]

    own = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    return {inode: addresses[inode] for inode in own & addresses.keys()}


def wait_until(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return result


@pytest.fixture
def mark(monkeypatch):
    """Marks the environment of all processes a test starts: none may be left."""
    mark = f"nanopaged-test-{uuid.uuid4()}"
    monkeypatch.setenv("NANOPAGED_TEST", mark)
    yield mark

    left = processes(mark)
    try:
        wait_until(lambda: not processes(mark), NOTICED, f"the end of {left}")
    finally:
        for pid in processes(mark):
            os.kill(pid, signal.SIGKILL)


def start_rank_after(code, index, options, port):
    exec(textwrap.dedent(code), {"RANK": index + 1})
    parallel.start_rank(index, options, port)


@pytest.fixture
def in_workers(monkeypatch):
    """`in_workers(code)`: code that an engine's workers run first, with `RANK` set."""
    return lambda code: monkeypatch.setattr(
        parallel, "start_rank", partial(start_rank_after, code)
    )


@pytest.fixture
def in_scripts(tmp_path):
    """The same for scripts: Python imports `sitecustomize` when it starts."""

    def install(code):
        lines = "import os\nRANK = int(os.environ.get('RANK', 0))\n" + textwrap.dedent(
            code
        )
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text(lines)

    return install


def start(path, **options):
    return LLM(
        str(path), **(OPTIONS | {"tensor_parallel_size": 2, "num_blocks": 64} | options)
    )


def start_two(path):
    """Two engines, started at the same time."""
    with ThreadPoolExecutor(2) as threads:
        return [*threads.map(start, [path] * 2)]


def two_starts_and_stops(path, mark, wanted):
    before = listening()
    engines = start_two(path)
    workers = {pid for llm in engines for pid in pids_of(llm)}
    assert len(workers) == 2 and workers <= {*processes(mark)}
    assert len(listening()) >= len(before) + 2, "this test looks at the wrong sockets"

    for llm in engines:
        assert generate(llm, [5, 6, 7], greedy(6)) == [[wanted]]
        llm.shutdown()
        workers -= {*workers} - {*processes(mark)}
        llm.shutdown()  # the second time does nothing

    assert not workers
    assert listening() == before


@linux
@pytest.mark.slow
def test_a_stop_leaves_no_process_and_no_port(llama, reference, mark):
    two_starts_and_stops(llama, mark, reference.generate(llama, [5, 6, 7], 6))


@linux
@pytest.mark.slow
def test_twenty_starts_and_stops_leave_no_process_and_no_port(llama, reference, mark):
    for _ in range(10):
        two_starts_and_stops(llama, mark, reference.generate(llama, [5, 6, 7], 6))


@pytest.mark.slow
def test_an_engine_that_was_shut_down_raises(llama, mark):
    llm = start(llama)
    llm.add_request([5, 6, 7], greedy(NEW_TOKENS))
    llm.step()
    llm.shutdown()
    llm.step()  # reports the abort, without any rank

    assert not llm.has_unfinished_requests()
    for use in (llm.generate, llm.add_request):
        with pytest.raises(RuntimeError, match="shut down"):
            use([5, 6, 7])


@pytest.mark.slow
@linux
def test_ranks_listen_to_no_other_machine(llama, mark):
    """They trust whoever connects, so only this machine may reach their ports."""
    before = listening()
    with start(llama) as llm:
        found = [listening(pid) for pid in ("self", *pids_of(llm))]
    new = [found[0][inode] for inode in found[0].keys() - before.keys()]
    assert len(new) >= 1, "this test looks at the wrong sockets"
    assert {*new, *found[1].values()} == {"0100007F"}, "127.0.0.1, byte by byte"


def kill_while_decoding(llm, when, victim=1):
    """Kill a rank after some steps; returns the seconds until the error."""
    pid = pids_of(llm)[victim - 1]
    stream = llm.stream([[5, 6, 7]] * 3, greedy(90))
    for _ in range(when):
        next(stream)
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)

    with pytest.raises(RuntimeError) as error:
        for _ in stream:
            pass
    seconds = time.monotonic() - killed

    assert f"rank {victim} failed:" in str(error.value) and "SIGKILL" in str(
        error.value
    )
    assert seconds < NOTICED
    with pytest.raises(RuntimeError, match="shut down"):
        llm.generate([5, 6, 7])
    check_empty(llm)

    llm.shutdown()
    return seconds


@linux
def test_a_rank_killed_while_decoding_is_named(llama, mark):
    before = listening()
    print(f"noticed after {kill_while_decoding(start(llama), 20):.2f} s")
    assert listening() == before


@linux
@pytest.mark.slow
def test_twenty_of_twenty_killed_ranks_are_named(llama, mark):
    seconds = [kill_while_decoding(start(llama, tensor_parallel_size=4), 20, victim=2)]
    for when in range(1, 80, 8):
        seconds += [
            kill_while_decoding(llm, when + i) for i, llm in enumerate(start_two(llama))
        ]
    assert len(seconds) > 20
    print(f"noticed after {min(seconds):.2f} to {max(seconds):.2f} s")


FAIL = """
    if RANK == {rank}:
        from nanopaged.model_runner import ModelRunner
        run, steps = ModelRunner.run, []
        def fail(self, *args):
            steps.append(1)
            if len(steps) == 5:
                raise ValueError("the machine is on fire")
            return run(self, *args)
        ModelRunner.run = fail
"""


@pytest.mark.slow
@linux
def test_an_exception_in_a_rank_arrives_with_its_traceback(llama, mark, in_workers):
    in_workers(FAIL.format(rank=1))
    llm = start(llama)
    started = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        llm.generate([5, 6, 7], greedy(90), use_tqdm=False)
    assert time.monotonic() - started < NOTICED

    message = str(error.value)
    assert "rank 1" in message and "ValueError: the machine is on fire" in message
    assert "Traceback" in message and "in serve" in message and "in fail" in message
    check_empty(llm)
    with pytest.raises(RuntimeError, match="shut down"):
        llm.generate([5, 6, 7])


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import os; os.kill(os.getpid(), 9)", "rank 1 .*SIGKILL"),
        ("import os; os._exit(3)", "rank 1 .*exit code 3"),
        (
            """
         import nanopaged.loader
         def fail(path): raise OSError("no such disk")
         nanopaged.loader.find_targets = fail
         """,
            "rank 1 .*no such disk",
        ),
    ],
    ids=["killed", "exited", "failed"],
)
def test_a_rank_that_ends_while_starting_is_named(
    code, expected, llama, mark, in_workers
):
    in_workers(code)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=f"(?s){expected}"):
        start(llama).generate([5, 6, 7], greedy(NEW_TOKENS), use_tqdm=False)
    assert time.monotonic() - started < 2 * NOTICED


@pytest.mark.slow
def test_an_error_of_rank_0_while_starting_ends_the_others(llama, mark, monkeypatch):
    monkeypatch.setattr(loader, "read_tensors", lambda file: {})
    with pytest.raises(ValueError, match="missing"):
        start(llama)


@pytest.fixture
def no_process(monkeypatch):
    def start_processes(*args, **kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr(parallel, "start_processes", start_processes)


@pytest.mark.parametrize(
    ("fields", "size", "message"),
    [
        ({}, 5, "must divide num_attention_heads=4, got 5"),
        ({}, 3, "must divide num_attention_heads=4, got 3"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
            2,
            "must divide num_key_value_heads=3 or be a multiple of it, got 2",
        ),
        ({"intermediate_size": 101}, 2, "must divide intermediate_size=101, got 2"),
        ({"vocab_size": 161}, 2, "must divide vocab_size=161, got 2"),
        ({}, 0, "must be .*, got 0"),
    ],
)
def test_shares_that_are_not_equal_are_refused_before_anything_starts(
    fields, size, message, llama, edit_model, mark, no_process
):
    path = edit_model(llama, config=lambda config: config.update(fields))
    with pytest.raises(ValueError, match=f"^tensor_parallel_size {message}"):
        start(path, tensor_parallel_size=size)


# --- the smallest pool ---

SMALL_POOL = """
    import nanopaged.model_runner
    nanopaged.model_runner.CPU_POOL_BYTES = {bytes} if RANK else 4 << 30
"""


@pytest.mark.slow
@pytest.mark.parametrize("poor", [0, 1])
def test_the_smallest_pool_of_all_ranks_is_the_pool(
    poor, llama, mark, in_workers, monkeypatch, reference, draw_prompts
):
    """Otherwise block ids would name memory that a rank does not have."""
    block_bytes = 2 * 2 * 1 * 16 * 4 * OPTIONS["block_size"]
    if poor == 0:
        monkeypatch.setattr(nanopaged.model_runner, "CPU_POOL_BYTES", 30 * block_bytes)
    else:
        in_workers(SMALL_POOL.format(bytes=30 * block_bytes))

    prompts = draw_prompts(llama, [17] * 6, 24)
    with start(llama, num_blocks=None) as llm:
        assert (
            llm.block_manager.num_blocks
            == llm.runner.num_blocks
            == llm.stats().blocks_total
            == 30
        )
        answers = generate(llm, prompts, greedy(24))
        assert llm.stats().preemptions_recompute > 0

    assert answers == [[reference.generate(llama, prompt, 24)] for prompt in prompts]


@pytest.mark.slow
def test_swapped_blocks_have_the_same_ids_where_pools_would_differ(
    llama, mark, in_workers, reference, draw_prompts
):
    """Ids in CPU memory follow the device's ids: those of the smallest pool."""
    block_bytes = 2 * 2 * 1 * 16 * 4 * OPTIONS["block_size"]
    in_workers(SMALL_POOL.format(bytes=30 * block_bytes))

    prompts = draw_prompts(llama, [17] * 6, 24)
    with start(
        llama,
        num_blocks=None,
        preemption_mode="swap",
        swap_space=60 * block_bytes / 2**30,
    ) as llm:
        assert (llm.block_manager.num_blocks, llm.runner.num_swap_blocks) == (30, 60)
        answers = generate(llm, prompts, greedy(24))
        assert llm.stats().preemptions_swap > 0

    assert answers == [[reference.generate(llama, prompt, 24)] for prompt in prompts]


# --- scripts, started by Python and by torchrun ---


SCRIPT = """
import json, sys
from nanopaged import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM({path!r}, tensor_parallel_size={size}, num_blocks=64, max_model_len=96,
              block_size=4, dtype="float32", device="cpu")
    params = SamplingParams(temperature=0, max_tokens={count}, ignore_eos=True)
    print("ready", flush=True)
    for output in llm.generate([[5, 6, 7], [9, 8, 7, 6, 5]], params, use_tqdm=False):
        print(json.dumps(output.outputs[0].token_ids), flush=True)
"""
FOREVER = """
    while True:
        llm.generate([[5, 6, 7]] * 3, params, use_tqdm=False)
"""


@pytest.fixture
def script(tmp_path, llama):
    """`script(code, size)`: a script that ends with more code of its main part."""

    def write(code="", size=2, count=12):
        file = tmp_path / "script.py"
        main = SCRIPT.format(path=str(llama), size=size, count=count)
        file.write_text(main + code)
        return file

    return write


@pytest.fixture
def popen(tmp_path, mark):
    """Start a process in its own group, in an empty directory, with pipes."""

    def start(*command, **options):
        directory = tmp_path / "cwd"
        directory.mkdir(exist_ok=True)
        python_path = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
        env = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": python_path,
        }
        return subprocess.Popen(
            [*map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            cwd=directory,
            start_new_session=True,
            **options,
        )

    return start


def finish(process, seconds=60, given=None):
    """A process's output, once it and all that hold its pipes have ended."""
    try:
        return process.communicate(given, timeout=seconds)
    finally:
        process.kill()


def answers_of(stdout):
    return [json.loads(line) for line in stdout.splitlines() if line.startswith("[")]


@pytest.fixture
def wanted(llama, reference):
    return [
        reference.generate(llama, prompt, 12) for prompt in ([5, 6, 7], [9, 8, 7, 6, 5])
    ]


@pytest.mark.slow
def test_a_script_that_forgets_to_shut_down(script, popen, wanted):
    """It prints its answers and nothing else, and ends with all its ranks."""
    process = popen(sys.executable, script())
    stdout, stderr = finish(process)
    assert process.returncode == 0, stderr
    assert stdout.count("ready") == 1 and answers_of(stdout) == wanted
    assert stderr == ""


@pytest.mark.slow
def test_the_error_for_a_script_without_a_guard_says_so(script, popen):
    """Starting a process imports the script, which would start another, and so on."""
    file = script()
    file.write_text(file.read_text().replace('if __name__ == "__main__"', "if True"))
    process = popen(sys.executable, file)
    stdout, stderr = finish(process)

    assert process.returncode == 1 and "ready" not in stdout
    assert (
        "RuntimeError: rank 1 failed" in stderr
        and "if __name__ == '__main__':" in stderr
    )


@pytest.mark.slow
def test_a_repl_may_start_ranks(script, popen, wanted):
    """So may a notebook: there is no file to import, so it needs no guard."""
    code = script().read_text().replace('if __name__ == "__main__":', "if True:") + "\n"
    process = popen(sys.executable, "-i", stdin=subprocess.PIPE)
    stdout, stderr = finish(process, given=code)
    assert process.returncode == 0, stderr
    assert answers_of(stdout) == wanted and "Error" not in stderr


@pytest.mark.slow
@pytest.mark.parametrize("bad", ["num_blocks=1", "max_model_len=99999", "block_size=3"])
def test_a_bad_option_is_an_error_of_the_script_and_leaves_nothing(bad, script, popen):
    file = script()
    name = bad.partition("=")[0]
    file.write_text(re.sub(rf"{name}=\d+", bad, file.read_text()))
    process = popen(sys.executable, file)
    stdout, stderr = finish(process)
    assert process.returncode == 1 and "ready" not in stdout
    assert stderr.count("Traceback") == 1, "the other ranks add nothing"
    assert re.search(rf"^ValueError: {name}", stderr, re.MULTILINE)


def read_ready(process):
    assert process.stdout.readline() == "ready\n", process.stderr.read()


@linux
@pytest.mark.slow
@pytest.mark.parametrize("whom", ["the group", "rank 0"])
def test_ctrl_c_ends_all_ranks(whom, script, popen, mark):
    """A terminal interrupts the whole process group, `kill -INT` one process."""
    process = popen(sys.executable, script(FOREVER))
    read_ready(process)
    process.stdout.readline()
    assert len(processes(mark)) == 2

    sent = time.monotonic()
    (os.killpg if whom == "the group" else os.kill)(process.pid, signal.SIGINT)
    _, stderr = finish(process)
    assert time.monotonic() - sent < NOTICED
    assert process.returncode in (130, -signal.SIGINT)
    assert (
        stderr.rstrip().endswith("KeyboardInterrupt") and stderr.count("Traceback") <= 2
    )
    assert "rank 1" not in stderr


@linux
@pytest.mark.slow
def test_after_ctrl_c_in_a_step_the_engine_is_shut_down(llama, mark):
    """Ranks interrupted in the middle of a step cannot continue with another."""
    llm = start(llama)

    def interrupted(batch):
        raise KeyboardInterrupt

    llm.runner._prepare = interrupted
    pids = pids_of(llm)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([5, 6, 7], use_tqdm=False)
    with pytest.raises(RuntimeError, match="shut down"):
        llm.generate([5, 6, 7], use_tqdm=False)
    assert not {*pids} & {*processes(mark)}


@linux
@pytest.mark.slow
def test_the_other_ranks_end_when_rank_0_is_killed(script, popen, mark):
    process = popen(sys.executable, script(FOREVER))
    read_ready(process)
    process.kill()
    finish(process, NOTICED)  # until the last holder of the pipes ends


@linux
@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_ending_during_the_start_leaves_nothing(sign, script, popen, mark):
    process = popen(sys.executable, script())
    wait_until(lambda: len(processes(mark)) == 2, 60, "the start of rank 1")
    process.send_signal(sign)
    finish(process, 2 * NOTICED)
    assert process.returncode


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def nodes(count, per_node, port):
    """The command of each node, without the script."""
    common = [
        f"--nnodes={count}",
        f"--nproc-per-node={per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=test",
        "--local-addr=127.0.0.1",
    ]
    return [[*TORCHRUN, *common] for _ in range(count)]


@linux
@pytest.mark.slow
def test_torchrun_on_one_machine(script, popen, wanted):
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2"]
    process = popen(*command, script("    llm.shutdown()"))
    stdout, stderr = finish(process)
    assert process.returncode == 0, stderr
    assert stdout.count("ready") == 1, "only rank 0 runs the rest of the script"
    assert answers_of(stdout) == wanted


@linux
@pytest.mark.slow
@pytest.mark.parametrize("per_node", [1, 2])
def test_torchrun_on_two_nodes(per_node, script, popen, wanted):
    """Two agents meet at a port of one of them."""
    file = script("    llm.shutdown()", size=2 * per_node)
    agents = [popen(*command, file) for command in nodes(2, per_node, free_port())]
    outputs = [finish(agent) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    stdout = "".join(out for out, _ in outputs)
    assert stdout.count("ready") == 1 and answers_of(stdout) == wanted


@linux
@pytest.mark.slow
def test_under_torchrun_a_forgotten_shutdown_ends_the_others(script, popen, wanted):
    """There the store belongs to torchrun and does not end with rank 0."""
    process = popen(*TORCHRUN, "--standalone", "--nproc-per-node=2", script())
    stdout, stderr = finish(process)
    assert process.returncode == 0, stderr
    assert answers_of(stdout) == wanted


@linux
@pytest.mark.slow
def test_under_torchrun_an_exception_in_a_rank_ends_all(script, popen, in_scripts):
    """Its traceback is in the output, and torchrun names the rank."""
    in_scripts(FAIL.format(rank=1))
    process = popen(*TORCHRUN, "--standalone", "--nproc-per-node=2", script(FOREVER))
    stdout, stderr = finish(process)
    assert process.returncode
    assert "ValueError: the machine is on fire" in stderr
    assert re.search(r"rank *: 1 \(local_rank: 1\)", stderr)


# --- memory while loading ---

LIMITED = """
    import re, resource
    from nanopaged.model_runner import ModelRunner
    load, limit = ModelRunner._load_model, resource.RLIMIT_DATA
    def limited(self, *args):
        with open("/proc/self/status") as status:
            used = int(re.search(r"VmData:\\s+(\\d+)", status.read())[1]) * 1024
        old = resource.getrlimit(limit)
        resource.setrlimit(limit, (used + {room}, old[1]))
        model = load(self, *args)
        resource.setrlimit(limit, old)
        return model
    ModelRunner._load_model = limited
"""


@linux
@pytest.mark.slow
def test_no_rank_needs_memory_for_all_weights(
    make_model, script, popen, in_scripts, llama
):
    """Each process may allocate three quarters of the checkpoint: half of it fits.

    What is mapped from the file counts as well, and so does every temporary.
    """
    path = make_model(
        "llama",
        seed=23,
        hidden_size=1024,
        intermediate_size=2816,
        head_dim=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=8192,
        max_position_embeddings=256,
        max_shard_size="30MB",
        tie_word_embeddings=False,
    )
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    shard = max(file.stat().st_size for file in path.glob("*.safetensors"))
    in_scripts(LIMITED.format(room=size * 3 // 4 + shard))

    results = {}
    for ranks in (1, 2):
        file = script(size=ranks)
        file.write_text(file.read_text().replace(str(llama), str(path)))
        process = popen(sys.executable, file)
        results[ranks] = finish(process), process.returncode

    print(f"checkpoint {size:,} bytes, largest shard {shard:,}")
    (stdout, stderr), code = results[2]
    assert code == 0 and len(answers_of(stdout)) == 2, stderr

    (_, stderr), code = results[1]
    assert code and ("memory" in stderr.lower()), (
        "the limit has no effect: one rank needs more"
    )
