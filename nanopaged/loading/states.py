"""Modules of transformers that remember earlier tokens by a state, as Mamba's do.

The state of a module has a fixed size, however long its sequence is: the module's last
inputs, for a convolution, and a matrix that every token changes. Transformers keeps
both in a layer of its cache. Here the state of a sequence is a dict with such a layer
for each module, by the module's number. It is empty until its step has run, and never
changes after that: the next step makes a new one. So forks and beams may share it.

A module computes sequences of one length, and changes their states in the cache that it
is given. But the entries of a flat batch differ in length, and states never change. So
the entries that decode are computed together, with copies of their states stacked in
one layer, and each of the others is computed alone. What the layer then holds becomes
the new states.
"""

import inspect
from copy import copy, deepcopy
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

# The tensors of a layer of a cache: a dict of each kind.
KINDS = ("conv_states", "recurrent_states")
source_of = cache(inspect.getsource)  # it parses the whole file, each time


def keeps_state(code: Any) -> bool:
    """Whether a class, or a file, keeps a state in transformers' cache."""
    return "cache.update_conv_state(" in source_of(code)


def plug_in_states(modules: list[Any], config: Any, shared: Any) -> None:
    """Let these modules compute the entries of a flat batch."""
    layers = transformers.DynamicCache(config=config).layers if modules else []
    for number, module in enumerate(modules):
        module.forward = Stateful(number, module, layers[module.layer_idx], shared)


def find_runs(metadata: Any) -> list[tuple[list[int], Tensor]]:
    """The entries that are computed together, and their tokens, [num_entries, count]:
    first those that decode.
    """
    counts, ends = metadata.counts, metadata.ends
    starts = np.cumsum(counts) - counts
    for past, seq in zip(ends - counts, metadata.seqs, strict=True):
        assert (seq.states[0] is None) == (past == 0), "a state is of computed tokens"
    is_decode = (counts == 1) & (ends > 1)
    decodes, others = (np.flatnonzero(x).tolist() for x in (is_decode, ~is_decode))
    runs = [decodes] * bool(decodes) + [[entry] for entry in others]
    tokens = [starts[run][:, None] + np.arange(counts[run[0]]) for run in runs]
    return [(run, torch.from_numpy(some).to(metadata.token_ids.device))
            for run, some in zip(runs, tokens, strict=True)]


def from_layers(layers: list[Any], make: Any) -> Any:
    """A layer of a cache. `make` gives each tensor from those of `layers`."""
    new = copy(layers[0])
    for kind in KINDS:
        tensors = [vars(layer)[kind] for layer in layers]
        vars(new)[kind] = {
            key: None if first is None else make([each[key] for each in tensors])
            for key, first in tensors[0].items()}
    return new


def num_bytes(state: Any) -> int:
    """How much memory the state of a sequence takes."""
    return sum(tensor.nbytes for layer in state.values() for kind in KINDS
               for tensor in vars(layer)[kind].values() if tensor is not None)


class Stateful:
    """Stands in for `forward` of a module with a state.

    empty: the module's layer of a cache, before the first token.
    """

    def __init__(self, number: int, module: Any, empty: Any, shared: Any) -> None:
        self.number, self.empty, self.shared = number, empty, shared
        self.compute, self.layer_idx = module.forward, module.layer_idx
        self.names = [*inspect.signature(module.forward).parameters]
        # Transformers' Mamba 1 starts a chunk of several tokens without its state.
        self.by_token = "mamba_selective_scan(" in source_of(module.__class__)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """What the module returns for a flat batch: [1, num_tokens, ...], or several
        such tensors.
        """
        named |= zip(self.names, args, strict=False)
        runs = self.shared.runs
        outs = [out for entries, tokens in runs
                for out in self.compute_run(entries, tokens, named)]
        order = torch.cat([tokens.flatten() for _, tokens in runs]).argsort()

        def join(pieces: Any) -> Tensor:
            return torch.cat([piece.flatten(0, 1) for piece in pieces])[order][None]

        if isinstance(outs[0], Tensor):
            return join(outs)
        return tuple(map(join, zip(*outs, strict=True)))

    def compute_run(self, entries: list[int], tokens: Tensor, named: Any) -> list[Any]:
        """The outputs for entries that are computed together. Fills their new states.
        """
        states = [self.shared.metadata.seqs[entry].states for entry in entries]
        olds = [old[self.number] for old, _ in states if old is not None]
        layer = from_layers(olds, torch.cat) if olds else deepcopy(self.empty)
        cache = transformers.Cache(layers={self.layer_idx: layer})
        outs = []
        for some in tokens.split(1 if olds and self.by_token else tokens.shape[1], 1):
            given = {name: self.pick(x, some) for name, x in named.items()}
            outs.append(self.compute(**given | {"cache": cache}))
        for row, (_, new) in enumerate(states):
            # A row of each tensor. (A view would keep all rows in memory.)
            new[self.number] = from_layers(
                [layer], lambda tensors, row=row: tensors[0][row : row + 1].clone())
        return outs

    def pick(self, x: Any, tokens: Tensor) -> Any:
        """[1, num_tokens, ...] -> [num_entries, count, ...]"""
        is_flat = isinstance(x, Tensor) and x.shape[:2] == (
            1, self.shared.metadata.counts.sum())
        return x[0][tokens] if is_flat else x
