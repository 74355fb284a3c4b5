"""Optimizers of sharded parameters.

elementwise.py    `local`: PyTorch's elementwise optimizers step plain local tensors
"""

from hsdp.optim.elementwise import ELEMENTWISE, local

__all__ = ["ELEMENTWISE", "local"]
