"""`full_params` and `gathered_apply`: whole while the body runs, sharded in all cases afterwards, written back as told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import hsdp
from hsdp.errors import StaleParametersError, StateError
from hsdp.weights.full_params import full_params, gathered_apply
from tests.support.models import MLP, make_case
from tests.support.rig import Pool, RankEnv, RemoteError
from tests.support.sharded import check_sharded, mesh_id, pool_for, shard
from tests.support.twin import assert_same, full, full_grads
from tests.support.twin import full_params as whole_values

CASES = ["transformer", "tied", "scalar", "conv", "mixed"]


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def _check_whole(model: nn.Module, plain: nn.Module) -> None:
    """Names, kinds and values are those of the plain model, by every way to get at them."""
    assert_same(dict(_values(model)), dict(_values(plain)), 0.0, 0.0)
    assert_same(dict(model.state_dict()), dict(plain.state_dict()), 0.0, 0.0)
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert type(param) is nn.Parameter, name
        assert (param.dtype, param.requires_grad) == (other.dtype, other.requires_grad), name
        assert model.get_parameter(name) is param
    for (name, module), other_module in zip(model.named_modules(), plain.modules(), strict=True):
        for key in other_module._parameters:
            mine, other = getattr(module, key), getattr(other_module, key)
            assert (mine is None) == (other is None), f"{name}.{key}"
            assert mine is None or torch.equal(mine, other), f"{name}.{key}"


def _sharded(name: str, mesh: Any) -> nn.Module:
    """The case's model; of the transformer some parameters are kept whole."""
    model = make_case(name).model()
    return shard(model, mesh, replicate_params=[p for n, p in model.named_parameters() if "norm" in n])


def _check_back(model: nn.Module, before: dict[str, nn.Parameter]) -> None:
    check_sharded(model)
    for name, param in model.named_parameters():
        assert param is before[name], f"{name} is another object than before"


def _read(env: RankEnv, shape: tuple[int, ...]) -> None:
    for name in CASES:
        model, plain = _sharded(name, env.mesh(shape)), make_case(name).model()
        next(model.parameters()).requires_grad_(False)
        next(plain.parameters()).requires_grad_(False)
        before = dict(model.named_parameters())
        with full_params(model) as entered:
            assert entered is model
            _check_whole(model, plain)
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(7.0)  # dropped
        _check_back(model, before)
        assert_same(dict(whole_values(model)), dict(_values(plain)), 0.0, 0.0)
        with pytest.raises(LookupError), full_params(model, writeback="local"):
            next(model.parameters()).data.fill_(7.0)
            raise LookupError
        _check_back(model, before)
        assert_same(dict(whole_values(model)), dict(_values(plain)), 0.0, 0.0)


@pytest.mark.parametrize("shape", [(2,), (2, 2), (4, 1), (1, 4)], ids=mesh_id)
def test_parameters_are_whole_inside_and_sharded_afterwards(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(_read, shape)


def _change(env: RankEnv, shape: tuple[int, ...], writeback: Any, rank0_only: bool) -> None:
    for name in CASES:
        case = make_case(name)
        model, plain = _sharded(name, env.mesh(shape)), case.model()
        before = dict(model.named_parameters())
        batch = case.batch(0, 0)
        with torch.no_grad():
            case.loss(model, batch)  # has gathered the old values
        with full_params(model, writeback=writeback, rank0_only=rank0_only):
            whole = not isinstance(next(model.parameters()), DTensor)
            assert whole == (env.rank == 0 or not rank0_only)
            if whole:
                # "rank0": the others' changes are dropped. "local": all make the same.
                change = 2.0 if env.rank == 0 or writeback == "local" else 99.0
                for module in model.modules():
                    for key, param in module._parameters.items():
                        if param is not None and key == "bias":
                            setattr(module, key, nn.Parameter(param.detach() * change))  # put in place of it
                for key, param in model.named_parameters():
                    if not key.endswith("bias"):
                        param.data.mul_(change)
        with torch.no_grad():
            for param in plain.parameters():
                param.mul_(2.0)
        _check_back(model, before)
        assert_same(dict(whole_values(model)), dict(_values(plain)), 0.0, 0.0)
        with torch.no_grad():
            torch.testing.assert_close(case.loss(model, batch), case.loss(plain, batch), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", [(2, 2), (4,)], ids=mesh_id)
@pytest.mark.parametrize(("writeback", "rank0_only"), [("local", False), ("rank0", False), ("rank0", True)])
def test_changes_are_written_back(
    request: pytest.FixtureRequest, shape: tuple[int, ...], writeback: str, rank0_only: bool
) -> None:
    pool_for(request, shape).run(_change, shape, writeback, rank0_only)


def _reset(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()


def _apply_inside(env: RankEnv) -> None:
    model, plain = shard(make_case("mlp").model(), env.mesh(2)), make_case("mlp").model()
    torch.manual_seed(5)
    plain.apply(_reset)
    torch.manual_seed(5 + env.rank)  # those of rank 0 count
    with full_params(model, writeback="rank0"):
        assert model.apply(_reset) is model
    assert_same(whole_values(model), {name: param.detach() for name, param in plain.named_parameters()})


def test_apply_inside_is_that_of_torch(pool2: Pool) -> None:
    pool2.run(_apply_inside)


def _some(env: RankEnv) -> None:
    mesh = env.mesh(2)
    model = shard(MLP(), mesh, mp_policy=hsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model.extra = hsdp.fully_shard(nn.Linear(4, 4), mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    plain = MLP()
    plain.extra = nn.Linear(4, 4)
    plain.load_state_dict({name: full(param) for name, param in model.named_parameters()})
    first: Any = model.blocks[0]
    with full_params(model, recurse=False) if list(model._parameters) else full_params(first, recurse=False):
        assert type(first.weight) is nn.Parameter
        assert isinstance(model.blocks[1].weight, DTensor)
    with full_params(model, cast=torch.bfloat16):
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        torch.testing.assert_close(first.weight, plain.blocks[0].weight.bfloat16(), rtol=0, atol=0)
    with full_params(model):  # not what the policy computes in
        _check_whole(model, plain)
    with full_params(nn.ModuleList([first])):
        assert type(first.weight) is nn.Parameter
    whole: Any = hsdp.fully_shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), mesh=mesh)
    with full_params(whole[0]):  # a part of a unit: the unit is gathered
        assert type(whole[0].weight) is type(whole[1].weight) is nn.Parameter
    assert isinstance(whole[1].weight, DTensor)


def test_one_unit_another_dtype_a_part_of_a_unit(pool2: Pool) -> None:
    pool2.run(_some)


def _marks(env: RankEnv) -> None:
    model: Any = nn.LSTM(3, 4)
    model.weight_ih_l0.no_decay = True
    hsdp.fully_shard(model, mesh=env.mesh(2))
    x = torch.ones(2, 1, 3)
    expected = model(x)[0].detach()
    with full_params(model, writeback="local"):
        assert model.weight_ih_l0.no_decay
        assert all(a is b for a, b in zip(model._flat_weights, model.parameters(), strict=True))
        for param in model.parameters():
            param.data.mul_(1.0)
    assert all(isinstance(weight, DTensor) for weight in model._flat_weights)
    torch.testing.assert_close(model(x)[0], expected)


def test_marks_on_parameters_and_the_references_of_an_rnn(pool2: Pool) -> None:
    pool2.run(_marks)


class Meddler(nn.Module):
    """Calls a function in forward, and in backward by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.in_forward: Callable[[], object] = lambda: None
        self.in_backward: Callable[[], object] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.in_forward()
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda grad: (self.in_backward(), None)[1])
        return y


def _in_the_middle(env: RankEnv) -> None:
    model: Any = shard(Meddler(), env.mesh(2))
    x = torch.ones(2, 4)

    def meddle() -> None:
        with full_params(model):
            pass

    model.in_forward = meddle
    with pytest.raises(StateError, match=r"full_params: unit 'Meddler \(root\)' is FORWARD \(.*\), expected IDLE"):
        model(x)
    model.in_forward, model.in_backward = lambda: None, meddle
    with pytest.raises(StateError, match="in the middle of a backward"):
        model(x).sum().backward()
    model.in_backward = lambda: None
    model(x).sum().backward()  # as if nothing had been
    check_sharded(model)

    with full_params(model):
        with pytest.raises(StateError, match=r"is FULL_PARAMS \(.*\), expected IDLE"), full_params(model):
            pass
        with pytest.raises(StateError, match=r"is FULL_PARAMS \(.*\), expected IDLE"):
            gathered_apply(model, lambda module: None)
        for _ in range(2):  # the refusal changes nothing
            with pytest.raises(StateError, match=r"forward: unit .* is FULL_PARAMS \(.*\), expected IDLE"):
                model(x)
        assert type(model.layer.weight) is nn.Parameter
    check_sharded(model)
    model(x).sum().backward()


def test_refused_in_the_middle_of_an_iteration(pool2: Pool) -> None:
    pool2.run(_in_the_middle)


def _between(env: RankEnv) -> None:
    model: Any = hsdp.fully_shard(MLP(), mesh=env.mesh(2))
    before = dict(model.named_parameters())
    x = torch.ones(2, 8)
    y = model(x)
    with full_params(model):
        assert type(model.blocks[2].weight) is nn.Parameter
    y.sum().backward()  # to read in between does no harm
    _check_back(model, before)
    y = model(x)
    with full_params(model, writeback="local"):
        model.blocks[0].weight.data.zero_()
    with pytest.raises(StaleParametersError):
        y.sum().backward()
    model(x).sum().backward()
    _check_back(model, before)
    assert full(model.blocks[0].weight.detach()).abs().sum() == 0
    model.unshard()
    shown = model.blocks[2].weight
    assert type(shown) is nn.Parameter
    with full_params(model):
        registered = dict(model.named_parameters())["blocks.2.weight"]
        assert model.blocks[2].weight is registered is not shown
        assert torch.equal(registered, shown)
    assert model.blocks[2].weight is shown, "what was open before is not open any more"
    model.reshard()
    _check_back(model, before)


def test_rule_9_written_between_forward_and_backward(pool2: Pool) -> None:
    pool2.run(_between)


def _optimizer_goes_on(env: RankEnv) -> None:
    case = make_case("mlp")
    model, plain = shard(case.model(), env.mesh((2, 2))), case.model()
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (model, plain)]
    for step in range(3):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            case.loss(m, case.batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with full_params(model, writeback="rank0"), torch.no_grad():
            model.blocks[1].weight.mul_(0.5 if env.rank == 0 else 3.0)
        with torch.no_grad():
            plain.blocks[1].weight.mul_(0.5)
    assert_same(dict(whole_values(model)), dict(_values(plain)))


def test_optimizers_never_notice(pool4: Pool) -> None:
    pool4.run(_optimizer_goes_on)


CLEARS: dict[str, Callable[[nn.Module], object]] = {
    "zero_grad": lambda m: m.zero_grad(),
    "to zeros": lambda m: m.zero_grad(set_to_none=False),
    "none": lambda m: [setattr(param, "grad", None) for param in m.parameters()],
    "foreach": lambda m: torch._foreach_zero_([param.grad for param in m.parameters()]),
    "data": lambda m: [param.grad.data.zero_() for param in m.parameters()],  # type: ignore[union-attr]
    "detached": lambda m: [param.grad.detach().zero_() for param in m.parameters()],  # type: ignore[union-attr]
    "another parameter": lambda m: m.blocks[0].__setattr__("weight", nn.Parameter(m.blocks[0].weight.detach() * 2)),  # type: ignore[index,union-attr]
}


def _gradients_cleared(env: RankEnv, how: str, writeback: str | None, pending: bool) -> None:
    case = make_case("mlp")
    model, plain = shard(case.model(), env.mesh(2)), case.model()
    model.set_requires_gradient_sync(not pending)  # type: ignore[operator]
    ranks = {id(model): [env.rank], id(plain): range(2)}
    for step in range(2):
        for m in (model, plain):
            for rank in ranks[id(m)]:
                (case.loss(m, case.batch(step, rank)) / len(ranks[id(m)])).backward()
        if step == 0:
            with full_params(model, writeback=writeback), torch.no_grad():  # type: ignore[arg-type]
                CLEARS[how](model)
            if writeback is not None or how != "another parameter":
                CLEARS[how](plain)
        model.set_requires_gradient_sync(True)  # type: ignore[operator]
    assert_same(full_grads(model), {name: param.grad for name, param in plain.named_parameters()})


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("writeback", [None, "rank0", "local"])
@pytest.mark.parametrize("how", CLEARS)
def test_gradients_that_are_cleared_inside_are_cleared(pool2: Pool, how: str, writeback: str | None, pending: bool) -> None:
    pool2.run(_gradients_cleared, how, writeback, pending)


def _cleared_behind_an_error(env: RankEnv) -> None:
    """What was cleared before the body raised is cleared."""
    case = make_case("mlp")
    model = shard(case.model(), env.mesh(2))
    case.loss(model, case.batch(0, env.rank)).backward()
    with pytest.raises(KeyError), full_params(model, writeback="rank0"):
        model.zero_grad()
        raise KeyError
    assert all(param.grad is None for param in model.parameters())


def test_gradients_that_are_cleared_before_an_error_are_cleared(pool2: Pool) -> None:
    pool2.run(_cleared_behind_an_error)


LOSSES: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "penalty": (lambda m, o: sum(p.square().sum() for p in m.parameters()).backward(), "was read or changed"),
    "norm": (lambda m, o: [p.grad.norm() for p in m.parameters()], "was read or changed"),
    "clip": (lambda m, o: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0), "was read or changed"),
    "hsdp's clip": (lambda m, o: hsdp.clip_grad_norm_(m, 1.0), "was read or changed"),
    "assigned": (lambda m, o: [setattr(p, "grad", p.detach()) for p in m.parameters()], "has got a gradient"),
    "hook": (lambda m, o: [p.register_hook(lambda g: g * 2) for p in m.parameters()], "a hook was registered"),
    "step": (lambda m, o: o.step(), "are lent to full_params"),
}


def _gradients_lost(env: RankEnv, how: str) -> None:
    case = make_case("mlp")
    model = shard(case.model(), env.mesh(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    case.loss(model, case.batch(0, env.rank)).backward()
    before = full_grads(model)
    act, message = LOSSES[how]
    with pytest.raises(StateError, match=message), full_params(model, writeback="rank0"):
        act(model, optimizer)
    assert_same(full_grads(model), before, 0.0, 0.0)
    optimizer.step()


@pytest.mark.parametrize("how", LOSSES)
def test_what_would_be_lost_with_full_gradients_is_refused(pool2: Pool, how: str) -> None:
    pool2.run(_gradients_lost, how)


def _replaced_by_another_shape(env: RankEnv) -> None:
    model: Any = shard(MLP(), env.mesh(2))
    before = dict(model.named_parameters())
    try:
        with full_params(model, writeback="local"):
            model.blocks[0].bias = nn.Parameter(torch.zeros(3))
    finally:
        _check_back(model, before)


def test_a_parameter_of_another_shape_is_refused(pool2: Pool) -> None:
    with pytest.raises(RemoteError, match=r"'bias' of unit .* was replaced by Parameter of shape \(3,\), which cannot"):
        pool2.run(_replaced_by_another_shape)


def _tied(env: RankEnv) -> None:
    """Of the values under the two names of one parameter none gets lost without a word."""
    model: Any = shard(make_case("tied").model(), env.mesh(2))
    unit = next(unit for unit in model._units() if any(len(param.places) > 1 for param in unit.params))
    ((one, first), (two, second)), shape = next(
        (list(param.holders()), param.spec.shape) for param in unit.params if len(param.places) > 1
    )
    for values in ((1.0, None), (None, 2.0), (1.0, 2.0)):
        before = dict(whole_values(model))
        with pytest.raises(StateError, match=r"has the names '.*', '.*', which were tied"):  # noqa: SIM117
            with full_params(model, writeback="rank0"):
                for module, name, value in ((one, first, values[0]), (two, second, values[1])):
                    if value is not None:
                        setattr(module, name, nn.Parameter(torch.full(shape, value, dtype=torch.float64)))
        assert_same(dict(whole_values(model)), before, 0.0, 0.0)
    with full_params(model, writeback="rank0"):
        for module, name in ((one, first), (two, second)):
            setattr(module, name, nn.Parameter(torch.full(shape, 3.0, dtype=torch.float64)))
    assert getattr(one, first) is getattr(two, second)
    assert bool((full(getattr(one, first).detach()) == 3.0).all())


def test_rule_2_values_of_tied_names_that_differ_are_refused(pool2: Pool) -> None:
    pool2.run(_tied)


def _frozen(env: RankEnv) -> None:
    def freeze(module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(False)
            module.weight.seen = True  # type: ignore[assignment]

    def replace(module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm):
            for name in ("weight", "bias"):
                setattr(module, name, nn.Parameter(torch.zeros(4), requires_grad=False))
            module.weight.seen = True  # type: ignore[assignment]

    def init(module: nn.Module) -> None:
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
        freeze(module)

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))

    def check(model: Any) -> None:
        assert [p.requires_grad for p in model.parameters()] == [True, True, False, False, True, True]
        assert model[1].weight.seen and isinstance(model[1].weight, DTensor)
        model(torch.ones(2, 4)).sum().backward()
        assert [p.grad is not None for p in model.parameters()] == [True, True, False, False, True, True]

    model: Any = shard(block(), env.mesh(2))
    check(model.apply(freeze))
    check(shard(block(), env.mesh(2)).apply(replace))
    with full_params(model, writeback="local"):
        model.requires_grad_(True)
    assert all(p.requires_grad for p in model.parameters())
    with full_params(model):
        model.requires_grad_(False)
    assert all(p.requires_grad for p in model.parameters()), "without writeback changes are dropped"
    for rank0_only in (False, True):
        model = shard(block(), env.mesh(2))
        with full_params(model, writeback="rank0", rank0_only=rank0_only):
            model[1].weight.seen = True
            model[1].requires_grad_(False)
        check(model)
    with torch.device("meta"):
        model = block()
    check(hsdp.init_sharded(shard(model, env.mesh(2)), init))


def test_rule_29_what_is_frozen_while_it_is_full_stays_frozen(pool2: Pool) -> None:
    pool2.run(_frozen)


def _apply(env: RankEnv, shape: tuple[int, ...]) -> None:
    case = make_case("transformer")
    model, plain = shard(case.model(), env.mesh(shape)), case.model()
    before = dict(model.named_parameters())
    order: list[list[str]] = [[], []]

    def init(module: nn.Module, seen: list[str]) -> None:
        seen.append(type(module).__name__.removeprefix("FSDP"))
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight)
        for param in module.parameters(recurse=False):
            assert type(param) is nn.Parameter

    torch.manual_seed(5 + env.rank)  # each draws its own; the first one's count
    assert gathered_apply(model, lambda module: init(module, order[0])) is model
    torch.manual_seed(5)
    plain.apply(lambda module: init(module, order[1]))
    assert order[0] == order[1]
    _check_back(model, before)
    assert_same(dict(whole_values(model)), dict(_values(plain)), 0.0, 0.0)

    def fails(module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            return
        raise LookupError

    with pytest.raises(LookupError):
        gathered_apply(model, fails)
    _check_back(model, before)
    assert_same(dict(whole_values(model)), dict(_values(plain)), 0.0, 0.0)


@pytest.mark.parametrize("shape", [(2, 2), (4,)], ids=mesh_id)
def test_apply_gives_every_rank_the_values_of_the_first(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(_apply, shape)


def _peak(env: RankEnv) -> None:
    model: Any = shard(MLP((8, 8, 8, 8, 8)), env.mesh(2))
    most = 0

    def look(module: nn.Module) -> None:
        nonlocal most
        most = max(most, sum(type(p) is nn.Parameter for p in model.parameters()))

    gathered_apply(model, look)
    assert most == 2  # the two of one unit: the root has none of its own
    pair: Any = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)])
    hsdp.fully_shard([pair[0], pair[2]], mesh=env.mesh(2))  # a unit of siblings, with another one between them
    hsdp.fully_shard(pair[1], mesh=env.mesh(2))
    gathered_apply(pair, lambda m: [p.data.fill_(3.0) for p in m.parameters(recurse=False)])
    assert all(bool((full(p.detach()) == 3.0).all()) for p in pair.parameters())


def test_apply_holds_one_unit_at_a_time(pool2: Pool) -> None:
    pool2.run(_peak)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"writeback": "rank1"}, ValueError, "expected None, 'rank0' or 'local'"),
        ({"writeback": "local", "rank0_only": True}, ValueError, "the other ranks have no full parameters"),
        ({"cast": torch.int8}, TypeError, "expected a floating-point torch.dtype"),
        ({"cast": torch.bfloat16, "writeback": "rank0"}, ValueError, "would round every parameter"),
        ({}, ValueError, "no parameter of it is sharded; call fully_shard"),
        ({"recurse": False}, ValueError, "or pass recurse=True"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), full_params(nn.Linear(2, 2), **options):
        pass
    with pytest.raises(TypeError, match="expected a function of a module"):
        gathered_apply(nn.Linear(2, 2), 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected an nn\.Module"), full_params("model"):  # type: ignore[arg-type]
        pass
