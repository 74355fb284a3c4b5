"""What a rank holds of a tensor, whichever kind it is."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from hsdp.params.pending import landed
from hsdp.params.subclass import data_of


def local_of(param: Tensor) -> Tensor:
    """What this rank holds of a parameter, as a plain tensor: itself, unless it is a DTensor or has a gather extension."""
    return data_of(landed(param._local_tensor) if isinstance(param, DTensor) else param)
