"""What the CPU's kernel reads of the cache: counted, so a busy machine changes nothing.

A decode is as fast as memory delivers K and V. The kernel runs as plain Python here, on
an array that writes down what is read. The model of the processor: its cache has room
for the K and V of one block. What is read of the same block again costs nothing, and a
block that is left and read again later has to be fetched again.
"""

from itertools import groupby
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("numba", reason="pip install numba")

from nanopaged import paged_attention  # noqa: E402
from nanopaged.paged_attention import run_program  # noqa: E402

BLOCK_SIZE, HEAD_DIM, NUM_KEYS, KV_HEAD = 4, 8, 18, 1
TABLE = [6, 2, 5, 0, 3]  # its last block holds two keys


class Recorded(np.ndarray):
    """An array whose `reads` get the numbers of the elements that are read.

    `numbers` has the number of each element. Views are arrays of the same kind.
    """

    def __getitem__(self, index):
        found, numbers = super().__getitem__(index), self.numbers[index]
        self.reads.append(numbers)
        if isinstance(found, Recorded):
            found.numbers, found.reads = numbers, self.reads
        return found


def decode(group_size, window=1 << 40):
    """Run the kernel for one query and one KV head. Returns the blocks in the order in
    which they are fetched, and how many elements of K and of V are read.
    """
    rng = np.random.default_rng(group_size)
    shape = 8, 2, 2, BLOCK_SIZE, HEAD_DIM  # of the cache
    plain = rng.standard_normal(shape).astype(np.float32)
    cache = plain.view(Recorded)
    cache.numbers, cache.reads = np.arange(plain.size).reshape(shape), []
    q = rng.standard_normal((1, 2, group_size, HEAD_DIM)).astype(np.float32)
    out = np.zeros_like(q)
    kernel = getattr(run_program, "py_func", run_program)
    # What is fetched ahead is not a read of its own: it is read later.
    with mock.patch.object(paged_attention, "prefetch", lambda row: row.reads.pop()):
        kernel(KV_HEAD, out, q, cache, np.array(TABLE),
               np.array([[0], [0], [NUM_KEYS]]), window, None, 1)

    keys, values = plain[TABLE][:, :, KV_HEAD].swapaxes(0, 1).reshape(2, -1, HEAD_DIM)
    seen = slice(max(0, NUM_KEYS - window), NUM_KEYS)
    probs = np.exp(q[0, KV_HEAD].astype(float) @ keys[seen].T)
    expected = probs @ values[seen] / probs.sum(1, keepdims=True)
    np.testing.assert_allclose(out[0, KV_HEAD], expected, rtol=1e-4, atol=1e-5)

    # A view of several blocks reads nothing yet, nor does that of a block's rows.
    blocks = [np.min(numbers) // plain[0].size for numbers in cache.reads
              if np.ndim(numbers) < 3]
    elements = np.concatenate([np.ravel(numbers) for numbers in cache.reads
                               if np.ndim(numbers) < 2])
    is_value = elements // plain[0, 0].size % 2
    return [block for block, _ in groupby(blocks)], np.bincount(is_value, minlength=2)


@pytest.mark.parametrize("group_size", [1, 2, 5])
def test_all_heads_of_a_group_use_a_block_while_it_is_there(group_size):
    fetched, _ = decode(group_size)
    assert sorted(fetched) == sorted(TABLE)


def test_a_head_reads_each_number_of_k_and_v_once():
    _, (from_k, from_v) = decode(group_size=2)
    assert max(from_k, from_v) <= 2 * NUM_KEYS * HEAD_DIM


def test_only_the_blocks_of_the_window_are_fetched():
    fetched, _ = decode(group_size=2, window=7)  # positions 11 to 17
    assert set(fetched) == set(TABLE[2:])
