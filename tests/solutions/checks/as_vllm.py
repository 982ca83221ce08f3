"""The drop-in for vLLM: what vLLM itself has answered, the names that scripts use, and
five programs, each beside an answer of transformers.

    python as_vllm.py vllm|names|lm_eval|langchain|llama_index|outlines|trl
"""

import json
import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

sys.path.insert(0, str(Path(__file__).parent.parent))
import as_vllm  # noqa: F401
import torch
import vllm
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm_answers import answers

from nanopaged.loading.checkpoint import BUNDLED

LINES = [
    "But, soft! what light through yonder window breaks?",
    "It is the east, and Juliet is the sun.",
    "Now is the winter of our discontent",
    "Made glorious summer by this sun of York;",
    "If music be the food of love, play on;",
    "Friends, Romans, countrymen, lend me your ears;",
    "The quality of mercy is not strain'd,",
    "We few, we happy few, we band of brothers;"]


class Reference:
    """transformers in float32, greedy."""

    def __init__(self):
        self.model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(BUNDLED)

    def text(self, prompt, count, processors=()):
        """The continuation of a string or of a list of token ids."""
        ids = self.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        found = self.model.generate(
            torch.tensor([ids]), max_new_tokens=count, do_sample=False,
            logits_processor=[*processors])
        answer = found[0, len(ids) :]
        return self.tokenizer.decode(answer, skip_special_tokens=True)


# -- vLLM itself -----------------------------------------------------------------------

def is_near(found, expected):
    """Whether they are the same, but for rounded numbers."""
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(is_near, found, expected))
    is_number = isinstance(expected, float) and isinstance(found, float)
    return abs(found - expected) < 2e-3 if is_number else found == expected


def check_vllm():
    recorded = json.loads(Path(__file__).with_name("vllm.json").read_text())
    found = json.loads(json.dumps(answers()))
    wrong = [name for name in recorded if not is_near(found[name], recorded[name])]
    for name in wrong:
        print(f"{name}: {found[name]}\n  vLLM: {recorded[name]}")
    assert not wrong and found.keys() == recorded.keys(), wrong
    print(f"{len(recorded)} answers are those of vLLM")


# -- lm-eval ---------------------------------------------------------------------------

def tasks(folder):
    """A multiple choice, a perplexity, and a generation."""
    rows = [{"text": line, "start": line[: len(line) // 2],
             "ends": [line[len(line) // 2 :], other[len(other) // 2 :]]}
            for line, other in zip(LINES, LINES[1:] + LINES[:1], strict=True)]
    (folder / "lines.json").write_text("\n".join(map(json.dumps, rows)))
    common = {"dataset_path": "json", "test_split": "test", "dataset_kwargs": {
        "data_files": {"test": str(folder / "lines.json")}}}
    return [
        common | {"task": "choice", "output_type": "multiple_choice",
                  "doc_to_text": "{{start}}", "doc_to_choice": "{{ends}}",
                  "doc_to_target": 0, "target_delimiter": "",
                  "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]},
        common | {"task": "perplexity", "output_type": "loglikelihood_rolling",
                  "doc_to_text": "", "doc_to_target": "{{text}}",
                  "metric_list": [{"metric": "word_perplexity"},
                                  {"metric": "bits_per_byte"}]},
        common | {"task": "generation", "output_type": "generate_until",
                  "doc_to_text": "{{start}}", "doc_to_target": "{{text}}",
                  "generation_kwargs": {"until": ["\n"], "max_gen_toks": 24,
                                        "do_sample": False},
                  "metric_list": [{"metric": "exact_match"}]}]


def evaluate(backend, **arguments):
    import lm_eval

    with TemporaryDirectory() as folder:
        found = lm_eval.simple_evaluate(
            backend, arguments | {"pretrained": str(BUNDLED), "dtype": "float32"},
            tasks=tasks(Path(folder)), log_samples=True, bootstrap_iters=0)
    numbers = {f"{task} {name}": value for task, metrics in found["results"].items()
               for name, value in metrics.items() if isinstance(value, float)}
    answers = {task: [sample["filtered_resps"] for sample in samples]
               for task, samples in found["samples"].items()}
    return numbers, answers


def check_lm_eval():
    ours, theirs = evaluate("vllm"), evaluate("hf", device="cpu")
    for name, value in theirs[0].items():
        print(f"{name}: {ours[0][name]:.6f}, hf {value:.6f}")
        assert abs(ours[0][name] - value) <= 1e-4 * abs(value), name
    assert ours[1]["generation"] == theirs[1]["generation"], "texts"
    for pair in zip(ours[1]["choice"], theirs[1]["choice"], strict=True):
        for (one, is_greedy), (other, other_greedy) in zip(*pair, strict=True):
            assert abs(one - other) < 1e-3 and is_greedy == other_greedy, pair
    print(f"{len(LINES)} lines: choices, perplexity and texts are those of hf")


# -- LangChain, LlamaIndex and Outlines ------------------------------------------------

def check_texts(name, texts, count=24):
    """Answers to the lines are those of transformers."""
    reference = Reference()
    assert texts == [reference.text(line, count) for line in LINES], texts
    print(f"{name}: {len(texts)} texts are those of transformers")


def check_langchain():
    from langchain_community.llms import VLLM

    llm = VLLM(model=str(BUNDLED), dtype="float32", temperature=0, max_new_tokens=24)
    check_texts("langchain", llm.batch(LINES))


def check_llama_index():
    from llama_index.llms.vllm import Vllm

    llm = Vllm(model=str(BUNDLED), dtype="float32", temperature=0, max_new_tokens=24)
    check_texts("llama_index", [llm.complete(line).text for line in LINES])


SCHEMA = {"type": "object", "additionalProperties": False,
          "properties": {"name": {"type": "string", "maxLength": 8},
                         "age": {"type": "integer", "minimum": 0, "maximum": 99}},
          "required": ["name", "age"]}


def check_outlines():
    """Free text, choices and expressions are those of Outlines' own backend for
    transformers, which does not use xgrammar. It writes JSON with other spaces, so
    answers with a schema are those of transformers with xgrammar's processor.
    """
    import outlines
    import xgrammar
    from xgrammar.contrib.hf import LogitsProcessor

    reference = Reference()
    theirs = outlines.from_transformers(reference.model, reference.tokenizer)
    llm = LLM(str(BUNDLED), dtype="float32", num_blocks=256)
    ours = outlines.from_vllm_offline(llm)
    params = SamplingParams(temperature=0, max_tokens=40)
    options = {"sampling_params": params, "use_tqdm": False}
    for kind in (None, Literal["Romeo", "Juliet", "nobody"],
                 outlines.types.Regex("[A-Z][a-z]{2,5} [0-9]{2}")):
        texts = [ours(line, kind, **options) for line in LINES]
        assert texts == [theirs(line, kind, max_new_tokens=40, do_sample=False)
                         for line in LINES], (kind, texts)
    assert [ours(LINES[0], kind, **options)] == ours.batch(LINES, kind, **options)[0]

    info = xgrammar.TokenizerInfo.from_huggingface(reference.tokenizer, vocab_size=512)
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(
        json.dumps(SCHEMA), any_whitespace=False)
    for line in LINES:
        text = ours(line, outlines.types.JsonSchema(SCHEMA), **options)
        ids = reference.tokenizer.apply_chat_template(
            [{"role": "user", "content": line}], add_generation_prompt=True,
            return_dict=False)
        assert text == reference.text(ids, 40, [LogitsProcessor(grammar)]), text
        person = json.loads(text)
        assert person.keys() == {"name", "age"} and 0 <= person["age"] <= 99, text
    print(f"outlines: 4 kinds of {len(LINES)} texts are those of transformers")


# -- TRL -------------------------------------------------------------------------------

def check_trl():
    """GRPO with vLLM in its own process. The log-probabilities with which tokens were
    sampled are those of the model that is trained, also after each update.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions, **_):
        return [float(text.count("e")) for text in completions]

    with TemporaryDirectory() as folder:
        reference = Reference()
        reference.model.save_pretrained(folder)
        reference.tokenizer.save_pretrained(folder)
        config = GRPOConfig(
            folder + "/out", use_vllm=True, vllm_mode="colocate", use_cpu=True,
            bf16=False, max_steps=4, per_device_train_batch_size=8, num_generations=4,
            max_completion_length=24, learning_rate=1e-3, logging_steps=1, report_to=[],
            save_strategy="no", vllm_max_model_length=256, vllm_enable_sleep_mode=True)
        prompts = Dataset.from_dict({"prompt": ["ROMEO:\n", "JULIET:\n"] * 8})
        before = reference.model.state_dict()
        trainer = GRPOTrainer(folder, reward, config, prompts)
        trainer.train()
    gaps = [entry["sampling/sampling_logp_difference/max"]
            for entry in trainer.state.log_history if "loss" in entry]
    changes = [(before[name] - value).abs().max().item()
               for name, value in trainer.model.state_dict().items()]
    assert len(gaps) == 4 and max(gaps) < 1e-4 and max(changes) > 1e-3, (gaps, changes)
    print(f"trl: log-probabilities in 4 updates differ by {max(gaps):.1e} at most")


# -- Names -----------------------------------------------------------------------------

# What vLLM's scripts write: options of LLM, options of SamplingParams, other words of
# their programs; and whether it runs, or which word an error names.
SCRIPTS = [
    ({"trust_remote_code": True}, {}, None),
    ({"enable_lora": True}, {}, "enable_lora"),
    ({}, {"skip_special_tokens": False}, None),
    ({"dtype": "half"}, {}, "float16"),
    ({"dtype": "float"}, {}, None), ({"dtype": torch.float32}, {}, None),
    ({"pipeline_parallel_size": 1}, {}, None),
    ({"pipeline_parallel_size": 2}, {}, "pipeline_parallel_size"),
    ({}, {"repetition_penalty": 1.1}, None),
    ({"tokenizer": str(BUNDLED)}, {}, None),
    ({}, {"presence_penalty": 0.5, "frequency_penalty": 0.5}, None),
    ({}, {"best_of": 1}, None), ({}, {"best_of": 4}, "best_of"),
    ({"disable_custom_all_reduce": True, "download_dir": "/tmp",
      "disable_log_stats": True, "enable_chunked_prefill": True,
      "max_seq_len_to_capture": 512, "max_logprobs": 5, "tokenizer_mode": "slow"}, {},
     None),
    ({}, {"include_stop_str_in_output": True, "stop": ["e"]}, None),
    ({"quantization": "awq"}, {}, "quantization"),
    ({}, {"logits_processors": [lambda ids, logits: logits]}, None),
    ({"revision": None}, {"top_k": -1, "prompt_logprobs": 1}, None),
    ({"revision": "v2"}, {}, "revision"),
    ({"max_num_seqs": None, "quantization": None}, {"stop": None, "seed": None}, None),
    ({"gpu_memory_utilization": 0.5, "swap_space": 1, "enforce_eager": True}, {}, None)]


def check_names():
    for options, sampling, word in SCRIPTS:
        try:
            with LLM(str(BUNDLED), **{"num_blocks": 64} | options) as llm:
                params = SamplingParams(**{"max_tokens": 8} | sampling)
                outputs = llm.generate(["ROMEO:"], params, use_tqdm=False)
                assert outputs[0].outputs[0].text
                said = None
        except (TypeError, ValueError) as error:
            said = str(error)
        assert (said is None) == (word is None or word in "float16"), (options, said)
        assert said is None or word in said, said
    with LLM(model=str(BUNDLED), num_blocks=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, stop=["e"],
                                include_stop_str_in_output=True)
        output = llm.generate("ROMEO:", params)[0].outputs[0]
        assert output.text.endswith("e") and output.stop_reason == "e"
        assert SamplingParams(2).n == 2
        ids = llm.get_tokenizer()("ROMEO:").input_ids
        tokens = [llm.generate(**each, sampling_params=params)[0].outputs[0].token_ids
                  for each in ({"prompts": "ROMEO:"}, {"prompt_token_ids": [ids]})]
        assert tokens == [output.token_ids] * 2
    check_what_users_miss()
    check_structured_outputs()
    check_new_weights()
    check_another_tokenizer()
    check_refusals()
    print(f"{len(SCRIPTS)} kinds of scripts: run, or say what is not supported")


def check_what_users_miss():
    """Defaults, kinds of prompts, truncation, queues, and processors of both forms."""
    with LLM(str(BUNDLED), num_blocks=64, dtype="float32",
             generation_config="vllm") as llm:
        assert llm.get_default_sampling_params().temperature == 1
        assert llm.llm_engine.model_config.dtype == torch.float32
        params = SamplingParams(temperature=0, max_tokens=8)
        tokenizer = llm.get_tokenizer()
        ids = tokenizer("But, soft! what light").input_ids

        def run(prompt, params=params, **options):
            return llm.generate(prompt, params, use_tqdm=False, **options)[0]

        text = run("A").outputs[0].text
        assert run({"prompt": "A", "multi_modal_data": None}).outputs[0].text == text
        for prompt in ("But, soft! what light", {"prompt_token_ids": ids}):
            cut = run(prompt, tokenization_kwargs={"truncate_prompt_tokens": 4})
            assert cut.prompt_token_ids[-3:] == ids[-3:], cut
            assert len(cut.prompt_token_ids) == 4
            whole = run(prompt, tokenization_kwargs={"truncate_prompt_tokens": -1})
            assert whole.prompt_token_ids == ids
        names = llm.enqueue(["A", [5, 6]], params), llm.enqueue("B", params)
        assert [*map(len, names)] == [2, 1]
        found = llm.wait_for_completion()
        assert [output.outputs[0].text for output in found] == [
            run(prompt).outputs[0].text for prompt in ("A", [5, 6], "B")]

        seen = []

        class Tensors(LogitsProcessor):
            def __call__(self, ids, logits):
                seen.append(ids[0].tolist())
                return logits

        start = tokenizer("A").input_ids
        for process, expected in (
                (lambda ids, logits, *, k=5: seen.append(ids) or logits, []),
                (Tensors(), start),
                (lambda prompt, ids, logits: seen.append(prompt) or logits, start)):
            seen.clear()
            run("A", SamplingParams(max_tokens=3, logits_processors=[process]))
            assert len(seen) == 3 and seen[0] == expected, seen
        try:
            llm.enqueue(["A", [10**6]], params)
        except ValueError as error:
            assert "prompts[1]" in str(error) and not llm.has_unfinished_requests()
        else:
            raise AssertionError("there is no such token")

        def end_at_4(ids, logits):
            if len(ids) >= 4:
                logits[:] = -torch.inf
                logits[tokenizer.eos_token_id] = 0
            return logits

        answer = run("ROMEO:", SamplingParams(
            temperature=0, max_tokens=30, logits_processors=[end_at_4])).outputs[0]
        assert len(answer.token_ids) == 5 and answer.finish_reason == "stop"
        # A bad word that begins in the prompt is none.
        first, *_ = run("ROMEO:").outputs[0].token_ids
        word = tokenizer.decode([*tokenizer("ROMEO:").input_ids[-1:], first])
        kept = run("ROMEO:", replace(params, bad_words=[word])).outputs[0].token_ids
        assert kept[0] == first, (word, kept)


def check_structured_outputs():
    """Each keeps to its form, beside a request that has none; the rest is refused."""
    prompts = ["ROMEO:"] * 6
    forms = {"(yes|no)": {"choice": ["yes", "no"]}, "[ab]{3}": {"regex": "[ab]{3}"},
             "x[0-9]": {"grammar": 'root ::= "x" [0-9]'},
             r'\{"name": "[^"]{0,8}", "age": \d\d?\}': {"json": SCHEMA},
             r"\{.*": {"json_object": True}}
    params = [SamplingParams(max_tokens=60, seed=1, n=3,
                             structured_outputs=StructuredOutputsParams(**form))
              for form in forms.values()]
    with LLM(str(BUNDLED), num_blocks=64) as llm:
        free = SamplingParams(temperature=0, max_tokens=24)
        alone = llm.generate(prompts[0], free, use_tqdm=False)[0].outputs[0].text
        outputs = llm.generate(prompts, [*params, free], use_tqdm=False)
        assert outputs[-1].outputs[0].text == alone
        for output, form in zip(outputs, forms, strict=False):
            for answer in output.outputs:
                assert re.fullmatch(form, answer.text, re.DOTALL), (form, answer.text)
        for wrong, word in (({"regex": "("}, "parenthesis"), ({}, "one of"),
                            ({"json": {"type": "strng"}}, "strng"),
                            ({"regex": "a", "choice": ["a"]}, "one of"),
                            ({"structural_tag": "a"}, "structural_tag")):
            try:
                form = StructuredOutputsParams(**wrong)
                llm.generate("A", SamplingParams(structured_outputs=form))
            except (TypeError, ValueError) as error:
                assert word in str(error), error
            else:
                raise AssertionError(f"{wrong} was not refused")


def check_new_weights():
    """As trainers bring them: one by one, all at once, or merged with an adapter for as
    long as they are sent. Between the first and the last, requests are refused.
    """
    with LLM(str(BUNDLED), num_blocks=64, dtype="float32",
             logprobs_mode="processed_logprobs") as llm:
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        model = llm.llm_engine.model_executor.driver_worker.model_runner.model
        params = SamplingParams(max_tokens=8, logprobs=0, seed=3)

        def logprobs():
            return llm.generate("ROMEO:", params, use_tqdm=False)[0].outputs[0].logprobs

        old = logprobs()
        policy = Reference().model
        for name, weight in policy.named_parameters():
            merged = weight.data.clone()
            merged += 0.1 * ("layers.0.mlp" in name)
            model.load_weights([(name, merged)])
            merged -= 0.1 * ("layers.0.mlp" in name)
            if name == "model.embed_tokens.weight":
                try:
                    llm.chat([{"role": "user", "content": "Hi"}], params)
                except ValueError as error:
                    assert "layers.0.input_layernorm.weight" in str(error)
                else:
                    raise AssertionError("the model has some of the weights only")
        assert llm.reset_prefix_cache() and logprobs() != old
        model.load_weights(policy.state_dict().items())
        assert logprobs() == old
        for wrong, word in (({"temperature": 0.5}, "temperature"),
                            ({}, "_orig_mod.norm.weight")):
            try:
                llm.generate("ROMEO:", replace(params, **wrong))
            except ValueError as error:
                assert word in str(error), error
            else:
                raise AssertionError(f"{word} was not refused")
            model.load_weights([("_orig_mod.norm.weight", weight)])


def check_another_tokenizer():
    """Its EOS ends an answer."""
    other = AutoTokenizer.from_pretrained(BUNDLED)
    other.eos_token = "\u0120"  # a space
    with LLM(str(BUNDLED), tokenizer=other, num_blocks=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=40)
        params.logit_bias = {other.eos_token_id: 100.0}
        answer = llm.generate("ROMEO:", params, use_tqdm=False)[0].outputs[0]
        assert answer.finish_reason == "stop"
        assert answer.token_ids == [other.eos_token_id]


def check_refusals():
    """What is missing is named, with the value."""
    for make, words in (
            (lambda: SamplingParams(flat_logprobs=True), "flat_logprobs True"),
            (lambda: StructuredOutputsParams(choice="yes"), "choice yes"),
            (lambda: StructuredOutputsParams(choice=["a", 5]), "choice 5"),
            (lambda: StructuredOutputsParams(regex=5), "regex 5"),
            (lambda: SamplingParams(structured_outputs={"choice": ["a"]}),
             "structured_outputs StructuredOutputsParams"),
            (lambda: SamplingParams(ignore_eos=True, structured_outputs=(
                StructuredOutputsParams(regex="a"))), "ignore_eos structured_outputs"),
            (lambda: SamplingParams(logits_processors=[print]).processors(None, 1),
             "logits_processors"),
            (lambda: vllm.LLM.beam_search(None, [], vllm.BeamSearchParams(
                2, 4, include_stop_str_in_output=True)), "include_stop_str_in_output"),
            (lambda: vllm.LLM.pairs(None, [], 5, {"add_special_tokens": False}),
             "tokenization_kwargs add_special_tokens"),
            (lambda: SamplingParams(detokenize=False, stop=["a"]), "detokenize"),
            (lambda: LLM(str(BUNDLED), kv_cache_dtype="fp8"), "kv_cache_dtype fp8"),
            (lambda: LLM(str(BUNDLED), enable_lora=True), "enable_lora True"),
            (lambda: vllm.AsyncLLM(), "AsyncLLM"),
            (lambda: vllm.LoRARequest("a", 1, "b"), "LoRARequest")):
        try:
            make()
        except (TypeError, ValueError) as error:
            assert all(word in str(error) for word in words.split()), error
        else:
            raise AssertionError(f"{words} was not refused")
    args = ["--max-model-len", "256", "--dtype", "float32", "--enable-prefix-caching"]
    parser = vllm.EngineArgs.add_cli_args(vllm.utils.FlexibleArgumentParser())
    engine_args = vllm.EngineArgs.from_cli_args(parser.parse_args(args))
    assert engine_args.max_model_len == 256 and engine_args.dtype == "float32"
    vllm.distributed.cleanup_dist_env_and_memory()
    assert {"temperature", "max_tokens"} <= SamplingParams.__annotations__.keys()
    changed = replace(SamplingParams(stop="a"), include_stop_str_in_output=True, n=2)
    assert changed.stop == ["a"] and changed.include_stop_str_in_output


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    globals()[f"check_{sys.argv[1]}"]()
