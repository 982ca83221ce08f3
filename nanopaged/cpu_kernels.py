"""PagedAttention in plain loops, by Numba: read this before Triton's `kernels.py`.

`NumbaAttention` in `attention.py` calls it; the shapes are explained there. Under
`NUMBA_DISABLE_JIT=1` this is plain Python, and a debugger steps through it.

A query q_i attends to the blocks of its sequence, one after the other: K_j and V_j are
the keys and values of block j. This is equation 4 of the paper:

    A_ij = exp(q_i K_j / sqrt(d)) / sum over blocks t of exp(q_i K_t / sqrt(d))
    o_i  = sum over blocks j of A_ij V_j

where the sum over a block is also one over its keys. The denominator is known only
after the last block. So numerator and denominator are both summed up, relative to the
highest score so far, and divided at the end. This is the online softmax of Milakov and
Gimelshein.
"""
# mypy: ignore-errors

import ctypes
import math
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.extending import intrinsic

# Sums may be reordered, or else they could not use vector instructions. The flags that
# assume there is no NaN and no infinity are left out.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}
CACHE_LINE = 64  # bytes that the processor loads at a time

try:
    # What a compiler makes of "#pragma omp parallel", from the library that torch uses.
    openmp_parallel = ctypes.CDLL(None).GOMP_parallel
except (AttributeError, TypeError):  # it has another name: this is not Linux
    openmp_parallel = None
own_threads = ThreadPoolExecutor()  # used in its place; none is started before


@njit(inline="always")
def to_float32(number):
    """float32, or the bits of bfloat16 as uint16, or those of float16 as int16."""
    if isinstance(number, np.uint16):
        # A bfloat16 is the upper half of a float32.
        return np.uint32(np.uint32(number) << 16).view(np.float32)
    if isinstance(number, np.int16):
        # Sign, 5 bits of exponent and 10 of fraction become float32's sign, 8 and 23.
        # Exponents count from -15, and in float32 from -127: times 2^112 makes up for
        # that. The highest exponent, all ones, means infinity or NaN, and stays so.
        sign = (np.uint32(number) & 0x8000) << 16
        rest = (np.uint32(number) & 0x7FFF) << 13
        if rest >= 0x0F800000:
            rest |= 0x70000000
        return np.uint32(sign | rest).view(np.float32) * np.float32(2.0**112)
    return number


@intrinsic
def prefetch(typing_context, array, index):
    """Start to load array[index], and do not wait for it: one machine instruction.

    How Numba is told to use it does not matter for what follows.
    """

    def generate(context, builder, signature, arguments):
        data = context.make_array(array)(context, builder, arguments[0]).data
        address = builder.gep(data, [arguments[1]])
        integer = ir.IntType(32)
        # Arguments: the address; 0: to read; 3: keep it in all caches; 1: it is data.
        function = builder.module.declare_intrinsic(
            "llvm.prefetch",
            [address.type],
            ir.FunctionType(ir.VoidType(), [address.type] + 3 * [integer]),
        )
        builder.call(function, [address, integer(0), integer(3), integer(1)])
        return context.get_dummy_value()

    return types.none(array, index), generate


if config.DISABLE_JIT:

    def prefetch(array, index):
        """Python has nothing to prefetch."""


@njit(cache=True, nogil=True, fastmath=FASTMATH, error_model="numpy")
def paged_attention(first, last, q, kv_cache, block_tables, ends, out, lse):
    """Decodes: one query per sequence.

    The work is cut into programs, a word of Triton's: each computes one KV head of one
    sequence over one part of its keys, some blocks in a row. The caller merges parts.

    first, last   run programs first to last - 1 of num_seqs * num_kv_heads * num_parts
    q             [num_seqs, num_heads, head_dim], float32
    kv_cache      [num_blocks, 2, num_kv_heads, block_size, head_dim]
    block_tables  [num_seqs, max_blocks]
    ends          [num_seqs]: number of keys; nothing after them is read
    out           [num_parts, num_seqs, num_heads, head_dim], float32
    lse           [num_parts, num_seqs, num_heads]: log of the sum of the exponentials
    """
    num_parts, num_seqs, num_heads, head_dim = out.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group_size = num_heads // num_kv_heads
    scale = np.float32(1 / math.sqrt(head_dim))
    line = CACHE_LINE // kv_cache.itemsize

    scores = np.empty(block_size, np.float32)
    highest = np.empty(group_size, np.float32)
    total = np.empty(group_size, np.float32)
    acc = np.empty((group_size, head_dim), np.float32)

    for program in range(first, last):
        # A program has one KV head and one part of the keys of one sequence.
        seq = program % num_seqs
        kv_head = program // num_seqs % num_kv_heads
        part = program // num_seqs // num_kv_heads

        num_blocks = (ends[seq] + block_size - 1) // block_size
        first_block = num_blocks * part // num_parts
        last_block = num_blocks * (part + 1) // num_parts
        highest[:] = -1e30  # not -inf: that minus itself is not a number
        total[:] = 0
        acc[:] = 0

        for j in range(first_block, last_block):
            block = block_tables[seq, j]
            k = kv_cache[block, 0, kv_head]  # [block_size, head_dim]
            v = kv_cache[block, 1, kv_head]
            num_keys = min(block_size, ends[seq] - j * block_size)

            # Blocks lie anywhere, so the processor cannot guess which one is next.
            next_block = block_tables[seq, min(j + 1, last_block - 1)]
            next_k = kv_cache[next_block, 0, kv_head]
            next_v = kv_cache[next_block, 1, kv_head]

            # All heads of the group use the block while it is in the processor's cache.
            for g in range(group_size):
                head = kv_head * group_size + g

                higher = highest[g]
                for key in range(num_keys):
                    for dim in range(0, head_dim, line):
                        prefetch(next_k[key], dim)
                    score = np.float32(0)
                    for dim in range(head_dim):
                        score += q[seq, head, dim] * to_float32(k[key, dim])
                    scores[key] = score * scale
                    higher = max(higher, scores[key])

                # The sums so far are relative to a lower score: shrink them.
                shrink = math.exp(highest[g] - higher)
                highest[g] = higher
                total[g] *= shrink
                for dim in range(head_dim):
                    acc[g, dim] *= shrink

                for key in range(num_keys):
                    for dim in range(0, head_dim, line):
                        prefetch(next_v[key], dim)
                    prob = math.exp(scores[key] - higher)
                    total[g] += prob
                    for dim in range(head_dim):
                        acc[g, dim] += prob * to_float32(v[key, dim])

        # A part may have no keys: then its result is 0, and its weight too.
        for g in range(group_size):
            head = kv_head * group_size + g
            divisor = max(total[g], np.float32(1e-30))
            lse[part, seq, head] = highest[g] + math.log(divisor)
            for dim in range(head_dim):
                out[part, seq, head, dim] = acc[g, dim] / divisor


def run_on_threads(work, num_threads):
    """Call `work` on each of torch's threads at the same time.

    After an operation torch's threads do not sleep, they spin for some milliseconds, so
    that the next operation finds them awake. Threads of our own would have to fight
    them for the cores. So the kernel runs on the very same threads.
    """
    if openmp_parallel is None:
        shares = [own_threads.submit(work) for _ in range(num_threads)]
        wait(shares)
        for share in shares:
            share.result()  # raises what `work` has raised
        return

    errors = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def work_and_keep_error(_):
        try:
            work()
        except BaseException as error:  # Ctrl-C, too: C code would drop it
            errors.append(error)

    openmp_parallel(work_and_keep_error, None, num_threads, 0)
    if errors:
        raise errors[0]
