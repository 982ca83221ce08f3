"""What a machine can do at best, measured, and what that means for some requests.

A step cannot be faster than its bytes over the memory's bandwidth, nor than its
operations over the rate of matrix products. Decoding a few sequences is bound by bytes:
all weights are read for each token. Prompts are bound by operations.
"""

import time
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from nanopaged import LLM
from nanopaged.attention import cdiv
from nanopaged.cpu_products import pack
from nanopaged.model import Linear
from nanopaged.tour.kv import token_bytes

Requests: TypeAlias = list[tuple[list[int], int]]  # a prompt, tokens to generate


def fastest(function: Callable[[], Any], device: torch.device, runs: int = 5) -> float:
    """Seconds of the fastest run: a limit is what was reached once."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    function()  # a warm-up
    seconds = []
    for _ in range(runs):
        wait()
        began = time.perf_counter()
        function()
        wait()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def machine_limits(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Bytes/s and FLOP/s, measured.

    Bytes: the sum of a buffer of 1 GiB, which no cache can hold. Operations: many rows
    times a large matrix, the engine's own `Linear`, which is packed as in the engine.
    """
    buffer = torch.ones(2**27, dtype=torch.int64, device=device)
    batch = 1024 if device.type == "cpu" else 8192
    rows, columns = 8192, 2048
    linear = Linear(columns, rows=rows).to(device, dtype)
    linear.requires_grad_(False).weight.normal_()
    pack(linear)
    x = torch.randn(batch, columns).to(device, dtype)
    sum_s = fastest(buffer.sum, device)
    product_s = fastest(lambda: linear(x), device)
    return {
        "bytes_per_s": buffer.nbytes / sum_s,
        "flops_per_s": 2 * batch * rows * columns / product_s}


def count_weights(config: Any) -> tuple[int, int]:
    """How many weights a decode step reads: in all layers, and in the output head."""
    heads = config.num_attention_heads + config.num_key_value_heads
    attention_weights = config.hidden_size * 2 * heads * config.head_dim  # q, o, k, v
    mlp_weights = config.hidden_size * 3 * config.intermediate_size
    layer_weights = config.num_hidden_layers * (attention_weights + mlp_weights)
    return layer_weights, config.hidden_size * config.vocab_size


def count_keys(num_tokens: int) -> int:
    """How many keys the first tokens of a sequence see: 1 + 2 + ... + num_tokens."""
    return num_tokens * (num_tokens + 1) // 2


def time_floor(
    requests: Requests, llm: LLM, limits: dict[str, float]) -> dict[str, float]:
    """The least time in which this machine could serve `requests`.

    Bytes: all weights once a step, in as few steps as the longest output and
    max_num_seqs allow; K and V of the whole context for every decode, and of every
    prompt once. Operations: 2 for every weight and token, and 4 x heads x head_dim for
    every query and key in every layer. Activations and writes do not count, and bytes
    and operations overlap perfectly: the floor is the larger of the two.
    """
    config = llm.model_config
    layer_weights, head_weights = count_weights(config)
    weights = layer_weights + head_weights
    lengths = [length for _, length in requests]
    tokens_in = sum(len(prompt) for prompt, _ in requests)
    tokens_out = sum(lengths)
    steps = max(*lengths, cdiv(tokens_out, llm.config.max_num_seqs))

    computed = 0  # tokens, of which the last one of a request is none
    keys = 0  # that the computed tokens see
    prompt_keys = 0
    for prompt, length in requests:
        num_tokens = len(prompt) + length - 1
        computed += num_tokens
        keys += count_keys(num_tokens)
        prompt_keys += count_keys(len(prompt))

    weight_bytes = steps * weights * llm.runner.dtype.itemsize
    num_read = keys - prompt_keys + tokens_in  # keys, each with its value
    kv_bytes = num_read * token_bytes(llm)
    bytes_s = (weight_bytes + kv_bytes) / limits["bytes_per_s"]

    per_key = 4 * config.num_attention_heads * config.head_dim
    flops = 2 * layer_weights * computed
    flops += 2 * head_weights * tokens_out  # prompts need the head only once
    flops += config.num_hidden_layers * per_key * keys
    flops_s = flops / limits["flops_per_s"]
    floor_s = max(bytes_s, flops_s)
    return {"bytes_s": bytes_s, "flops_s": flops_s, "floor_s": floor_s}
