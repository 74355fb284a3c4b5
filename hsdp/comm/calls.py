"""Calls of a process group's collectives, under whatever names the group has them (backends.py); they return works."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hsdp.comm.backends import names_in


def start_gather(group: Any, outputs: list[Tensor], inputs: list[Tensor], options: Any) -> list[Any]:
    """Gathers each input of every rank into its output, in rank order."""
    names = names_in(group.__class__)
    single = names["gather"]
    if single and len(inputs) == 1:
        return [getattr(group, single)(outputs[0], inputs[0], options)]
    if len(inputs) > 1 and (coalesced := names["gather_coalesced"]):
        return [getattr(group, coalesced)(outputs, inputs, options)]
    pairs = zip(outputs, inputs, strict=True)
    if single:
        return [getattr(group, single)(output, mine, options) for output, mine in pairs]
    return [group.allgather([list(output.tensor_split(group.size()))], [mine], options) for output, mine in pairs]


def start_scatter(group: Any, outputs: list[Tensor], inputs: list[Tensor], options: Any) -> list[Any]:
    """Sums each input over ranks and leaves this rank's part, one of equal ones, in its output."""
    names = names_in(group.__class__)
    single = names["scatter"]
    if single and len(inputs) == 1:
        return [getattr(group, single)(outputs[0], inputs[0], options)]
    if len(inputs) > 1 and (coalesced := names["scatter_coalesced"]):
        return [getattr(group, coalesced)(outputs, inputs, options)]
    pairs = zip(outputs, inputs, strict=True)
    if single:
        return [getattr(group, single)(output, whole, options) for output, whole in pairs]
    return [group.reduce_scatter([output], [list(whole.tensor_split(group.size()))], options) for output, whole in pairs]


def start_all_to_all(group: Any, outputs: list[Tensor], inputs: list[Tensor], options: Any) -> list[Any]:
    """Sends the r-th of equal parts of each input to rank r."""
    pairs = zip(outputs, inputs, strict=True)
    if single := names_in(group.__class__)["all_to_all"]:
        return [getattr(group, single)(output, sent, [], [], options) for output, sent in pairs]
    size = group.size()
    return [group.alltoall(list(o.tensor_split(size)), list(i.tensor_split(size)), options) for o, i in pairs]


def start_exchange(
    group: Any, output: Tensor, sent: Tensor, received: list[int], sizes: list[int], options: Any
) -> list[Any]:
    """Sends `sizes[r]` elements to rank r, behind those for the ranks before it; `received[r]` come from there."""
    if single := names_in(group.__class__)["all_to_all"]:
        return [getattr(group, single)(output, sent, received, sizes, options)]
    return [group.alltoall(list(output.split(received)), list(sent.split(sizes)), options)]
