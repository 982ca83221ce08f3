"""Any decoder of transformers: its own modules, with our attention plugged in.

This is for families that `model.py` lacks. Like `CausalLM`, `AnyDecoder` has the two
methods that the runner calls: `forward` and `head`.

What could a family do that a flat batch with blocks gets wrong? If its config tells,
`check_family` refuses it before any weight is read. `attend` refuses arguments that it
does not know. The rest only shows in the results: layers that remember tokens by other
means than attention and the states of `states.py`, or that take a token's place in the
batch for its position. So `plug_in_attention` compares two sequences with what
transformers computes for them, before the engine serves anything.
"""

import inspect
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from nanopaged.attention import Scoring, TorchAttention, cdiv
from nanopaged.batch import Batch
from nanopaged.checks import check
from nanopaged.loading import states
from nanopaged.loading.errors import explained
from nanopaged.sequence import NO_STATES

FAMILY = ("a family that remembers earlier tokens by attention, or by a state in "
          "transformers' cache, and lets attention be exchanged")
# Arguments of attention that change nothing here. (Q and K are rotated already.)
HARMLESS = ("dropout", "position_ids", "use_cache", "output_attentions")


def check_family(config: Any) -> None:
    """ValueError if this config of transformers tells that we cannot compute it."""
    family = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    is_open = family and family._supports_attention_backend and not family._is_stateful
    types = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    if not is_open or "linear_attention" in types:
        is_open = family and states.keeps_state(inspect.getmodule(family))
    check(bool(is_open), "model_type in config.json", FAMILY, config.model_type)


def attend(layer: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, *,
           scaling: float, sliding_window: int | None = None,
           s_aux: Tensor | None = None, **more: Any) -> tuple[Tensor, None]:
    """What a layer of transformers calls; q, k, v: [1, heads, num_tokens, head_dim]."""
    is_causal = getattr(layer, "is_causal", True)
    more |= {"a mask": attention_mask, "later keys": not is_causal}  # for the error
    unknown = [name for name, value in more.items()
               if name not in HARMLESS and value is not None and value is not False]
    name, shared, v_dim = type(layer).__name__, layer.shared, v.shape[-1]
    check(not unknown, f"attention in {name}", "without what ours lacks", unknown)
    # The pool has one shape for all layers. Narrower heads (those of Gemma 4's layers
    # with windows, and DeepSeek's V) are padded; where KV heads are fewer, they repeat.
    backend = shared.backend
    shape = num_kv_heads, head_dim = backend.num_kv_heads, backend.head_dim
    q, k, v = (nn.functional.pad(x, (0, head_dim - x.shape[-1]))
               if x.shape[-1] < head_dim else x for x in (q, k, v))
    if k.shape[1] < num_kv_heads:
        k, v = (x.repeat_interleave(num_kv_heads // x.shape[1], 1) for x in (k, v))
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    check(k.shape[1:] == v.shape[1:] == shape, f"K and V in {name}",
          f"{shape}, as in all other layers", tuple(k.shape[1:]))
    # (Of this call, not of this layer: a layer may run twice. If there are more calls
    # than caches, this is a StopIteration.)
    kv_cache = next(shared.unused_caches)
    shared.windows.add(sliding_window)
    backend.store(k, v, kv_cache, shared.metadata.slots)
    scoring = Scoring(scaling, sliding_window or None, s_aux)
    out = backend.attend(q, kv_cache, shared.metadata, scoring)
    return out.view(1, *q.shape)[..., :v_dim], None


transformers.AttentionInterface.register("nanopaged", attend)


class AnyDecoder(nn.Module):
    """Transformers' model, for a flat batch with blocks.

    `plug_in_attention` makes it so: until then, transformers computes everything.
    """

    def __init__(self, model: Any, sizes: Any, backend: TorchAttention) -> None:
        super().__init__()
        self.model = model.to(backend.device)
        self.sizes, self.decoder = sizes, self.model.get_decoder()
        self.run_decoder = self.decoder.forward
        # What `attend` needs. It gets only its layer, so every module has it.
        self.shared: Any = SimpleNamespace(backend=backend, windows=set())
        for module in self.modules():
            vars(module)["shared"] = self.shared
        self.stateful = [
            each for each in model.modules() if states.keeps_state(type(each))]

    def forward(self, token_ids: Tensor, kv_caches: Tensor, metadata: Any) -> Tensor:
        self.shared.unused_caches, self.shared.metadata = iter(kv_caches), metadata
        self.shared.runs = states.find_runs(metadata) if self.stateful else []
        self.output = self.run_decoder(
            token_ids[None], position_ids=metadata.positions[None], use_cache=False)
        for seq in metadata.seqs if self.stateful else ():
            seq.states = None, seq.states[1]  # nobody needs the old one any more
        return self.output.last_hidden_state[0]  # type: ignore[no-any-return]

    def head(self, x: Tensor) -> Tensor:
        """What the model computes after its decoder: some families scale logits, and
        some look at more than hidden states. So the whole model is called, with any
        tokens. It calls its decoder, which by now returns `output` whatever it gets.
        """
        self.output["last_hidden_state"] = x[None]
        tokens = torch.zeros(1, len(x), dtype=torch.int64, device=x.device)
        return self.model(tokens).logits[0]  # type: ignore[no-any-return]

    def compute_in_blocks(self, runner: Any, ids: Tensor, half: int) -> Tensor:
        """The logits of two sequences, computed at once: two chunks of `half` tokens,
        and then token by token. This measures a state, too.
        """
        length, size, logits = ids.shape[1], runner.config.block_size, []
        seqs: Any = [SimpleNamespace(states=NO_STATES) for _ in ids]
        for start, end in pairwise([0, half, *range(2 * half, length + 1)]):
            used, num_blocks = cdiv(end, size), cdiv(length, size)
            blocks = [*range(used), *range(num_blocks, num_blocks + used)]
            tokens = ids[:, start:end].flatten().tolist()
            for seq in seqs:
                seq.states = seq.states[1], {}
            hidden, *_ = runner.forward(runner.prepare(Batch(
                token_ids=tokens, counts=[end - start] * 2, ends=[end] * 2,
                block_ids=blocks, seqs=seqs)))
            logits.append(self.head(hidden).view(2, end - start, -1))
        runner.state_bytes = states.num_bytes(seqs[0].states[1])
        return torch.cat(logits, 1)

    @torch.inference_mode()
    def plug_in_attention(self, runner: Any) -> int:
        """Compute two sequences with transformers alone. Then plug our attention and
        our states in, and compute both again; ValueError if results differ. Returns how
        long a sequence may get.
        """
        size, vocab_size = runner.config.block_size, self.sizes.vocab_size
        longest = runner.longest_sequence
        # Few tokens, in several blocks if blocks are small: two chunks, and decodes.
        length = min(max(2 * size + 2, 10), 66, longest)
        half = max((length - 4) // 2, 1)
        ids = torch.arange(2 * length, device=runner.device).view(2, -1) % vocab_size
        runner.make_pools(2 * cdiv(length, size), 0)  # for this comparison alone
        with explained(f"model_type in config.json must be {FAMILY}, got "
                       f"{self.sizes.model_type!r}: "):
            wanted = self.model(ids, use_cache=False).logits.float()
            self.model.set_attn_implementation("nanopaged")
            self.decoder.forward = lambda *_, **__: self.output
            states.plug_in_states(self.stateful, self.sizes.hf_config, self.shared)
            errors = (self.compute_in_blocks(runner, ids, half) - wanted).norm(dim=-1)
        # (If a token's embedding is zero, its logits may be, too.)
        errors /= wanted.norm(dim=-1).clamp(min=1e-6)
        # Each call of attention has used one cache. The others need no place in a pool.
        runner.num_layers -= sum(1 for _ in self.shared.unused_caches)
        runner.make_pools(0, 0)  # back to the padding block alone
        # A family may give its window to the mask that it makes, but not to attention.
        # Ours gets no mask, so sequences must not get longer than the window: up to
        # there it makes no difference.
        window, types = self.sizes.sliding_window, self.sizes.layer_types
        is_used = types is None or "sliding_attention" in types
        if window and is_used and window not in self.shared.windows:
            longest = min(longest, window)
        # In 16 bits, rounding may even send a token to another expert, so 0.2 passes. A
        # lost state changes results by 0.16, and there rounding changes them by 0.04.
        tolerance = 0.05 if self.stateful else 0.2
        if runner.dtype == torch.float32:
            tolerance = 1e-3
        parts = errors[:, :longest].tensor_split([half, 2 * half], 1)
        check(all(bool(part.mean() < tolerance) for part in parts if part.numel()),
              "model_type in config.json", FAMILY, self.sizes.model_type)
        return int(longest)
