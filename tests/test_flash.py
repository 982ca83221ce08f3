"""The flash backend against stand-ins for FlashAttention's two packages.

The stand-ins have the signatures of the real functions, refuse what those refuse, and compute what
those compute: attention with the causal mask at the bottom right. What is too small or too wide
for them goes to Triton, in its interpreter here.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
import torch.nn.attention.varlen

import nanopaged
from nanopaged import attention
from nanopaged.attention import FlashAttention
from test_attention import Case

pytest.importorskip("triton", reason="pip install triton")

F16 = torch.float16
PROMPTS = [
    (0, 40),
    (0, 7),
    (32, 20),
    (3, 9),
    (0, 2),
]  # (past, new): at most four keys a query


def reference(q, k, v, cu_q, cu_k, max_q, max_k):
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert {x.stride(-1) for x in (q, k, v)} == {1}
    assert q.dim() == k.dim() == v.dim() == 3
    assert q.shape[1] % k.shape[1] == 0
    assert {x.dtype for x in (cu_q, cu_k)} == {torch.int32}
    assert all(x.is_contiguous() for x in (cu_q, cu_k))
    assert (cu_q[-1], cu_k[-1]) == (len(q), len(k))
    assert (type(max_q), type(max_k)) == (int, int)
    assert (max_q, max_k) == (cu_q.diff().max(), cu_k.diff().max())
    out = torch.empty_like(q)
    for i in range(len(cu_q) - 1):
        queries, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        one, k_one, v_one = (
            x.transpose(0, 1).float() for x in (q[queries], k[keys], v[keys])
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


@pytest.fixture(params=["flash-attn", "torch", "torch 2.11"])
def calls(request, monkeypatch):
    """The sizes of every call of the package that is there."""
    calls = []

    def note(q, k):
        calls.append((len(q), len(k)))

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                               dropout_p=0.0, softmax_scale=None, causal=False,
                               window_size=(-1, -1)):  # fmt: skip
        assert causal
        note(q, k)
        return reference(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        )

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None,
                    scale=None, window_size=(-1, -1), enable_gqa=False):  # fmt: skip
        assert enable_gqa
        return varlen_attn_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
                                window_size=window_size)  # fmt: skip

    def varlen_attn_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None,
                         scale=None, window_size=(-1, -1)):  # fmt: skip
        assert window_size == (-1, 0)  # causal
        note(query, key)
        return reference(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)

    package = None  # it is not installed
    if request.param == "flash-attn":
        package = ModuleType("flash_attn")
        package.__spec__ = ModuleSpec("flash_attn", None)
        package.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    stand_in = varlen_attn_2_11 if request.param == "torch 2.11" else varlen_attn
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", stand_in)
    return calls


class FlashCase(Case):
    def __init__(self, seqs, heads=(4, 2, 64), block_size=16, dtype=F16):
        super().__init__(seqs, heads, block_size, dtype)
        self.cache[self.cache == 1e4] = torch.nan

    def backend(self):
        return FlashAttention(
            *self.heads, self.block_size, self.dtype, torch.device("cpu")
        )

    def check(self):
        expected, out = self.expected(), self.run().double()
        assert ((out - expected).norm(dim=1) < 2e-3 * expected.norm(dim=1)).all()


@pytest.mark.parametrize("heads", [(1, 1, 64), (4, 2, 80), (6, 1, 128)], ids=str)
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_prompts_get_the_right_keys(calls, heads, block_size):
    FlashCase(PROMPTS, heads, block_size).check()
    assert calls == [(78, 113)]


@pytest.mark.parametrize(
    "seqs, dtype",
    [
        ([(0, 40), (0, 7)], torch.float32),  # no kernel of theirs
        ([(40, 1), (3, 1), (0, 1)], F16),  # decodes: graphs record them
        ([(1, 1), (0, 1)], F16),  # even with few keys
        ([(200, 20), (0, 20)], F16),  # more would be copied than computed
        ([(0, 9), (500, 1)], F16),
    ],
    ids=str,
)
def test_what_does_not_suit_it_is_tritons(calls, seqs, dtype):
    FlashCase(seqs, dtype=dtype).check()
    assert calls == []


def test_decodes_may_come_along(calls):
    FlashCase([(30, 1), (0, 50), (9, 1)]).check()
    assert calls == [(52, 91)]


@pytest.mark.parametrize(
    "calls",
    ["flash-attn", pytest.param("torch", marks=pytest.mark.slow)],
    indirect=True,
)
def test_the_engine_says_the_same_as_with_triton(calls):
    prompts = ["ROMEO:\nBut soft, what light through yonder", "To be"]
    params = nanopaged.SamplingParams(temperature=0, max_tokens=4)
    said = {}
    for backend in ("triton", "flash"):
        options = {"dtype": "float16", "num_blocks": 64, "max_num_seqs": 4}
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


def test_torchs_own_function_takes_what_it_gets(monkeypatch):
    """Without data, but with its own checks: of this version of torch."""
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(
        attention, "to_device", lambda x, device: torch.from_numpy(x).to(device)
    )
    case = FlashCase(PROMPTS)
    backend = FlashAttention(*case.heads, case.block_size, F16, torch.device("meta"))
    metadata = case.prepare(backend)
    out = backend.attend(case.q.to("meta"), case.cache.to("meta"), metadata)
    assert (out.shape, out.dtype) == ((len(case.q), 4 * 64), F16)
