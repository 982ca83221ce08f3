"""The tour: watch the engine's own runs, and the paper's results reproduced.

`memory` has the paper's figures on memory. Nothing in the engine imports this package.
"""
