"""The drop-in for vLLM: lm-eval's own vLLM backend beside its Hugging Face backend, on
tasks that are made here; and the names that vLLM's scripts use.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent.parent))
import as_vllm  # noqa: F401
import lm_eval
import torch
from vllm import LLM, SamplingParams

from nanopaged.loader import BUNDLED

LINES = [
    "But, soft! what light through yonder window breaks?",
    "It is the east, and Juliet is the sun.",
    "Now is the winter of our discontent",
    "Made glorious summer by this sun of York;",
    "If music be the food of love, play on;",
    "Friends, Romans, countrymen, lend me your ears;",
    "The quality of mercy is not strain'd,",
    "We few, we happy few, we band of brothers;"]


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
    print(f"{len(SCRIPTS)} kinds of scripts: run, or say what is not supported")


if __name__ == "__main__":
    check_names()
    check_lm_eval()
