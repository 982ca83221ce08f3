"""The flash backend against stand-ins for FlashAttention's two packages.

The stand-ins have the signatures of the real functions, refuse what those refuse, and
compute what those compute: attention over a paged cache, with the causal mask at the
bottom right. Steps of decodes alone, and float32, go to Triton, in its interpreter
here.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
import torch.nn.attention.varlen

import nanopaged
from nanopaged.triton_attention import FlashAttention
from test_attention import Case

pytest.importorskip("triton", reason="pip install triton")

F16 = torch.float16
PROMPTS = [(0, 40), (0, 7), (32, 20), (3, 9), (0, 2)]  # (past, new)


def reference(q, k, v, cu_q, cu_k, max_q, max_k, block_table):
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert {x.stride(-1) for x in (q, k, v, block_table)} == {1}
    assert (q.dim(), k.dim(), v.dim()) == (3, 4, 4)
    assert k.shape[1] % 256 == 0  # "Paged KV cache block size must be divisible by 256"
    assert q.shape[1] % k.shape[2] == 0
    assert {x.dtype for x in (cu_q, cu_k, block_table)} == {torch.int32}
    assert all(x.is_contiguous() for x in (cu_q, cu_k))
    assert len(block_table) == len(cu_q) - 1 == len(cu_k) - 1
    assert cu_q[-1] == len(q)
    assert (type(max_q), type(max_k)) == (int, int)
    assert (max_q, max_k) == (cu_q.diff().max(), cu_k.diff().max())
    out = torch.empty_like(q)
    for i in range(len(cu_q) - 1):
        queries, num_keys = slice(cu_q[i], cu_q[i + 1]), int(cu_k[i + 1] - cu_k[i])
        blocks = block_table[i, : -(-num_keys // k.shape[1])].long()
        keys, values = (x[blocks].flatten(0, 1)[:num_keys] for x in (k, v))
        one, k_one, v_one = (
            x.transpose(0, 1).float() for x in (q[queries], keys, values)
        )
        k_one, v_one = (
            x.repeat_interleave(len(one) // len(x), 0) for x in (k_one, v_one)
        )
        scores = one @ k_one.transpose(1, 2) / q.shape[-1] ** 0.5
        later = scores.shape[2] - scores.shape[1]
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(later)
        probs = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[queries] = (probs @ v_one).transpose(0, 1).to(q.dtype)
    return out


@pytest.fixture
def calls(monkeypatch):
    """How long each call of the package was, and where its K came from."""
    calls = []

    def note(q, cu_seqlens_k, k):
        calls.append((len(q), int(cu_seqlens_k[-1]), k.untyped_storage().data_ptr()))

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        block_table=None,
    ):
        assert causal
        note(q, cu_seqlens_k, k)
        return reference(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table
        )

    package = ModuleType("flash_attn")
    package.__spec__ = ModuleSpec("flash_attn", None)
    package.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    return calls


class FlashCase(Case):
    def __init__(self, seqs, heads=(4, 2, 64), block_size=256, dtype=F16):
        super().__init__(seqs, heads, block_size, dtype)

    def backend(self):
        return FlashAttention(
            *self.heads, self.block_size, self.dtype, torch.device("cpu")
        )

    def check(self):
        expected, out = self.expected(), self.run().double()
        assert ((out - expected).norm(dim=1) < 2e-3 * expected.norm(dim=1)).all()


@pytest.mark.parametrize("heads", [(1, 1, 64), (4, 2, 80), (6, 1, 128)], ids=str)
@pytest.mark.parametrize("block_size", [256, 512, 1024])
def test_prompts_read_the_pool_in_place(calls, heads, block_size):
    case = FlashCase(PROMPTS, heads, block_size)
    case.check()
    assert calls == [(78, 113, case.cache.untyped_storage().data_ptr())]


@pytest.mark.parametrize(
    "seqs, dtype",
    [
        ([(0, 40), (0, 7)], torch.float32),  # no kernel of theirs
        ([(40, 1), (3, 1), (0, 1)], F16),  # decodes: graphs record them
        ([(1, 1), (0, 1)], F16),  # even with few keys
    ],
    ids=str,
)
def test_what_does_not_suit_it_is_tritons(calls, seqs, dtype):
    FlashCase(seqs, dtype=dtype).check()
    assert calls == []


def test_decodes_and_long_pasts_may_come_along(calls):
    FlashCase([(300, 1), (0, 50), (9, 1), (260, 5)]).check()
    assert [call[:2] for call in calls] == [(57, 301 + 50 + 10 + 265)]


@pytest.mark.parametrize("block_size", [16, 128, 384])
def test_small_blocks_are_refused(calls, block_size):
    message = (
        f"multiple of 256 for attention_backend='flash', got {block_size}: use 256"
    )
    with pytest.raises(ValueError, match=message):
        FlashCase([(0, 4)], block_size=block_size).backend()


@pytest.mark.slow
def test_the_engine_says_the_same_as_with_triton(calls):
    prompts = ["ROMEO:\nBut soft, what light through yonder", "To be"]
    params = nanopaged.SamplingParams(temperature=0, max_tokens=4)
    said = {}
    for backend in ("triton", "flash"):
        options = {
            "dtype": "float16",
            "num_blocks": 8,
            "max_num_seqs": 4,
            "block_size": 256,
        }
        with nanopaged.LLM(
            attention_backend=backend, max_num_batched_tokens=16, **options
        ) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            outputs += llm.generate(
                prompts[:1], params, use_tqdm=False
            )  # its prefix is cached
        said[backend] = [output.outputs[0].token_ids for output in outputs]
    assert said["flash"] == said["triton"]
    assert calls


def test_without_flash_attn_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ValueError, match="flash-attn.*install it, or use 'triton'"):
        FlashCase(PROMPTS).backend()
