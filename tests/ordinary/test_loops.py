"""Loops and optimizers: what users do to losses, gradients and weights between two forwards."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from hsdp.errors import StateError
from tests.ordinary.program import (
    DIM,
    MESHES,
    Program,
    Results,
    Scenario,
    adamw,
    blocks,
    check,
    mean,
    mean_square,
    results,
    scenario_id,
    scenarios_in,
    sgd,
)
from tests.support.sharded import mesh_id, pool_for
from tests.support.twin import full


def clips_values(program: Program) -> Results:
    """Clips every element of the gradients."""
    model = blocks()
    program.shard(model, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for k in range(3):
        program.loss(model, k).backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    return results(model)


def clips_the_norm(program: Program) -> Results:
    """Clips with torch's function, and logs the norm that it returns."""
    model, norms = blocks(), []
    program.shard(model, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for k in range(3):
        program.loss(model, k).backward()
        norms.append(full(nn.utils.clip_grad_norm_(model.parameters(), 1e-2)))
        optimizer.step()
        optimizer.zero_grad()
    return results(model, norms=torch.stack(norms))


def adds_a_parameter_group(program: Program) -> Results:
    """Trains a layer first, and gives the optimizer the others later."""
    model = blocks()
    program.shard(model, model)
    first, *others = list(model.parameters())
    optimizer = torch.optim.AdamW([first], lr=0.01)
    program.train(model, optimizer, range(2))
    optimizer.add_param_group({"params": others, "lr": 1e-3})
    program.train(model, optimizer, range(2, 4))
    return results(model)


def divides_accumulated_gradients(program: Program) -> Results:
    """Adds up micro-batches, divides the gradients' data by their number, and zeroes them in place."""
    model = blocks()
    program.shard(model, model)
    optimizer = sgd(model)
    for step in range(3):
        for micro in range(2):
            program.loss(model, 2 * step + micro).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad.data.div_(2)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return results(model)


def keeps_the_learning_rate_in_a_tensor(program: Program) -> Results:
    """Gives the optimizer a tensor for a learning rate, and halves it in place."""
    model = blocks(2)
    program.shard(model, model)
    rate = torch.tensor(0.01, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    program.train(model, optimizer)
    rate.mul_(0.5)
    program.train(model, optimizer)
    return results(model)


def rests_blocks_by_their_learning_rate(program: Program) -> Results:
    """Has a parameter group for each block, and sets one rate after the other to zero."""
    model = blocks()
    program.shard(model, model)
    optimizer = torch.optim.AdamW([{"params": block.parameters(), "lr": 0.01} for block in model])
    for k in range(4):
        optimizer.param_groups[k % 3]["lr"] = 0.0
        program.train(model, optimizer, [k])
    return results(model)


def hands_its_state_to_another_optimizer(program: Program) -> Results:
    """Goes on with a second optimizer that was given the state of the first."""
    model = blocks(2)
    program.shard(model, model)
    first, second = adamw(model), adamw(model)
    program.train(model, first, range(2))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    program.train(model, second, range(2, 4))
    return results(model)


def steps_with_a_closure(program: Program) -> Results:
    """Gives the optimizer a closure that computes loss and gradients."""
    model = blocks(2)
    program.shard(model, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def closure(k: int) -> float:
        optimizer.zero_grad()
        loss = program.loss(model, k)
        loss.backward()
        return loss.item()

    for k in range(3):
        optimizer.step(lambda: closure(k))
    return results(model)


class _Greedy(nn.Module):
    """Trains each of its layers alone, inside of its forward."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers
        self.optimizers: list[torch.optim.Optimizer] = []

    def forward(self, batches: list[Tensor]) -> Tensor:
        for layer, optimizer in zip(self.layers, self.optimizers, strict=True):
            batches = [layer(x.detach()) for x in batches]
            if torch.is_grad_enabled():
                mean([x.square().mean() for x in batches]).backward()
                optimizer.step()
                optimizer.zero_grad()
        return batches[0].detach()


def trains_layers_one_by_one_inside_a_forward(program: Program) -> Results:
    """Goes backward and steps for each layer, of which each has its own optimizer, while the root's forward runs."""
    model = _Greedy(blocks())
    program.shard(model, model.layers)
    model.optimizers = [adamw(layer) for layer in model.layers]
    return _fit_greedily(program, model)


def steps_all_layers_inside_a_forward(program: Program) -> Results:
    """The same with one optimizer, for which all other gradients are None."""
    model = _Greedy(blocks())
    program.shard(model, model.layers)
    model.optimizers = [adamw(model)] * len(model.layers)
    return _fit_greedily(program, model)


def _fit_greedily(program: Program, model: _Greedy) -> Results:
    for k in range(3):
        model(program.batches(k))
    with torch.no_grad():  # the root's backward never comes, for which it stays open behind a forward with gradients
        return results(model, evaluated=model([program.own_batch(9)]))


def looks_ahead(program: Program) -> Results:
    """Pulls the weights to slow ones every other step, by `param.data.copy_`."""
    model = blocks(2)
    program.shard(model, model)
    optimizer = sgd(model)
    slow_weights = [param.detach().clone() for param in model.parameters()]
    for k in range(4):
        program.train(model, optimizer, [k])
        if k % 2:
            for param, slow in zip(model.parameters(), slow_weights, strict=True):
                slow.add_(param.detach() - slow, alpha=0.5)
                param.data.copy_(slow)
    return results(model)


def averages_weights_in_a_list(program: Program) -> Results:
    """Keeps moving averages of the weights beside the model, and takes them for the last step."""
    model = blocks(2)
    program.shard(model, model)
    optimizer = sgd(model)
    averages = [param.detach().clone() for param in model.parameters()]
    for k in range(3):
        program.train(model, optimizer, [k])
        torch._foreach_lerp_(averages, [param.detach() for param in model.parameters()], 0.1)
    with torch.no_grad():
        for param, average in zip(model.parameters(), averages, strict=True):
            param.copy_(average)
    program.train(model, optimizer, [3])
    return results(model, average=averages[0])


def averages_weights_in_a_model(program: Program) -> Results:
    """Wants an `AveragedModel`, is told that sharded models are not copied, and shards a second one instead."""
    model, second = blocks(2), blocks(2)
    program.shard(model, model)
    program.shard(second, second)
    if program.sharded:
        with pytest.raises(TypeError, match="shard a second instance"):
            AveragedModel(model)
    second.load_state_dict(model.state_dict())
    optimizer = sgd(model)
    for k in range(4):
        program.train(model, optimizer, [k])
        for average, param in zip(second.parameters(), model.parameters(), strict=True):
            average.data.lerp_(param.data, 1 / (k + 2))
    averages = {f"average of {name}": tensor for name, tensor in results(second).items()}
    return {**results(model, evaluated=program.evaluate(second, 9)), **averages}


def learns_from_a_mean_teacher(program: Program) -> Results:
    """Wants a deep copy for a teacher, shards a second model instead, and moves it after the student."""
    student, teacher = blocks(2), blocks(2)
    program.shard(student, student)
    if program.sharded:
        with pytest.raises(TypeError, match="copy the module before fully_shard"):
            copy.deepcopy(student)
    program.shard(teacher.requires_grad_(False), teacher)
    teacher.load_state_dict(student.state_dict())
    optimizer = sgd(student)

    def distance(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            goal = teacher(x) + 1
        loss: Tensor = (model(x) - goal).square().mean()
        return loss

    for k in range(4):
        program.train(student, optimizer, [k], distance)
        with torch.no_grad():
            for slow, param in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(param, 0.1)
    return results(student, teacher=program.evaluate(teacher, 9))


def assigns_data(program: Program) -> Results:
    """Steps by `param.data = ...`, is told to write into it, and does that."""
    model = blocks(2)
    program.shard(model, model)
    program.loss(model, 0).backward()
    stepped = [param.data - 0.1 * param.grad for param in model.parameters() if param.grad is not None]
    if program.sharded:
        param = model.get_parameter("1.0.weight")
        param.data = param.data * 2
        with pytest.raises(StateError, match=r"'0\.weight' of unit '1'.*write into it instead \(param\.data\.copy_"):
            program.loss(model, 0)
    for param, value in zip(model.parameters(), stepped, strict=True):
        param.data.copy_(value)
        param.grad = None
    program.train(model, sgd(model))
    return results(model)


def drops_some_gradients(program: Program) -> Results:
    """Sets the gradient of one parameter to None before each step."""
    model = blocks()
    program.shard(model, model)
    optimizer = adamw(model)
    for k in range(3):
        program.loss(model, k).backward()
        list(model.parameters())[k].grad = None
        optimizer.step()
        optimizer.zero_grad()
    return results(model)


def projects_conflicting_gradients(program: Program) -> Results:
    """Takes the gradients of two tasks apart, and gives each parameter one that serves both."""
    model = blocks()
    program.shard(model, model)
    optimizer, params = sgd(model), list(model.parameters())
    for k in range(3):
        per_task: list[list[Tensor]] = []
        for task in range(2):
            program.loss(model, 10 * k + task).backward()
            per_task.append([param.grad.detach().clone() for param in params if param.grad is not None])
            optimizer.zero_grad()
        for param, one, other in zip(params, *per_task, strict=True):
            agree, length = (full(one) * full(other)).sum(), full(one).square().sum()
            param.grad = one + other * 0.5 if agree > 0 else one + other - one * (agree / length)
        optimizer.step()
        optimizer.zero_grad()
    return results(model)


def halves_gradients_in_hooks(program: Program) -> Results:
    """Registers hooks on parameters for some steps, and removes them."""
    model = blocks()
    program.shard(model, model)
    optimizer = sgd(model)
    handles = [param.register_hook(lambda grad: grad * 0.5) for param in list(model.parameters())[:3]]
    program.train(model, optimizer, range(2))
    for handle in handles:
        handle.remove()
    program.train(model, optimizer, range(2, 4))
    return results(model)


def goes_backward_twice(program: Program) -> Results:
    """Retains the graph for the backward of a second loss."""
    model = blocks(2)
    program.shard(model, model)
    optimizer = sgd(model)
    for k in range(3):
        outs = [model(x) for x in program.batches(k)]
        mean([out.square().mean() for out in outs]).backward(retain_graph=True)
        mean([out.abs().mean() for out in outs]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return results(model)


def truncates_backpropagation_in_time(program: Program) -> Results:
    """Carries a hidden state from step to step, detached."""
    model = blocks(2)
    program.shard(model, model)
    optimizer = sgd(model)
    hidden = [torch.zeros(3, DIM, dtype=torch.float64) for _ in program.batches(0)]
    for k in range(4):
        hidden = [model(state.detach() + x) for state, x in zip(hidden, program.batches(k), strict=True)]
        mean([state.square().mean() for state in hidden]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return results(model)


def attacks_its_inputs(program: Program) -> Results:
    """Trains on adversarial examples, made of the loss's gradient by the input."""
    model = blocks(2)

    def attacked(model: nn.Module, x: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(leaf).square().mean(), leaf)
        loss: Tensor = model((leaf + 0.1 * grad.sign()).detach()).square().mean()
        return loss

    return program.fit(model, model, loss_of=attacked)


def compares_views(program: Program) -> Results:
    """Runs the model on several views of a batch, one of them without gradients."""

    def distance(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = (model(x) - model(x.flip(0)).detach()).square().mean() + model(x * 0.5).mean()
        return loss

    model = blocks()
    return program.fit(model, model, loss_of=distance)


def iterates_to_a_fixed_point(program: Program) -> Results:
    """Iterates without gradients, and differentiates the last iteration alone."""

    def at_the_fixed_point(model: nn.Module, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(3):
                state = model(state + x)
        loss: Tensor = model(state + x).square().mean()
        return loss

    model = blocks(2)
    return program.fit(model, model, loss_of=at_the_fixed_point)


def measures_how_sharp_its_minimum_is(program: Program) -> Results:
    """Logs losses at scaled weights, with gradients enabled and without a backward, and scales `param.data` back."""
    model, seen = nn.Sequential(*blocks(), nn.Linear(DIM, DIM)).double(), []
    program.shard(model, list(model)[:3])
    optimizer = sgd(model)
    for k in range(3):
        for factor in (1.0, 2.0, 0.25):
            for param in model.parameters():
                param.data.mul_(factor)
            seen.append(mean_square(model, program.own_batch(k)).item())
        for param in model.parameters():
            param.data.mul_(2.0)
        program.train(model, optimizer, [k])
    return results(model, seen=torch.tensor(seen, dtype=torch.float64))


def looks_for_flat_minima(program: Program) -> Results:
    """Climbs along the gradient, takes the gradient there, steps with it from where it was (SAM)."""
    model = blocks()
    program.shard(model, model)
    optimizer = sgd(model)
    for k in range(3):
        program.loss(model, k).backward()
        climbed = [param.grad.detach() * 0.5 for param in model.parameters() if param.grad is not None]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), climbed)
        optimizer.zero_grad()
        program.loss(model, k).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), climbed)
        optimizer.step()
        optimizer.zero_grad()
    return results(model)


def infers_around_each_step(program: Program) -> Results:
    """Evaluates in inference mode before the forward, and between backward and step."""
    model, seen = blocks(2), []
    program.shard(model, model)
    optimizer = sgd(model)
    for k in range(3):
        with torch.inference_mode():
            seen.append(model(program.own_batch(k + 5)).sum().item())
        program.loss(model, k).backward()
        with torch.inference_mode():
            seen.append(model(program.own_batch(k + 7)).sum().item())
        optimizer.step()
        optimizer.zero_grad()
    return results(model, seen=torch.tensor(seen, dtype=torch.float64))


@pytest.mark.parametrize("scenario", scenarios_in(__name__), ids=scenario_id)
@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_loops_equal_their_twins(request: pytest.FixtureRequest, shape: tuple[int, ...], scenario: Scenario) -> None:
    pool_for(request, shape).run(check, shape, scenario)
