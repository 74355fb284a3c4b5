"""Checkpoints that torchtitan, Lightning and accelerate wrote of FSDP2's models, loaded into hsdp's on another mesh.

    torchrun --nproc-per-node 2 -m tests.checkpoint.foreign_run torchtitan lightning accelerate

The libraries' own code saves (the extra `ecosystem` brings them); here is nothing but the calls that their users make. What
was loaded is compared bit for bit with what was saved: parameters, buffers, the optimizer's state and settings.
tests/checkpoint/test_foreign.py runs it.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hsdp import checkpoint
from hsdp.examples.launch import leave
from tests.checkpoint import models as cm
from tests.checkpoint.test_torch import by_fsdp2, by_hsdp
from tests.support.worker import RankEnv

STEPS = range(3)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int) -> Tensor:
    """This rank's rows."""
    rank = dist.get_rank()
    return torch.randint(13, (4, 6), generator=torch.Generator().manual_seed(step))[2 * rank : 2 * rank + 2]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=0.01, betas=(0.8, 0.9))


Saved = tuple[Path, nn.Module, torch.optim.Optimizer]


def torchtitan(env: RankEnv, directory: Path) -> Saved:
    """Its checkpoint manager and its containers of optimizers and schedulers."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

    model = by_fsdp2(env, (1, 2))
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01, "betas": (0.8, 0.9)})
    optimizers = OptimizersContainer(
        OptimizersContainer.Config(param_groups=[group], implementation="for-loop"), model_parts=[model]
    )
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=10)
    manager = CheckpointManager(
        CheckpointManager.Config(enable=True, interval=1, folder="checkpoint"),
        dataloader=Counting(),  # type: ignore[arg-type]
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": Counting()},
        sd_adapter=None,
        base_folder=str(directory),
    )
    for step in STEPS:
        loss_of(model, batch(step)).backward()
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
    manager.save(len(STEPS))
    manager.close()
    return directory / "checkpoint" / f"step-{len(STEPS)}", model, optimizers.optimizers[0]


class Counting:
    """State of another kind, as trainers and data loaders have it."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(3, dtype=torch.int32), "seen": 7}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing here is loaded by the library")


def lightning(env: RankEnv, directory: Path) -> Saved:
    """`Trainer.save_checkpoint` with `ModelParallelStrategy`."""
    import lightning as library
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(library.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "model"):
                self.model = by_fsdp2(env, (1, 2))

        def training_step(self, tokens: Tensor, index: int) -> Tensor:
            return loss_of(self.model, tokens)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

    class Batches(torch.utils.data.Dataset[Tensor]):
        def __len__(self) -> int:
            return len(STEPS)

        def __getitem__(self, index: int) -> Tensor:
            return batch(index)

    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = library.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, use_distributed_sampler=False, **quiet
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(Batches(), batch_size=None))
    trainer.save_checkpoint(directory / "step-3.ckpt")
    return directory / "step-3.ckpt", module.model, trainer.optimizers[0]


def accelerate(env: RankEnv, directory: Path) -> Saved:
    """`Accelerator.save_state`; it takes its FSDP2 path on accelerators only, so that on the CPU it has to be told."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=False, state_dict_type="SHARDED_STATE_DICT"
    )
    # What makes a state anew takes this from the one that all share.
    PartialState._shared_state["distributed_type"] = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    sharded = by_fsdp2(env, (1, 2))
    model, optimizer = accelerator.prepare(sharded, adamw(sharded))
    for step in STEPS:
        accelerator.backward(loss_of(model, batch(step)))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(directory / "checkpoint_3"), safe_serialization=False)
    return directory / "checkpoint_3", sharded, optimizer.optimizer


LIBRARIES = {"torchtitan": torchtitan, "lightning": lightning, "accelerate": accelerate}


def check(library: str, env: RankEnv) -> str:
    """Saves by a library, loads into hsdp; returns what was compared."""
    where = [tempfile.mkdtemp(prefix="hsdp-foreign-") if env.rank == 0 else None]
    dist.broadcast_object_list(where)
    path, model, optimizer = LIBRARIES[library](env, Path(str(where[0])))
    dist.barrier()
    ours = by_hsdp(env, (2, 1), seed=9)
    fresh = adamw(ours)
    loaded = checkpoint.load(path, ours, fresh)
    expected, found = cm.whole_state(model, optimizer), cm.whole_state(ours, fresh)
    expected = {name: value for name, value in expected.items() if not name.endswith(".param_names")}
    cm.assert_equal(found, expected)
    tensors = [value for value in found.values() if isinstance(value, Tensor)]
    size = sum(tensor.nbytes for tensor in tensors)
    return (
        f"{library} {version(library)}: {len(loaded.report.loaded)} names of the model, {len(tensors)} tensors in all, "
        f"{size:,} bytes and {len(found) - len(tensors)} settings equal"
    )


def main(libraries: list[str]) -> None:
    """Runs those that are named; rank 0 prints a line for each."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    env = RankEnv(dist.get_rank(), dist.get_world_size())
    for library in libraries:
        results = check(library, env)
        if env.rank == 0:
            print(results, flush=True)
    leave(0)


if __name__ == "__main__":
    main(sys.argv[1:])
