"""The one-page examples: alone and on meshes they do the same, and what the plain models do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hsdp.examples import gan, int8_gather, lora
from hsdp.examples.launch import process_group
from tests.support.rig import RankEnv
from tests.support.sharded import check_rest, check_sharded, mesh_id, pool_for
from tests.support.twin import assert_same, full_params

STEPS = 6


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    """A mesh of this process only, and `shard_units` that does nothing: the plain models."""
    for example in (gan, int8_gather, lora):
        monkeypatch.setattr(example, "shard_units", lambda *args, **kwargs: [])
    with process_group(torch.device("cpu")):
        yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))


def _mean(values: Any) -> Tensor:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _lora(mesh: DeviceMesh) -> tuple[nn.Module, Tensor]:
    model = lora.build(mesh, 4)
    small = lora.adapters(model)
    base = {name: param for name, param in model.named_parameters() if name not in small}
    told = lora.learn(model, base.values(), 1, STEPS, mesh)
    assert all(param.grad is None and not param.requires_grad for param in small.values())
    before = {name: value.clone() for name, value in full_params(model).items()}
    told += lora.learn(model, small.values(), 7, STEPS, mesh)
    changed = {name for name, value in full_params(model).items() if not torch.equal(value, before[name])}
    assert changed == small.keys(), "the base model changed, or an adapter did not"
    return model, _mean(told)


def _lora_on_ranks(env: RankEnv, shape: tuple[int, ...], expected: Tensor, path: Path) -> None:
    model, losses = _lora(env.mesh(shape))
    torch.testing.assert_close(losses, expected, rtol=2e-3, atol=0)  # in float32
    check_sharded(model)
    check_rest(model)
    lora.save(model, path)  # type: ignore[arg-type]
    dist.barrier()
    saved = torch.load(path)
    assert saved.keys() == lora.adapters(model).keys()
    for name, value in full_params(model).items():
        assert name not in saved or torch.equal(saved[name], value), name


def test_lora_does_on_a_mesh_what_it_does_alone(alone: DeviceMesh, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    _, losses = _lora(alone)
    assert losses[STEPS - 1] < losses[0] - 1
    assert losses[-1] < losses[STEPS] - 1
    for shape in ((2, 1), (2, 2)):
        pool_for(request, shape).run(_lora_on_ranks, shape, losses, tmp_path / f"{mesh_id(shape)}.pt")


def _gan_on_ranks(env: RankEnv, shape: tuple[int, ...], losses: Tensor, params: list[dict[str, Tensor]]) -> None:
    models = gan.build(env.mesh(shape), torch.float64)
    told = _mean(gan.train(models, STEPS, env.mesh(shape)))
    torch.testing.assert_close(told, losses, rtol=1e-9, atol=1e-9)
    for model, expected in zip(models, params, strict=True):
        assert_same(dict(full_params(model)), dict(expected), 1e-8, 1e-8)
        check_sharded(model)
        check_rest(model)


def test_rule_18_a_gan_does_on_a_mesh_what_it_does_alone(alone: DeviceMesh, request: pytest.FixtureRequest) -> None:
    models = gan.build(alone, torch.float64)
    losses = _mean(gan.train(models, STEPS, alone))
    params = [{name: value.clone() for name, value in full_params(model).items()} for model in models]
    for shape in ((1, 2), (2, 2)):
        pool_for(request, shape).run(_gan_on_ranks, shape, losses, params)


def _int8_on_ranks(env: RankEnv, shape: tuple[int, ...], expected: list[float]) -> None:
    model = int8_gather.build(env.mesh(shape))
    losses = _mean(int8_gather.train(model, STEPS, env.mesh(shape)))
    # In fp32, and the plain model does not round its weights: near, but not the same.
    torch.testing.assert_close(losses, torch.tensor(expected, dtype=torch.float64), rtol=0.05, atol=0.01)
    assert (losses != torch.tensor(expected)).any(), "nothing was rounded"
    check_sharded(model)
    check_rest(model)


def test_int8_weights_learn_as_plain_ones_do(alone: DeviceMesh, request: pytest.FixtureRequest) -> None:
    losses = int8_gather.train(int8_gather.build(alone), STEPS, alone)
    assert losses[-1] < losses[0] - 1
    for shape in ((4,), (2, 2)):
        pool_for(request, shape).run(_int8_on_ranks, shape, losses)


def test_the_examples_run_as_a_single_process(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert lora.main(["--steps", "20", "--save", str(tmp_path / "adapters.pt")]) == 0
    assert gan.main(["--steps", "20"]) == 0
    assert int8_gather.main(["--steps", "20"]) == 0
    output = capsys.readouterr().out
    assert "adapters: 7,168 parameters learn to count by 7" in output
    assert "81,920 weights gathered in 8 bits learn to count" in output
    assert "of 8 clouds have some" in output
    assert len(torch.load(tmp_path / "adapters.pt")) == 16
    with pytest.raises(SystemExit):
        gan.main(["--replicate", "3"])


def test_where_adapters_go_is_looked_at_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for path, words in (
        (tmp_path / "file" / "adapters.pt", "cannot make the folder"),
        (tmp_path, "is a folder; name a file"),
    ):
        with pytest.raises(SystemExit), mock.patch.object(lora, "learn") as learn:
            lora.main(["--steps", "1", "--save", str(path)])
        assert words in capsys.readouterr().err and not learn.called
    assert lora.main(["--steps", "1", "--save", str(tmp_path / "new" / "adapters.pt")]) == 0
    assert torch.load(tmp_path / "new" / "adapters.pt")
