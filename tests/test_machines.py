"""What hardware, operating systems and packages choose, each side on any machine.

`tests/README.md` has a table of these choices. `tools/cpus.py` pretends CPUs; what
needs a GPU is in `test_gpu_path.py`.
"""

import ctypes
import importlib
import os
import platform
import random
import socket
import sys
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from helpers import (
    ROOT,
    all_tokens_of,
    complete,
    floats,
    generate,
    greedy,
    message_of,
)
from nanopaged import LLM, BeamSearchParams, SamplingParams, paged_attention
from nanopaged.config import EngineConfig
from nanopaged.loading import processes, start_up
from nanopaged.loading.weights import products
from tools.cpus import EACH_CPU, KINDS, OWN_CPU
from tools.models import shape

NUMBA, TRITON = (
    pytest.mark.skipif(not find_spec(name), reason=f"pip install {name}")
    for name in ("numba", "triton"))
NUMBA_KINDS = [kind for kind in KINDS if kind not in ("threads", "no-numba")]


def to_bfloat16(tensors):
    tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})


# -- Processors ------------------------------------------------------------------------


@NUMBA
@pytest.mark.parametrize("cpu", NUMBA_KINDS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "size", [(64, 128), (2, 64), (30, 7), (15, 7), (512, 300)], ids=str)
def test_a_packed_product_is_that_of_torch(size, bias, dtype, cpu):
    """Our kernels compute one or two rows where W has whole blocks of 64 outputs, and
    up to 32 in float32: an odd number of rows, less than four rows of W, several
    portions. The head of a step without samples gets no row at all.
    """
    linear = torch.nn.Linear(*size, bias, dtype=dtype)
    precise = torch.nn.Linear(*size, bias)
    precise.load_state_dict(linear.state_dict())
    result = products.compute_dtype(dtype, torch.device("cpu"))
    tolerance = 1e-2 if result == torch.bfloat16 else 1e-4
    shapes = [(rows, size[0]) for rows in (0, 1, 2, 3, 4, 9, 32, 33)]
    shapes += [(1, rows, size[0]) for rows in (0, 1, 2)] + [(2, 1, size[0])]
    with torch.inference_mode():
        products.pack(linear, batch_invariant=False)
        for x in (torch.randn(shape).to(result) for shape in shapes):
            if type(linear.forward) is not partial:  # torch computes it
                x = x.to(dtype)
            torch.testing.assert_close(
                linear(x), precise(x.float()).to(x.dtype), rtol=tolerance,
                atol=tolerance)


@EACH_CPU
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_in_bfloat16_log_probabilities_are_nearly_those_of_transformers(
        family, make_model, edit_model, reference, engine):
    """In chunks, so that some steps have no sample. Two sequences at most, because our
    own kernel multiplies one row or two, and W has whole blocks in all of these models.
    """
    path = make_model(family, seed=31, vocab_size=128, intermediate_size=96,
                      tie_word_embeddings=family == "qwen3")
    path = edit_model(path, weights=to_bfloat16)
    llm = engine(path, dtype="bfloat16", max_num_seqs=2, max_num_batched_tokens=9)
    model = llm.engine.runner.model
    assert llm.engine.runner.kv_caches.dtype == torch.bfloat16
    assert {x.dtype for x in model.parameters() if x.ndim == 2} == {torch.bfloat16}
    # Where only weights, K and V are in bfloat16, less is left of a difference.
    most = 0.1 if model.model.norm.weight.dtype == torch.float32 else 0.3
    prompts = [[*range(3, 3 + length)] for length in (1, 6, 20, 41)]
    for output in llm.generate(prompts, greedy(6, logprobs=128), use_tqdm=False):
        prompt, completion = output.prompt_token_ids, output.outputs[0]
        logits = reference.logits(path, prompt + completion.token_ids)
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        found = torch.tensor([[entry[token] for token in range(128)]
                              for entry in map(floats, completion.logprobs)])
        assert 0 < (found - expected).abs().max() < most


@EACH_CPU
def test_a_step_may_have_prompts_alone_and_any_parameters(make_model, engine):
    """Prompts that are longer than a step leave the head without rows. With penalties,
    several answers and beams, steps have one row, two, and more.
    """
    path = make_model("qwen3", seed=31, vocab_size=128, intermediate_size=96)
    llm = engine(path, dtype="bfloat16", max_num_batched_tokens=8)
    rng = random.Random(0)
    prompts = [[rng.randrange(128) for _ in range(length)] for length in (1, 2, 30, 50)]
    params = [greedy(5), SamplingParams(n=2, max_tokens=5, seed=1, ignore_eos=True),
              greedy(5, repetition_penalty=1.2, frequency_penalty=0.5),
              SamplingParams(max_tokens=5, top_p=0.9, seed=2, ignore_eos=True)]
    alone = [generate(llm, [prompt], [each])
             for prompt, each in zip(prompts, params, strict=True)]
    assert [len(each[0]) for each in alone] == [1, 2, 1, 1]
    together = generate(llm, prompts, params)
    assert [[len(tokens) for tokens in each] for each in together] == [
        [5], [5, 5], [5], [5]]
    (found,) = llm.beam_search([prompts[2]], BeamSearchParams(3, 5, ignore_eos=True))
    assert {len(tokens) for tokens in all_tokens_of(found)} == {5}


@NUMBA
@OWN_CPU
@pytest.mark.parametrize(("machine", "operators", "found"), [
    ("x86_64", SimpleNamespace(_is_mkldnn_bf16_supported=lambda: False), True),
    ("aarch64", SimpleNamespace(_is_mkldnn_bf16_supported=lambda: True), True),
    ("aarch64", SimpleNamespace(_is_mkldnn_bf16_supported=lambda: False), False),
    ("arm64", SimpleNamespace(), False)],
    ids=["x86", "Graviton 3", "Graviton 2", "Mac"])
def test_each_kind_of_processor_is_asked_in_its_own_way(
        machine, operators, found, monkeypatch, cpu):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.ops, "mkldnn", operators)
    assert products.has_bfloat16() is found
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    expected = torch.bfloat16 if found else torch.float32
    assert products.compute_dtype(torch.bfloat16, cpu) == expected
    assert products.compute_dtype(torch.bfloat16, gpu) == torch.bfloat16
    assert products.compute_dtype(torch.float16, cpu) == torch.float16


@NUMBA
@OWN_CPU
def test_blocks_are_read_only_where_onednn_arranges_them_as_our_kernel_reads(
        monkeypatch, cpu):
    weight = torch.randn(128, 6).bfloat16()
    pairs = weight.view(-1, 64, 3, 2).transpose(1, 2).contiguous()

    def find(arranged, **missing):
        operators = SimpleNamespace(data_ptr=torch.Tensor.data_ptr)
        for name in missing:
            delattr(operators, name)
        monkeypatch.setattr(torch.ops, "mkldnn", operators)
        return products.find_blocks(arranged, weight)

    assert (find(pairs) == pairs.view(torch.int32).squeeze(-1).numpy().view("uint32")
            ).all()
    assert find(weight) is None and find(pairs, data_ptr=True) is None


@NUMBA
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_onednn_no_answer_is_said_not_to_depend_on_the_batch(
        dtype, llama, engine, monkeypatch):
    """In bfloat16 without instructions for it, our own kernel needs no oneDNN. Compiled
    by Numba 0.61, its rows depend on each other, too.
    """
    monkeypatch.setattr(torch.ops, "mkldnn", None)
    monkeypatch.setattr(products, "has_bfloat16", lambda: False)
    try:
        llm = engine(llama, dtype=dtype, batch_invariant=True)
        assert len(complete(llm, [5, 6, 7], greedy(4)).token_ids) == 4
        assert dtype == "bfloat16"
    except ValueError as error:
        assert f"changes the bits of a product in torch.{dtype})" in str(error)


@NUMBA
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_where_bits_depend_on_the_batch_that_is_noticed_at_the_start(
        dtype, llama, monkeypatch):
    """As with torch 2.11 on a processor without AVX-512, where the last rows of an odd
    number get other bits; and as with Numba 0.61.
    """
    def other_bits(function):
        def product(x, *arguments, **options):
            out = function(x, *arguments, **options)
            out[..., -1:, :] *= 1 + 2**-20 * (x.shape[:-1].numel() % 2)
            return out

        return product

    if dtype == "float32":
        operators = SimpleNamespace(
            _reorder_linear_weight=torch.ops.mkldnn._reorder_linear_weight,
            _linear_pointwise=SimpleNamespace(default=other_bits(
                torch.ops.mkldnn._linear_pointwise.default)))
        monkeypatch.setattr(torch.ops, "mkldnn", operators)
    else:
        monkeypatch.setattr(products, "has_bfloat16", lambda: False)
        monkeypatch.setattr(
            products, "float32_product", other_bits(products.float32_product))
    message = message_of(lambda: LLM(llama, dtype=dtype, batch_invariant=True))
    assert message.startswith("batch_invariant must be False (with this processor")


@NUMBA
@pytest.mark.parametrize(("has_bfloat16", "has_numba", "stored", "found"), [
    (True, True, "bfloat16", "bfloat16"), (True, True, "float16", "bfloat16"),
    (False, True, "bfloat16", "bfloat16"), (False, True, "float16", "float32"),
    (True, False, "bfloat16", "float32"), (True, True, "float32", "float32")])
def test_auto_takes_sixteen_bits_where_they_are_fast(
        has_bfloat16, has_numba, stored, found, monkeypatch):
    monkeypatch.setattr(products, "has_bfloat16", lambda: has_bfloat16)
    if not has_numba:
        monkeypatch.setattr(start_up, "products", None)
    share = SimpleNamespace(dtype=getattr(torch, stored))
    dtype = start_up.pick_dtype(EngineConfig(), share, torch.device("cpu"))
    assert dtype == getattr(torch, found)


def test_only_a_large_model_gets_several_threads(llama, engine, tmp_path):
    sizes = shape((2, 1, 8), 256, 2**16, num_hidden_layers=1, tie_word_embeddings=True)
    AutoConfig.for_model("llama", **sizes).save_pretrained(tmp_path)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for model, expected in ((llama, 1), (tmp_path, 2)):
            llm = engine(model, load_format="dummy", max_model_len=32)
            with llm.engine.runner.settings():
                assert torch.get_num_threads() == expected
            assert len(complete(llm, [5, 6, 7], greedy(4)).token_ids) == 4
    finally:
        torch.set_num_threads(before)


# -- Threads, and the C library --------------------------------------------------------


def run_again(module):
    """Run the file of a module once more; returns the new module."""
    spec = importlib.util.spec_from_file_location("again", module.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    return again


@NUMBA
@pytest.mark.parametrize("error", [RuntimeError, AttributeError, OSError])
def test_loops_are_compiled_even_if_they_cannot_be_kept(error, monkeypatch):
    """Without a folder to write to, with Numba disabled, or without sources."""
    from nanopaged.cpu import threads

    def fail(path):
        raise error

    monkeypatch.setattr(Path, "read_bytes", fail)
    kernel = threads.loop.__wrapped__(paged_attention.run_program, parallel=False)
    assert kernel.py_func.__code__ is threads.run_programs.__code__


@NUMBA
@pytest.mark.parametrize(("system", "first"), [
    ("linux", "omp"), ("darwin", "workqueue"), ("win32", "omp")])
def test_numba_is_told_which_threads_to_use_before_it_starts_any(
        system, first, monkeypatch):
    import numba

    from nanopaged.cpu import threads

    monkeypatch.setattr(numba.config, "THREADING_LAYER_PRIORITY", [])
    monkeypatch.setattr(sys, "platform", system)
    run_again(threads)
    assert numba.config.THREADING_LAYER_PRIORITY[0] == first


@NUMBA
@pytest.mark.parametrize(("system", "library", "calls", "forks"), [
    ("linux", "glibc", ["mallopt", "mallopt", "malloc_trim"], 1),
    ("linux", "musl", [], 1), ("darwin", "", [], 1), ("win32", "", [], 0)])
def test_only_glibc_is_asked_to_keep_memory(system, library, calls, forks, monkeypatch):
    from nanopaged.cpu import threads

    called, registered = [], []
    functions = {name: lambda *_, name=name: called.append(name)
                 for name in ("mallopt", "malloc_trim") if library == "glibc"}
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(**functions))
    monkeypatch.setattr(
        os, "register_at_fork", lambda **_: registered.append(1), raising=False)
    monkeypatch.setattr(sys, "platform", system)
    threads.prepare_process.__wrapped__()
    threads.give_memory_back()
    assert called == calls and len(registered) == forks


# -- Memory ----------------------------------------------------------------------------

MEMINFO = "MemTotal: 64000000 kB\nMemAvailable:   4194304 kB\n"  # 4 GiB
GIB = 2**30
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(("files", "expected"), [
    ({}, 4 * GIB),
    ({f"{V2}/memory.max": "max\n", "proc/self/cgroup": "0::/\n"}, 4 * GIB),
    ({f"{V2}/memory.max": "3221225472\n"}, 3 * GIB),  # a container
    ({f"{V2}/a/memory.max": "2147483648", f"{V2}/a/b c/memory.max": "max",
      "proc/self/cgroup": "0::/a/b c\n"}, 2 * GIB),  # systemd, Slurm
    ({f"{V2}/other/memory.max": "1", "proc/self/cgroup": "0::/a\n"}, 4 * GIB),
    ({f"{V1}/memory.limit_in_bytes": "1073741824",
      "proc/self/cgroup": "9:cpu:/x\n7:memory:/docker/ab\n"}, GIB),
    ({f"{V1}/memory.limit_in_bytes": "9223372036854771712",
      f"{V1}/job/step/memory.limit_in_bytes": "1073741824",
      f"{V1}/x/memory.limit_in_bytes": "1",
      "proc/self/cgroup": "9:cpu:/x\n7:hugetlb,memory:/job/step\n0::/job\n"}, GIB),
    ({f"{V1}/memory.limit_in_bytes": "3221225472", "proc/self/status":
      "VmPeak: 9 kB\nVmRSS:  1048576 kB\n"}, 2 * GIB)],
    ids=["none", "v2 without one", "v2", "v2 nested", "v2 of others", "v1", "v1 nested",
         "what is used counts"])
def test_the_smallest_limit_of_memory_counts(files, expected, tmp_path):
    for name, text in ({"proc/meminfo": MEMINFO} | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert start_up.free_memory(tmp_path) == expected


@pytest.mark.parametrize("has_sysconf", [True, False], ids=["Mac", "Windows"])
def test_without_proc_half_of_the_memory_counts_as_free(
        has_sysconf, tmp_path, monkeypatch):
    if has_sysconf:
        sizes = {"SC_PHYS_PAGES": 2**21, "SC_PAGE_SIZE": 2**12}
        monkeypatch.setattr(os, "sysconf", sizes.get, raising=False)
    else:
        monkeypatch.delattr(os, "sysconf", raising=False)
    assert start_up.free_memory(tmp_path) == 4 * GIB


# -- GPUs, packages, and other processes -----------------------------------------------


def pretend_gpu(monkeypatch, major, has_triton=True, hip=None):
    """What is asked about a GPU before anything runs there."""
    properties = SimpleNamespace(major=major, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    if not has_triton:
        monkeypatch.setitem(sys.modules, "triton", None)
    elif not find_spec("triton"):
        pytest.skip("pip install triton")
    return torch.device("cuda", 0)


@pytest.mark.parametrize(("major", "has_triton", "found"), [
    (9, True, "triton"), (8, True, "triton"), (7, True, "torch"), (9, False, "torch")])
def test_auto_takes_our_kernels_where_they_can_run(
        major, has_triton, found, monkeypatch):
    """Not on a GPU before Ampere, and not without Triton, as on Windows."""
    device = pretend_gpu(monkeypatch, major, has_triton)
    assert start_up.pick_backend("auto", torch.float16, device) == found
    if found == "torch":
        message = message_of(
            lambda: start_up.pick_backend("triton", torch.float16, device))
        assert "one of ['torch'] with this device, dtype and packages" in message


@pytest.mark.parametrize(("major", "stored", "found"), [
    (9, "bfloat16", "bfloat16"), (7, "bfloat16", "float16"), (9, "float32", "float32")])
def test_auto_takes_the_dtype_that_a_gpu_is_fast_in(major, stored, found, monkeypatch):
    device = pretend_gpu(monkeypatch, major)
    share = SimpleNamespace(dtype=getattr(torch, stored))
    assert start_up.pick_dtype(EngineConfig(), share, device) == getattr(torch, found)


@pytest.mark.parametrize(("major", "hip", "driver", "uses_pdl"), [
    (9, None, 12030, True), (9, None, 12020, False), (8, None, 13000, False),
    (9, "7.0", None, False)], ids=["Hopper", "an old driver", "Ampere", "AMD"])
def test_kernels_start_early_only_where_the_gpu_can(
        major, hip, driver, uses_pdl, monkeypatch):
    device = pretend_gpu(monkeypatch, major, hip=hip)
    monkeypatch.setattr(
        torch._C, "_cuda_getDriverVersion", lambda: driver, raising=False)
    sizes = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    backend = start_up.make_backend("triton", sizes, 16, torch.float16, device)
    assert backend.uses_pdl is uses_pdl


@TRITON
def test_without_flash_attn_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    sizes = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    message = message_of(lambda: start_up.make_backend(
        "flash", sizes, 256, torch.float16, torch.device("cpu")))
    assert message.startswith("attention_backend='flash' needs a package that is miss")


@TRITON
@pytest.mark.parametrize("options", [(16, "float16"), (256, "float32")])
def test_what_flash_attn_would_refuse_is_refused_at_the_start(options, llama):
    found = message_of(lambda: LLM(
        llama, attention_backend="flash", block_size=options[0], dtype=options[1]))
    assert found.startswith("block_size (with a dtype of 16 bits) must be a multipl")


@TRITON
def test_an_error_while_recording_is_not_hidden(monkeypatch):
    """Only what waits for the GPU means that a model cannot be recorded."""
    from nanopaged.gpu import graphs

    def fail(metadata):
        raise RuntimeError("an error of a kernel")

    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    runner = SimpleNamespace(settings=nullcontext, prepare=print, forward=fail,
                             padding_block=0)
    with pytest.raises(RuntimeError, match="an error of a kernel"):
        graphs.record(runner)
    assert modes == ["error", "default"]


@pytest.mark.parametrize("name", ["posix", "nt"])
def test_a_port_in_use_is_an_error_on_every_system(name, monkeypatch):
    """Windows lets two servers share a port if each allows that it is used again."""
    from nanopaged.tour import live

    monkeypatch.setattr(os, "name", name)
    assert run_again(live).Server.allow_reuse_address == (name == "posix")
    assert not live.Server.allow_reuse_port


@pytest.mark.parametrize(("system", "names", "expected"), [
    ("Linux", ["eth0", "lo"], "lo"), ("Mac", ["lo0", "en0"], "lo0"),
    ("Windows", ["ethernet_32769", "loopback_0"], "loopback_0")])
@pytest.mark.parametrize("has_gpu", [False, True])
def test_ranks_listen_on_the_loopback_alone(
        system, names, expected, has_gpu, monkeypatch):
    """Whatever a system calls it. On GPUs, tensors go by NCCL."""
    calls = []
    for name, value in {
            "init_process_group": calls.append, "get_rank": lambda: 1,
            "new_group": lambda **_: None}.items():
        monkeypatch.setattr(processes.dist, name, value)
    monkeypatch.setattr(processes.weakref, "finalize", lambda *_: None)
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(names)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
                        "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    ranks = processes.join(EngineConfig(tensor_parallel_size=2))
    assert os.environ["GLOO_SOCKET_IFNAME"] == expected and ranks.rank == 1
    assert calls == ([1, "cpu:gloo,cuda:nccl"] if has_gpu else ["gloo"])


@pytest.mark.parametrize("package", ["numba", "triton"])
def test_the_engine_runs_without_a_package(package, warm, tmp_path):
    code = f"""if True:
        import sys
        sys.modules[{package!r}] = None
        from nanopaged import LLM, SamplingParams
        params = SamplingParams(temperature=0, max_tokens=4)
        for dtype in ("auto", "float32", "bfloat16"):
            with LLM(dtype=dtype, device="cpu", num_blocks=64) as llm:
                (found,) = llm.generate([[10, 20, 30]], params, use_tqdm=False)
                print(*found.outputs[0].token_ids)"""
    status, printed = warm("-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert status == 0 and printed.count("12 199 41 70\n") == 3, printed


# -- Code of strangers -----------------------------------------------------------------

MODEL = """{"model_type": "strange", "auto_map": {
    "AutoConfig": "strange.Config", "AutoModelForCausalLM": "strange.Model"}}"""
TOKENIZER = """{"tokenizer_class": "Strange",
    "auto_map": {"AutoTokenizer": ["strange.Strange", null]}}"""


@pytest.mark.parametrize(("name", "text"), [
    ("config.json", MODEL), ("tokenizer_config.json", TOKENIZER)])
def test_the_code_of_a_checkpoint_never_runs(
        name, text, text_model, edit_model, tmp_path, monkeypatch):
    """It is refused at once, and nothing is asked on stdin."""
    asked = []
    monkeypatch.setattr("builtins.input", lambda *_: asked.append(1) or "y")
    path = edit_model(text_model)
    (path / "strange.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (path / name).write_text(text)
    (path / "tokenizer.json").rename(path / "vocab.txt")  # of a class that is unknown
    message = message_of(lambda: LLM(path, device="cpu"))
    assert "must not need Python code that the checkpoint brings along" in message
    assert asked == [] and not (tmp_path / "ran").exists()


# -- This file's own table -------------------------------------------------------------


def test_the_table_of_choices_names_tests_that_exist():
    text = (ROOT / "tests/README.md").read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    sources = {path: path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")}
    assert len(rows) > 20
    for row in rows:
        *_, tests = row.strip("| ").split(" | ")
        for test in tests.split(", "):
            assert any(f"def {test.strip('`')}" in text for text in sources.values()), (
                row)
