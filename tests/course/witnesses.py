"""For each way to break the engine (`course.FAULTS`) a test that sees it, and no other.

`test_course.py` runs all of them on every broken engine. They are answers to the last
milestone, so students do not get this file.
"""

import pytest

from helpers import CPU, complete, floats, greedy, tokens_of
from nanopaged import LLM, SamplingParams
from nanopaged.frontend.detokenizer import Detokenizer

PROMPT = "ROMEO:\n"


@pytest.fixture(scope="module")
def llm():
    llm = LLM(**CPU, attention_backend="torch", num_blocks=64)
    yield llm
    llm.shutdown()


def pieces_of(llm, answer):
    """The text of each token."""
    return [llm.get_tokenizer().decode([token]) for token in answer.token_ids]


def test_it_loads_and_runs(llm):
    """This one sees nothing, and must earn nothing."""
    answer = complete(llm, PROMPT, greedy(20))
    assert answer.text and len(answer.token_ids) == 20


def test_a_stop_string_in_two_tokens(llm):
    answer = complete(llm, PROMPT, greedy(12))
    pieces = pieces_of(llm, answer)
    stop = pieces[5][-1] + pieces[6][:1]
    stopped = complete(llm, PROMPT, greedy(12, stop=stop))
    assert stopped.text == answer.text[: answer.text.index(stop)]


def test_a_stop_string_at_the_start(llm):
    first = complete(llm, PROMPT, greedy(1)).text
    assert complete(llm, PROMPT, greedy(4, stop=first)).text == ""


def test_streamed_text_stays(llm):
    answer = complete(llm, PROMPT, greedy(12)).text
    params = greedy(12, stop=answer[-4:])
    texts = [output.outputs[0].text for output in llm.stream(PROMPT, params)]
    assert all(texts[-1].startswith(text) for text in texts)


def test_half_characters_wait(llm):
    reader = Detokenizer(llm.get_tokenizer(), [], [])
    reader.update([128], final=False, may_stop=False)
    assert reader.text == ""
    reader.update([128, 103], final=False, may_stop=False)
    assert reader.text == "é"


def test_a_stop_token_has_no_text(llm):
    answer = complete(llm, PROMPT, greedy(8))
    token = answer.token_ids[5]
    at = answer.token_ids.index(token)
    stopped = complete(llm, PROMPT, greedy(8, stop_token_ids=[token]))
    assert stopped.text == "".join(pieces_of(llm, answer)[:at])


def test_a_stop_at_the_last_token(llm):
    first = tokens_of(llm.generate([PROMPT], greedy(1), use_tqdm=False)[0])
    stopped = complete(llm, PROMPT, greedy(1, stop_token_ids=first))
    assert stopped.finish_reason == "stop"


def test_min_tokens(llm):
    first = complete(llm, PROMPT, greedy(1)).token_ids
    stopped = complete(llm, PROMPT, greedy(8, stop_token_ids=first, min_tokens=4))
    assert len(stopped.token_ids) >= 4


def test_cumulative_logprob(llm):
    answer = complete(llm, PROMPT, greedy(6, logprobs=0))
    logprobs = [floats(each)[token] for each, token
                in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(logprobs))


def test_logits(llm, reference):
    ids = llm.get_tokenizer()(PROMPT).input_ids
    path = llm.model_config.source
    expected, _ = reference.endless(path, ids, 8)
    assert complete(llm, PROMPT, greedy(8)).token_ids == expected


def test_copy_on_write(llm):
    alone = complete(llm, PROMPT * 3, greedy(12)).token_ids
    (output,) = llm.generate([PROMPT * 3], greedy(12, n=3), use_tqdm=False)
    assert [each.token_ids for each in output.outputs] == [alone] * 3


def test_seeds(llm):
    params = SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True)
    one, other = llm.generate([PROMPT, PROMPT], params, use_tqdm=False)
    assert tokens_of(one) != tokens_of(other)


def test_stop_reason(llm):
    first = complete(llm, PROMPT, greedy(1)).token_ids
    stopped = complete(llm, PROMPT, greedy(8, stop_token_ids=first))
    assert stopped.stop_reason == first[0]


def test_order_of_outputs(llm):
    outputs = llm.generate([PROMPT, PROMPT], [greedy(8), greedy(2)], use_tqdm=False)
    assert [len(tokens_of(output)) for output in outputs] == [8, 2]


def test_cache_salt(llm):
    prompt = {"prompt": PROMPT * 20, "cache_salt": "one"}
    for salt, is_found in ("one", False), ("one", True), ("two", False):
        prompt["cache_salt"] = salt
        (output,) = llm.generate([prompt], greedy(1), use_tqdm=False)
        assert (output.num_cached_tokens > 0) == is_found
