"""The paper's figures on memory, simulated: `python bench.py memory` draws them.

`simulation` is a server under load, with the engine's own scheduler. `contiguous` has
the memory that it is compared with, and `workloads` the requests. `figures` has the
paper's numbers beside ours. The engine and the tour import nothing from here.
"""
