"""On a CPU: attention in plain loops, and fast matrix products."""
