"""The torch backend against attention written out token by token over dense K and V.

Slots that nobody has written hold NaN, and block tables name wrong blocks past a
sequence's end: whatever reads too far, or writes beside its slot, shows.
"""

import math
import random

import numpy as np
import pytest
import torch

from nanopaged import attention
from nanopaged.attention import TorchAttention

GARBAGE = math.nan
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-4}
HEADS = [
    (1, 1, 8),
    (4, 4, 16),
    (8, 2, 16),
    (6, 3, 24),
    (14, 2, 64),
    (5, 1, 80),
    (3, 3, 96),
]


class Case:
    """A cache with some sequences' past in it, and a step's new tokens: (past, new) for
    each.
    """

    def __init__(
        self, seqs, heads=(4, 2, 8), block_size=4, dtype=torch.float64, seed=0
    ):
        self.heads, self.block_size, self.dtype, self.seqs = (
            heads,
            block_size,
            dtype,
            seqs,
        )
        self.generator = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads, head_dim = heads
        needed = [-(-(past + new) // block_size) for past, new in seqs]
        self.num_blocks = sum(needed) + 3
        order = random.Random(seed).sample(range(self.num_blocks), self.num_blocks)
        width = max(needed) + 2
        self.tables = np.zeros((len(seqs), width), np.int64)
        for row, count in enumerate(needed):
            self.tables[row, :count] = [order.pop() for _ in range(count)]
            # What stands behind is stale: a block of somebody else, or of nobody.
            self.tables[row, count:] = order[-1] if row % 2 else self.tables[0, 0]
        self.q = self.draw(sum(new for _, new in seqs), num_heads)
        self.dense = [self.draw(2, past + new, num_kv_heads) for past, new in seqs]
        shape = (self.num_blocks, 2, num_kv_heads, block_size, head_dim)
        self.cache = torch.full(shape, GARBAGE, dtype=dtype)
        for row, (past, _) in enumerate(seqs):
            self.write(self.cache, row, 0, past)

    def draw(self, *shape):
        shape = (*shape, self.heads[2])
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(
            self.dtype
        )

    def write(self, cache, row, begin, end):
        for position in range(begin, end):
            block, offset = divmod(position, self.block_size)
            cache[self.tables[row, block], :, :, offset] = self.dense[row][:, position]

    def new(self):
        """This step's K and V, flat: [num_tokens, num_kv_heads, head_dim] each."""
        parts = [
            dense[:, past:]
            for dense, (past, _) in zip(self.dense, self.seqs, strict=True)
        ]
        return torch.cat(parts, 1)

    def expected(self):
        """One softmax per token and head, in float64."""
        num_heads, num_kv_heads, head_dim = self.heads
        rows, queries = [], iter(self.q.double())
        for dense, (past, new) in zip(self.dense, self.seqs, strict=True):
            for position in range(past, past + new):
                q, (k, v) = next(queries), dense.double()
                out = []
                for head in range(num_heads):
                    kv_head = head // (num_heads // num_kv_heads)
                    keys, values = (
                        k[: position + 1, kv_head],
                        v[: position + 1, kv_head],
                    )
                    probs = torch.softmax(keys @ q[head] / math.sqrt(head_dim), 0)
                    out.append(probs @ values)
                rows.append(torch.cat(out))
        return torch.stack(rows)

    def backend(self):
        return TorchAttention(
            *self.heads, self.block_size, self.dtype, torch.device("cpu")
        )

    def prepare(self, backend):
        past, new = (np.array(column) for column in zip(*self.seqs, strict=True))
        return backend.prepare(self.tables, past, new)

    def run(self, backend=None):
        backend = backend or self.backend()
        metadata = self.prepare(backend)
        q = self.store(backend, metadata)
        return backend.attend(q, self.cache, metadata)

    def store(self, backend, metadata, with_norms=False):
        """K and V, without a rotation; returns Q."""
        qkv = torch.cat((self.q, *self.new()), 1).to(self.cache.device)
        cos = qkv.new_ones(len(qkv), 1, self.heads[2])
        rotation = cos, torch.zeros_like(cos)
        weights = [cos[0, 0]] * 2 if with_norms else []
        return backend.rotate_and_store(
            qkv, weights, 1e-6, rotation, self.cache, metadata
        )

    def check(self, backend=None):
        expected, out = self.expected(), self.run(backend)
        assert out.shape == expected.shape
        assert out.dtype == self.dtype
        torch.testing.assert_close(
            out.double(), expected, rtol=0, atol=TOLERANCE[self.dtype]
        )


MIXED = [
    (0, 1),
    (0, 5),
    (7, 1),
    (8, 1),
    (9, 1),
    (4, 4),
    (3, 6),
    (0, 17),
    (16, 3),
    (40, 1),
    (5, 1),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_chunks_and_decodes_mix_under_any_heads(heads, dtype):
    Case(MIXED, heads, dtype=dtype).check()


@pytest.mark.parametrize("block_size", [1, 2, 4, 16, 64, 256])
def test_any_block_size_gives_the_same(block_size):
    Case(MIXED, block_size=block_size).check()


@pytest.mark.parametrize("past", [0, 3, 4, 5, 127])
@pytest.mark.parametrize("new", [1, 4, 128, 129, 300])
def test_a_chunk_of_any_length_after_a_past_of_any_length(past, new):
    Case([(past, new)], (2, 1, 4)).check()


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_how_many_queries_share_a_mask_changes_nothing(most, monkeypatch):
    monkeypatch.setattr(attention, "MASKED_QUERIES", most)
    case = Case(MIXED)
    sizes = [
        chunk.mask.shape
        for chunk in case.prepare(case.backend()).chunks
        if chunk.mask is not None
    ]
    assert max(queries for queries, _ in sizes) == min(most, 6)
    case.check()


def test_a_prompt_from_the_start_needs_no_mask():
    case = Case([(0, 1300), (3, 1), (0, 1)], (2, 1, 4))
    chunks = case.prepare(case.backend()).chunks
    assert [chunk.mask is None for chunk in chunks] == [True, False, True]


def test_one_backend_serves_big_and_small_steps_in_turn():
    backend = Case([(0, 1)]).backend()
    for seed, seqs in enumerate(
        ([(0, 3)], MIXED, [(60, 1)], [(0, 200)], MIXED[::-1], [(0, 1)])
    ):
        Case(seqs, seed=seed).check(backend)


def test_a_sequence_reads_what_another_stores_in_the_same_step():
    case = Case([(0, 9), (8, 1)])
    case.tables[1, :2] = case.tables[
        0, :2
    ]  # the second shares the two blocks that the first fills
    case.dense[1][:, :8] = case.dense[0][:, :8]
    case.cache.fill_(GARBAGE)
    case.check()


def test_store_writes_its_slots_and_nothing_else():
    case = Case(MIXED, (6, 3, 8))
    expected = case.cache.clone()
    for row, (past, new) in enumerate(case.seqs):
        case.write(expected, row, past, past + new)
    case.run()
    assert torch.equal(case.cache.nan_to_num(7), expected.nan_to_num(7))


def test_a_layer_of_the_pool_is_a_cache():
    """The runner passes one layer of [num_layers, 2, ...]: a view, at an offset."""
    case = Case(MIXED)
    pool = torch.full((3, *case.cache.shape), GARBAGE, dtype=case.dtype)
    pool[1], case.cache = case.cache, pool[1]
    case.check()
    assert pool[0].isnan().all() and pool[2].isnan().all()


def test_the_answer_of_a_sequence_does_not_depend_on_its_neighbours():
    together = Case(MIXED)
    out = together.run().split([new for _, new in MIXED])
    for row, seq in enumerate(MIXED):
        alone = Case([seq])
        first = sum(new for _, new in MIXED[:row])
        alone.q, alone.dense = together.q[first : first + seq[1]], [together.dense[row]]
        alone.write(alone.cache, 0, 0, seq[0])
        torch.testing.assert_close(alone.run(), out[row], rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_random_steps(seed):
    rng = random.Random(seed)
    group, kv_heads = rng.randint(1, 5), rng.randint(1, 4)
    heads = (group * kv_heads, kv_heads, rng.choice([2, 8, 10, 16]))
    seqs = [
        (rng.choice([0, rng.randint(0, 70)]), rng.choice([1, 1, rng.randint(1, 40)]))
        for _ in range(rng.randint(1, 9))
    ]
    Case(
        seqs, heads, rng.choice([1, 2, 4, 8, 16]), rng.choice(list(TOLERANCE)), seed
    ).check()
