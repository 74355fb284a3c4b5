"""The counters: against hand-made sequences, and against what FSDP2 is known to do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.counting import CollectiveCounter, CopyCounter, LiveBytes
from tests.support.models import make_case
from tests.support.rig import fake_world


# torch 2.13 renames all_gather_into_tensor and others; 2.11 has only the old names.
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_collectives_are_counted_with_bytes_and_transfers() -> None:
    with fake_world(4) as env:
        group = env.mesh((2, 2)).get_group("shard")
        small, whole = torch.zeros(4), torch.zeros(16)
        with CollectiveCounter() as counter:
            dist.all_gather_into_tensor(whole, small)
            with dist._coalescing_manager(device=torch.device("cpu")):
                dist.all_gather_into_tensor(whole, small)
                dist.all_gather_into_tensor(torch.zeros(8), torch.zeros(2))
            dist.reduce_scatter_tensor(small, whole)
            dist.all_reduce(whole, group=group)
            dist.all_reduce(whole.double())
            dist.all_to_all_single(torch.zeros(16), whole)
            distribute_tensor(whole, env.mesh(4), [Shard(0)], src_data_rank=None).full_tensor()
        gathers = counter.total("all_gather")
        assert (gathers.calls, gathers.transfers) == (3, 4)
        assert (gathers.bytes_in, gathers.bytes_out) == (16 + 24 + 16, 64 + 96 + 64)
        assert gathers.wire_bytes == gathers.bytes_out * 3 / 4
        assert counter.total("reduce_scatter").wire_bytes == 64 * 3 / 4
        assert counter.total("all_reduce", group).wire_bytes == 64
        assert counter.total("all_reduce").wire_bytes == 64 + 2 * 128 * 3 / 4
        assert counter.counts() == {"all_gather": 3, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}
        assert counter.calls[0].out_ptrs == (whole.data_ptr(),)


def test_collectives_of_fsdp2_in_forward_and_backward() -> None:
    case = make_case("transformer")
    with fake_world(8) as env:
        model = case.model()
        for module in (*model.blocks, model):
            fsdp.fully_shard(module, mesh=env.mesh((2, 4)))
        with CollectiveCounter() as counter:
            case.loss(model, case.batch(0, 0)).backward()
    num_units = len(model.blocks) + 1
    gathers = 2 * num_units - 1  # the root stays whole
    assert counter.counts() == {"all_gather": gathers, "reduce_scatter": num_units, "all_reduce": num_units}


def test_copies_are_counted() -> None:
    a, b = torch.zeros(8), torch.ones(8)
    with CopyCounter() as counter:
        a.copy_(b)
        a.double()
        torch.cat([a, b])
        torch._foreach_copy_([a, b], [b, a])
        torch.split_with_sizes_copy(a, [4, 4], out=[torch.zeros(4), torch.zeros(4)])
        a.add_(b).view(2, 4)
        a[::2].contiguous()
        a.copy_(b[:1].expand(8))
    assert [one.op for one in counter.copies] == [
        *("copy_", "_to_copy", "cat", "_foreach_copy_", "split_with_sizes_copy", "clone", "copy_")
    ]
    assert counter.written() == 32 + 64 + 64 + 64 + 32 + 16 + 32
    assert counter.written(casts=True) == 64
    assert counter.read(casts=False, min_bytes=40) == 64 + 64
    assert counter.by_op()["copy_"] == 64


def test_copies_of_fsdp2_gathers() -> None:
    with fake_world(4) as env:
        model = torch.nn.Linear(64, 64, bias=False)
        fsdp.fully_shard(model, mesh=env.mesh(4))
        unit = 64 * 64 * 4
        with CopyCounter() as counter:
            model.unshard()
        assert counter.written() == unit // 4 + unit
        assert counter.read() == unit // 4 + unit


def test_live_bytes() -> None:
    before = torch.zeros(1000)
    with LiveBytes() as bytes_:
        a = torch.zeros(100)
        view = a[10:]
        assert bytes_.live == 400
        del a
        assert bytes_.live == 400
        del view
        assert bytes_.live == 0
        buffer = torch.empty(50)
        buffer.untyped_storage().resize_(0)
        assert bytes_.live == 0
        buffer.untyped_storage().resize_(4000)
        buffer.fill_(0)
        buffer.untyped_storage().resize_(0)
        before.untyped_storage().resize_(0)
        assert (bytes_.live, bytes_.peak, bytes_.peak_sizes) == (-4000, 4000, [4000])
        bytes_.reset_peak()
        assert bytes_.peak == 0


def test_live_bytes_in_backward() -> None:
    weight = torch.zeros(100, 100, requires_grad=True)
    x = torch.zeros(1, 100)
    (x @ weight).sum().backward()  # a gradient that only C++ holds
    with LiveBytes() as bytes_:
        (x @ weight).sum().backward()
        assert bytes_.live == 0
        assert 40_000 <= bytes_.peak <= 41_000
        weight.grad = None
    assert bytes_.live == -40_000
