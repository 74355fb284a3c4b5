"""Tensor subclasses around several tensors: codes and scales, nested ones, with and without the outer size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

import hsdp
from hsdp import checkpoint
from hsdp.offload import CPUOffloadPolicy
from tests.support.models import Case, mse
from tests.support.rig import Pool, RankEnv, fake_world
from tests.support.sharded import check_rest, pool_for, shard
from tests.support.twin import Twin, sgd, train, train_twin

aten = torch.ops.aten


class Codes(Tensor):
    """4-bit codes, two in a byte: (rows, columns) of them around (rows, columns / 2) uint8."""

    packed: Tensor

    @staticmethod
    def __new__(cls, packed: Tensor) -> Codes:
        shape = (packed.shape[0], 2 * packed.shape[1])
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.uint8, device=packed.device)

    def __init__(self, packed: Tensor) -> None:
        self.packed = packed

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["packed"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Codes:
        return cls(inner["packed"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func}: codes are handled by the weight around them")

    def unpacked(self) -> Tensor:
        return torch.stack((self.packed & 15, self.packed >> 4), -1).flatten(1)


class FourBit(Tensor):
    """A frozen matrix of 4-bit codes (rows, columns) and one scale per row, (rows, 1): QLoRA's base in small.

    Cut by rows; scales, and codes, which are a subclass themselves, are gathered each.
    """

    codes: Codes
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Codes, scales: Tensor) -> FourBit:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype, device=scales.device)

    def __init__(self, codes: Codes, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales

    @classmethod
    def of(cls, weight: Tensor) -> FourBit:
        scales = weight.abs().amax(1, keepdim=True) / 7
        codes = (weight / scales).round().add(8).to(torch.uint8)
        return cls(Codes(codes[:, ::2] | codes[:, 1::2] << 4), scales)

    def plain(self) -> Tensor:
        return (self.codes.unpacked().to(self.scales.dtype) - 8) * self.scales

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["codes", "scales"], "four bits"

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Any], context: str, size: Any, stride: Any) -> FourBit:
        assert context == "four bits" and tuple(inner["codes"].shape) == tuple(size)
        return cls(inner["codes"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0]
        if func in (aten.detach.default, aten.clone.default, aten.slice.Tensor, aten.alias.default):
            assert len(args) < 2 or args[1] == 0, "rows only"
            return cls(Codes(func(first.codes.packed, *args[1:])), func(first.scales, *args[1:]))
        if func is aten.split.Tensor:
            pairs = zip(func(first.codes.packed, *args[1:]), func(first.scales, *args[1:]), strict=True)
            return [cls(Codes(packed), scales) for packed, scales in pairs]
        if func is aten.new_zeros.default:
            rows, columns = args[1]
            return cls(Codes(first.codes.packed.new_zeros((rows, columns // 2))), first.scales.new_zeros((rows, 1)))
        if func is aten.copy_.default:
            first.codes.packed.copy_(args[1].codes.packed)
            first.scales.copy_(args[1].scales)
            return first
        if func in (aten.view.default, aten.as_strided.default) and tuple(args[1]) == tuple(first.shape):
            return cls(Codes(first.codes.packed), first.scales)
        return func(*tree_map_only(cls, cls.plain, args), **tree_map_only(cls, cls.plain, kwargs))

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.codes.packed, self.scales), len(self)

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        packed, scales = outputs
        if out is not None:
            assert out.codes.packed.data_ptr() == packed.data_ptr() and out.scales.data_ptr() == scales.data_ptr()
            return None
        return type(self)(Codes(packed), scales), outputs


class FourBitOfSize(FourBit):
    """The same by the protocol's longer form, which tells the outer size: padding of uneven rows is dropped here."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> Any:
        assert isinstance(module, nn.Module) and mesh.ndim == 1
        return (self.codes.packed, self.scales), outer_size

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is not None:
            return None
        packed, scales = outputs
        return type(self)(Codes(packed[: metadata[0]]), scales[: metadata[0]]), outputs


class Linear(nn.Module):
    """A quantised weight and an adapter of rank 2."""

    def __init__(self, num_in: int, num_out: int, kind: Any) -> None:
        super().__init__()
        weight = FourBit.of(torch.randn(num_out, num_in, dtype=torch.float64))
        base = weight.plain() if kind is None else kind(weight.codes, weight.scales)
        self.base = nn.Parameter(base, requires_grad=False)
        self.down = nn.Parameter(torch.randn(2, num_in, dtype=torch.float64))
        self.up = nn.Parameter(torch.randn(num_out, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        base = self.base.plain() if isinstance(self.base, FourBit) else self.base
        return F.linear(x, base) + F.linear(F.linear(x, self.down), self.up)


class Net(nn.Module):
    def __init__(self, hidden: int, kind: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((Linear(16, hidden, kind), Linear(hidden, 16, kind)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def _batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 16, generator=generator).double(), torch.randn(4, 16, generator=generator).double()


def case(hidden: int, kind: Any) -> Case:
    return Case("qlora", lambda: Net(hidden, kind), _batch, mse)


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.full_tensor() for name, param in model.named_parameters() if param.requires_grad}


def check_trains(env: RankEnv, shape: tuple[int, ...], hidden: int, kind: Any, options: dict[str, Any], twin: Twin) -> None:
    own = case(hidden, kind)
    plain = own.model()
    if env.rank:  # ranks that disagree take the first one's
        plain.blocks[0].base.codes.packed.zero_()
        plain.blocks[1].base.scales.zero_()
    model: Any = shard(plain, env.mesh(shape), **options)
    losses = train(model, own, env.rank, len(twin.losses), sgd([p for p in model.parameters() if p.requires_grad]))
    torch.testing.assert_close(losses, twin.losses[:, env.rank], rtol=1e-11, atol=1e-11)
    for name, value in _trained(model).items():
        torch.testing.assert_close(value, twin.params[name], rtol=1e-11, atol=1e-11, msg=name)
    check_rest(model)
    for block in model.blocks:
        local = block.base.to_local()
        rows, columns = block.base.shape
        assert isinstance(block.base, DTensor) and type(local) is kind and len(local) <= -(-rows // shape[-1])
        group = next(group for unit in (block,) for group in unit._units()[0].dtype_groups if group.kind.composite)
        chunk = -(-rows // shape[-1])
        bound = lambda size: -(-size // 64) * 64  # noqa: E731
        assert group.shard.numel() == bound(chunk * columns // 2) + bound(chunk * 8), "codes and scales, and no more"
        assert group.transient_bytes == 0


OFFLOADED = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
CASES: list[tuple[tuple[int, ...], int, Any, dict[str, Any]]] = [
    ((2,), 8, FourBit, {}),
    ((2, 2), 8, FourBit, {}),
    ((2, 2), 8, FourBitOfSize, OFFLOADED),
    ((4, 1), 8, FourBit, {}),
    ((4,), 6, FourBitOfSize, {}),  # 2, 2, 2 and no rows
    ((4,), 10, FourBitOfSize, OFFLOADED),  # 3, 3, 3 and 1 row
]


@pytest.mark.parametrize(("shape", "hidden", "kind", "options"), CASES)
def test_adapters_over_four_bits_train_as_the_twins_do(
    shape: tuple[int, ...], hidden: int, kind: Any, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    pool = pool_for(request, shape)
    plain = case(hidden, None)
    twin = train_twin(plain.model, plain.batch, pool.world_size, 3, sgd)
    pool.run(check_trains, shape, hidden, kind, options, twin)


# -- the rest of the library ---------------------------------------------------------------------------------------------


def check_rest_of_library(env: RankEnv) -> None:
    """Moved, described, stepped by a flat optimizer; what cannot be saved or lent is refused by name."""
    model: Any = shard(case(6, FourBitOfSize).model(), env.mesh((2,)))
    held = [part.clone() for block in model.blocks for part in _inside(block.base)]
    model.to(torch.float64)
    x = torch.randn(2, 16, dtype=torch.float64)
    optimizer = hsdp.optim.local(sgd([p for p in model.parameters() if p.requires_grad]))
    model(x).sum().backward()
    optimizer.step()
    assert all(map(torch.equal, held, (part for block in model.blocks for part in _inside(block.base)))), "frozen"
    assert "48 B" in hsdp.describe(model), hsdp.describe(model)  # 3 x 16 codes of half a byte, and 3 scales
    with pytest.raises(TypeError, match=r"'blocks.0.base' is a FourBitOfSize around several tensors.*adapters"):
        checkpoint.full_state_dict(model)
    with (
        pytest.raises(hsdp.StateError, match=r"parameter 'base' of unit 'blocks.0' is a FourBitOfSize .*unshard"),
        hsdp.full_params(model),
    ):
        pass
    block = model.blocks[0]
    block.unshard()
    assert torch.equal(block.base.plain(), case(6, None).model().blocks[0].base)
    block.reshard()
    check_rest(model)


def _inside(param: Any) -> tuple[Tensor, Tensor]:
    local = param.to_local()
    return local.codes.packed, local.scales


def test_composites_in_the_rest_of_the_library(pool2: Pool) -> None:
    pool2.run(check_rest_of_library)


class Uncut(FourBit):
    """One that torch.chunk cannot cut."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.split.Tensor:
            raise NotImplementedError("no split")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Alike(FourBit):
    """One whose tensors begin at the same row of their memory, which torch's own TwoTensor asks in elements."""

    def __init__(self, codes: Codes, scales: Tensor) -> None:
        packed = codes.packed
        assert packed.storage_offset() // packed.stride(0) == scales.storage_offset() // scales.stride(0)
        super().__init__(codes, scales)


def test_tensors_of_a_composite_have_memory_of_their_own_on_the_meta_device_too() -> None:
    layer = Linear(16, 8, Alike)
    parts = Codes(torch.empty(8, 8, dtype=torch.uint8, device="meta")), torch.empty(8, 1, device="meta")
    layer.base = nn.Parameter(Alike(*parts), requires_grad=False)
    with fake_world(4):
        hsdp.fully_shard(layer.to("meta"))
    assert [part.shape for part in _inside(layer.base)] == [(2, 8), (2, 1)]


def test_a_composite_that_cannot_be_cut_is_told_by_name() -> None:
    layer = Linear(16, 8, Uncut)
    with fake_world(4):
        with pytest.raises(hsdp.ExtensionError, match=r"parameter 'base': Uncut.chunk.* failed with .*no split"):
            hsdp.fully_shard(layer)
        assert type(layer) is Linear
