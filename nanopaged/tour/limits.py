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
from nanopaged.model import Linear, pack
from nanopaged.tour.kv import token_bytes

Requests: TypeAlias = list[tuple[list[int], int]]  # a prompt, tokens to generate


def fastest(function: Callable[[], Any], device: torch.device, runs: int = 5) -> float:
    """Seconds of the fastest run: a limit is what was reached once."""
    wait: Any = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    seconds = []
    for _ in range(runs + 1):
        wait()
        began = time.perf_counter()
        function()
        wait()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


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
    flops = 2 * batch * rows * columns
    return {
        "bytes_per_s": buffer.nbytes / fastest(buffer.sum, device),
        "flops_per_s": flops / fastest(lambda: linear(x), device)}


def count_weights(config: Any) -> tuple[int, int]:
    """How many weights a decode step reads: in all layers, and in the output head."""
    heads = config.num_attention_heads + config.num_key_value_heads
    attention_weights = config.hidden_size * 2 * heads * config.head_dim  # q, o, k, v
    mlp_weights = config.hidden_size * 3 * config.intermediate_size
    layer_weights = config.num_hidden_layers * (attention_weights + mlp_weights)
    return layer_weights, config.hidden_size * config.vocab_size


def count_keys(num_tokens: int) -> int:
    """How many keys the first tokens of a sequence see: 1, 2, 3 and so on, added up."""
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
    lengths = [length for _, length in requests]
    tokens_in = sum(len(prompt) for prompt, _ in requests)
    tokens_out = sum(lengths)
    steps = max(*lengths, -(-tokens_out // llm.config.max_num_seqs))
    # The last token of a request is never computed.
    keys = sum(count_keys(len(prompt) + length - 1) for prompt, length in requests)
    prompt_keys = sum(count_keys(len(prompt)) for prompt, _ in requests)

    weight_bytes = steps * (layer_weights + head_weights) * llm.runner.dtype.itemsize
    kv_bytes = (keys - prompt_keys + tokens_in) * token_bytes(llm)
    bytes_s = (weight_bytes + kv_bytes) / limits["bytes_per_s"]

    flops = 2 * layer_weights * (tokens_in + tokens_out - len(requests))
    flops += 2 * head_weights * tokens_out  # prompts need the head only once
    flops += (
        4 * config.num_hidden_layers * config.num_attention_heads
        * config.head_dim * keys)
    flops_s = flops / limits["flops_per_s"]
    return {"bytes_s": bytes_s, "flops_s": flops_s, "floor_s": max(bytes_s, flops_s)}
