"""What a GPU will do, as far as a machine without one can know.

The engine runs on a GPU that is only pretended (gpu/pretended.py), from its start to
its last token. What its kernels would be compiled for is compiled ahead of time, for
real GPUs.
"""

import gc
import json
import logging
import random
import re
import threading
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo import eval_frame

from helpers import (
    add_all,
    complete,
    counters,
    drain,
    draw_requests,
    greedy,
    message_of,
    new_group,
    run_python,
    sample_for,
    serve,
)
from nanopaged import LLM, SamplingParams

triton = pytest.importorskip("triton", reason="pip install triton")

from gpu.pretended import PretendedGpu  # noqa: E402

OPTIONS = {"max_num_seqs": 7, "max_model_len": 40, "max_num_batched_tokens": 16}


@pytest.fixture
def quick_gpu():
    """One whose kernels compute nothing."""
    with PretendedGpu(computes=False) as gpu:
        yield gpu


@pytest.fixture
def tiny(make_model):
    """Small, as the interpreter takes some milliseconds for each program."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    return make_model("llama", num_hidden_layers=1, hidden_size=32, vocab_size=160,
                      intermediate_size=72, seed=11, **sizes)


def requests(seed=24, count=8, max_tokens=12, **more):
    return list(draw_requests(
        seed, count, vocab_size=160, lengths=[1, 2, 3, 7, 8, 9, 20], most=3,
        max_tokens=max_tokens, stop=(), **more))


def take_random_steps(llm, num_steps):
    """Requests come, with all that changes what a step launches; some are aborted."""
    rng, ids = random.Random(0), []
    changes = [{"presence_penalty": 1}, {"frequency_penalty": 0.5},
               {"repetition_penalty": 1.2}, {"logit_bias": {3: 1}},
               {"logits_processors": [lambda ids, logits: -logits]}, *[{}] * 5]
    drawn = iter(requests(0, num_steps, max_tokens=20, more=lambda rng: {
        "top_p": rng.choice([1, 0.9]), "top_k": rng.choice([0, 1, 5]),
        "min_p": rng.choice([0, 0.1]), "ignore_eos": rng.random() < 0.5,
        "prompt_logprobs": rng.choice([None, None, 2])} | rng.choice(changes)))
    for _ in range(num_steps):
        if rng.random() < 0.3 or not llm.has_unfinished_requests():
            ids.append(llm.add_request(*next(drawn)))
        if rng.random() < 0.02:
            llm.abort_request(rng.choice(ids))
        llm.step()
    drain(llm)


# -- From the start to the last token --------------------------------------------------


@pytest.mark.parametrize("options", [
    {"num_blocks": 11, "preemption_mode": "swap"}, *(
        pytest.param(options, marks=pytest.mark.slow) for options in (
            {"num_blocks": None}, {"num_blocks": 11, "attention_backend": "torch"},
            {"num_blocks": 11, "enforce_eager": True}))], ids=str)
def test_an_engine_on_a_gpu_serves_what_it_serves_on_a_cpu(tiny, engine, options):
    work = requests(count=5)
    expected = serve(engine(tiny, **OPTIONS), work)
    with PretendedGpu() as gpu:
        llm = engine(tiny, device="cuda", **(OPTIONS | options))
        assert llm.engine.runner.kv_caches.is_cuda and llm.engine.steps_ahead
        assert serve(llm, work) == expected
        assert gpu.selected == {0}, "a thread may have another GPU as its default"
        replayed = gpu.launches.count("graph")
        if options["num_blocks"]:
            mode = options.get("preemption_mode", "recompute")
            assert counters(llm)[f"preemptions_{mode}"] > 0
        has_graphs = not {"enforce_eager", "attention_backend"} & {*options}
        assert (replayed > 5) == has_graphs
        assert not has_graphs or gpu.capture_mode == "thread_local"
        if "enforce_eager" in options:
            assert not gpu.graphs and not gpu.compiled
        assert llm.stats().steps > replayed


def test_recorded_steps_use_the_head_that_is_loaded(make_model, engine):
    """The new weights have a head of its own, which was tied to the embeddings."""
    tied = make_model("qwen3", seed=3, tie_word_embeddings=True)
    weights = load_file(tied / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0)
    work, answers = requests(count=3), []
    with PretendedGpu() as gpu:
        for device in ("cpu", "cuda"):
            llm = engine(tied, device=device, **OPTIONS)
            model = llm.engine.runner.model  # what is copied to this GPU is not tied
            model.lm_head.weight = model.model.embed_tokens.weight
            llm.load_weights(weights.items())
            answers.append(serve(llm, work))
        assert "graph" in gpu.launches
    assert answers[0] == answers[1]


@pytest.mark.parametrize("most", [1, 3, 15, 17, 33])
def test_every_number_of_decodes_has_a_graph(tiny, engine, quick_gpu, most):
    llm = engine(tiny, device="cuda", max_num_seqs=most)
    for count in {1, 2, most // 2, most - 1, most} - {0}:
        add_all(llm, [[1, 2]] * count, SamplingParams(max_tokens=3, ignore_eos=True))
        llm.step()
        quick_gpu.launches.clear()
        llm.step()
        assert quick_gpu.launches[0] == "graph", f"no graph for {count} of {most}"
        assert "paged_attention" not in quick_gpu.launches
        drain(llm)


def test_the_pool_gets_what_is_left(tiny, engine, quick_gpu):
    """An engine that came before, with a larger pool, does not count."""
    options = OPTIONS | {"max_num_seqs": 10_000, "num_blocks": None}
    quick_gpu.free_bytes, sizes = 350 << 20, []
    for utilization in (0.9, 0.9, 0.85):
        llm = engine(tiny, device="cuda", enforce_eager=True,
                     gpu_memory_utilization=utilization, **options)
        sizes.append(llm.engine.runner.kv_caches.nbytes)
        quick_gpu.held += 1 << 40
    assert sizes[0] == sizes[1] > sizes[2] > 0
    assert sizes[0] <= 0.9 * quick_gpu.free_bytes - (256 << 20), "nothing for graphs"


def test_a_small_gpu_is_told_what_to_do(tiny, engine):
    with PretendedGpu(free_bytes=1 << 20, computes=False) as gpu:
        message = message_of(lambda: engine(tiny, device="cuda", num_blocks=None))
        assert "num_blocks must be at least 1 (memory is low)" in message
        assert not gpu.graphs


def test_an_old_gpu_serves_by_torch_and_not_by_triton(tiny, engine):
    with PretendedGpu(capability=(7, 5), computes=False):
        message = message_of(lambda: engine(
            tiny, device="cuda", attention_backend="triton"))
        assert "one of ['torch'] with this device, dtype and packages" in message
        llm = engine(tiny, device="cuda", **OPTIONS)
        assert serve(llm, requests(count=2))


def test_the_start_draws_random_weights_on_the_gpu_and_says_what_it_does(
        tiny, engine, quick_gpu, caplog):
    with caplog.at_level(logging.INFO, "nanopaged"):
        llm = engine(tiny, device="cuda", load_format="dummy", **OPTIONS)
    told = "TritonAttention in torch.float32.*KV cache: 64 blocks.*4 CUDA graphs"
    assert re.search(told, caplog.text, re.S)
    assert all(weight.is_cuda for weight in llm.engine.runner.model.parameters())
    assert serve(llm, requests(count=2))


def test_a_graph_records_compiled_functions_whatever_the_caller_has_set(
        tiny, engine, quick_gpu):
    with torch.compiler.set_stance("force_eager"):
        engine(tiny, device="cuda", **OPTIONS)
    for graph in quick_gpu.graphs:
        assert {"add_norm", "silu_mul", "norm_rotate"} <= {
            name for name, _ in graph.operations}


def test_an_eager_engine_lets_others_run_compiled(tiny, engine, quick_gpu):
    """While one thread is within a step that compiles nothing."""
    compiled = engine(tiny, device="cuda", **OPTIONS)
    eager = engine(tiny, device="cpu", enforce_eager=True, **OPTIONS)
    is_within, may_go_on, ways = threading.Event(), threading.Event(), []

    def stay(_, logits):
        is_within.set()
        assert may_go_on.wait(60)
        return logits

    def note(_, logits):
        ways.append(eval_frame._stance.stance)
        return logits

    thread = threading.Thread(target=complete, args=(
        eager, [1, 2], greedy(1, logits_processors=[stay])))
    thread.start()
    assert is_within.wait(60)
    complete(compiled, [1, 2], greedy(1, logits_processors=[note]))
    may_go_on.set()
    thread.join()
    assert ways == ["default"]


def test_every_graph_is_reset_before_an_engine_goes(tiny, engine, quick_gpu):
    """Or else the end of NCCL's group would wait for it for good."""
    for forget in (LLM.shutdown, lambda llm: None):
        llm = LLM(tiny, device="cuda", dtype="float32", num_blocks=64, **OPTIONS)
        graphs, quick_gpu.graphs = quick_gpu.graphs, []
        assert graphs and not any(graph.is_reset for graph in graphs)
        forget(llm)
        del llm
        gc.collect()
        assert all(graph.is_reset for graph in graphs)


# -- Nothing is compiled while serving -------------------------------------------------

def count_variants(calls):
    """How many graphs torch.compile has made after each of these calls."""
    torch._dynamo.reset()
    graphs, compiled, counts = [], {}, []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def build(x):
        if hasattr(x, "stride"):
            return torch.empty_strided(x.shape, x.stride, dtype=x.dtype).fill_(1)
        return [build(y) for y in x] if isinstance(x, (list, tuple)) else x

    with torch.inference_mode(), torch._dynamo.config.patch(recompile_limit=64):
        for function, arguments in calls:
            if function not in compiled:
                compiled[function] = torch.compile(
                    function, dynamic=True, backend=backend)
            compiled[function](*build(arguments))
            counts.append(len(graphs))
    torch._dynamo.reset()
    return counts


@pytest.mark.parametrize("num_steps", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_serving_compiles_nothing_that_the_start_has_not(
        make_model, engine, num_steps):
    """In 16 bits, because whatever changes logits computes in 32."""
    options = {"max_model_len": 120, "max_num_seqs": 17, "num_blocks": 24}
    with PretendedGpu(computes=False) as gpu:
        llm = engine(make_model("qwen3", seed=3), device="cuda", dtype="float16",
                     max_num_batched_tokens=64, **options)
        at_start, num_at_start = {*gpu.kernel_keys}, len(gpu.compiled)
        assert {name for name, _ in gpu.compiled} == {
            "add_norm", "silu_mul", "norm_rotate", "fill_pending", "draw",
            "lowest_kept", "penalize", "mark"}
        take_random_steps(llm, num_steps)
    assert counters(llm)["preemptions_recompute"] > 0
    new = {*gpu.kernel_keys} - at_start
    assert not new, f"Triton compiles {sorted(new)[0]} while the engine serves"
    counts = count_variants(list(gpu.compiled.values()))
    assert counts[-1] == counts[num_at_start - 1], "a function is compiled once more"
    # Each for one row, and for more; two in 32 bits, too; tokens for as many as fit.
    assert counts[-1] <= 2 * 10 + 1


# -- What a step costs -----------------------------------------------------------------


def cost_of_a_step(llm, gpu, params, count=5):
    """Launches and copies to the device in a step of decodes; the host waits once."""
    add_all(llm, [[1, 2, 3]] * count, params)
    for _ in range(3):
        llm.step()
    gpu.launches.clear(), gpu.waits.clear()
    before, before_to_host = gpu.copies, gpu.copies_to_host
    llm.step()
    copies, launches = gpu.copies - before, list(gpu.launches)
    assert gpu.waits == ["an event"], f"the host waits for {gpu.waits}"
    assert gpu.copies_to_host == before_to_host + 1
    drain(llm)
    return launches, copies


def test_a_decode_step_of_qwen3_launches_no_more_than_before(
        make_model, engine, quick_gpu):
    """In bfloat16, with small matrices. Compiled functions count as one."""
    gpu, path = quick_gpu, make_model("qwen3", num_hidden_layers=4, seed=3)
    llm = engine(path, device="cuda", dtype="bfloat16", **OPTIONS)
    nodes = Counter(name for name, _ in gpu.graphs[0].operations)
    assert sum(nodes.values()) <= 4 * 11 + 16, f"a graph has more nodes: {nodes}"
    options = {"max_tokens": 9, "ignore_eos": True}
    for temperature in (0, 0.6):
        params = SamplingParams(temperature=temperature, **options)
        assert cost_of_a_step(llm, gpu, params) == (["graph", "copy_"], 1)
    changes = {"repetition_penalty": 1.2, "presence_penalty": 1, "logit_bias": {3: 1},
               "min_tokens": 9, "stop_token_ids": [5, 6]}
    launches, _ = cost_of_a_step(llm, gpu, SamplingParams(**options, **changes))
    assert len(launches) <= 2 + 10


def test_nothing_waits_but_the_reading_of_tokens(tiny, engine, quick_gpu):
    """Whatever is sampled; only log-probabilities, and so beams, are read at once. (A
    swap waits, too.)
    """
    llm = engine(tiny, device="cuda", num_blocks=14, **OPTIONS)
    plain = [(prompt, params) for prompt, params in requests(count=12)
             if isinstance(params, SamplingParams) and params.logprobs is None]
    quick_gpu.waits.clear()
    serve(llm, plain + [([1, 2], SamplingParams(
        top_p=0.9, top_k=5, min_tokens=3, stop_token_ids=[5, 6]))])
    assert {*quick_gpu.waits} == {"an event"}
    assert len(quick_gpu.waits) <= llm.stats().steps


@pytest.mark.parametrize(("limits", "expected"), [
    ({"top_p": 0.9}, ("sort", (2, 160))), ({"top_k": 3}, ("topk", (2, 160)))], ids=str)
def test_only_the_rows_that_have_limits_are_sorted(limits, expected, monkeypatch):
    """And wholly only if all their logits are asked for."""
    functions = {name: getattr(torch.Tensor, name) for name in ("sort", "topk")}
    sorts = set()
    for name in functions:
        def note(x, *arguments, name=name, **more):
            sorts.add((name, tuple(x.shape)))
            return functions[name](x, *arguments, **more)

        monkeypatch.setattr(torch.Tensor, name, note)
    params = [{}, limits, {"min_p": 0.1}, {"temperature": 0}, limits, {}]
    seqs = [new_group([1], SamplingParams(**each)).sequences[0] for each in params]
    logits = torch.randn(6, 160, generator=torch.Generator().manual_seed(0)).half()
    with PretendedGpu():
        tokens = sample_for(logits.to("cuda"), seqs).read()
    assert sorts == {expected}
    assert tokens == sample_for(logits, seqs).read()


# -- Compiled ahead of time ------------------------------------------------------------

COMPILE = """
import json, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nanopaged.gpu import kernels

def tool(knob, *words):
    result = subprocess.run([knob.path, *words], capture_output=True, text=True)
    return result.stdout + result.stderr

for arch, name, kinds, options in json.load(open(sys.argv[1])):
    kernel = getattr(kernels, name)
    pairs = list(zip(kernel.arg_names, kinds))
    signature = {arg: kind for arg, (kind, _) in pairs}
    constants = {arg: value for arg, (kind, value) in pairs if kind == "constexpr"}
    attributes = {(i,): [["tt.divisibility", 16]] for i, (_, (kind, value))
                  in enumerate(pairs) if kind != "constexpr" and value == "D"}
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32),
                              options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = tool(triton.knobs.nvidia.cuobjdump, "-res-usage", file.name)
        registers, stack, local = (int(re.search(rf"{what}:(\\d+)", usage)[1])
                                   for what in ("REG", "STACK", "LOCAL"))
    print(json.dumps([registers, stack + local, compiled.metadata.shared]))
"""
# What a program may have, and a multiprocessor has, in KiB.
SHARED_MEMORY = {80: (163, 164), 86: (99, 100), 90: (227, 228)}
HEADS = [  # query heads, KV heads, head_dim
    ((16, 8, 128), "bfloat16"), ((14, 2, 64), "float16"), ((32, 32, 80), "bfloat16"),
    ((8, 1, 256), "bfloat16"), ((4, 2, 16), "float32"), ((4, 2, 128), "float32")]


def compile_kernels(jobs, folder):
    """[registers, bytes spilled, bytes of shared memory] of each."""
    (folder / "jobs").write_text(json.dumps(jobs))
    lines = run_python("-c", COMPILE, str(folder / "jobs"), TRITON_INTERPRET=None)
    return list(map(json.loads, lines.splitlines()))


@pytest.mark.parametrize("arch", [
    pytest.param(arch, marks=pytest.mark.slow if arch == 90 else pytest.mark.sweep)
    for arch in SHARED_MEMORY])
def test_kernels_compile_for_gpus_and_fit_into_them(arch, make_model, engine, tmp_path):
    """As the engine launches them; what decodes run spills no registers."""
    jobs = []
    for (query_heads, kv_heads, head_dim), dtype in HEADS:
        path = make_model(
            "qwen3", num_attention_heads=query_heads, num_key_value_heads=kv_heads,
            head_dim=head_dim, hidden_size=64, intermediate_size=64, vocab_size=160,
            num_hidden_layers=1, max_position_embeddings=256)
        with PretendedGpu(divmod(arch, 10), computes=False) as gpu:
            engine(path, device="cuda", dtype=dtype, block_size=16, max_model_len=64,
                   max_num_seqs=4, max_num_batched_tokens=64)
        for jit, _, kinds, options in gpu.kernel_keys.values():
            jobs.append((arch, jit.__name__, kinds, options))
            if jit.__name__ == "paged_attention":  # and with a window and sinks
                more = dict(zip(jit.arg_names, kinds, strict=True))
                more |= {"sinks": more["q"], "WINDOW": ("constexpr", 128)}
                jobs.append((arch, jit.__name__, [*more.values()], options))
    assert {name for _, name, *_ in jobs} == {"store", "paged_attention", "merge_parts"}
    for job, usage in zip(jobs, compile_kernels(jobs, tmp_path), strict=True):
        _, name, kinds, options = job
        registers, spills, shared = usage
        most, whole = SHARED_MEMORY[arch]
        assert shared <= most << 10, job
        is_chunk = options.get("num_warps") == 8
        assert spills == 0 or is_chunk or kinds[0][0] == "*fp32", job
        if name == "paged_attention" and kinds[0][0] == "*bf16" and (
                ("constexpr", 128) in kinds[-5:]) and not is_chunk:
            num_programs = {80: 2, 90: 3}.get(arch, 1)
            assert num_programs * 128 * registers <= 64 << 10, job
            assert num_programs * (shared + 1024) <= whole << 10, job
