"""On a GPU: attention in Triton, and recorded steps."""
