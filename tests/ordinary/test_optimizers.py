"""What users do to optimizers and to weights between steps: stock ones, on local tensors, shared out among replicas."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hsdp
from hsdp.errors import StateError
from tests.ordinary.program import Program, Results, Scenario, blocks, check, results, scenario_id, scenarios_in
from tests.support.rig import RankEnv
from tests.support.sharded import mesh_id, pool_for

KINDS: dict[str, dict[str, bool] | None] = {"stock": None, "local": {}, "over replicas": {"over_replicas": True}}


def _steps(program: Program, optimizer: Any) -> Any:
    """The optimizer as the test has it step."""
    kind = KINDS[vars(program)["kind"]]
    return hsdp.optim.local(optimizer, **kind) if program.sharded and kind is not None else optimizer


def _sharded(program: Program, count: int = 3, **adamw: Any) -> tuple[nn.Sequential, Any]:
    model = blocks(count)
    program.shard(model, model)
    return model, _steps(program, torch.optim.AdamW(list(model.parameters()), lr=0.01, **adamw))


def _here(param: Any) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def points_it_at_another_model(program: Program) -> Results:
    """Trains a model, then puts another one's parameters, as many of them, into the same group; accumulates there first."""
    first, optimizer = _sharded(program, 2)
    second = program.shard(blocks(2))
    program.train(first, optimizer, range(2))
    optimizer.param_groups[0]["params"][:] = list(second.parameters())
    with second.no_sync() if program.sharded else nullcontext():  # type: ignore[operator]
        program.loss(second, 1).backward()
    if program.sharded:
        with pytest.raises(StateError, match="not summed over all ranks"):
            optimizer.step()
        second.set_is_last_backward(False)  # type: ignore[operator]
    for k in range(2, 5):
        program.loss(second, k).backward()
        optimizer.step()
        optimizer.zero_grad()
    if program.sharded:
        second.set_is_last_backward(True)  # type: ignore[operator]
    return {**results(first), **{f"second {name}": value for name, value in results(second).items()}}


def averages_weights_in_a_step_hook(program: Program) -> Results:
    """Moves averages towards detached parameters, which it has kept since the beginning, behind every step."""
    model, optimizer = _sharded(program)
    kept = [param.detach() for param in model.parameters()]
    averages = [param.clone() for param in kept]

    def average(*_: Any) -> None:
        torch._foreach_lerp_(averages, kept, 0.25)

    optimizer.register_step_post_hook(average)
    program.train(model, optimizer, range(4))
    return results(model, **{f"average {k}": average for k, average in enumerate(averages)})


def decays_local_tensors(program: Program) -> Results:
    """Multiplies and clamps the local tensors behind every step."""
    model, optimizer = _sharded(program)
    for k in range(4):
        program.train(model, optimizer, [k])
        with torch.no_grad():
            torch._foreach_mul_([_here(param) for param in model.parameters()], 0.97)
            for param in model.parameters():
                _here(param).clamp_(-0.25, 0.25)
    return results(model)


def steps_several_times(program: Program) -> Results:
    """Makes three steps with each gradient, and looks at the weights behind the second."""
    model, optimizer = _sharded(program)
    sums = []
    for k in range(3):
        program.loss(model, k).backward()
        for at in range(3):
            optimizer.step()
            if at == 1:
                sums.append(sum(param.detach().sum() for param in model.parameters()))
        optimizer.zero_grad()
    return results(model, **{f"sum {k}": value for k, value in enumerate(sums)})  # type: ignore[arg-type]


def saves_and_loads_by_torch(program: Program) -> Results:
    """Saves both state dicts by `torch.save`, and goes back to them later."""
    model, optimizer = _sharded(program)
    program.train(model, optimizer, range(2))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    program.train(model, optimizer, range(2, 4))
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    program.train(model, optimizer, range(4, 6))
    return results(model)


def loads_its_state_before_a_step(program: Program) -> Results:
    """Goes back to an older state of the optimizer between a backward and its step."""
    model, optimizer = _sharded(program)
    program.train(model, optimizer, range(2))
    older = copy.deepcopy(optimizer.state_dict())
    program.train(model, optimizer, range(2, 4))
    program.loss(model, 4).backward()
    optimizer.load_state_dict(older)
    optimizer.step()
    optimizer.zero_grad()
    program.train(model, optimizer, range(5, 6))
    return results(model)


def resets_momenta(program: Program) -> Results:
    """Forgets the state of one block, and the second moments of the others."""
    model, optimizer = _sharded(program)
    program.train(model, optimizer, range(2))
    for param in model[1].parameters():
        optimizer.state[param] = {}
    for param in (*model[0].parameters(), *model[2].parameters()):
        optimizer.state[param]["exp_avg_sq"] = torch.zeros_like(param)
    program.train(model, optimizer, range(2, 4))
    return results(model)


def steps_parameters_of_a_unit_in_two_ways(program: Program) -> Results:
    """Has one optimizer for the weights and another one for the biases of one unit, and one more for both now and then."""
    model = program.shard(blocks())
    params = list(model.parameters())
    weights = _steps(program, torch.optim.SGD(params[::2], lr=0.1, momentum=0.9))
    biases = torch.optim.AdamW(params[1::2], lr=0.01)
    both = torch.optim.SGD(params, lr=0.05)
    for k in range(4):
        program.loss(model, k).backward()
        for optimizer in (weights, biases, *[both] * (k % 2)):
            optimizer.step()
        model.zero_grad()
    return results(model)


def trains_two_models_at_once(program: Program) -> Results:
    """Has one optimizer for two models, whose outputs are multiplied with each other."""
    first, second = blocks(3), blocks(2)
    for model in (first, second):
        program.shard(model, model)
    optimizer = _steps(program, torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=0.01))

    def product(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x).square() * second(x)).mean()  # type: ignore[no-any-return]

    program.train(first, optimizer, loss_of=product)
    return {**results(first), **{f"second {name}": value for name, value in results(second).items()}}


def changes_its_groups(program: Program) -> Results:
    """Adds a group, changes settings of others, removes one, and takes a parameter out."""
    model = blocks()
    program.shard(model, model)
    groups: list[dict[str, Any]] = [
        {"params": list(model[0].parameters()), "lr": 0.02},
        {"params": list(model[1].parameters())},
    ]
    optimizer = _steps(program, torch.optim.AdamW(groups, lr=0.01))
    program.train(model, optimizer, range(2))
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.03})
    program.train(model, optimizer, range(2, 4))
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["betas"] = 0.001, (0.5, 0.9)
    program.train(model, optimizer, range(4, 5))
    del optimizer.param_groups[1]
    optimizer.param_groups[0]["params"].pop()
    program.train(model, optimizer, range(5, 7))
    return results(model)


def skips_steps_of_infinite_gradients(program: Program) -> Results:
    """Scales losses by a `GradScaler`, clips, and has an infinite loss on one rank."""
    model, optimizer = _sharded(program)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for k in range(5):
        loss = program.loss(model, k)
        if k == 2 and (program.rank == 1 or not program.sharded):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return results(model, scale=torch.tensor(scaler.get_scale(), dtype=torch.float64))


def scales_losses_for_two_optimizers(program: Program) -> Results:
    """Has one `GradScaler` for two optimizers, micro-batches, and gradients that are not finite on one rank."""
    model = blocks()
    program.shard(model, model)
    params = list(model.parameters())
    optimizers = [
        _steps(program, torch.optim.AdamW(params[:3], lr=0.01, fused=True)),
        _steps(program, torch.optim.SGD(params[3:], lr=0.1, momentum=0.9)),
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for k in range(6):
        for at in range(2):
            with model.accumulate(last=at == 1) if program.sharded else nullcontext():  # type: ignore[operator]
                loss = program.loss(model, 2 * k + at)
                if k in (2, 3) and at == 0 and (program.rank == 1 or not program.sharded):
                    loss = loss * (float("inf") if k == 2 else float("nan"))
                scaler.scale(loss).backward()
        for optimizer in optimizers[k % 2 :]:
            scaler.unscale_(optimizer)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        scales.append(torch.tensor(scaler.get_scale(), dtype=torch.float64))
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=k % 2 == 0)
    return results(model, scales=torch.stack(scales))


def steps_under_a_schedule(program: Program) -> Results:
    """Has a schedule of learning rate and momentum, and AMSGrad."""
    model, optimizer = _sharded(program, amsgrad=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=6)
    for k in range(5):
        program.train(model, optimizer, [k])
        schedule.step()
    return results(model)


def _as(scenario: Scenario, kind: str, program: Program) -> Results:
    vars(program)["kind"] = kind
    return scenario(program)


def _check(env: RankEnv, shape: tuple[int, ...], scenario: Scenario, kind: str) -> None:
    check(env, shape, partial(_as, scenario, kind))


@pytest.mark.parametrize("scenario", scenarios_in(__name__), ids=scenario_id)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 2)], ids=mesh_id)
def test_optimizers_equal_their_twins(
    request: pytest.FixtureRequest, shape: tuple[int, ...], kind: str, scenario: Scenario
) -> None:
    if shape == (2,) and kind == "over replicas":
        pytest.skip("there are none")
    pool_for(request, shape).run(_check, shape, scenario, kind)
