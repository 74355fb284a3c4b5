"""What one rank alone does otherwise, or fails at, while whole tensors go from rank to rank: all raise, and none waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from hsdp import checkpoint, fully_shard
from hsdp.checkpoint import CheckpointError
from tests.checkpoint import models as cm
from tests.soak.persistence.faults import planted
from tests.support.rig import Pool
from tests.support.worker import RankEnv

pytest.importorskip("safetensors")

PARTLY = "partly changed; load a checkpoint before you use them"


def _boom(*args: Any) -> None:
    raise ArithmeticError("a hook")


def _differently(env: RankEnv, path: Path) -> None:
    model, odd = cm.build(env.mesh(2)), env.rank == 1
    calls: dict[str, Callable[[], object]] = {
        "dtype: ": lambda: checkpoint.save_safetensors(path, model, dtype=torch.bfloat16 if odd else None),
        "max_file_bytes: ": lambda: checkpoint.save_safetensors(path, model, max_file_bytes=100 if odd else 1000),
        "src_rank: ": lambda: checkpoint.load_full_state_dict(model, checkpoint.full_state_dict(model), env.rank),
    }
    for name, call in calls.items():
        with pytest.raises(CheckpointError, match=rf"called with different arguments: {name}.* on rank 0, .* on rank 1"):
            call()
    with pytest.raises(ValueError if odd else CheckpointError, match=r"save_safetensors\(dtype=torch.int32\)"):
        checkpoint.save_safetensors(path, model, dtype=torch.int32 if odd else None)
    assert not path.exists()


def test_arguments_that_decide_what_travels_are_compared(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(_differently, tmp_path / "export")


def _cast(env: RankEnv, path: Path) -> None:
    """Bytes of other dtypes would be taken for values."""
    model = cm.build(env.mesh(2))
    optimizer = cm.two_groups(model)
    cm.train(model, optimizer, [0], env.rank, env.world_size)
    whole = checkpoint.full_state_dict(model)
    if env.rank == 1:
        for entries in optimizer.state.values():
            entries["exp_avg"] = entries["exp_avg"].float()
    with pytest.raises(CheckpointError, match=r"ranks hold other numbers of bytes, [\d,]+ and [\d,]+: "):
        checkpoint.full_optimizer_state_dict(model, optimizer)
    model.to(torch.float32 if env.rank == 1 else torch.float64)
    for gather in (checkpoint.full_state_dict, lambda model: list(checkpoint.iter_full_state_dict(model))):
        with pytest.raises(CheckpointError, match=r"ranks hold other numbers of bytes, [\d,]+ and [\d,]+: "):
            gather(model)
    calls = (
        lambda: checkpoint.save_safetensors(path, model),
        lambda: checkpoint.load_full_state_dict(model, whole),
    )
    for call in calls:
        with pytest.raises(CheckpointError, match=r"model: .* tensors of [\d,]+ bytes.* on rank 0, .* on rank 1"):
            call()


def test_a_model_that_one_rank_has_cast_does_not_travel(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(_cast, tmp_path / "export")


def _hooked(env: RankEnv, path: Path) -> None:
    """A hook of the state dict raises on one rank."""
    model = cm.build(env.mesh(2))
    checkpoint.save_safetensors(path, model)
    whole = checkpoint.full_state_dict(model)
    if env.rank == 1:
        model._register_state_dict_hook(_boom)  # type: ignore[no-untyped-call]
    calls = (
        lambda: checkpoint.save_safetensors(path, model),
        lambda: checkpoint.load_safetensors(path, model),
        lambda: checkpoint.full_state_dict(model),
        lambda: list(checkpoint.iter_full_state_dict(model)),
        lambda: checkpoint.load_full_state_dict(model, whole),
    )
    for call in calls:
        with pytest.raises(ArithmeticError if env.rank == 1 else CheckpointError, match="a hook"):
            call()


def test_a_hook_that_raises_on_one_rank_is_told_to_all(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(_hooked, tmp_path / "export")


def _handed(env: RankEnv, path: Path) -> None:
    """A hook raises when the values are in their places."""
    model = cm.build(env.mesh(2))
    optimizer = cm.two_groups(model)
    cm.train(model, optimizer, [0], env.rank, env.world_size)
    checkpoint.save_safetensors(path, model)
    whole, state = checkpoint.full_state_dict(model), checkpoint.full_optimizer_state_dict(model, optimizer)
    if env.rank == 1:
        model.register_load_state_dict_post_hook(_boom)
        optimizer.register_load_state_dict_post_hook(_boom)
    calls = (
        lambda: checkpoint.load_safetensors(path, model),
        lambda: checkpoint.load_full_state_dict(model, whole),
        lambda: checkpoint.load_full_optimizer_state_dict(model, optimizer, state),
    )
    for call in calls:
        with pytest.raises(CheckpointError, match=f"on rank 1: .*ArithmeticError: a hook.*{PARTLY}"):
            call()


def test_who_has_loaded_hears_that_another_rank_has_not(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(_handed, tmp_path / "export")


class _Vanishing(Mapping[str, Any]):
    """Gives one of the tensors once: its file is gone then."""

    def __init__(self, held: Mapping[str, Any]) -> None:
        self._held, self._left = held, 1

    def __getitem__(self, name: str) -> Any:
        if name == "unused":
            self._left -= 1
            if self._left < 0:
                raise FileNotFoundError(2, "No such file or directory", "unused.bin")
        return self._held[name]

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def _vanishing(env: RankEnv) -> None:
    model = cm.build(env.mesh((2, 1) if env.world_size == 2 else (2, 2)))
    whole = checkpoint.full_state_dict(model)
    with pytest.raises(CheckpointError, match=f"on rank 0: .*FileNotFoundError.*{PARTLY}"):
        checkpoint.load_full_state_dict(model, _Vanishing(whole))
    checkpoint.load_full_state_dict(model, whole)
    for name, value in checkpoint.full_state_dict(model).items():
        assert torch.equal(value, whole[name]), name


def test_a_state_that_vanishes_while_it_is_dealt_out_leaves_nobody_waiting(pool2: Pool, pool4: Pool) -> None:
    pool2.run(_vanishing)
    pool4.run(_vanishing)


def _short_of_memory(env: RankEnv, failing: int, path: Path) -> None:
    """One rank has no memory, once: at each operator in turn that needs some. All ranks hear of it, and can go on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 3))
    fully_shard(model[1], mesh=init_device_mesh(env.device, (1, 2), mesh_dim_names=("edp", "ep"))["edp"])  # copies
    fully_shard(model, mesh=env.mesh((1, 2)), shard_placement_fn=_cut)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    whole, state = checkpoint.full_state_dict(model), checkpoint.full_optimizer_state_dict(model, optimizer)
    calls: dict[str, Callable[[], object]] = {
        "full": lambda: checkpoint.full_state_dict(model),
        "each": lambda: list(checkpoint.iter_full_state_dict(model)),
        "state": lambda: checkpoint.full_optimizer_state_dict(model, optimizer),
        "export": lambda: checkpoint.save_safetensors(path, model, dtype=torch.float64),
        "load": lambda: checkpoint.load_full_state_dict(model, whole),
        "load state": lambda: checkpoint.load_full_optimizer_state_dict(model, optimizer, state),
    }
    for name, call in calls.items():
        for count in range(1000):
            error: Exception | None = None
            with planted(("op", count, failing, "MemoryError"), env.rank, "") as charge:
                try:
                    call()
                except (CheckpointError, MemoryError) as raised:
                    error = raised
            told: list[Any] = [None] * env.world_size
            dist.all_gather_object(told, (charge.fired, str(error or "")))
            # None, if the optimizer that is tried out for what it makes of a state could not be: nothing is compared then.
            assert len({bool(text) for _, text in told}) == 1, f"{name}, operator {count}: {told}\n{charge.where}"
            if not told[failing][0]:  # they were all tried
                break
    checkpoint.load_full_state_dict(model, whole)
    checkpoint.load_full_optimizer_state_dict(model, optimizer, state)
    found, again = checkpoint.full_state_dict(model), checkpoint.full_optimizer_state_dict(model, optimizer)
    cm.assert_equal(found, whole)
    assert str(again) == str(state)
    assert not list(path.glob("*.partial"))


def _cut(param: nn.Parameter) -> Shard | None:
    """The second weight is cut along its columns, which do not lie one behind the other in the whole one."""
    return Shard(1) if param.shape == (3, 5) else None


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_has_no_memory_leaves_nobody_waiting(pool2: Pool, tmp_path: Path, failing: int) -> None:
    pool2.run(_short_of_memory, failing, tmp_path / "export")


def test_a_process_alone_hears_the_same(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    checkpoint.save_safetensors(tmp_path, model)
    model.register_load_state_dict_post_hook(_boom)
    with pytest.raises(CheckpointError, match=f"ArithmeticError: a hook.*{PARTLY}"):
        checkpoint.load_safetensors(tmp_path, model)
