"""Attention on a GPU: Triton's kernels, and recorded steps."""
