"""What a CPU computes besides attention in plain loops, compiled by Numba.

Numbers in bfloat16 are passed as their bits (uint16; of weights, two in one uint32).
"""
# mypy: ignore-errors

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from nanopaged.paged_attention import FASTMATH, prefetch, rounded, to_float32

# -- Between matrix products: programs, each of which computes one token ---------------


@njit(nogil=True, fastmath=FASTMATH)
def add_norm(token, out, x, residual, weight, eps):
    """As in `nanopaged/fused.py`, but the sum replaces the residual, and the rest is
    rounded only at the end.
    """
    x, residual, out = x[token], residual[token], out[token]
    for i in range(len(weight)):
        total = to_float32(x[i]) + to_float32(residual[i])
        residual[i] = rounded(total, residual[i])
    scale = inverse_rms(residual, eps)
    for i in range(len(weight)):
        normed = scale * to_float32(residual[i]) * to_float32(weight[i])
        out[i] = rounded(normed, x[i])


@njit(nogil=True, fastmath=FASTMATH)
def norm_rotate(token, out, x, q_weight, k_weight, cos, sin, num_kv_heads, eps):
    """As in `nanopaged/fused.py`, but rounded only at the end. (Both halves of a head
    have the same angles.)
    """
    half, num_heads = x.shape[2] // 2, x.shape[1]
    for head in range(num_heads):
        row, rotated = x[token, head], out[token, head]
        weight = q_weight if head < num_heads - num_kv_heads else k_weight
        scale = np.float32(1) if q_weight is None else inverse_rms(row, eps)
        for i in range(half):
            x1, x2 = scale * to_float32(row[i]), scale * to_float32(row[half + i])
            if q_weight is not None:
                x1 *= to_float32(weight[i])
                x2 *= to_float32(weight[half + i])
            c, s = to_float32(cos[token, 0, i]), to_float32(sin[token, 0, i])
            rotated[i] = rounded(x1 * c - x2 * s, row[i])
            rotated[half + i] = rounded(x2 * c + x1 * s, row[i])


@njit(nogil=True, fastmath=FASTMATH)
def inverse_rms(row, eps):
    """1 / sqrt(mean(row^2) + eps): RMSNorm multiplies a row by this."""
    squares = np.float32(0)  # their sum
    for i in range(len(row)):
        squares += to_float32(row[i]) ** 2
    return np.float32(1 / np.sqrt(squares / len(row) + eps))


# -- The KV cache ----------------------------------------------------------------------


@njit(nogil=True)
def store(token, k, v, kv_cache, slots):
    """Copy a token's K and V into its slot, rounded to the type of the cache."""
    block, offset = divmod(slots[token], kv_cache.shape[3])
    for head in range(k.shape[1]):
        for dim in range(k.shape[2]):
            like = kv_cache[block, 0, head, offset, dim]  # for its type
            key = rounded(to_float32(k[token, head, dim]), like)
            value = rounded(to_float32(v[token, head, dim]), like)
            kv_cache[block, 0, head, offset, dim] = key
            kv_cache[block, 1, head, offset, dim] = value


@overload(prefetch)
def compiled_prefetch(row):
    """The compiled version of `prefetch` in `paged_attention.py`."""
    def compiled(row):
        for offset in range(0, row.nbytes, 64):  # the size of a cache line
            prefetch_line(row.ctypes.data + offset)
    return compiled


@intrinsic
def prefetch_line(_, address):
    """The processor's own instruction for the cache line at this address."""
    def emit(context, builder, signature, arguments):
        number = ir.IntType(32)
        line = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [line.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [line.type], kind)
        # 0: to read it; 3: into the nearest cache; 1: data, and not instructions
        builder.call(function, [line, number(0), number(3), number(1)])
        return context.get_dummy_value()
    return types.void(types.intp), emit


# -- Matrix products: bfloat16 times bfloat16, or times float32 ------------------------


@njit(nogil=True, fastmath=FASTMATH)
def multiply_block(block, out, x, weight):
    """Part of out = x W^T, for one or two rows of x: the outputs of 64 rows of W.

    out, x  [num_rows, num_outputs] and [num_rows, size]
    weight  [num_outputs / 64, size / 2, 64], uint32: W as oneDNN arranges it, with two
            bfloat16 numbers of a row in each uint32

    Reading W from memory takes most of the time. A block is one piece of memory, so the
    processor fetches it ahead of time. And 64 sums grow side by side in vectors, so
    nothing is left to add up at the end.
    """
    for row in range(len(x)):
        sums = np.zeros(64, np.float32)
        for k in range(weight.shape[1]):
            first, second = to_float32(x[row, 2 * k]), to_float32(x[row, 2 * k + 1])
            for n in range(64):
                sums[n] += multiply(weight[block, k, n], first, second)
        for n in range(64):
            out[row, 64 * block + n] = rounded(sums[n], out[row, n])


@njit(nogil=True, fastmath=FASTMATH)
def multiply_four(n, out, x, weight):
    """Part of out = x W^T: the outputs of four rows of W, n, n + quarter, and so on.

    out     [num_rows, num_outputs], float32
    x       [2, num_rows, size / 2], float32: its even columns, then the odd ones
    weight  [num_outputs, size / 2], uint32: two bfloat16 numbers of W in each

    Reading W from memory takes most of the time, so the loop works on several things at
    once: four rows of W, a to d, far apart, because a processor that notices several
    streams fetches further ahead; two rows of x, i and j, so that each number of W that
    has arrived is used twice; and both numbers of a pair. `ia` is the output of row i
    and row a. (W need not be split into even and odd, because x is.)
    """
    quarter = (len(weight) + 3) // 4
    last, last_row = len(weight) - 1, len(out) - 1
    # Past the last row of W, or of x, the last one is computed again.
    a, b = n, min(n + quarter, last)
    c, d = min(n + 2 * quarter, last), min(n + 3 * quarter, last)
    for i in range(0, last_row + 1, 2):
        j = min(i + 1, last_row)
        ia = ib = ic = id = ja = jb = jc = jd = np.float32(0)
        for k in range(x.shape[2]):
            ia += multiply(weight[a, k], x[0, i, k], x[1, i, k])
            ja += multiply(weight[a, k], x[0, j, k], x[1, j, k])
            ib += multiply(weight[b, k], x[0, i, k], x[1, i, k])
            jb += multiply(weight[b, k], x[0, j, k], x[1, j, k])
            ic += multiply(weight[c, k], x[0, i, k], x[1, i, k])
            jc += multiply(weight[c, k], x[0, j, k], x[1, j, k])
            id += multiply(weight[d, k], x[0, i, k], x[1, i, k])
            jd += multiply(weight[d, k], x[0, j, k], x[1, j, k])
        out[i, a], out[i, b], out[i, c], out[i, d] = ia, ib, ic, id
        out[j, a], out[j, b], out[j, c], out[j, d] = ja, jb, jc, jd


@njit(inline="always")
def multiply(pair, even, odd):
    """Multiply each number of a pair by its own factor, and add the products. A
    bfloat16 is the upper half of a float32. The first number is the lower half of the
    pair, so it is shifted.
    """
    first = np.uint32(pair << np.uint32(16)).view(np.float32)
    second = np.uint32(pair & np.uint32(0xFFFF0000)).view(np.float32)
    return first * even + second * odd
