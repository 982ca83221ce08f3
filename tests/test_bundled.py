"""The bundled model is small, in Hugging Face format, as good as its card says."""

import json
import re

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanopaged import SamplingParams
from nanopaged.loader import BUNDLED

HELD_OUT = BUNDLED.parents[2] / "shared" / "data" / "tinyshakespeare.txt"
PROMPTS = [
    "ROMEO:\n",
    "First Citizen:\nBefore we proceed any further, hear me",
    "O",
    "KING RICHARD III:\nA horse, a horse",
    "naïve 😀: this is no Shakespeare.",
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BUNDLED)


@pytest.fixture(scope="module")
def model():
    """As transformers loads it, with nothing missing and nothing left over."""
    model, loading_info = AutoModelForCausalLM.from_pretrained(
        BUNDLED, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading_info.values()), loading_info
    return model.eval()


def test_greedy_tokens_are_those_of_transformers(model, tokenizer, engine, reference):
    llm = engine(None, block_size=16, max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=32)
    for prompt, output in zip(
        PROMPTS, llm.generate(PROMPTS, params, False), strict=True
    ):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            expected = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=32,
            )[0]

        assert reference.is_clear(BUNDLED, ids[0].tolist(), 32), (
            f"choose another prompt: {prompt!r}"
        )
        assert output.prompt_token_ids == ids[0].tolist()
        assert output.outputs[0].token_ids == expected[ids.shape[1] :].tolist()
        assert output.outputs[0].finish_reason == "length"

        completion = tokenizer.decode(expected[ids.shape[1] :])
        assert output.outputs[0].text.strip() and completion.startswith(
            output.outputs[0].text
        )


def test_it_is_a_small_qwen3_with_grouped_query_attention_and_tied_embeddings():
    config = json.loads((BUNDLED / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert 1 < config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["tie_word_embeddings"] is True

    weights = BUNDLED / "model.safetensors"
    assert weights.stat().st_size <= 12_000_000

    with safe_open(weights, "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118


@given(st.text())
@example("ROMEO:\n  But soft!\t\r\n\n")
@example("naïve 😀 ﷽ \x00\x7f\u200b 日本語")
@settings(deadline=None, max_examples=200)
def test_the_tokenizer_gives_back_any_text(tokenizer, text):
    assume(tokenizer.eos_token not in text)
    ids = tokenizer(text).input_ids
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids) == text


def test_its_card_states_how_it_was_made_and_how_good_it_is():
    card = (BUNDLED / "README.md").read_text(encoding="utf-8").lower()
    assert "shakespeare" in card, "data"
    assert "tenth" in card or "90%" in card or "10%" in card, "split"
    assert "held out" in card or "held-out" in card, "split"
    assert re.search(r"\d[\d,]* (optimi[sz]er |training )?steps", card), "steps"
    assert re.search(r"\d[\d,.]* *(s|seconds|min|minutes|h|hours?)\b", card), "time"
    loss = re.search(r"(\d\.\d+)\W+nats (?:per|a) character", card)
    assert loss and 1.0 < float(loss[1]) <= 1.6, "held-out loss in nats per character"


@pytest.mark.skipif(not HELD_OUT.is_file(), reason="needs the text it was trained on")
@torch.inference_mode()
def test_it_predicts_unseen_text(model, tokenizer):
    text = HELD_OUT.read_text(encoding="utf-8")
    # train.py saw everything before this.
    held_out = text[int(0.9 * len(text)) :][:20_000]
    ids = torch.tensor(tokenizer(held_out).input_ids)

    nats = 0.0
    for start in range(0, len(ids) - 1, 512):  # every window starts without context
        targets = ids[start + 1 : start + 513]
        logits = model(ids[None, start : start + len(targets)]).logits[0]
        nats += torch.nn.functional.cross_entropy(
            logits, targets, reduction="sum"
        ).item()

    assert 1.0 < nats / len(held_out) <= 1.60
