"""The calculator: its formulas beside a second computation, its command, its page."""

import json
import random
from typing import NamedTuple

import pytest

from helpers import ROOT
from nanopaged.tour import kv, sizes
from nanopaged.tour.__main__ import main
from nanopaged.tour.guide import lessons, paper
from nanopaged.tour.page import calculator
from test_tour_browser import open_page, write_page  # noqa: F401

BANDWIDTH, RATE = 0.8 * 3.35e12, 0.5 * 989e12  # of an H100, as the page assumes
STATE = 4 * 32 * 128 * 128 + 2 * 3 * 8192  # bytes: gated delta net, and convolution
# No paper has Qwen3-Next's exact count: experts and routers, three of four layers with
# states, one with gated attention, and the embeddings twice.
QWEN3_NEXT = (48 * (513 * 3 * 2048 * 512 + 2048 * 512)
              + 36 * (2048 * (8192 + 4096 + 64) + 4 * 8192 + 4096 * 2048)
              + 12 * (2048 * (8192 + 2 * 512) + 4096 * 2048) + 2 * 151936 * 2048)


class Second(NamedTuple):
    """What a model's paper, card or configuration says, worked out by hand."""

    weights: float  # as published, with all embeddings
    embeddings: float  # of them, those that are only looked up
    head: float
    idle: float  # in experts that a token does not meet
    key: float  # bytes of K and V of a token in a layer
    full: int  # layers that keep all tokens
    windows: tuple = (0, 0)  # layers, tokens
    states: int = 0  # layers
    experts: tuple = (1, 1)  # all, active
    pair: int = 4 * 4096  # operations, for a query and a key of a prompt
    decoded: int = 0  # and of a decode, if they are others
    gpus: int = 1


MODELS = {
    "Qwen3-0.6B": Second(596_049_920, 0, 151936 * 1024, 0, 4 * 8 * 128, 28,
                         pair=4 * 16 * 128),
    "Llama-3-8B": Second(8_030_261_248, 128256 * 4096, 128256 * 4096, 0, 4096, 32),
    "Llama-3-70B": Second(70_553_706_496, 128256 * 8192, 128256 * 8192, 0, 4096 / 4, 80,
                          pair=4 * 8192, gpus=4),
    "Gemma-3-27B": Second(25.6e9 + 262208 * 5376, 0, 262208 * 5376, 0, 4 * 16 * 128, 10,
                          (52, 1024)),
    "Mixtral-8x7B": Second(46_702_792_704, 32000 * 4096, 32000 * 4096,
                           32 * 6 * 3 * 4096 * 14336, 4096 / 2, 32, experts=(8, 2),
                           gpus=2),
    "gpt-oss-20b": Second(20.91e9, 201088 * 2880, 201088 * 2880,
                          24 * 28 * 3 * 2880**2, 4 * 8 * 64, 12, (12, 128),
                          experts=(32, 4)),
    "DeepSeek-V3": Second(671e9, 129280 * 7168, 129280 * 7168,
                          58 * 248 * 3 * 7168 * 2048, 2 * 576, 61, experts=(256, 8),
                          pair=2 * 128 * (192 + 128), decoded=2 * 128 * (576 + 512),
                          gpus=32),
    "Qwen3-Next-80B-A3B": Second(QWEN3_NEXT, 151936 * 2048, 151936 * 2048,
                                 48 * 502 * 3 * 2048 * 512, 4 * 2 * 256 / 2, 12,
                                 states=36, experts=(512, 10), gpus=4)}


def worked_out(model, seqs, tokens_in=4000, tokens_out=800):
    """Room, bytes, a step, a prompt and the bend, without the calculator's formulas."""
    length, (layers, window) = tokens_in + tokens_out / 2, model.windows
    count, active = model.experts
    chat = model.key * (model.full * length + layers * min(length, window))
    states = model.states * STATE / model.gpus
    room = 0.9 * 85e9 - 2 * model.weights / model.gpus
    multiplied = model.weights - model.embeddings - model.idle
    missed = (1 - active / count) ** seqs  # a share of the experts
    all_experts = model.idle * count / max(count - active, 1)
    read = 2 * (model.weights - model.embeddings - missed * all_experts) / model.gpus
    keys = model.full * length + layers * min(length, window)
    seen = model.full * tokens_in**2 / 2 + layers * (
        window * tokens_in - window**2 / 2 if layers else 0)
    decoded = model.decoded or model.pair
    step = max(read / BANDWIDTH, 2 * seqs * multiplied / RATE / model.gpus) + max(
        seqs * (chat + 2 * states) / BANDWIDTH,
        seqs * keys * decoded / RATE / model.gpus)
    bytes_read = 2 * (model.weights - model.embeddings)
    prompt = seen * model.pair / RATE + max(
        2 * tokens_in * (multiplied - model.head) / RATE, bytes_read / BANDWIDTH)
    return {"weights_gb": 2e-9 * model.weights / model.gpus,
            "room_tokens": room / (chat + states) * length, "step_ms": 1000 * step,
            "prompt_ms": 1000 * prompt / model.gpus,
            "bend": bytes_read / BANDWIDTH / (2 * multiplied / RATE)}


@pytest.mark.parametrize("seqs", [1, 5, 64, 512])
@pytest.mark.parametrize("name", MODELS)
def test_figures_are_those_of_a_second_computation(name, seqs):
    given = sizes.choose(name, "H100", gpus=MODELS[name].gpus, tokens_in=4000,
                         tokens_out=800)
    known = sizes.evaluate(given, "fixed")
    known = sizes.evaluate(known | {"running": seqs}, "step")
    expected = worked_out(MODELS[name], seqs)
    assert {figure: known[figure] for figure in expected} == pytest.approx(
        expected, rel=0.01)


def test_the_chapters_compute_llama_as_the_calculator_does():
    gpu = {"bytes_per_s": BANDWIDTH, "flops_per_s": RATE}
    for seqs, kv_bits in ((1, 16), (64, 8), (400, 16)):
        given = sizes.choose("Llama-3-8B", "H100", tokens_in=2048, tokens_out=0,
                             kv_bits=kv_bits)
        known = sizes.evaluate(given, "fixed")
        known = sizes.evaluate(known | {"running": seqs}, "step")
        assert kv.step_ms(gpu, seqs, 2048, kv_bits / 16) == pytest.approx(
            known["step_ms"], rel=0.001)
    assert sum(kv.prompt_ms(gpu, 2048)) == pytest.approx(known["prompt_ms"], rel=0.001)
    assert kv.EXAMPLE["room"] == pytest.approx(known["room_tokens"], rel=0.001)


def test_measured_steps_are_above_the_floor_by_what_the_page_tells():
    """The bytes alone are the floor that was recorded with an H100's steps."""
    parts = raw("gpu-h100")["parts"]
    tasks = parts["step"]["tasks"]
    share = tasks["limits"]["bytes_per_s"] / 3.35e12
    for seqs, row in paper.MEASURED["h100"]["steps"].items():
        recorded = tasks[f"step of {seqs}"]
        assert (row["keys"], row["step_ms"]) == (recorded["keys"], recorded["step_ms"])
        known = lessons.step_of(int(seqs), row["keys"], bandwidth_share=share,
                                flops_share=1)
        assert known["step_ms"] == pytest.approx(recorded["floor_ms"], rel=0.01)
    decode = raw("cpu-decode")["decode"]["nanopaged"]
    for seqs, row in paper.MEASURED["cpu"]["steps"].items():
        rate = decode[f"decode, batch {seqs}"]["median"]
        assert row["step_ms"] == pytest.approx(1000 * int(seqs) / rate, rel=0.001)
    told = {row[:2]: row[3] / row[2] for row in lessons.sizes()["rows"]}
    assert len(told) == 8 and min(told.values()) > 1.2 and max(told.values()) < 4.5


def raw(name):
    path = ROOT / "tests" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_copy_runs_as_many_chats_as_the_load_needs():
    """Little's law, and as many GPUs as the plan asks for."""
    known = sizes.compute(sizes.choose("Llama-3-70B", "H200", gpus=4, load=100))
    assert known["copies"] * known["plan"] * known["capacity"] >= 100
    assert (known["copies"] - 1) * known["plan"] * known["capacity"] < 100
    busy = known["load_copy"] * known["request_ms"] / 1000
    assert 0.9 < busy <= 1 and known["running"] < known["most"]
    assert sizes.DATA["limits"][int(known["limit"])] == "operations"


@pytest.mark.parametrize("gpu, gpus, options, limit", [
    ("H100", 1, {"tokens_in": 100, "tokens_out": 2000}, "bandwidth"),
    ("L4", 1, {"tokens_in": 200, "tokens_out": 2000}, "memory for K and V"),
    ("A100", 1, {"tokens_in": 3000, "tokens_out": 100}, "operations")])
def test_which_limit_it_is(gpu, gpus, options, limit):
    known = sizes.compute(sizes.choose("Llama-3-8B", gpu, gpus=gpus, **options))
    assert sizes.DATA["limits"][int(known["limit"])] == limit


# -- A model's own file ----------------------------------------------------------------

CONFIGS = {
    "DeepSeek-V3": {
        "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129280,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "tie_word_embeddings": False},
    "Gemma-3-27B": {"text_config": {
        "num_hidden_layers": 62, "hidden_size": 5376, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 21504,
        "vocab_size": 262208, "sliding_window": 1024, "sliding_window_pattern": 6,
        "tie_word_embeddings": True}},
    "gpt-oss-20b": {
        "num_hidden_layers": 24, "hidden_size": 2880, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
        "vocab_size": 201088, "sliding_window": 128, "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 12},
    "Qwen3-Next-80B-A3B": {
        "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 5120,
        "vocab_size": 151936, "full_attention_interval": 4, "num_experts": 512,
        "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "linear_num_value_heads": 32,
        "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "attn_output_gate": True}}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_says_what_the_named_model_has(name, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[name]))
    found, named = (
        sizes.compute(sizes.choose(str(model), "B200", gpus=16))
        for model in (path, name))
    assert {figure: found[figure] for figure in sizes.DATA["shown"]} == pytest.approx(
        {figure: named[figure] for figure in sizes.DATA["shown"]})


@pytest.mark.parametrize("change, said", [
    ({"vocab_size": None}, "vocab_size.* must be a whole number from 1 to .*, got 0"),
    ({"hidden_size": "large"}, "hidden_size.* must be a whole number from 1 to"),
    ({"layer_types": 3}, "is no model's config.json"),
    ({"layer_types": ["mamba"] * 24}, "unknown here \\(mamba\\): give a named model"),
    ({"num_experts_per_tok": 99}, "num_experts_per_tok.* from 0 to 32, got 99")])
def test_a_wrong_config_is_refused_in_a_sentence(change, said, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["gpt-oss-20b"] | change))
    with pytest.raises(ValueError, match=said):
        sizes.compute(sizes.choose(str(path), "H100"))


# -- The command -----------------------------------------------------------------------

def test_the_command_prints_each_figure_with_its_formula(capsys):
    main(["--sizes", "--model", "DeepSeek-V3", "--gpu", "H200", "--gpus", "8",
          "--weight-bits", "8"])
    printed = capsys.readouterr().out
    assert printed.startswith("DeepSeek-V3 on 8 x H200\n")
    assert "84.1 GB   weights_gb = ((always + routed) * weight_bits / 8" in printed
    assert len(printed.splitlines()) == 1 + len(sizes.DATA["shown"])


@pytest.mark.parametrize("options, said", [
    ("--gpu V100", "--gpu must be one of L4, A100, H100, H200, B200, got 'V100'"),
    ("--model none", "--model must be a config.json, or one of Qwen3-0.6B"),
    ("--model pyproject.toml", "--model: pyproject.toml is no model's config.json"),
    ("--gpus two", "argument --gpus: invalid float value: 'two'"),
    ("--gpus 1.5", "--gpus (GPUs a copy) must be a whole number from 1 to 1,024, got"),
    ("--kv-bits 0", "--kv-bits (bits of a number in K and V) must be a number from 1"),
    ("--load nan", "--load (requests a second) must be a number from 0.001"),
    ("--model DeepSeek-V3", "--gpus (GPUs a copy) must be more, or the bits fewer")])
def test_a_wrong_option_is_refused_in_a_sentence(options, said, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match="2"):
        main(["--sizes", *options.split()])
    assert f"error: {said}" in capsys.readouterr().err.splitlines()[-1]


# -- In a browser ----------------------------------------------------------------------


@pytest.fixture
def browser(tmp_path, open_page):  # noqa: F811
    return open_page(write_page(tmp_path / "sizes.html", f'<div class="guide">'
                                f"{calculator()}</div>"), size=(375, 667))


@pytest.mark.browser
def test_the_page_computes_what_python_does(browser):
    """Figures of random inputs, and the same inputs are refused."""
    rng, drawn, expected = random.Random(0), [], []
    for _ in range(200):
        given = sizes.choose(
            rng.choice([*MODELS]), rng.choice([*sizes.DATA["gpus"]]),
            gpus=rng.choice([1, 2, 8, 16]), weight_bits=rng.choice([0, 4, 8, 16]),
            kv_bits=rng.choice([8, 16]), tokens_in=rng.randrange(1, 20_000),
            tokens_out=rng.randrange(1, 3_000), load=rng.uniform(0.1, 99),
            max_seqs=rng.choice([0.5, 64, 256, 1024]))
        drawn.append(given)
        try:
            expected.append(sizes.compute(given))
        except ValueError:
            expected.append(None)
    found = browser.run(
        f"return {json.dumps(drawn)}.map(given => {{ try {{ return npSizes(given); }} "
        "catch (error) { return null; } })")
    assert 40 < expected.count(None) < 160
    assert [one is None for one in found] == [one is None for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == (other and pytest.approx(other, rel=1e-9))


@pytest.mark.browser
def test_the_page_works_by_keys_on_a_narrow_screen(browser):
    unlabelled = browser.each(".np-sizes :is(input, select)", "one.labels.length")
    assert set(unlabelled) == {1}
    before = browser.each(".np-sizes form > div > details", "one.textContent")
    assert len(before) == len(sizes.DATA["shown"])
    enter(browser, "tokens_in", "3000")
    after = browser.each(".np-sizes form > div > details", "one.textContent")
    assert len(before) == len(after) and before != after

    browser.run("document.querySelector('.np-sizes form > div > details summary')"
                ".focus()")
    press_enter(browser)
    opened = browser.each(".np-sizes form > div > details[open] code",
                          "one.textContent")
    assert opened[0].startswith("weights_gb = ((always + routed) * weight_bits / 8")
    assert opened[1].startswith("= ((6,979,321,856 + 0) * 16 / 8")
    (inner,) = browser.each(".np-sizes details details:nth-of-type(1) > summary",
                            "one.textContent")
    assert inner.startswith("weights in the layers that every token meets: 6,979,")

    enter(browser, "gpus", "0")
    assert browser.text(".np-sizes [role=status]") == (
        "\u201cGPUs a copy\u201d must be a whole number from 1 to 1,024.")
    assert browser.each("[aria-invalid=true]", "one.name") == ["gpus"]
    enter(browser, "gpus", "1")
    assert browser.text(".np-sizes [role=status]") == ""
    # What was open is open again.
    assert browser.each(".np-sizes form > div > details[open]", "1") == [1]

    browser.run("const choice = document.querySelector('.np-sizes [name=model]');"
                "choice.value = 'DeepSeek-V3';"
                "choice.dispatchEvent(new Event('input', {bubbles: true}))")
    assert "leave no room for a chat" in browser.text(".np-sizes [role=status]")
    enter(browser, "layers", "2")
    assert browser.each(".np-sizes [name=model]", "one.value") == [""]
    wide = browser.run("return document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0
    browser.check_is_quiet()


def enter(browser, name, text):
    """Type into an input, in place of what is there."""
    browser.run(f"const box = document.querySelector('.np-sizes [name={name}]');"
                "box.closest('details')?.setAttribute('open', ''); box.focus();"
                "box.select()")
    browser.call("Input.insertText", text=text)


def press_enter(browser):
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter",
                     windowsVirtualKeyCode=13, text="\r")
    browser.run("await new Promise(requestAnimationFrame)")
