"""Optimizers of sharded parameters, where the work of a step is done once.

elementwise.py    `local`: PyTorch's elementwise optimizers step plain local tensors
replicas.py       the same shared out among replicas
targets.py        the plain tensors, and where parameters lie in them
target_states.py  their states, from those of parameters and back
states.py         what a state consists of, to notice that somebody has put another one there
whole_matrix.py   `whole_matrix`: optimizers that look at matrices as a whole; start reading here
muon.py           `Muon`, one of them
matrices.py       which matrices there are, who owns each, in which buckets they travel
exchange.py       one bucket's way to the owners and back
adamw_groups.py   AdamW for what is no matrix
"""

from hsdp.optim.elementwise import ELEMENTWISE, local
from hsdp.optim.muon import COEFFICIENTS, Muon, newton_schulz
from hsdp.optim.whole_matrix import WholeMatrix, whole_matrix

__all__ = ["COEFFICIENTS", "ELEMENTWISE", "Muon", "WholeMatrix", "local", "newton_schulz", "whole_matrix"]
