"""Text in, text out: prompts, chat, stop strings, streams, never half a character.

A scripted model emits a known text token by token, so the right output after each of
them is known. A random model emits arbitrary bytes. Streamed text only grows, towards
the final text.
"""

import json
import random
import shutil
from functools import partial

import pytest

import helpers
from helpers import tokens_of, without_half_characters
from nanopaged import SamplingParams

greedy = partial(helpers.greedy, max_tokens=40)


@pytest.fixture(scope="session")
def script(tokenizer):
    """Distinct tokens whose text has characters of one to four bytes, split up."""
    text = "hé€u 😀nдblo."
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokens) == text
    assert len(tokens) > len(text) + 3, "characters should be split into several tokens"
    return tokens


@pytest.fixture(scope="session")
def speaker(make_scripted_model, script):
    """A model that repeats the script."""
    return make_scripted_model(script)


@pytest.fixture(scope="session")
def words(tokenizer):
    """A script of ordinary words: tokens of several characters."""
    tokens = tokenizer.encode(" the block table of", add_special_tokens=False)
    texts = [tokenizer.decode([token]) for token in tokens]
    assert max(map(len, texts)) >= 3 and len(tokens) >= 4
    return tokens


def text_of(output):
    return output.outputs[0].text


def continue_script(llm, tokens, **params):
    """The scripted model's completion after `tokens`."""
    return llm.generate([list(tokens)], greedy(**params), use_tqdm=False)[0].outputs[0]


def streamed(llm, prompt, params):
    """Every output of one streamed request, each checked against the previous one."""
    outputs = list(llm.stream([prompt], params))
    finished = [output.finished for output in outputs]
    assert finished == [False] * (len(outputs) - 1) + [True]

    texts = [text_of(output) for output in outputs]
    for before, after in zip(texts, texts[1:], strict=False):
        assert after.startswith(before), "streamed text was taken back"

    counts = [len(output.outputs[0].token_ids) for output in outputs]
    assert counts == sorted(set(counts))

    return outputs


# --- whole characters ---


def test_text_is_the_decoding_of_the_tokens(speaker, script, tokenizer, engine):
    for count in range(1, 2 * len(script)):
        output = continue_script(engine(speaker), script[-1:], max_tokens=count)
        expected = [script[i % len(script)] for i in range(count)]
        assert list(output.token_ids) == expected
        full = tokenizer.decode(expected, skip_special_tokens=True)
        assert full.startswith(output.text)
        assert without_half_characters(output.text) == without_half_characters(full)


def test_a_character_is_streamed_with_its_last_byte(speaker, script, tokenizer, engine):
    count = 2 * len(script)
    outputs = streamed(engine(speaker), script[-1:], greedy(max_tokens=count))
    assert len(outputs) == count
    for output in outputs:
        tokens = tokens_of(output)
        assert text_of(output) == without_half_characters(tokenizer.decode(tokens))
    assert text_of(outputs[-1]) == 2 * tokenizer.decode(script)


@pytest.mark.parametrize("seed", range(12))
def test_arbitrary_bytes_stream_towards_the_final_text(
    text_model, seed, tokenizer, engine
):
    params = SamplingParams(temperature=1.5, max_tokens=60, ignore_eos=True, seed=seed)
    outputs = streamed(engine(text_model), [seed, 40 + seed, 7], params)
    final = outputs[-1].outputs[0]
    full = tokenizer.decode(list(final.token_ids), skip_special_tokens=True)
    assert len(full) > 10
    assert full.startswith(final.text)
    assert set(full[len(final.text) :]) <= {"\ufffd"}
    assert all(full.startswith(text_of(output)) for output in outputs)


def test_incomplete_bytes_appear_at_the_end(text_model, tokenizer, engine):
    """A replacement character is right once a later token rules out a character."""
    params = [
        SamplingParams(temperature=1.5, max_tokens=80, ignore_eos=True, seed=s)
        for s in range(20)
    ]
    outputs = engine(text_model).generate([[4, 5]] * 20, params, use_tqdm=False)
    for output in outputs:
        full = tokenizer.decode(tokens_of(output), skip_special_tokens=True)
        assert without_half_characters(full) == without_half_characters(text_of(output))
    assert any(
        "\ufffd" in without_half_characters(text_of(output)) for output in outputs
    )


def test_text_is_not_cleaned_up_even_if_the_tokenizer_would(
    text_model, tmp_path, engine
):
    """It would depend on what follows; older releases of transformers do it."""
    copy = shutil.copytree(text_model, tmp_path / "model")
    file = copy / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"clean_up_tokenization_spaces": True}
    file.write_text(json.dumps(settings))
    assert engine(copy).tokenizer.clean_up_tokenization_spaces is False


def test_special_tokens_have_no_text(make_scripted_model, tokenizer, engine):
    bos = tokenizer.bos_token_id
    end = tokenizer.eos_token_id
    a, b = tokenizer.encode("a", add_special_tokens=False) + tokenizer.encode(
        "b", add_special_tokens=False
    )
    path = make_scripted_model([a, bos, b, end])
    output = continue_script(engine(path), [end], ignore_eos=False)

    assert list(output.token_ids) == [a, bos, b, end]
    assert output.text == "ab"
    assert output.finish_reason == "stop"


def test_spaces_and_bytes_of_a_sentencepiece_tokenizer_come_out_right(
    make_scripted_model, sentencepiece_tokenizer, engine
):
    """Its decoder cuts the first space: pieces decoded one by one would lose them all.

    The very first space may be output or not: it divides the text from the prompt.
    """
    text = "the blocks of😀 table"
    script = sentencepiece_tokenizer.encode(text, add_special_tokens=False)
    assert sentencepiece_tokenizer.decode(script) == text
    assert len(script) == 9  # four of them are the bytes of one character

    llm = engine(make_scripted_model(script, sentencepiece_tokenizer))
    outputs = streamed(llm, script[-1:], greedy(max_tokens=2 * len(script)))
    assert text_of(outputs[-1]).removeprefix(" ") == f"{text} {text}"

    for output in outputs:
        decoded = sentencepiece_tokenizer.decode(tokens_of(output))
        assert text_of(output).removeprefix(" ") == without_half_characters(decoded)
    assert (
        continue_script(llm, script[-1:], stop="😀 t").text.removeprefix(" ")
        == "the blocks of"
    )
    assert (
        continue_script(llm, script[-1:], stop="e the").text.removeprefix(" ")
        == "the blocks of😀 tabl"
    )


def test_tokens_unknown_to_the_tokenizer_have_no_text(
    make_model, edit_model, tokenizer, engine
):
    """Vocabularies are padded: Qwen's models have 267 rows without a token."""
    path = edit_model(make_model("llama", seed=5, vocab_size=len(tokenizer) + 200))
    tokenizer.save_pretrained(path)
    params = SamplingParams(temperature=2.0, max_tokens=60, ignore_eos=True, seed=1)
    output = streamed(engine(path), [4, 5, len(tokenizer) + 3], params)[-1].outputs[0]
    assert sum(token >= len(tokenizer) for token in output.token_ids) > 5
    full = tokenizer.decode(list(output.token_ids), skip_special_tokens=True)
    assert full.startswith(output.text)
    assert set(full[len(output.text) :]) <= {"\ufffd"}


# --- stop strings ---


def stopped(llm, script, stop, tokenizer, **params):
    """Complete with stop strings, streamed and not; check what holds for every stop."""
    output = continue_script(llm, script[-1:], stop=stop, **params)
    outputs = streamed(llm, script[-1:], greedy(stop=stop, **params))
    assert text_of(outputs[-1]) == output.text
    assert list(outputs[-1].outputs[0].token_ids) == list(output.token_ids)

    stops = [stop] if isinstance(stop, str) else stop
    for step in outputs:
        assert output.text.startswith(text_of(step)), (
            "text after the stop, or part of the stop"
        )
        assert not any(string in text_of(step) for string in stops)

    return output


def test_a_stop_string_of_one_token(speaker, script, tokenizer, engine):
    output = stopped(engine(speaker), script, "n", tokenizer)
    assert output.text == "hé€u 😀"
    assert output.finish_reason == "stop"
    assert tokenizer.decode(list(output.token_ids)) == "hé€u 😀n"


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("nд", "hé€u 😀"),
        ("€u 😀n", "hé"),
        ("hé€u", ""),
        (".h", "hé€u 😀nдblo"),  # across the end of the script
        ("blo.hé€", "hé€u 😀nд"),
        ("😀", "hé€u "),
        ("é", "h"),
    ],
)
def test_a_stop_string_across_tokens(speaker, script, stop, text, tokenizer, engine):
    output = stopped(engine(speaker), script, stop, tokenizer)
    assert output.text == text
    assert output.finish_reason == "stop"


def test_a_stop_string_within_a_token(make_scripted_model, words, tokenizer, engine):
    llm = engine(make_scripted_model(words))
    whole = tokenizer.decode(words)
    for start in range(1, len(whole) - 1):
        for stop in (whole[start], whole[start : start + 2]):
            output = stopped(llm, words, stop, tokenizer)
            assert output.text == (whole + whole).split(stop)[0]
            assert output.finish_reason == "stop"


def test_the_tokens_end_with_the_one_that_completes_the_stop(
    make_scripted_model, words, tokenizer, engine
):
    path = make_scripted_model(words)
    output = stopped(engine(path), words, "block", tokenizer)
    needed = next(
        i for i in range(len(words)) if "block" in tokenizer.decode(words[:i])
    )
    assert list(output.token_ids) == words[:needed]


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["nд", "€"], "hé"),
        (["€", "nд"], "hé"),
        (["zzz", "u 😀"], "hé€"),
        (["u 😀nдX", "nд"], "hé€u 😀"),  # begins earlier but never completes
        (["é€u", "€u"], "h"),  # both end with the same token: the earlier start counts
        (["€u", "é€u"], "h"),
        (("h",), ""),
    ],
)
def test_of_several_stop_strings_the_earliest_counts(
    speaker, script, stops, text, tokenizer, engine
):
    assert stopped(engine(speaker), script, stops, tokenizer).text == text


def test_the_start_of_a_stop_string_that_never_completes_is_output(
    speaker, script, tokenizer, engine
):
    llm = engine(speaker)
    whole = tokenizer.decode(script)
    output = stopped(llm, script, ["blo.X", "😀m"], tokenizer, max_tokens=len(script))
    assert output.text == whole
    assert output.finish_reason == "length"


def test_stop_strings_are_not_searched_for_in_the_prompt(
    speaker, script, tokenizer, engine
):
    """Neither within it nor across its end."""
    llm = engine(speaker)
    prompt = script[-2:]
    assert tokenizer.decode(prompt) == "o."
    output = continue_script(llm, prompt, stop=["o.", ".h"], max_tokens=4)
    assert len(output.token_ids) == 4
    assert output.finish_reason == "length"


def test_stop_strings_work_with_arbitrary_bytes(text_model, engine):
    cut = 0
    llm = engine(text_model)
    for seed in range(20):
        free = SamplingParams(
            temperature=1.5, max_tokens=60, ignore_eos=True, seed=seed
        )
        whole = text_of(llm.generate([[4, 5]], free, use_tqdm=False)[0])
        stop = whole[len(whole) // 2 : len(whole) // 2 + 2]
        if "\ufffd" in stop:
            continue
        params = SamplingParams(
            temperature=1.5, max_tokens=60, ignore_eos=True, seed=seed, stop=[stop]
        )
        outputs = streamed(llm, [4, 5], params)

        assert text_of(outputs[-1]) == whole[: whole.index(stop)]
        assert all(
            text_of(outputs[-1]).startswith(text_of(output)) for output in outputs
        )

        cut += 1

    assert cut >= 3


def test_a_stop_string_survives_preemption(text_model, engine):
    texts = []
    for num_blocks in (300, 26):
        llm = engine(text_model, num_blocks=num_blocks)
        params = [
            SamplingParams(
                temperature=1.5, max_tokens=60, ignore_eos=True, seed=s, stop=["e", "q"]
            )
            for s in range(12)
        ]
        outputs = llm.generate([[4, 5, s] for s in range(12)], params, use_tqdm=False)
        texts.append([(text_of(o), o.outputs[0].finish_reason) for o in outputs])

    assert llm.stats().preemptions_recompute > 0
    assert texts[0] == texts[1]
    assert not any("e" in text or "q" in text for text, _ in texts[0])


# --- prompts ---


def test_every_form_of_a_prompt_means_the_same(text_model, tokenizer, engine):
    text = "the block table"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id

    llm = engine(text_model)
    forms = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, greedy(), use_tqdm=False)
    outputs += [llm.generate(form, greedy(), use_tqdm=False)[0] for form in forms]

    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert all(list(output.prompt_token_ids) == ids for output in outputs)
    assert [output.prompt for output in outputs[:4:2]] == [text, text]


def test_a_list_of_ints_is_one_prompt(text_model, engine):
    outputs = engine(text_model).generate(
        [4, 5, 6], greedy(max_tokens=2), use_tqdm=False
    )
    assert [list(output.prompt_token_ids) for output in outputs] == [[4, 5, 6]]


def test_outputs_come_in_the_order_of_the_prompts(text_model, engine):
    """Although short ones finish first and there is room for only three."""
    rng = random.Random(3)
    prompts = [
        [rng.randrange(300) for _ in range(rng.randint(1, 30))] for _ in range(20)
    ]
    params = [greedy(max_tokens=rng.randint(1, 40)) for _ in prompts]
    llm = engine(text_model, max_num_seqs=3, max_num_batched_tokens=16)
    outputs = llm.generate(prompts, params, use_tqdm=False)

    assert [list(output.prompt_token_ids) for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [
        p.max_tokens for p in params
    ]


def test_one_params_object_serves_all_prompts(text_model, engine):
    llm = engine(text_model)
    prompts = ["the block", "first come"]
    shared = llm.generate(prompts, greedy(), use_tqdm=False)
    listed = llm.generate(prompts, [greedy(), greedy()], use_tqdm=False)
    assert [text_of(output) for output in shared] == [
        text_of(output) for output in listed
    ]


def test_params_default_to_sixteen_tokens(text_model, engine):
    output = engine(text_model, seed=3).generate(["the"], use_tqdm=False)[0]
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_no_prompts_no_outputs(text_model, engine):
    llm = engine(text_model)
    assert llm.generate([], greedy(), use_tqdm=False) == []
    assert list(llm.stream([], greedy())) == []


def test_without_a_progress_bar_none_is_made(text_model, engine, monkeypatch):
    """Each has a finalizer, and Python drops a Ctrl-C that strikes in one."""
    import nanopaged.llm

    monkeypatch.setattr(nanopaged.llm, "tqdm", None)
    assert engine(text_model).generate(["the"], greedy(), use_tqdm=False)


def test_the_progress_bar_changes_nothing(text_model, engine, capfd):
    llm = engine(text_model)
    loud = llm.generate(["the", "a block"], greedy())
    assert "2/2" in capfd.readouterr().err
    quiet = llm.generate(["the", "a block"], greedy(), use_tqdm=False)
    assert capfd.readouterr().err == ""
    assert [text_of(output) for output in loud] == [text_of(output) for output in quiet]


# --- streams ---


def test_a_stream_yields_as_tokens_come(text_model, engine):
    llm = engine(text_model)
    steps_before = llm.stats().steps
    stream = llm.stream(["the block", "a free block"], greedy(max_tokens=10))
    first = next(stream)

    assert len(first.outputs[0].token_ids) == 1
    assert not first.finished
    assert llm.stats().steps - steps_before <= 2

    rest = list(stream)
    assert len(rest) == 19
    assert sum(output.finished for output in rest) == 2


def test_a_stream_ends_with_what_generate_returns(text_model, engine):
    llm = engine(text_model)
    prompts = ["the block", "a free block", "first"]
    params = [greedy(max_tokens=count) for count in (3, 12, 7)]
    final = {}
    for output in llm.stream(prompts, params):
        final[tuple(output.prompt_token_ids)] = output

    for output in llm.generate(prompts, params, use_tqdm=False):
        assert text_of(final[tuple(output.prompt_token_ids)]) == text_of(output)
        assert final[tuple(output.prompt_token_ids)].finished


def test_a_streamed_output_does_not_change_afterwards(text_model, engine):
    outputs = list(engine(text_model).stream("the block", greedy(max_tokens=8)))
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 9))


# --- chat ---


def test_chat_applies_the_template_of_the_tokenizer(text_model, tokenizer, engine):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "who holds the block?"},
    ]
    llm = engine(text_model)
    output = llm.chat(messages, greedy())[0]
    text = "<|bos|><system>be brief\n<user>who holds the block?\n<assistant>"
    ids = tokenizer.encode(text, add_special_tokens=False)

    assert list(output.prompt_token_ids) == ids  # with one <|bos|>, from the template
    again = llm.generate([ids], greedy(), use_tqdm=False)[0]
    assert text_of(output) == text_of(again)


def test_chat_takes_several_conversations(text_model, engine):
    llm = engine(text_model)
    conversations = [[{"role": "user", "content": word}] for word in ("block", "table")]
    together = llm.chat(conversations, greedy())
    alone = [llm.chat(conversation, greedy())[0] for conversation in conversations]
    assert [text_of(output) for output in together] == [
        text_of(output) for output in alone
    ]


def test_chat_without_a_template_raises(text_model, edit_model, engine):
    path = edit_model(text_model)
    (path / "chat_template.jinja").unlink(missing_ok=True)
    config = path / "tokenizer_config.json"
    config.write_text(config.read_text().replace("chat_template", "no_template"))
    llm = engine(path)
    with pytest.raises(ValueError, match="(?i)chat.template"):
        llm.chat([{"role": "user", "content": "hello"}], greedy())
    assert not llm.has_unfinished_requests()


# --- without a tokenizer ---


def test_a_directory_without_a_tokenizer_serves_token_ids(
    llama, engine, reference, draw_prompts
):
    prompt = draw_prompts(llama, [9], 16)[0]
    llm = engine(llama)
    outputs = list(llm.stream([prompt], greedy(max_tokens=16)))
    assert list(outputs[-1].outputs[0].token_ids) == reference.generate(
        llama, prompt, 16
    )
    assert {text_of(output) for output in outputs} == {""}


@pytest.mark.parametrize(
    "prompt", ["the block", {"prompt": "the block"}], ids=["str", "dict"]
)
def test_without_a_tokenizer_a_text_prompt_is_rejected(llama, prompt, engine):
    llm = engine(llama)
    with pytest.raises(ValueError, match="(?i)tokenizer"):
        llm.generate([prompt], greedy(), use_tqdm=False)
    assert not llm.has_unfinished_requests()


def test_without_a_tokenizer_a_stop_string_is_rejected(llama, engine):
    """It could never match."""
    llm = engine(llama)
    with pytest.raises(ValueError, match="(?i)tokenizer"):
        llm.generate([[1, 2]], greedy(stop="x"), use_tqdm=False)
    assert not llm.has_unfinished_requests()
