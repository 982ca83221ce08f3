"""Decodes by recorded graphs: padded to a recorded size, in tensors that are used again and again.

A CUDA graph repeats the same kernels on the same tensors, so every step copies its own numbers into
them. What can go wrong there has nothing to do with a GPU: a padding row that writes K and V, a
block table that is wider than the one of the step before, a size that no graph has. Here a stand-in
takes the place of the graph: it calls what was recorded again, on the recorded tensors.
"""

import random

import pytest
import torch

MOST = 7  # sequences: the sizes are 1, 2, 4 and 7


pytest.importorskip("triton", reason="pip install triton")
if torch.cuda.is_available():
    pytest.skip("tests/test_gpu.py has real graphs", allow_module_level=True)

def record_calls(runner):
    """Record what `capture_graphs` does, with calls in place of graphs; returns their sizes."""
    replayed = []

    def stand_in(run):
        logits = run()

        @torch.inference_mode()
        def replay():
            replayed.append(len(logits))
            logits.copy_(run())

        return replay, logits

    runner.capture_graphs(stand_in)
    return replayed


def requests(seed):
    from nanopaged import BeamSearchParams, SamplingParams

    rng = random.Random(seed)
    for index in range(8):
        prompt = [rng.randrange(60) for _ in range(rng.choice([1, 2, 3, 7, 8, 9, 20]))]
        if index == 3:
            yield prompt, BeamSearchParams(beam_width=3, max_tokens=6)
            continue
        yield prompt, SamplingParams(
            n=rng.choice([1, 1, 3]), max_tokens=rng.randrange(2, 12), seed=index,
            temperature=rng.choice([0, 1.0]), stop_token_ids=[5, 17, 40],
            logprobs=rng.choice([None, 2]),
        )  # fmt: skip


def answers(llm, seed):
    prompts, params = zip(*requests(seed), strict=True)
    outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    return [[(c.token_ids, c.finish_reason) for c in output.outputs] for output in outputs]


@pytest.mark.parametrize(("mode", "steps_ahead"), [
    pytest.param("recompute", 0, marks=pytest.mark.slow), ("swap", 1)])  # fmt: skip
def test_graphs_change_no_answer(llama, engine, counters, mode, steps_ahead):
    roomy = {"max_num_seqs": 64, "max_num_batched_tokens": 64, "max_model_len": 40}
    expected = answers(engine(llama, **roomy), seed=1)
    llm = engine(llama, num_blocks=14, max_model_len=40, max_num_seqs=MOST, preemption_mode=mode,
                 max_num_batched_tokens=16, attention_backend="triton")  # fmt: skip
    llm.steps_ahead = steps_ahead  # which only a GPU has otherwise
    replayed = record_calls(llm.runner)
    assert answers(llm, seed=1) == expected
    assert {*replayed} >= {1, 4, MOST}, "batches of several sizes"
    assert len(replayed) < llm.stats().steps, "prompts have no graph"
    assert counters(llm)[f"preemptions_{mode}"] > 0


def test_padding_writes_nothing(llama, engine):
    """The pool after some decodes is the same to the last bit, whether they were padded or not."""
    from nanopaged import SamplingParams

    params, pools = SamplingParams(temperature=0, ignore_eos=True, max_tokens=6), []
    for graphs in (False, True):
        llm = engine(llama, num_blocks=12, max_model_len=40, max_num_seqs=MOST,
                     attention_backend="triton")  # fmt: skip
        replayed = record_calls(llm.runner) if graphs else None
        outputs = llm.generate([[1, 2, 3], [4, 5], [6] * 9], params, use_tqdm=False)
        pools.append((llm.runner.kv_caches.clone(), [o.outputs[0].token_ids for o in outputs]))
    assert replayed and {*replayed} == {4}, "three sequences decode in the graph of four"
    assert pools[0][1] == pools[1][1]
    assert torch.equal(pools[0][0], pools[1][0])


@pytest.mark.parametrize("most", [1, 2, 3, 8, 15, 16, 17, 20, 33, 100])
def test_every_batch_size_has_a_graph(llama, engine, most):
    llm = engine(llama, max_num_seqs=most, attention_backend="triton")
    llm.runner.capture_graphs(lambda run: (run, torch.empty(0)))  # recorded, but never run
    sizes = llm.runner.graphs
    assert (min(sizes), max(sizes)) == (1, most)
    for size in range(1, most + 1):  # with less padding than sequences, or 16
        assert min(s for s in sizes if s >= size) < size + max(size, 16)
