"""A product of a few rows in plain loops, compiled by Numba: bfloat16 times float32."""
# mypy: ignore-errors

import numpy as np
from numba import njit, prange

from nanopaged.cpu import threads
from nanopaged.paged_attention import FASTMATH


@threads.keep
@njit(nogil=True)
def run_products(out, *others):
    """Compute out = x W^T. `run_four` explains the arguments."""
    quarter = (out.shape[1] + 3) // 4
    for n in prange(quarter):
        run_four(np.int64(n), quarter, out, *others)


@njit(nogil=True, fastmath=FASTMATH)
def run_four(n, quarter, out, even, odd, weight):
    """Compute the outputs for four rows of W: n, n + quarter, and so on.

    out        [num_rows, num_outputs], float32
    even, odd  [num_rows, size / 2], float32: the numbers of x at even and odd indices
    weight     [num_outputs, size / 2], uint32: two bfloat16 numbers of W in each

    Reading W from memory takes most of the time, so the loop works on several things at
    once: four rows of W, far apart, because a processor that notices several streams
    fetches further ahead; two rows of x, so that each number of W that has arrived is
    used twice; and both numbers of a pair, each multiplied where it is. That is why x
    is split into even and odd.
    """
    last, last_row = len(weight) - 1, len(out) - 1
    # Indices past the last row repeat it.
    a, b = n, min(n + quarter, last)
    c, d = min(n + 2 * quarter, last), min(n + 3 * quarter, last)
    for i in range(0, last_row + 1, 2):
        j = min(i + 1, last_row)
        ia = ib = ic = id = ja = jb = jc = jd = np.float32(0)
        for k in range(even.shape[1]):
            ia += multiply(weight[a, k], even[i, k], odd[i, k])
            ja += multiply(weight[a, k], even[j, k], odd[j, k])
            ib += multiply(weight[b, k], even[i, k], odd[i, k])
            jb += multiply(weight[b, k], even[j, k], odd[j, k])
            ic += multiply(weight[c, k], even[i, k], odd[i, k])
            jc += multiply(weight[c, k], even[j, k], odd[j, k])
            id += multiply(weight[d, k], even[i, k], odd[i, k])
            jd += multiply(weight[d, k], even[j, k], odd[j, k])
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
