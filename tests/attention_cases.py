"""Attention with a cache, and what it must give: for test_attention.py and gpu/.

Slots that nobody has written hold NaN, and block tables go on with somebody else's
blocks after a sequence's end: whatever reads too far, or writes beside its slot, shows.
"""

import random
from functools import cached_property
from types import SimpleNamespace

import numpy as np
import torch

from nanopaged.attention import INPUTS, Metadata, Scoring
from nanopaged.batch import Batch
from nanopaged.loading import start_up

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
CPU = torch.device("cpu")
TOLERANCE = {F64: 1e-13, F32: 1e-5, F16: 2e-3, BF16: 1e-2}  # relative


def make_backend(name, heads=(4, 2, 16), block_size=16, dtype=F32, device=CPU):
    sizes = zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads,
                strict=True)
    return start_up.make_backend(
        name, SimpleNamespace(**dict(sizes)), block_size, dtype, device)


class Case:
    """A cache with the past of some sequences in it, and the new tokens of a step."""

    def __init__(self, seqs, heads=(4, 2, 16), block_size=4, dtype=F32, seed=0,
                 temper=1.0, **how):
        self.seqs, self.heads, self.block_size, self.dtype = (
            seqs, heads, block_size, dtype)
        self.how = {"scale": heads[2] ** -0.5} | how  # and the window, and sinks
        self.counts = np.array([new for _, new in seqs])
        self.ends = np.array([past + new for past, new in seqs])
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

        def draw(*shape):
            precise = torch.promote_types(dtype, F32)  # float64 takes six times as long
            numbers = torch.randn(*shape, heads[2], generator=generator, dtype=precise)
            return numbers.to(dtype)

        needed = -(-self.ends // block_size)
        num_blocks = int(needed.sum()) + 2
        order = rng.sample(range(num_blocks), num_blocks)
        self.tables = np.full((len(seqs), needed.max() + 2), order.pop())
        for row, count in enumerate(needed):
            self.tables[row, :count] = [order.pop() for _ in range(count)]
        self.q = draw(int(self.counts.sum()), heads[0]) * temper
        self.dense = [draw(end, 2, heads[1]) for end in self.ends]  # K and V
        shape = num_blocks, 2, heads[1], block_size, heads[2]
        self.cache = torch.full(shape, torch.nan, dtype=dtype)
        for row, (past, _) in enumerate(seqs):
            self.write(self.cache, row, 0, past)

    def write(self, cache, row, first, end):
        block, offset = np.divmod(np.arange(first, end), self.block_size)
        cache[self.tables[row, block], :, :, offset] = self.dense[row][first:end]

    def metadata(self, backend):
        sizes = -(-self.ends // self.block_size)
        rows = [row[:size] for row, size in zip(self.tables, sizes, strict=True)]
        tables = np.concatenate([*rows, self.tables[0, -1:]])  # and a strange block
        metadata = Metadata(
            Batch(counts=self.counts, ends=self.ends, block_ids=tables), backend)
        for name in INPUTS:
            array = np.ascontiguousarray(vars(metadata)[name])
            vars(metadata)[name] = torch.from_numpy(array).to(backend.device)
        return metadata

    def run(self, backend):
        """Store K and V in the cache, then attend."""
        return self.prepare(backend)()

    def prepare(self, backend):
        """Store K and V in the cache; returns a function that attends."""
        metadata = self.metadata(backend)
        new = [dense[past:] for dense, (past, _) in
               zip(self.dense, self.seqs, strict=True)]
        qkv = torch.cat((self.q, torch.cat(new).flatten(1, 2)), 1).to(backend.device)
        # Views, not contiguous, as in the model.
        q, k, v = qkv.split([self.heads[0], self.heads[1], self.heads[1]], 1)
        self.cache = self.cache.to(backend.device)
        backend.store(k, v, self.cache, metadata.slots)
        return lambda: backend.attend(
            q, self.cache, metadata, Scoring(**self.how))

    def worst_error(self, out):
        """Of a token's result, relative to that result."""
        error = (out.cpu().double() - self.expected).norm(dim=1)
        worst = float((error / self.expected.norm(dim=1)).max())
        assert worst < TOLERANCE[self.dtype]  # and so no NaN
        return worst

    @cached_property
    def expected(self):
        rows, queries = [], iter(self.q.double())
        scale, window, sinks = map(self.how.get, ("scale", "window", "sinks"))
        sinks = torch.full((self.heads[0],), -torch.inf) if sinks is None else sinks
        for dense, count, end in zip(self.dense, self.counts, self.ends, strict=True):
            k, v = dense.double().repeat_interleave(
                self.heads[0] // self.heads[1], 2).unbind(1)
            for seen in range(end - count + 1, end + 1):
                keys = slice(max(0, seen - window) if window else 0, seen)
                scores = torch.einsum("hd,khd->hk", next(queries), k[keys]) * scale
                # A sink is a key without a V.
                scores = torch.cat((sinks[:, None].to(scores), scores), 1)
                probs = scores.softmax(-1)[:, 1:]
                rows.append(torch.einsum("hk,khd->hd", probs, v[keys]).flatten())
        return torch.stack(rows)

    def check(self, name, **changes):
        backend = make_backend(name, self.heads, self.block_size, self.dtype)
        vars(backend).update(changes)
        out = self.run(backend)
        assert (out.shape, out.dtype) == (self.expected.shape, self.dtype)
        self.worst_error(out)
        return out
