"""What a rank runs on: rates that a plan assumes until it is told better ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from hsdp.planning.traffic import Link


@dataclass(frozen=True)
class Machine:
    """A kind of device, and how its ranks are connected.

    Attributes:
        title: its name for people.
        flops: floating-point operations per second that training achieves on one rank.
        bandwidth: bytes per second between a rank and its memory, as achieved.
        memory: bytes of one device; None: not known.
        link: between ranks.
    """

    title: str
    flops: float
    bandwidth: float
    memory: int | None = None
    link: Link = field(default_factory=Link)


_SLOW_IB = Link(fast=240e9, slow=22.5e9)
_LOOPBACK = Link(fast=1e9, slow=1e9, latency=200e-6, fast_step=100e-6, slow_step=100e-6)

MACHINES: dict[str, Machine] = {
    "h100": Machine("H100", 400e12, 2.7e12, 80 * 2**30),
    "h200": Machine("H200", 400e12, 3.8e12, 141 * 10**9),
    "a100": Machine("A100", 180e12, 1.6e12, 80 * 2**30, _SLOW_IB),
    "cpu": Machine("CPU core", 40e9, 10e9, None, _LOOPBACK),
}
"""Machines by the names that `plan` and the command know.

H100 and H200: 40 % of the nominal 989e12 flops in bf16; A100: 58 % of 312e12. 80 % of the nominal memory bandwidth; 80
% and 90 % of NVLink and of one network adapter per GPU (400 Gbit/s; 200 Gbit/s beside an A100). The CPU's figures stand
for one core with gloo over the loopback device: `python -m hsdp doctor` measures those of a machine.
"""


def machine_of(machine: Machine | str) -> Machine:
    """A machine, or the one of that name.

    Raises:
        ValueError: there is none of that name.
    """
    if isinstance(machine, Machine):
        return machine
    if machine not in MACHINES:
        raise ValueError(f"plan(machine={machine!r}): not known; choose one of {', '.join(MACHINES)}, or pass a Machine")
    return MACHINES[machine]
