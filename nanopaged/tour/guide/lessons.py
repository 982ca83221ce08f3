"""What each chapter shows: small runs of the engine, made while the page is made.

The local variables of a lesson are the values of its chapter's text, by name. So no
number in the text can be wrong tomorrow.
"""

import io
import runpy
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from nanopaged import LLM, SamplingParams
from nanopaged.attention import Metadata
from nanopaged.batch import Batch
from nanopaged.frontend.outputs import RequestOutput
from nanopaged.ranks import SENT
from nanopaged.tour import kv, page
from nanopaged.tour import sizes as calculator
from nanopaged.tour.guide import blockwise, figures, lab, paper, storm
from nanopaged.tour.guide.lab import STORY, Run, Values, engine, greedy, others, watch
from nanopaged.tour.guide.markdown import Html, python

SMALLEST = Path(__file__).parents[2] / "smallest.py"
LOVERS = ["ROMEO:\n", "JULIET:\n"]
SYSTEM = "You are a citizen of Verona, and you speak in verse.\n\n"
NAMES = ["ROMEO:\n", "FRIAR LAURENCE:\n", "Nurse:\n"]


def opening() -> Values:
    """Three requests: the first two begin alike, and the second wants two answers."""
    params = [SamplingParams(n=n, temperature=0.8, max_tokens=26, seed=6, stop="\n")
              for n in (1, 2, 1)]
    with engine(num_blocks=16) as llm:
        run = watch(llm, "Three requests share a pool", [*STORY, "Nurse:\nO "], params)
    state = max(run.scheduled(), key=lambda each: len(each["blocks"]))
    step = 1 + run.scheduled().index(state)
    picture = Html(page.TEMPLATES.get_template("picture.svg").render(
        state=state, **run.header()))
    memory = paper.RESULTS["memory"]
    return locals()


def loop() -> Values:
    with engine(num_blocks=8) as llm:
        run = watch(llm, "One request, from its prompt to its last token",
                    STORY[:1], greedy(8))
        size = llm.config.block_size
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(SMALLEST), run_name="__main__")
    rows = printed.getvalue().splitlines()
    answer = run.outputs[0].outputs[0]
    counts = [batch.counts[0] for batch in run.batches]
    return locals()


def cache() -> Values:
    """Generate with the cache, and without it: then each token costs the whole text."""
    count = 64
    with engine(enable_prefix_caching=False, attention_backend="auto", block_size=16,
                num_blocks=32) as llm:
        prompt = llm.tokenizer("ROMEO:\n").input_ids
        llm.generate(prompt, greedy(4), use_tqdm=False)  # warm-up
        seconds_with, answer = timed(llm, prompt, count)
        text, seconds_without = list(prompt), 0.0
        for _ in range(count):
            seconds, token = timed(llm, text, 1)
            text += token
            seconds_without += seconds
        token_bytes, config = kv.token_bytes(llm), llm.model_config
        number_bytes = llm.engine.runner.dtype.itemsize
    assert text == prompt + answer
    computed_with = len(prompt) + count - 1
    computed_without = sum(range(len(prompt), len(prompt) + count))  # the whole text
    tokens = 4096  # in each sequence of the table
    models, gib, element_bytes = kv.MODELS, kv.GIB, kv.ELEMENT_BYTES
    return locals()


def timed(llm: LLM, prompt: list[int], count: int) -> tuple[float, list[int]]:
    """The seconds that an answer takes, and its tokens."""
    began = time.perf_counter()
    [output] = llm.generate(prompt, greedy(count), use_tqdm=False)
    seconds = time.perf_counter() - began
    return seconds, output.outputs[0].token_ids


def batch() -> Values:
    some, most, long = 8, 32, 2048
    speeds = tokens_per_second((1, some, most))
    with engine() as llm:
        weight_bytes = sum(each.nbytes for each in llm.engine.runner.model.parameters())
    buffer = torch.ones(2**25)  # no cache can hold it
    bandwidth = buffer.nbytes / lab.fastest(buffer.sum, buffer.device)
    chat = paper.HALF_ANSWERED
    modelled = figures.lines(
        "Milliseconds per step, by the number of sequences in its batch.",
        {"without K and V": steps_ms(0), f"chats of {chat:.0f} tokens": steps_ms(chat),
         f"texts of {long:,} tokens": steps_ms(long)},
        "Modelled: Llama-3-8B on an A100, with four fifths of the bytes/s on its data "
        "sheet and half of the operations/s. A line ends where 80 GB are full.",
        "sequences that decode together (twice as many each time)", y_label="ms")
    return locals()


def steps_ms(length: float) -> dict[str, float]:
    """What a step takes on the A100, by the number of sequences, of this length."""
    return {str(size): kv.step_ms(kv.EXAMPLE["a100"], size, length)
            for size in (2**power for power in range(10))
            if size * length <= kv.EXAMPLE["room"]}


def tokens_per_second(batch_sizes: tuple[int, ...]) -> dict[int, float]:
    """The speed of decoding, by the number of sequences that decode together."""
    speeds = dict.fromkeys(batch_sizes, 0.0)
    count = 12
    with engine(attention_backend="auto", block_size=16, num_blocks=256,
                max_num_seqs=64) as llm:
        for size in batch_sizes:
            prompts = [[token + 1] for token in range(size)]
            for _ in range(3):  # the best of several rounds: a machine is never quiet
                began = time.perf_counter()
                llm.generate(prompts, greedy(count), use_tqdm=False)
                seconds = time.perf_counter() - began
                speeds[size] = max(speeds[size], size * count / seconds)
    return speeds


def blocks() -> Values:
    prompts = ["ROMEO:\n", lab.SPEECH]
    params = [ends_early(prompts[0], 14, 24), ends_early(prompts[1], 6, 20)]
    requests = prompts, params
    with engine(num_blocks=16) as llm:
        run = watch(llm, "Two requests of different lengths", *requests)
        size = llm.config.block_size
    other_sizes = others(
        {f"blocks of {n}": {"block_size": n, "num_blocks": 64 // n}
         for n in (1, 16)}, *requests)
    tables = [state["seqs"]["0.0"]["table"] for state in run.scheduled()]
    is_longer = [len(table) > len(tables[0]) for table in tables]
    step = 1 + is_longer.index(True)
    table = tables[step - 1]
    position = 2 * size + 1
    seen = step + 1
    assert run.scheduled()[seen - 1]["seqs"]["0.0"]["computed"] > position
    slots, longest = kv.SLOTS, kv.LONGEST
    mean_in, mean_out = paper.MEAN_LENGTHS
    memory = paper.use_of_memory(paper.RESULTS["memory"])
    return locals()


def ends_early(prompt: str, count: int, max_tokens: int) -> SamplingParams:
    """Greedy: the answer ends after `count` tokens, though it might have more."""
    with engine() as llm:
        [output] = llm.generate(prompt, greedy(count), use_tqdm=False)
    *others, last = output.outputs[0].token_ids
    assert last not in others, "it would end even earlier"
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True,
                          stop_token_ids=[last])


def step() -> Values:
    """The story of A and B, as the files of the engine tell it."""
    with engine(num_blocks=8) as llm:
        params = [greedy(5), SamplingParams(n=2, max_tokens=4, seed=1, ignore_eos=True)]
        run = watch(llm, "A, and one step later B, which asks for two answers", STORY,
                    params, together=False)
        size = llm.config.block_size
    _, second, third = run.batches[:3]
    metadata = Metadata(second, llm.engine.runner.backend)
    positions, slots = metadata.positions.tolist(), metadata.slots.tolist()
    assert second.counts == [1, 2], "the text describes this step"
    assert third.moves, "and this one"
    message = listing(second)
    return locals()


def listing(batch: Batch) -> Html:
    """What a batch of the story says, a line for each list that is not empty.

    Tokens have names as in the engine's files: p and q in prompts, then t, u and v.
    """
    names = []
    for entry, (count, end) in enumerate(zip(batch.counts, batch.ends, strict=True)):
        for position in range(end - count, end):
            if position >= 6:  # the length of both prompts
                names.append(f"{'tuv'[entry]}{position - 6}")
            elif entry == 1 and position >= 4:
                names.append(f"q{position}")
            else:
                names.append(f"p{position}")
    token_ids = f"token_ids = [{', '.join(names)}]"
    lists = {name: list(getattr(batch, name)) for name in SENT[1:]}
    found = [f"{name} = {items}" for name, items in lists.items() if items]
    return python("\n".join([token_ids, *found]))


def attention() -> Values:
    with engine(block_size=16, num_blocks=32) as llm:
        params = SamplingParams(n=2, max_tokens=24, seed=1, ignore_eos=True)
        expected, given = blockwise.compare(llm, ["ROMEO:\n", lab.SPEECH], params)
        config = llm.model_config
    example = query_over_blocks()
    overhead, block_size = paper.OVERHEAD, 16
    num_blocks, last = len(example["blocks"]), example["blocks"][-1]
    softmax = Html(page.TEMPLATES.get_template("softmax.html").render(example=example))
    difference = abs(expected - given).max()
    assert difference < 1e-4, "the engine's attention is not the paper's formula"
    return locals()


def query_over_blocks() -> dict[str, Any]:
    with engine(block_size=16, num_blocks=8, attention_backend="numba") as llm:
        # These leave the free blocks in disorder.
        llm.generate(["ROMEO:\n" * 8, "JULIET:\n" * 4], [greedy(3), greedy(20)],
                     use_tqdm=False)
        return blockwise.example(llm, lab.SPEECH * 2)


def schedule() -> Values:
    budget = 8
    requests = (["ROMEO:\n", "JULIET:\n", "\n".join([lab.SPEECH] * 2)],
                [greedy(12), greedy(12), greedy(4)])
    with engine(num_blocks=32, max_num_batched_tokens=budget) as llm:
        run = watch(llm, f"Two short requests and a long one; {budget} tokens a step",
                    *requests)
    budgets = others({f"{n} tokens a step": {"max_num_batched_tokens": n}
                      for n in (4, 16, 64)}, *requests, num_blocks=32)
    counts = run.counts(2)
    num_tokens = len(run.outputs[2].prompt_token_ids)
    chunks = [count for count in counts if count][:-3]
    assert sum(chunks) == num_tokens
    assert absent(run, 0) == absent(run, 1) == []
    for missed in (absent(each, 1) for each in budgets.values()):
        assert missed == [*range(1, 1 + len(missed))], "only before it begins"
    step = 1 + counts.index(budget - 2)
    waits = sorted((first_token(each) for each in (run, *budgets.values())),
                   key=lambda row: int(row["budget"]))
    return locals()


def first_token(run: Run) -> Values:
    """How long the third request waits for its first token, and the longest step."""
    steps = next(step for step, batch in enumerate(run.batches, 1)
                 if any(seq.group.request_id == "2" for seq in batch.receivers))
    return {"budget": run.header()["budget"], "steps": steps,
            "most": max(len(batch.token_ids) for batch in run.batches)}


def absent(run: Run, request: int) -> list[int]:
    """The steps, counted from 1, in which a request did not run, before its end."""
    counts = run.counts(request)
    present = [step for step, count in enumerate(counts, 1) if count]
    return [step for step in range(1, max(present)) if step not in present]


def prefix() -> Values:
    prompts = [SYSTEM + name for name in NAMES]
    with engine(num_blocks=60) as llm:
        run = watch(llm, "Three prompts that begin alike", prompts, greedy(5))
    without = others({"without the cache": {"enable_prefix_caching": False},
                      "blocks of 16": {"block_size": 16, "num_blocks": 16}},
                     prompts, greedy(5), num_blocks=60)
    lengths = [len(output.prompt_token_ids) for output in run.outputs]
    hits = [output.num_cached_tokens for output in run.outputs]
    large = 16
    large_hits = [output.num_cached_tokens
                  for output in without["blocks of 16"].outputs]
    chain = list(looked_up(run))
    return locals()


def looked_up(run: Run) -> Iterator[Values]:
    """The full blocks of the second prompt, around where it leaves the first one."""
    table = run.scheduled()[0]["seqs"]["1.0"]["table"]
    prompt = run.groups["1"]["prompt"]
    size = run.header()["block_size"]
    num_shared = run.outputs[1].num_cached_tokens // size
    before = "nothing"
    for index in range(len(prompt) // size):
        found = f"found: #{table[index]}" if index < num_shared else (
            "not there" if index == num_shared else "not looked up")
        if abs(index - num_shared + 0.5) < 2 or index == 0:
            yield {"index": index, "before": before, "found": found,
                   "text": "".join(prompt[index * size : (index + 1) * size])}
        before = f"logical block {index}"


def fork() -> Values:
    with engine(num_blocks=16) as llm:
        samples = watch(llm, "One prompt, three answers", [lab.SPEECH[:22]],
                        SamplingParams(n=3, temperature=0.9, max_tokens=8, seed=4))
    copies = samples.batches[1].moves
    prompt_tokens = len(samples.outputs[0].prompt_token_ids)
    return locals()


def full() -> Values:
    """The same two requests in a pool that is too small, recomputed and swapped."""
    pool = 8
    with engine() as llm:
        alone = llm.generate(LOVERS, greedy(16), use_tqdm=False)
    recompute = preempted(pool, "recompute")
    swap = preempted(pool, "swap")
    sizes = {f"recompute, {n} blocks": {"num_blocks": n} for n in (7, 16)}
    ways = {f"swap, {pool} blocks": swap["run"]} | others(sizes, LOVERS, greedy(16))
    for preemption in (recompute, swap):
        assert answers(preemption["run"].outputs) == answers(alone)
    # What it costs to bring a sequence back.
    even, tokens = paper.EVEN, 256
    bus = 32e9  # bytes/s: PCIe 4.0 with 16 lanes
    return locals()


def results() -> Values:
    return paper.RESULTS | {
        "limit": paper.LIMIT, "context": 8192, "chat": paper.HALF_ANSWERED,
        "latency": paper.latency(paper.RESULTS["latency"])}


def gpu() -> Values:
    return {"pending": [-1 - n for n in range(len(step()["second"].sample_entries))]}


def oncall() -> Values:
    """What some symptoms look like in this engine."""
    prompts = [f"{number} {SYSTEM}{name}" for number, name in enumerate(NAMES)]
    with engine(num_blocks=60) as llm:
        outputs = llm.generate(prompts, greedy(5), use_tqdm=False)
    spoilt = [output.num_cached_tokens for output in outputs]
    waits, torch_version = schedule()["waits"], torch.__version__.partition("+")[0]
    runs = {str(rate): storm.serve(rate) for rate in storm.RATES}
    rate, max_num_seqs = 0.5, 5
    calmer, stormy = storm.serve(rate, max_num_seqs), runs[str(rate)]
    names = {"tokens": "all tokens", "in_time": "tokens in time",
             "again": "computed again", "waiting": "waiting requests"}
    picture = figures.lines(
        "More and more load on a small pool.",
        {label: {at: run[name] for at, run in runs.items()}
         for name, label in names.items()},
        f"{storm.COUNT} requests in a pool for {storm.SLOTS} tokens, each with "
        f"{storm.TOKENS_IN} tokens in and {storm.TOKENS_OUT} out. In time is a request "
        f"whose first token takes at most {storm.FIRST} steps, and the later "
        f"ones on average {storm.GAP} at most.",
        "requests that come in a step", y_label="per step")
    return locals()


def sizes() -> Values:
    """Computed steps and prompts, beside those that were measured. A CPU's rates were
    measured, too; of an H100's, we assume what the calculator does.
    """
    rows = []
    for machine in ("h100", "cpu"):
        measured = paper.MEASURED[machine]
        rates = {} if machine == "h100" else {
            "bandwidth_tb": measured["bytes_per_s"] / 1e12, "bandwidth_share": 1,
            "tflops": measured["flops_per_s"] / 1e12, "flops_share": 1}
        for seqs, row in measured["steps"].items():
            known = step_of(int(seqs), row["keys"], **rates)
            rows.append((machine, seqs, known["step_ms"], row["step_ms"]))
        prompt_ms = 2 * 1000 * 128 * known["per_token"] / known["rate"]
        rows.append((machine, "", prompt_ms, 1000 * 128 / measured["prompts_per_s"]))
    return {"rows": rows, "calculator": page.calculator(),
            "reached": calculator.DATA["defaults"]}


def step_of(seqs: int, keys: int, **rates: float) -> dict[str, float]:
    """A step of Qwen3-0.6B, for so many sequences with so many keys in all."""
    given = calculator.choose("Qwen3-0.6B", "H100", tokens_in=keys / seqs, tokens_out=0,
                              **rates)
    known = calculator.evaluate(given, "fixed") | {"running": seqs}
    return calculator.evaluate(known, "step")


def answers(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def preempted(pool: int, mode: str) -> Values:
    """What happens in a pool of so many blocks, in which only one of two requests fits.
    """
    with engine(num_blocks=pool, preemption_mode=mode, swap_space=2e-4) as llm:
        run = watch(llm, "Two requests in a pool for one", LOVERS, greedy(16))
        stats = llm.stats()
    steps = absent(run, 1)
    leaves = steps[0]
    returns = steps[-1] + 1
    back = run.scheduled()[returns - 1]["seqs"]["1.0"]
    count = stats.preemptions_recompute + stats.preemptions_swap
    return locals()


def ranks() -> Values:
    with engine(num_blocks=24) as llm:
        run = watch(llm, "", ["ROMEO:\n", lab.SPEECH, "JULIET:\n"], greedy(6))
        config = llm.model_config
    table = run.scheduled()[1]["seqs"]["0.0"]["table"]
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    drawing = Html(page.TEMPLATES.get_template("ranks.svg").render(table=table))
    large, width, large_batch = kv.MODELS["Llama-3-70B"], 8192, 64
    element_bytes, mib = kv.ELEMENT_BYTES, 2**20
    return locals()
