"""Decodes run recorded graphs, padded to a recorded size, in the same tensors.

A CUDA graph repeats the same kernels on the same tensors, so every step copies its own
numbers into them. What can go wrong does not depend on a GPU: a padding row that writes
K and V, a block table wider than the previous step's, a size without a graph. Here
`record_calls` replaces the graphs: it repeats the recorded calls on the recorded
tensors.
"""

import pytest
import torch

from helpers import counters, draw_requests, record_calls, serve
from nanopaged import SamplingParams

MOST = 7  # sequences: the sizes are 1, 2, 4 and 7

pytest.importorskip("triton", reason="pip install triton")
if torch.cuda.is_available():
    pytest.skip("tests/test_gpu.py has real graphs", allow_module_level=True)


@pytest.mark.parametrize(
    ("mode", "steps_ahead"),
    [pytest.param("recompute", 0, marks=pytest.mark.slow), ("swap", 1)],
)
def test_graphs_change_no_answer(llama, engine, mode, steps_ahead):
    limits = {"vocab_size": 160, "most": 3, "max_tokens": 12, "stop": ()}
    lengths = [1, 2, 3, 7, 8, 9, 20]
    requests = list(draw_requests(seed=24, count=8, lengths=lengths, **limits))

    roomy = {"max_num_seqs": 64, "max_num_batched_tokens": 64, "max_model_len": 40}
    expected = serve(engine(llama, **roomy), requests)
    llm = engine(
        llama,
        num_blocks=14,
        max_model_len=40,
        max_num_seqs=MOST,
        preemption_mode=mode,
        max_num_batched_tokens=16,
        attention_backend="triton",
    )
    llm.steps_ahead = steps_ahead  # elsewhere only a GPU runs ahead
    replayed = record_calls(llm.runner)

    assert serve(llm, requests) == expected
    assert {*replayed} >= {1, 4, MOST}, "batches of several sizes"
    assert len(replayed) < llm.stats().steps, "prompts have no graph"
    assert counters(llm)[f"preemptions_{mode}"] > 0


def test_padding_writes_nothing(llama, engine):
    """After some decodes the pool is the same, whether they were padded or not.

    Written slots are compared with a tolerance: a product of four rows and one of three
    round differently. But the same slots are written, and padding writes to none.
    """
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=6)
    pools = []
    for graphs in (False, True):
        llm = engine(
            llama,
            num_blocks=12,
            max_model_len=40,
            max_num_seqs=MOST,
            attention_backend="triton",
        )
        replayed = record_calls(llm.runner) if graphs else None
        outputs = llm.generate([[1, 2, 3], [4, 5], [6] * 9], params, use_tqdm=False)
        pools.append(
            (llm.runner.kv_caches.clone(), [o.outputs[0].token_ids for o in outputs])
        )

    assert replayed and {*replayed} == {4}, (
        "three sequences decode in the graph of four"
    )
    assert pools[0][1] == pools[1][1]
    plain, padded = pools[0][0], pools[1][0]
    assert torch.equal(plain == 0, padded == 0), "other slots were written"
    torch.testing.assert_close(padded, plain, rtol=0, atol=1e-4)


@pytest.mark.parametrize("most", [1, 2, 3, 8, 15, 16, 17, 20, 33, 100])
def test_every_batch_size_has_a_graph(llama, engine, most):
    llm = engine(llama, max_num_seqs=most, attention_backend="triton")
    llm.runner.capture_graphs(lambda run: (run, torch.empty(0)))  # they never run
    sizes = llm.runner.graphs
    assert (min(sizes), max(sizes)) == (1, most)
    for size in range(1, most + 1):  # with less padding than sequences, or less than 16
        assert min(s for s in sizes if s >= size) < size + max(size, 16)
