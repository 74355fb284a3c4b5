"""Planning: what a model will communicate, hold and wait for on a mesh, before its first step or without the mesh.

    print(hsdp.plan(model, mesh=(8, 64), tokens_per_rank=8192))
    python -m hsdp plan --preset llama3-70b --mesh 8x64 16x32

`plan.events` is one step in program order; collectives, memory and time are three readings of it.
"""

from hsdp.planning.api import compare, plan
from hsdp.planning.data import Assumptions
from hsdp.planning.machines import MACHINES, Machine
from hsdp.planning.plans import Comparison, Plan
from hsdp.planning.presets import PRESETS, preset
from hsdp.planning.traffic import Link

__all__ = ["MACHINES", "PRESETS", "Assumptions", "Comparison", "Link", "Machine", "Plan", "compare", "plan", "preset"]
