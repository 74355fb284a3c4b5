"""Lightning and accelerate around hsdp, and around FSDP2, as scripts for torchrun; test_ecosystem.py compares them.

torchrun --nproc-per-node 2 -m tests.api.ecosystem_run lightning hsdp
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hsdp.examples.launch import leave
from tests.support.models import make_case

STEPS, MICRO_BATCHES = 3, 2


def build(library: Any, mesh: DeviceMesh, model: Any = None) -> nn.Module:
    """A small model, or the one that is given, sharded block by block."""
    model = make_case("mlp").model() if model is None else model
    for block in model.blocks:
        library.fully_shard(block, mesh=mesh)
    sharded: nn.Module = library.fully_shard(model, mesh=mesh)
    return sharded


def batches() -> list[tuple[Tensor, ...]]:
    """Those of this rank."""
    case = make_case("mlp")
    return [case.batch(step, dist.get_rank(), micro) for step in range(STEPS) for micro in range(MICRO_BATCHES)]


def told(model: nn.Module, losses: list[float]) -> dict[str, Any]:
    """What the two libraries must agree on."""
    params = {name: param.full_tensor() for name, param in model.named_parameters() if isinstance(param, DTensor)}
    assert params, "of the sharded model"
    return {"losses": losses, "params": {name: float(value.square().sum()) for name, value in params.items()}}


def lightning_trainer(library: Any) -> dict[str, Any]:
    """`Trainer` with `ModelParallelStrategy`: clipping, a distributed checkpoint, and a run that goes on from it."""
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.utils.data import DataLoader

    losses: list[float] = []

    class Module(lightning.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "model"):
                self.model = build(library, self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = make_case("mlp").loss(self.model, batch)
            losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def fit(epochs: int, path: Path | None) -> Any:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"),
            max_epochs=epochs,
            accumulate_grad_batches=MICRO_BATCHES,
            gradient_clip_val=0.5,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        module = Module()
        trainer.fit(module, DataLoader(Later(), batch_size=None), ckpt_path=path)
        return trainer, module

    class Later(torch.utils.data.Dataset[Any]):
        """Batches of a rank that is known when they are drawn."""

        def __len__(self) -> int:
            return STEPS * MICRO_BATCHES

        def __getitem__(self, index: int) -> Any:
            return batches()[index]

    trainer, _ = fit(1, None)
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where)
    path = Path(str(where[0])) / "checkpoint"
    trainer.save_checkpoint(path)
    _, module = fit(2, path)
    return told(module.model, losses)


def lightning_fabric(library: Any) -> dict[str, Any]:
    """`Fabric`, which switches gradient sync off for all but the last micro-batch."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(
        parallelize_fn=lambda model, mesh: build(library, mesh["data_parallel"], model),
        data_parallel_size=2,
        tensor_parallel_size=1,
        process_group_backend="gloo",
    )
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(make_case("mlp").model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    losses = []
    for index, batch in enumerate(batches()):
        last = index % MICRO_BATCHES == MICRO_BATCHES - 1
        with fabric.no_backward_sync(model, enabled=not last):
            loss = make_case("mlp").loss(model, batch)
            fabric.backward(loss)
        losses.append(float(loss.detach()))
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    return told(model.module, losses)


def accelerate_fsdp(library: Any) -> dict[str, Any]:
    """`Accelerator` with its FSDP2 path, which it takes on accelerators only: on the CPU it has to be told."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    accelerator.state.distributed_type = accelerator.state._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = build(library, mesh)
    model, optimizer = accelerator.prepare(sharded, torch.optim.AdamW(sharded.parameters(), lr=0.01))
    assert model is sharded and isinstance(model, FSDPModule), "a sharded model is left as it is"
    losses = []
    for batch in batches():
        with accelerator.accumulate(model):
            loss = make_case("mlp").loss(model, batch)
            accelerator.backward(loss)
            losses.append(float(loss.detach()))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return told(model, losses)


RUNS = {"trainer": lightning_trainer, "fabric": lightning_fabric, "accelerate": accelerate_fsdp}


def main(run: str, library: str) -> None:
    """Runs one with one library; rank 0 prints what it told as a line of JSON."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    result = RUNS[run](importlib.import_module(library))
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
