"""What must have the GPU for itself: memory as promised, and steps launched early."""

import pytest
import torch

from helpers import generate, greedy
from nanopaged import LLM, SamplingParams

pytestmark = pytest.mark.gpu


# --- memory ---


MEMORY = {
    "max_num_seqs": 16384,
    "max_num_batched_tokens": 16384,
    "enforce_eager": True,
    "num_blocks": None,
    "max_model_len": None,
    "block_size": 16,
    "swap_space": 0,
}


@pytest.mark.parametrize("utilization", [0.2, 0.4])
def test_the_pool_takes_its_share_of_memory(on_gpu, release, utilization):
    release()
    sizes = []
    for _ in range(2):  # what the first used must not count for the second
        llm = on_gpu(None, gpu_memory_utilization=utilization, **MEMORY)
        free, total = torch.cuda.mem_get_info()
        wanted = MEMORY["max_num_seqs"] * -(-llm.runner.max_model_len // 16)
        assert 1 - free / total < utilization + 0.01
        if llm.runner.num_blocks < wanted:  # memory is the limit
            assert 1 - free / total > utilization - 0.1
        sizes.append(llm.runner.num_blocks)
        assert len(generate(llm, [[5, 6, 7]], greedy(4))[0][0]) == 4
        llm.shutdown()
        release()

    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)


def test_the_error_for_a_step_that_cannot_fit_says_what_to_lower(on_gpu):
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        with pytest.raises(
            ValueError, match="max_num_batched_tokens=1000000 and max_num_seqs=4"
        ):
            on_gpu(
                None, num_blocks=None, max_num_seqs=4, max_num_batched_tokens=1_000_000
            )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_after_shutdown_an_engine_holds_no_memory(release):
    release()
    before = torch.cuda.memory_allocated()
    llm = LLM(device="cuda", num_blocks=2000, max_num_seqs=32)
    llm.generate(["O"], greedy(4), use_tqdm=False)
    pool = llm.runner.kv_caches.nbytes
    assert torch.cuda.memory_allocated() - before > pool

    llm.shutdown()
    assert torch.cuda.memory_allocated() - before < pool / 2

    del llm
    release()
    assert torch.cuda.memory_allocated() - before < 64 << 20  # cuBLAS keeps a workspace


# --- one step ahead ---


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_a_step_is_launched_while_the_previous_one_runs(on_gpu, enforce_eager):
    """The debug mode misses a wait for an unpinned copy: this test finds large ones."""
    llm = on_gpu(
        None,
        enforce_eager=enforce_eager,
        max_num_seqs=256,
        block_size=1,
        num_blocks=256 * 250,
        max_model_len=250,
        max_num_batched_tokens=1 << 16,
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=30, ignore_eos=True)
    for start in range(256):  # block tables of 200 KB
        llm.add_request([start, *range(200)], params)
    for _ in range(8):
        llm.step()  # warm up
    events = []
    early = []

    def keep_the_device_busy(phase, batch):
        if phase == "scheduled":
            torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second
            events.append(torch.cuda.current_stream().record_event())
        elif phase == "executed":
            early.append(not events[-1].query())

    llm.observers.append(keep_the_device_busy)
    for _ in range(4):
        llm.step()
    llm.observers.remove(keep_the_device_busy)
    while llm.has_unfinished_requests():
        llm.step()

    assert all(early), early
