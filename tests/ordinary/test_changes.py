"""Changes in the middle of training: weights, modules, dtypes, what is trained and what runs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

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
    results,
    scenario_id,
    scenarios_in,
    sgd,
)
from tests.support.sharded import mesh_id, pool_for


class _Ordered(nn.Module):
    """Blocks that run as `order` says at the time."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.blocks = blocks(count)
        self.order = list(range(count))

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x) + 0.5 * x
        return x


def _train_in_orders(program: Program, orders: list[list[int]]) -> Results:
    """Trains a step with each order of blocks."""
    model = _Ordered()
    program.shard(model, model.blocks)
    optimizer = sgd(model)
    for k, order in enumerate(orders):
        model.order = order
        program.train(model, optimizer, [k])
    return results(model, evaluated=program.evaluate(model, 9))


def _state(model: nn.Module, factor: float = 1.0) -> dict[str, Any]:
    return {name: tensor.detach().clone() * factor for name, tensor in model.state_dict().items()}


def halves_weights(program: Program) -> Results:
    """Writes to the weights between steps."""
    model = blocks()
    program.shard(model, model)
    optimizer = sgd(model)
    program.train(model, optimizer)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param * 0.5)
    program.train(model, optimizer, range(3, 6))
    return results(model)


def initialises_after_sharding(program: Program) -> Results:
    """Sets all weights by `nn.init` and in-place arithmetic after it has sharded the model."""
    model = blocks(2)
    program.shard(model, model)
    with torch.no_grad():
        for param in model.parameters():
            nn.init.constant_(param, 0.1)
            param.mul_(torch.tensor(2.0, dtype=torch.float64)).add_(0.01)
    program.train(model, sgd(model))
    return results(model)


def goes_back_to_an_older_state(program: Program) -> Results:
    """Loads the state dict of two steps ago."""
    model = blocks()
    program.shard(model, model)
    optimizer = sgd(model)
    program.train(model, optimizer, range(2))
    older = _state(model)
    program.train(model, optimizer, range(2, 4))
    newer = program.evaluate(model, 9)
    model.load_state_dict(older)
    program.train(model, optimizer, range(4, 5))
    return results(model, newer=newer)


def assigns_an_older_state(program: Program) -> Results:
    """Loads it with `assign=True`, and makes a new optimizer."""
    model = blocks()
    program.shard(model, model)
    program.train(model, sgd(model), range(2))
    older = _state(model)
    program.train(model, sgd(model), range(2, 4))
    model.load_state_dict(older, assign=True)
    program.train(model, sgd(model), range(4, 6))
    return results(model)


def loads_between_two_micro_batches(program: Program) -> Results:
    """Loads other weights while gradients of the old ones are kept, and adds those of the new ones to them."""
    model = blocks()
    program.shard(model, model)
    optimizer = sgd(model)
    program.loss(model, 0).backward()
    model.load_state_dict(_state(model, 0.9))
    program.train(model, optimizer, range(1, 3))
    return results(model)


def casts_there_and_back(program: Program) -> Results:
    """Casts the model to float32 and back between steps."""
    model = blocks(2)
    program.shard(model, model)
    with torch.no_grad():  # numbers that float32 holds, so that both models round the same way
        for param in model.parameters():
            param.copy_(param.float().double())
    model.float().double()
    program.train(model, sgd(model))
    return results(model)


def swaps_two_blocks(program: Program) -> Results:
    """Exchanges two units of a container between steps."""
    model = blocks()
    program.shard(model, model)
    optimizer = sgd(model)
    program.train(model, optimizer, range(2))
    model[1], model[2] = model[2], model[1]
    program.train(model, optimizer, range(2, 4))
    return results(model)


def drops_a_block(program: Program) -> Results:
    """Puts an identity in the place of a unit between steps."""
    model = blocks()
    program.shard(model, model)
    optimizer = sgd(model)
    program.train(model, optimizer, range(2))
    model[1] = nn.Identity()
    program.train(model, optimizer, range(2, 4))
    return results(model)


def puts_in_a_fresh_head(program: Program) -> Results:
    """Exchanges the last unit for a new one, which it shards too, and makes a new optimizer."""
    model = blocks()
    program.shard(model, model)
    program.train(model, sgd(model), range(2))
    model[2] = nn.Linear(DIM, DIM).double()
    program.shard(model[2])
    program.train(model, sgd(model), range(2, 4))
    return results(model)


def ties_after_sharding(program: Program) -> Results:
    """Ties the weights of two layers after sharding, is told why not, and unties them."""
    model = blocks()
    program.shard(model, [model[0]])
    root = r"Sequential \(root\)"
    # In the first forward nothing is gathered ahead: a unit looks at its parameters while those of the root are shown.
    for k, (one, other, unit) in enumerate([(0, 1, root), (2, 0, "0"), (2, 1, root), (0, 1, root)]):
        weight = model[one][0].weight
        if program.sharded:
            model[one][0].weight = model[other][0].weight
            with pytest.raises(StateError, match=rf"was tied to '.*weight' of unit '{unit}' after fully_shard; tie"):
                program.loss(model, k)
            model[one][0].weight = weight
        program.train(model, sgd(model), [k])
    return results(model)


def assigns_to_tied_weights(program: Program) -> Results:
    """Gives two names of one weight the same values, each a tensor of its own; different ones it is told not to."""

    def assign(model: nn.Module, **factors: float) -> None:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        for name in state:
            state[name] *= factors.get(name[0] if name.endswith("0.weight") else "", 1.0)
        model.load_state_dict(state, assign=True)

    if program.sharded:
        refused = blocks()
        refused[2][0].weight = refused[0][0].weight
        program.shard(refused)
        assign(refused, **{"0": 0.5})
        with pytest.raises(StateError, match=r"has the names '0\.0\.weight', '2\.0\.weight', which were tied when"):
            program.loss(refused, 0)
        program.roots.clear()  # it is of no use any more
        torch.manual_seed(0)
    model = blocks()
    model[2][0].weight = model[0][0].weight
    program.shard(model)
    program.train(model, sgd(model), range(2))
    assign(model)
    if not program.sharded:
        model[2][0].weight = model[0][0].weight  # torch unties them
    program.train(model, sgd(model), range(2, 4))
    return results(model)


def exchanges_weights(program: Program) -> Results:
    """Exchanges the weights of two units between steps."""
    model = blocks()
    program.shard(model, model)
    for k in range(3):
        program.train(model, sgd(model), [k])
        first, last = model[0][0], model[2][0]
        first.weight, last.weight = last.weight, first.weight
    return results(model)


def parametrises_after_sharding(program: Program) -> Results:
    """Registers a parametrisation on a sharded layer, is told why not, and trains a model that had it before sharding."""

    class Symmetric(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu() + weight.triu(1).T

    if program.sharded:
        refused = blocks(2)
        program.shard(refused, refused)
        with pytest.raises(StateError, match=r"'0\.weight' of unit '0' is no parameter .* before fully_shard"):
            parametrize.register_parametrization(refused[0][0], "weight", Symmetric())
            program.loss(refused, 0)
        program.roots.clear()  # it is of no use any more
        torch.manual_seed(0)
    model = blocks(2)
    parametrize.register_parametrization(model[0][0], "weight", Symmetric())
    return program.fit(model, model)


def freezes_blocks_in_turns(program: Program) -> Results:
    """Freezes another block for each step."""
    model = blocks()
    program.shard(model, model)
    optimizer = adamw(model)
    for k in range(4):
        model[k % 3].requires_grad_(False)
        program.train(model, optimizer, [k])
        model[k % 3].requires_grad_(True)
    return results(model)


def survives_a_hook_that_raises(program: Program) -> Results:
    """Goes on after a forward hook of its own has raised."""
    model, is_broken = blocks(), False
    program.shard(model, model)

    def fail(module: nn.Module, args: Any) -> None:
        if is_broken:
            raise KeyError("a batch that is not there")

    model[1].register_forward_pre_hook(fail)
    optimizer = sgd(model)
    for k in range(4):
        is_broken = k % 2 == 0
        with pytest.raises(KeyError) if is_broken else nullcontext():
            program.train(model, optimizer, [k])
    return results(model)


def runs_blocks_in_other_orders(program: Program) -> Results:
    """Runs its units in another order at each step."""
    return _train_in_orders(program, [[(at + k) % 4 for at in range(4)] for k in range(5)])


def drops_layers_at_random(program: Program) -> Results:
    """Skips other units at each step, the same ones on all ranks."""
    return _train_in_orders(program, [[at for at in range(4) if (at * 3 + k) % 4 != 1] for k in range(5)])


def repeats_blocks_until_it_likes_the_result(program: Program) -> Results:
    """Runs a unit more or less often at each step."""
    return _train_in_orders(program, [[0] * (1 + k % 3) + [3] for k in range(5)])


def grows_deeper(program: Program) -> Results:
    """Trains with the first units alone, then with more and more of them."""
    return _train_in_orders(program, [list(range(1 + k)) for k in range(4)])


def hooks_its_parameters_before_it_is_sharded(program: Program) -> Results:
    """Halves gradients in both kinds of hooks on parameters, set before the model is sharded, and removes one later."""

    def halve(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    model = blocks()
    handle = model[0][0].weight.register_hook(lambda grad: grad * 0.5)
    model[1][0].bias.register_hook(lambda grad: grad * 0.5)
    model[2][0].weight.register_post_accumulate_grad_hook(halve)
    program.shard(model, model)
    optimizer = sgd(model)
    for k in range(4):
        if k == 2:
            handle.remove()
        program.train(model, optimizer, [k])
    return results(model)


@pytest.mark.parametrize("scenario", scenarios_in(__name__), ids=scenario_id)
@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_changes_equal_their_twins(request: pytest.FixtureRequest, shape: tuple[int, ...], scenario: Scenario) -> None:
    pool_for(request, shape).run(check, shape, scenario)
