"""Modules that hold parameters or hand out tensors in their own ways: right gradients over two iterations."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import hsdp
from tests.graphs import DIM, Chain, Layer, Net, floats, step
from tests.rig import Pool, RankEnv
from tests.sharded import Run, check_grads, check_rest, check_sharded, mesh_id, pool_for, shard

# -- modules with parameters of their own kind ----------------------------------------------------------------------


class Recurrent(nn.Module):
    """RNNs keep a flat list of their weights."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        lstm = nn.LSTM(DIM, DIM, 2, batch_first=True, **options)
        width = DIM * (2 if options.get("bidirectional") else 1)
        self.blocks = nn.ModuleList([lstm, nn.GRU(options.get("proj_size", width), DIM, batch_first=True)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0)
        for block in self.blocks:
            x, _ = block(x)
        return x


class Attention(nn.Module):
    """Attention reads its projections' weights without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                nn.MultiheadAttention(DIM, 2, batch_first=True),
                nn.MultiheadAttention(DIM, 2, batch_first=True, kdim=DIM, vdim=DIM, add_bias_kv=True),
            ]
        )
        self.encoder = nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0)
        for block in self.blocks:
            x = block(x, x, x)[0]
        return self.encoder(x)  # type: ignore[no-any-return]


class Lists(nn.Module):
    """Parameters in lists and dicts, at several depths."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gains = nn.ParameterList(nn.Parameter(torch.rand(DIM)) for _ in range(3))
            self.named = nn.ParameterDict({"a": nn.Parameter(torch.rand(DIM, DIM)), "b": nn.Parameter(torch.rand(1))})

        def forward(self, x: Tensor) -> Tensor:
            for gain in self.gains:
                x = x * gain
            for _, value in self.named.items():
                x = x @ value if value.ndim == 2 else x * value
            return x * self.named["b"] + self.gains[-1]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Part(), self.Part()])
        self.more = nn.ParameterList([nn.Parameter(torch.rand(DIM))])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.more[0]


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def _parametrized() -> nn.Module:
    model = Chain()
    blocks: Any = model.blocks
    parametrize.register_parametrization(blocks[0].up, "bias", nn.Tanh())
    parametrizations.weight_norm(blocks[1].up)
    parametrizations.weight_norm(blocks[1].down, dim=1)
    linear = nn.Linear(DIM, DIM)
    parametrize.register_parametrization(linear, "weight", _Symmetric())
    blocks.append(linear)
    return model


def _weight_norm_of_old() -> nn.Module:
    model = Chain()
    blocks: Any = model.blocks
    nn.utils.weight_norm(blocks[1].up)
    blocks.append(nn.utils.weight_norm(nn.Linear(DIM, DIM)))
    return model


class Tied(nn.Module):
    """One weight under two names in a unit, and a whole module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))])
        self.blocks[0][2].weight = self.blocks[0][0].weight
        self.first = nn.Linear(DIM, DIM)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.blocks[0](self.first(x)))  # type: ignore[no-any-return]


class Strided(nn.Module):
    """Parameters that are not contiguous, huge next to tiny, empty, of no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(5, DIM).t())
        self.strided = nn.Parameter(torch.randn(5, 2 * DIM)[:, ::2])
        self.empty = nn.Parameter(torch.zeros(0))
        self.channels = nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.transposed @ self.strided + self.empty.sum()
        return y + self.channels(y[None, None]).mean((0, 1))


class Buffers(nn.Module):
    """Statistics that each rank keeps by itself, and units that have no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(DIM, DIM), nn.ReLU(), nn.BatchNorm1d(DIM), nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class ListUnits(Chain):
    """Two modules that form one unit, neither around the other; another one apart."""

    def units(self) -> list[Any]:
        blocks: Any = self.blocks
        return [[blocks[0], blocks[2]], blocks[1]]


class HeadAndNorm(Net):
    """A list unit at the end of the forward, as users do with the last norm and the head."""

    def units(self) -> list[Any]:
        blocks: Any = self.blocks
        return [*blocks[:2], [blocks[2], self.head]]


def _square(model: nn.Module, rank: int) -> Sequence[Tensor]:
    x = floats(rank)
    model(x).square().sum().backward()
    return [x.grad]  # type: ignore[list-item]


# -- outputs and inputs in containers -------------------------------------------------------------------------------


@dataclass
class Plain:
    first: Tensor
    second: Any = None


@dataclass(frozen=True)
class Slotted:
    __slots__ = ("first", "second")
    first: Tensor
    second: Any


class Named(NamedTuple):
    first: Tensor
    second: Any = None


class Holder:
    """An ordinary object."""

    def __init__(self, first: Tensor, second: Any = None) -> None:
        self.first = first
        self.second = second


class _Wrapping(nn.Module):
    """A linear layer whose result is wrapped."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(torch.tanh(self.linear(x)))


class Wrapped(nn.Module):
    """Blocks that hand their result on in some container."""

    def __init__(self, wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Wrapping(wrap) for _ in range(3))
        self.unwrap = unwrap

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks[:-1]:
            x = self.unwrap(block(x))
        return self.blocks[-1](x)


def _square_of(unwrap: Callable[[Any], Tensor], model: nn.Module, rank: int) -> Sequence[Tensor]:
    x = floats(rank)
    unwrap(model(x)).square().sum().backward()
    return [x.grad]  # type: ignore[list-item]


WRAPS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda t: (None, t, 3), lambda v: v[1]),
    "nested lists": (lambda t: [[{"a": (t,)}], "text"], lambda v: v[0][0]["a"][0]),
    "ordered dict": (lambda t: OrderedDict(a=t.detach(), b=t), lambda v: v["b"]),
    "dataclass": (lambda t: Plain(t.detach(), [t]), lambda v: v.second[0]),
    "slotted dataclass": (lambda t: Slotted(t.detach(), t), lambda v: v.second),
    "named tuple": (lambda t: Named(t.detach(), t), lambda v: v.second),
    "object": (lambda t: Holder(t.detach(), {"x": t}), lambda v: v.second["x"]),
    "function": (lambda t: lambda: t, lambda v: v()),
    "views": (lambda t: t.split(3, dim=1), lambda v: torch.cat(v, 1)),
}


class LeafOutputs(nn.Module):
    """A block that hands out its own weight and its input, beside its result."""

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(DIM, DIM))

        def forward(self, x: Tensor) -> Any:
            return x @ self.weight, self.weight, x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Unit(), self.Unit()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y, weight, same = block(x)
            x = y + same * 0.5 + (weight * 1e-3).sum()
        return x


class PassedOn(nn.Module):
    """Root and block hand out the leaf that they were given."""

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return self.linear(x), y

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Unit()])
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        x, y = self.blocks[0](x, x if y is None else y)
        return self.linear(x), y


def _prompt_over_three_steps(model: nn.Module, rank: int) -> Sequence[Tensor]:
    prompt = floats(rank)  # one leaf that goes through all iterations, as a learnt prompt does
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # leaves the values alone, but is a step
    for _ in range(3):
        out, same = model(prompt)
        (out.square().sum() + same.sum()).backward()
        optimizer.step()
    assert len(prompt._backward_hooks or ()) <= 2, "hooks pile up on a tensor that outlives the iteration"
    return [prompt.grad]  # type: ignore[list-item]


def _weight_handed_out_over_three_steps(model: nn.Module, rank: int) -> Sequence[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = floats(rank)
    for _ in range(3):
        model(x).square().sum().backward()
        optimizer.step()
    return [x.grad]  # type: ignore[list-item]


def _keywords(model: nn.Module, rank: int) -> Sequence[Tensor]:
    x, y = floats(rank), floats(rank, 1)
    out, same = model(x=x, y=y)
    (out.sum() + same.square().sum()).backward()
    return [x.grad, y.grad]  # type: ignore[list-item]


@dataclass(frozen=True)
class Kind:
    """A case: how to build the model, and what to do with it."""

    build: Callable[[], nn.Module]
    run: Run = _square


KINDS: dict[str, Kind] = {
    "LSTM and GRU": Kind(Recurrent),
    "LSTM in both directions": Kind(partial(Recurrent, bidirectional=True)),
    "LSTM with projections": Kind(partial(Recurrent, proj_size=3)),
    "attention": Kind(Attention),
    "parameter lists and dicts": Kind(Lists),
    "parametrizations": Kind(_parametrized),
    "weight norm of old": Kind(_weight_norm_of_old),
    "tied weights and modules": Kind(Tied),
    "strides and empty ones": Kind(Strided),
    "buffers, units without parameters": Kind(Buffers),
    "lists of modules": Kind(ListUnits),
    "last block and head in one unit": Kind(HeadAndNorm, step),
    "an output that is an input, over steps": Kind(PassedOn, _prompt_over_three_steps),
    "inputs by keyword": Kind(PassedOn, _keywords),
}
KINDS |= {
    f"output in a {name}": Kind(partial(Wrapped, wrap, unwrap), partial(_square_of, unwrap))
    for name, (wrap, unwrap) in WRAPS.items()
}


def _check(env: RankEnv, name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    kind = KINDS[name]
    plain = kind.build().double()
    model = shard(_twin_of(plain, kind), env.mesh(shape), **options)
    for _ in range(2):
        check_grads(model, plain, kind.run, env.rank, env.world_size)
        check_sharded(model)
    check_rest(model)


def _twin_of(plain: nn.Module, kind: Kind) -> nn.Module:
    """The same model again; not all of them can be copied."""
    try:
        return copy.deepcopy(plain)
    except RuntimeError:
        torch.manual_seed(0)
        model = kind.build().double()
        model.load_state_dict(plain.state_dict())
        return model


@pytest.mark.parametrize("shape", [(2, 2), (2,), (2, 1)], ids=mesh_id)
@pytest.mark.parametrize("name", KINDS)
def test_gradients_equal_plain_autograd(request: pytest.FixtureRequest, name: str, shape: tuple[int, ...]) -> None:
    options = {"reshard_after_forward": True} if len(shape) == 1 else {}
    pool_for(request, shape).run(_check, name, shape, options)


def _hand_out_weights(env: RankEnv, shape: tuple[int, ...]) -> str:
    plain = LeafOutputs().double()
    model = shard(copy.deepcopy(plain), env.mesh(shape))
    try:
        check_grads(model, plain, _weight_handed_out_over_three_steps, env.rank, env.world_size)
    except hsdp.StateError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_an_output_that_is_a_parameter_works_or_is_refused_by_name(
    request: pytest.FixtureRequest, shape: tuple[int, ...]
) -> None:
    for refusal in pool_for(request, shape).run(_hand_out_weights, shape):
        assert not refusal or ("'weight'" in refusal and "blocks." in refusal), refusal


# -- names, identity ------------------------------------------------------------------------------------------------


def _identity(env: RankEnv) -> None:
    plain = Net()
    model = shard(copy.deepcopy(plain), env.mesh(2))
    assert isinstance(model, Net)
    assert isinstance(model, hsdp.HSDPModule)
    assert type(model).__name__ == "HSDPNet"
    assert type(model.blocks[0]).__name__ == "HSDPLayer"
    assert type(shard(Net(), env.mesh(2))) is type(model), "one class for all instances"
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [p.shape for p in model.parameters()] == [p.shape for p in plain.parameters()]
    assert [p.stride() for p in model.parameters()] == [p.stride() for p in plain.parameters()]
    tied = shard(Tied(), env.mesh(2))
    assert tied.blocks[0][0].weight is tied.blocks[0][2].weight
    assert tied.first is tied.second
    linear = nn.Linear(3, 3)
    linear.weight.mark = "kept"  # type: ignore[attr-defined]
    assert hsdp.fully_shard(linear, mesh=env.mesh(2)).weight.mark == "kept"  # type: ignore[attr-defined]


def test_names_classes_and_ties_are_kept(pool2: Pool) -> None:
    pool2.run(_identity)


def _methods_see_whole_parameters(env: RankEnv) -> None:
    seen: list[tuple[int, ...]] = []

    class Watching(Layer):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(tuple(self.up.weight.shape))
            assert not isinstance(self.up.weight, torch.distributed.tensor.DTensor)
            assert isinstance(self.up.weight, nn.Parameter)
            return super().forward(x)

    model = hsdp.fully_shard(Watching().double(), mesh=env.mesh(2))
    model.register_forward_pre_hook(lambda module, args: seen.append(tuple(module.down.weight.shape)))
    model(floats(env.rank))
    assert seen == [(DIM, 2 * DIM + 1), (2 * DIM + 1, DIM)]


def test_forward_and_its_hooks_see_whole_parameters(pool2: Pool) -> None:
    pool2.run(_methods_see_whole_parameters)


# -- more than one model --------------------------------------------------------------------------------------------


def _distill(env: RankEnv) -> None:
    plain = Net().double(), Net().double()
    models = [shard(copy.deepcopy(one), env.mesh(2)) for one in plain]

    def run(student: nn.Module, teacher: nn.Module, rank: int) -> None:
        from tests.graphs import tokens

        batch = tokens(rank)
        out = student(batch)
        with torch.no_grad():
            target = teacher(batch)
        (out - target).square().sum().backward()

    for _ in range(2):
        check_grads(models[0], plain[0], lambda m, r: run(m, models[1] if m is models[0] else plain[1], r), env.rank, 2)
    assert all(param.grad is None for param in models[1].parameters())
    for model in models:
        check_rest(model)


def test_teacher_and_student(pool2: Pool) -> None:
    pool2.run(_distill)


def _adversaries(env: RankEnv) -> None:
    plain = Chain().double(), Chain().double()
    ours = [shard(copy.deepcopy(one), env.mesh(2)) for one in plain]

    def run(first: nn.Module, second: nn.Module, rank: int) -> None:
        x = floats(rank)
        made = first(x)
        second(made.detach()).square().sum().backward()  # the critic's turn
        second(made).sum().backward()  # the generator's: through the critic

    for _ in range(2):
        for at in (0, 1):  # gradients of the generator, then of the critic
            for model in (*plain, *ours):
                model.zero_grad()
            check_grads(
                ours[at], plain[at], lambda m, r: run(*(ours if m is ours[at] else plain), r), env.rank, 2  # type: ignore[arg-type,misc]
            )


def test_adversaries_whose_graphs_go_through_each_other(pool2: Pool) -> None:
    pool2.run(_adversaries)


def _forward_inside_backward(env: RankEnv) -> None:
    plain = Net().double(), Chain().double()
    ours = [shard(copy.deepcopy(one), env.mesh(2)) for one in plain]

    def run(outer: nn.Module, inner: nn.Module, rank: int) -> None:
        def train_inner(grad: Tensor) -> None:
            with torch.enable_grad():
                inner(floats(rank)).sum().backward()

        blocks: Any = outer.blocks
        handle = blocks[1].register_forward_hook(lambda module, args, out: out.register_hook(train_inner) and None)
        step(outer, rank)
        handle.remove()

    for _ in range(2):
        for at in (0, 1):
            for model in (*plain, *ours):
                model.zero_grad()
            check_grads(
                ours[at], plain[at], lambda m, r: run(*(ours if m is ours[at] else plain), r), env.rank, 2  # type: ignore[arg-type,misc]
            )


def test_a_model_trains_inside_the_backward_of_another(pool2: Pool) -> None:
    pool2.run(_forward_inside_backward)


def _delete(env: RankEnv) -> None:
    model = shard(Net().double(), env.mesh(2))
    optimizer = torch.optim.AdamW(model.parameters())
    for k in range(2):
        step(model, env.rank, k)
        optimizer.step()
        optimizer.zero_grad()
    local = model.head.weight.to_local()  # type: ignore[operator,union-attr]
    watched = [weakref.ref(model), *(weakref.ref(unit) for unit in model._units())]  # type: ignore[operator]
    del local, optimizer
    gc.collect()
    gc.disable()
    try:
        del model
        alive = [ref() for ref in watched if ref() is not None]
    finally:
        gc.enable()
    assert not alive, f"still alive without a collection: {alive}"


def test_deleting_a_model_frees_it_at_once(pool2: Pool) -> None:
    pool2.run(_delete)


def _zero_grad_frees(env: RankEnv) -> None:
    model = shard(Net().double(), env.mesh(2))
    for _ in range(2):
        step(model, env.rank)
        kept = [weakref.ref(p.grad._local_tensor.untyped_storage()) for p in model.parameters()]  # type: ignore[union-attr]
        model.zero_grad()
        assert not [ref for ref in kept if ref() is not None], "gradients outlive zero_grad"


def test_zero_grad_frees_the_gradients(pool2: Pool) -> None:
    pool2.run(_zero_grad_frees)


def _train_in_backward(env: RankEnv) -> None:
    plain = Net().double()
    model = shard(copy.deepcopy(plain), env.mesh(2))
    stepped: list[str] = []
    for name, param in model.named_parameters():

        def update(p: Tensor, name: str = name) -> None:
            stepped.append(name)
            assert p.grad is not None
            with torch.no_grad():
                p.add_(p.grad, alpha=-0.1)
            p.grad = None

        param.register_post_accumulate_grad_hook(update)
    step(model, env.rank)
    assert sorted(stepped) == sorted(name for name, _ in model.named_parameters())
    for rank in range(env.world_size):
        step(plain, rank)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None
        expected = theirs.detach() - 0.1 * theirs.grad / env.world_size
        torch.testing.assert_close(ours.full_tensor(), expected, rtol=1e-11, atol=1e-11)  # type: ignore[operator]


def test_an_optimizer_in_the_parameters_hooks(pool2: Pool) -> None:
    pool2.run(_train_in_backward)
