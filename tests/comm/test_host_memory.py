"""Collectives through memory that ranks of a host share: the same numbers as through sockets, and the same errors."""

from __future__ import annotations

import errno
import gc
import os
import socket
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import hsdp
from hsdp.comm import host_blocks, host_meeting, host_memory, work
from hsdp.comm.host_meeting import host_memory_of
from hsdp.comm.host_memory import HostMemory
from hsdp.errors import CollectiveError, DivergenceError
from tests.support.deep import Deep, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_rest, mesh_id, shard
from tests.support.twin import assert_same, full_grads, full_params


class _Unit:
    name = "blocks.3"


UNIT = _Unit()


def _memory(group: dist.ProcessGroup | None = None) -> HostMemory:
    memory = host_memory_of(group or dist.new_group())
    assert memory is not None, "ranks of a test are on one host"
    return memory


def _now(started: tuple[Sequence[Any], Any]) -> None:
    works, then = started
    for one in works:
        one.wait()
    then()


def _by_sockets(verb: str, tensor: Tensor) -> Tensor:
    ranks = dist.get_world_size()
    if verb == "all_gather":
        parts = [torch.empty_like(tensor) for _ in range(ranks)]
        dist.all_gather(parts, tensor)
        return torch.cat(parts)
    dist.all_reduce(total := tensor.to(torch.float64, copy=True))
    return total if verb == "all_reduce" else total.chunk(ranks)[dist.get_rank()]


def _collectives(env: RankEnv) -> None:
    memory, ranks = _memory(), env.world_size
    for seed, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16, torch.float16) * 3):
        of_rank = torch.Generator().manual_seed(seed * ranks + env.rank)
        sizes = [ranks * n for n in (1, 3, 0, 1000, 70_001)]
        tensors = [torch.randn(size, generator=of_rank, dtype=torch.float64).to(dtype) for size in sizes]
        gathered = [torch.full((ranks * size,), torch.nan, dtype=dtype) for size in sizes]
        parts = [torch.full((size // ranks,), torch.nan, dtype=dtype) for size in sizes]
        in_place = gathered[3].chunk(ranks)[env.rank].copy_(tensors[3])
        sums = [tensor.clone() for tensor in tensors]
        sums[3] = torch.empty_like(sums[3]).view(ranks, -1).t().copy_(sums[3].view(-1, ranks))  # not contiguous
        versions = [whole._version for whole in gathered]
        _now(memory.all_gather(UNIT, 1, gathered, [*tensors[:3], in_place, tensors[4]]))
        assert versions == [whole._version for whole in gathered], (
            "no backward takes a gather for a change, as of a backend"
        )
        _now(memory.reduce_scatter(UNIT, 2, parts, tensors, 1.0))
        _now(memory.all_reduce(UNIT, 3, sums))
        exchanged = [torch.full_like(tensor, torch.nan) for tensor in tensors]
        _now(memory.all_to_all(UNIT, 4, exchanged, tensors))
        close = {"rtol": torch.finfo(dtype).eps, "atol": 8 * ranks * torch.finfo(dtype).eps}
        for whole, part, total, tensor in zip(gathered, parts, sums, tensors, strict=True):
            assert torch.equal(whole, _by_sockets("all_gather", tensor))
            torch.testing.assert_close(part.double(), _by_sockets("reduce_scatter", tensor), **close)
            torch.testing.assert_close(total.double().reshape(-1), _by_sockets("all_reduce", tensor), **close)
            everybody = [torch.empty_like(total, memory_format=torch.contiguous_format) for _ in range(ranks)]
            dist.all_gather(everybody, total.contiguous())
            assert all(torch.equal(total, other) for other in everybody), "replicas must not drift apart"
        for received, tensor in zip(exchanged, tensors, strict=True):
            dist.all_to_all_single(expected := torch.empty_like(tensor), tensor)
            assert torch.equal(received, expected)


def _inside_a_transform(env: RankEnv) -> None:
    """Ranks meet, and gather more than they have a block for."""
    group, numel = dist.new_group(), 1 << 18
    whole = torch.zeros(2 * numel, dtype=torch.float64)
    mine = torch.full((numel,), 1.0 + env.rank, dtype=torch.float64)

    def call(x: Tensor) -> Tensor:
        _now(_memory(group).all_gather(UNIT, 1, [whole], [mine]))
        return x * 2.0

    _, tangent = torch.func.jvp(call, (torch.ones(2),), (torch.ones(2),))
    assert tangent.tolist() == [2.0, 2.0]
    assert torch.func.grad(lambda x: call(x).sum())(torch.ones(2)).tolist() == [2.0, 2.0]
    assert whole[:numel].eq(1.0).all() and whole[numel:].eq(2.0).all()


def test_ranks_meet_inside_a_transform_of_torch_func(pool2: Pool) -> None:
    pool2.run(_inside_a_transform)


def test_collectives_give_what_sockets_give(pool4: Pool) -> None:
    pool4.run(_collectives)


def _sizes_change(env: RankEnv) -> None:
    """Views of blocks are kept for the next post of the same sizes, but not for every size that there ever was."""
    memory, ranks = _memory(), env.world_size

    def total_of(size: int) -> Tensor:
        _now(memory.all_reduce(UNIT, size, [total := torch.full((size,), 1.0 + env.rank), torch.ones(size + 1)]))
        assert total.eq(sum(range(1, ranks + 1))).all()
        return total

    with mock.patch.object(host_blocks, "_MOST_LAYOUTS", 3):
        for size in (*range(1, 20), 7, 7, 7, 7):
            total_of(size)
        mappings = [*memory._free, *memory._written.values(), *(one for each in memory._theirs.values() for one in each)]
        assert len(memory._layouts._made) <= 3
        assert all(len(mapping._views) <= 3 for mapping in mappings)
        views = {id(view) for mapping in mappings for each in mapping._views.values() for view in each}
        for _ in range(4):
            total_of(7)
        assert views == {id(view) for mapping in mappings for each in mapping._views.values() for view in each}


def test_views_of_blocks_are_kept_for_sizes_that_come_again(pool2: Pool) -> None:
    pool2.run(_sizes_change)


def _trains_alike(env: RankEnv, shape: tuple[int, ...], policy: hsdp.CommPolicy, reshard: int | None = None) -> None:
    mesh = env.mesh(shape)
    models = [
        shard(seeded(Deep), mesh, comm_policy=replace(policy, shared_memory=shared), reshard_after_forward=reshard)
        for shared in (False, True)
    ]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for k in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, env.rank, k)
            optimizer.step()
            optimizer.zero_grad()
        ones, others = (full_params(model) for model in models)
        for name, one in ones.items():
            # The same sums, in rank order: but for all-reduces of more than two ranks, which gloo adds in a ring's order.
            assert torch.equal(one, others[name]), f"{name} in step {k}: {(one - others[name]).abs().max()}"
    check_rest(models[1])
    units: Any = [model._units() for model in models]  # type: ignore[operator]
    memories = [[[c.host_memory for c in (one.shard_comm, one.replicate_comm)] for one in each] for each in units]
    assert not any(memory for row in memories[0] for memory in row)
    # A bucket goes over the replicas' group of one of its units.
    for axis in range(len(shape)):
        assert any(row[axis] for row in memories[1])


POLICIES = {
    "default": hsdp.CommPolicy(),
    "direct": hsdp.CommPolicy(fusion="direct"),
    "packed, buckets": hsdp.CommPolicy(
        fusion="packed", reduce_scatter_bucket_bytes=1 << 12, all_reduce_bucket_bytes=1 << 12, prefetch=3
    ),
    "tree": hsdp.CommPolicy(reduction="tree"),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=mesh_id)
def test_models_train_to_the_same_bits(pool4: Pool, shape: tuple[int, ...], policy: str) -> None:
    pool4.run(_trains_alike, shape, POLICIES[policy])


def test_models_that_stay_gathered_in_parts_train_to_the_same_bits(pool4: Pool) -> None:
    pool4.run(_trains_alike, (4,), hsdp.CommPolicy(), 2)


def _blocks_of(memory: HostMemory) -> int:
    return len(memory._free) + len(memory._written)


def _reuses(env: RankEnv) -> None:
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    model: Any = shard(seeded(Deep), mesh)
    for k in range(30):
        step(model, env.rank, k)
        dist.barrier()
        memory = model._units()[0].shard_comm.host_memory
        if k == 3:
            steady = _blocks_of(memory)
    assert memory._posts > 100 and _blocks_of(memory) <= steady + 1, f"{steady} blocks became {_blocks_of(memory)}"
    assert not memory._unread and not memory._lines, "all was read"
    # More under way at a time takes more.
    handles = [unit.unshard(async_op=True) for unit in model.blocks]
    assert len(memory._unread) == len(model.blocks)
    for handle in reversed(handles):
        handle.wait()
    step(model, env.rank, 31)
    check_rest(model)
    assert not memory._unread


def test_blocks_are_used_again_when_all_ranks_have_read_them(pool2: Pool) -> None:
    pool2.run(_reuses)


def _grows(env: RankEnv) -> None:
    """Larger posts behind smaller ones, as of models one after the other, and smaller ones again."""
    memory = _memory()

    def all_reduce(key: int, count: int) -> None:
        total = torch.full((count,), float(1 + key))
        _now(memory.all_reduce(UNIT, key, [total]))
        assert torch.equal(total, torch.full_like(total, 2.0 * (1 + key)))

    for key, count in enumerate([1 << 18] * 6 + [1 << 20]):
        all_reduce(key, count)
        dist.barrier()
    assert memory._free, "there are blocks that all have read"
    assert not any(block.memory.any() for block in memory._free), "a larger one was made, and their pages are still there"
    for key in range(10, 16):
        all_reduce(key, 1 << 18)


def test_blocks_of_smaller_posts_give_their_pages_back(pool2: Pool) -> None:
    pool2.run(_grows)


def _one_late(env: RankEnv) -> None:
    """A gather that nobody waits for yet (`unshard(async_op=True)`) holds its own block, and not those behind it."""
    memory, mine = _memory(), torch.full((4,), float(env.rank))
    output = torch.empty(8)
    late = memory.all_gather(UNIT, 0, [output], [mine])
    for k in range(1, 300):
        total = mine.clone()
        _now(memory.all_reduce(UNIT, k, [total]))
        assert total.tolist() == [1.0] * 4
    assert _blocks_of(memory) < 10, f"{_blocks_of(memory)} blocks"
    _now(late)
    assert output.tolist() == [0.0] * 4 + [1.0] * 4


def test_one_late_reader_does_not_hold_the_blocks_behind(pool2: Pool) -> None:
    pool2.run(_one_late)


def _many_files(env: RankEnv) -> None:
    """The kernel refuses files while too many are on their way: the rank takes what comes meanwhile, and tries again."""
    memory, mine, refused = _memory(), torch.full((4,), float(env.rank)), []
    send = socket.send_fds

    def full(*args: Any) -> int:
        if len(refused) < 3:
            refused.append(None)
            raise OSError(errno.ETOOMANYREFS, "too many")
        return send(*args)

    total = mine.clone()
    with mock.patch.object(socket, "send_fds", full):
        _now(memory.all_reduce(UNIT, 0, [total]))
    assert len(refused) == 3 and total.tolist() == [1.0] * 4
    with mock.patch.object(host_memory, "_FULL", 0.0), mock.patch.object(socket, "send_fds", full):
        refused.clear()
        with pytest.raises(RuntimeError, match="ulimit -n"):
            _now(memory.all_reduce(UNIT, 1, [torch.ones(10_000_000)]))


def test_files_that_the_kernel_does_not_take_yet_are_sent_again(pool2: Pool) -> None:
    pool2.run(_many_files)


def _slow_reader(env: RankEnv) -> None:
    """Rank 1 reads late: what rank 0 wrote for it must stay, however much rank 0 writes meanwhile."""
    memory, size = _memory(), 1000
    started, outputs = [], []
    for k in range(20):
        output = torch.empty(2 * size)
        outputs.append(output)
        works = memory.all_gather(UNIT, k, [output], [torch.full((size,), float(100 * env.rank + k))])
        if env.rank == 0:
            _now(works)  # that it has read itself is no reason to write again
        else:
            started.append(works)
        del works
    for works in started:
        _now(works)
    for k, output in enumerate(outputs):
        assert output.view(2, -1).unique(dim=1).flatten().tolist() == [k, 100 + k]


def test_a_block_is_not_written_before_the_slowest_rank_has_read_it(pool2: Pool) -> None:
    pool2.run(_slow_reader)


def _fills_the_socket(env: RankEnv) -> None:
    """A thousand posts ahead of the other, and more: the kernel takes no more lines, and both send."""
    memory, mine = _memory(), torch.full((1,), float(env.rank))
    sums = [mine.clone() for _ in range(1500)]
    posts = [memory.all_reduce(UNIT, k, [total]) for k, total in enumerate(sums)]
    for post in posts:
        _now(post)
    assert torch.cat(sums).unique().tolist() == [1.0]


def test_ranks_may_be_a_thousand_posts_apart(pool2: Pool) -> None:
    pool2.run(_fills_the_socket)


def _abandons(env: RankEnv) -> None:
    memory = _memory()
    output, mine = torch.empty(env.world_size), torch.ones(1)
    for k in range(50):
        works = memory.all_gather(UNIT, k, [output], [mine])
        if k % 2:
            _now(works)
        del works
    memory._take_lines(0.0)
    assert not memory._unread and _blocks_of(memory) < 10
    _now(memory.all_reduce(UNIT, 50, [mine]))
    assert not memory._lines


def test_what_nobody_waits_for_holds_nothing(pool2: Pool) -> None:
    pool2.run(_abandons)


class _SignalError(Exception):
    """Comes from outside, at whatever line is running."""


def _is_interrupted(env: RankEnv) -> None:
    memory = _memory()
    outputs, mine = [torch.empty(env.world_size) for _ in range(2)], torch.ones(1)
    first = memory.all_gather(UNIT, 0, outputs[:1], [mine])
    with mock.patch.object(host_memory, "Reading", side_effect=_SignalError), pytest.raises(_SignalError):
        _now(first)
    second = memory.all_gather(UNIT, 1, outputs[1:], [mine])
    _now(first)
    _now(second)
    assert all(bool((output == 1.0).all()) for output in outputs)


def test_an_interrupt_does_not_lose_what_has_come(pool2: Pool) -> None:
    pool2.run(_is_interrupted)


class _Ends:
    """Garbage, which asks for posts that nobody waits for when it is collected, and leaves more garbage behind."""

    def __init__(self, abandoned: list[Any]) -> None:
        self._abandoned, self._me = abandoned, self

    def __del__(self) -> None:
        if self._abandoned:
            for post in self._abandoned:
                post.is_completed()
            _Ends(self._abandoned)


def _is_asked_from_within(env: RankEnv) -> None:
    memory = _memory()
    abandoned: list[Any] = [None]
    threshold = gc.get_threshold()
    try:
        for k in range(8):
            output, mine = torch.empty(env.world_size), torch.full((1,), float(k))
            (post,), _ = memory.all_gather(UNIT, 2 * k, [torch.empty_like(output)], [mine])
            abandoned[:] = [post]
            if not k:
                _Ends(abandoned)
                gc.set_threshold(1, 1, 1)
            _now(memory.all_gather(UNIT, 2 * k + 1, [output], [mine]))
            assert output.tolist() == [k] * env.world_size
    finally:
        gc.set_threshold(*threshold)
        abandoned.clear()


def test_garbage_that_is_collected_while_lines_are_taken_may_ask_for_its_posts(pool2: Pool) -> None:
    """A model that is deleted behind a step whose gathers over replicas are under way asks whether they have ended."""
    pool2.run(_is_asked_from_within)


def _hoards(env: RankEnv) -> None:
    memory = _memory()
    output, mine = torch.empty(env.world_size), torch.ones(1)
    _now(memory.all_gather(UNIT, 0, [output], [mine]))
    before, blocks = len(os.listdir("/proc/self/fd")), _blocks_of(memory)
    held = [memory.all_gather(UNIT, 1 + k, [output], [mine]) for k in range(100)]
    for works in held:
        _now(works)
    assert _blocks_of(memory) > blocks + 90, "posts that are not read keep their blocks"
    opened = len(os.listdir("/proc/self/fd")) - before
    assert opened < 10, f"{opened} files are open for {_blocks_of(memory)} blocks"


def test_blocks_keep_no_files_open(pool2: Pool) -> None:
    pool2.run(_hoards)


def _finds_no_memory(env: RankEnv) -> None:
    memory, mine = _memory(), torch.ones(4)
    for number, limit in ((errno.EMFILE, "-n"), (errno.EFBIG, "-f")):
        with (
            mock.patch("os.memfd_create", side_effect=OSError(number, os.strerror(number))),
            pytest.raises(CollectiveError, match=rf"all-reduce of unit 'blocks\.3'.*ulimit {limit}.*shared_memory=False"),
        ):
            memory.all_reduce(UNIT, 1, [mine])
    _now(memory.all_reduce(UNIT, 1, [mine]))
    assert mine.tolist() == [float(env.world_size)] * 4


def test_a_collective_without_memory_is_named_and_was_none(pool2: Pool) -> None:
    pool2.run(_finds_no_memory)


def _fails_to_write(env: RankEnv) -> None:
    memory = _memory()
    output, mine = torch.empty(env.world_size), torch.ones(1)
    if env.rank:
        with pytest.raises(NotImplementedError, match="meta"):
            memory.all_gather(UNIT, 0, [output], [mine.to("meta")])
    for k in range(3):
        _now(memory.all_gather(UNIT, k, [output], [k * mine]))
        assert output.tolist() == [k] * env.world_size


def test_a_post_that_could_not_be_written_was_none(pool2: Pool) -> None:
    """Nor was the block that was made for it: other ranks never see it."""
    pool2.run(_fails_to_write)


def _disagrees(env: RankEnv) -> None:
    memory, mine = _memory(), torch.ones(4)
    works, then = memory.all_reduce(UNIT, env.rank, [mine])
    works[0].wait()
    with pytest.raises(
        DivergenceError, match=f"rank {1 - env.rank} .* wrote for another collective .* the all-reduce of unit 'blocks.3'"
    ):
        then()
    works, then = memory.all_reduce(UNIT, 7, [torch.ones(100 * (1 + env.rank))])
    works[0].wait()
    with pytest.raises(DivergenceError, match=r"wrote \d+ bytes, not \d+"):
        then()


def test_collectives_that_do_not_belong_together_do_not_meet(pool2: Pool) -> None:
    pool2.run(_disagrees)


def _skips(env: RankEnv) -> None:
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    model: Any = shard(seeded(Deep), mesh)
    with mock.patch.object(work, "_TICK", timedelta(seconds=0.2)):
        for k in range(3):
            step(model, env.rank, k)
        if env.rank == 1:
            model._pair = lambda first, x: model.blocks[2 if first else 0](x)
        with pytest.raises(DivergenceError, match=r"the ranks disagree about .*'blocks\.\d'"):
            for k in range(3, 6):
                step(model, env.rank, k)


def test_ranks_that_take_other_branches_are_told(pool2: Pool) -> None:
    pool2.run(_skips)


def _is_late(env: RankEnv) -> None:
    memory, store = _memory(), dist.distributed_c10d._get_default_store()
    if env.rank == 1:
        store.wait(["asked"])
    works, then = memory.all_reduce(UNIT, 1, [total := torch.ones(2)])
    if env.rank == 0:
        assert not works[0].is_completed()
        with pytest.raises(RuntimeError, match="timed out"):
            works[0].wait(timedelta(seconds=0.05))
        store.set("asked", "yes")
    _now((works, then))
    assert works[0].is_completed() and total.tolist() == [env.world_size] * 2


def test_a_wait_ends_in_time(pool2: Pool) -> None:
    pool2.run(_is_late)


def _leaves(env: RankEnv) -> None:
    memory = _memory(group := dist.new_group())
    if env.rank == 1:
        host_meeting._known.pop(group)
        for peer in memory._peers.values():
            peer.close()
        return
    works, _ = memory.all_reduce(UNIT, 1, [torch.ones(2)])
    with pytest.raises(CollectiveError, match=r"all-reduce of unit 'blocks\.3' failed.*rank 1 of the group, on this host"):
        work.wait_for(works[0], "gloo", None, 0, "all-reduce", "blocks.3")
    assert works[0].is_completed()


def test_a_rank_that_is_gone_is_named(pool2: Pool) -> None:
    pool2.run(_leaves)


def _leaves_a_child_behind(env: RankEnv) -> None:
    """A rank goes, and a process that it forked lives on: the others learn of it all the same."""
    memory = _memory(group := dist.new_group())
    ended, goes_on = os.pipe()
    child = 0
    if env.rank == 1:
        child = os.fork()
        if not child:
            os.close(goes_on)
            os.read(ended, 1)  # until the rank is done
            os._exit(0)
        _now(memory.all_reduce(UNIT, 1, [torch.ones(2)]))
        host_meeting._known.pop(group)
        for peer in memory._peers.values():  # as its end would
            peer.close()
    else:
        _now(memory.all_reduce(UNIT, 1, [torch.ones(2)]))
        works, _ = memory.all_reduce(UNIT, 2, [torch.ones(2)])
        with pytest.raises(RuntimeError, match="rank 1 of the group, on this host, closed its connection"):
            works[0].wait(timedelta(seconds=20))
    dist.barrier()
    os.close(ended)
    os.close(goes_on)
    if child:
        os.waitpid(child, 0)


def test_a_forked_child_does_not_stand_for_a_rank_that_is_gone(pool2: Pool) -> None:
    pool2.run(_leaves_a_child_behind)


def _refuses(*args: Any) -> int:
    raise PermissionError("not here")


HINDRANCES: dict[str, tuple[Any, str, Any]] = {
    "in another network": (host_meeting, "_reaches", lambda *args: False),
    "may not send files": (host_meeting, "_hears", lambda *args: False),
    "may not share memory": (os, "memfd_create", _refuses),
}


def _cannot_share(env: RankEnv, how: str) -> None:
    """One of the ranks in the middle cannot: it is called, and calls."""
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    model: Any = shard(seeded(Deep), mesh)
    with mock.patch.object(*HINDRANCES[how]) if env.rank == 2 else nullcontext():
        step(model, env.rank, 0)
    assert all(unit.shard_comm.host_memory is None for unit in model._units())
    step(model, env.rank, 1)


@pytest.mark.parametrize("how", HINDRANCES)
def test_ranks_that_cannot_share_memory_keep_to_sockets(pool4: Pool, how: str) -> None:
    pool4.run(_cannot_share, how)


def _goes(env: RankEnv) -> None:
    memory = _memory(group := dist.new_group())
    _now(memory.all_reduce(UNIT, 1, [torch.ones(2)]))
    peers = list(memory._peers.values())
    host_meeting._known.pop(group)
    del memory
    gc.collect()
    assert all(peer.fileno() < 0 for peer in peers), "they are closed"


def test_nothing_holds_the_memory_of_a_group_that_is_gone(pool2: Pool) -> None:
    pool2.run(_goes)


def _fails_and_goes_on(env: RankEnv) -> None:
    class Fails(nn.Module):
        on = False

        def forward(self, x: Tensor) -> Tensor:
            if self.on:
                raise ArithmeticError("on all ranks")
            return x

    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    model, plain = (
        shard(seeded(Deep), mesh, comm_policy=policy) for policy in (None, hsdp.CommPolicy(shared_memory=False))
    )
    fails = Fails()
    for one in (model, plain):
        one.blocks[1].register_forward_hook(lambda module, args, result: fails(result))  # type: ignore[index, union-attr]
    for k in range(4):
        fails.on = k == 1
        for one in (model, plain):
            one.zero_grad()
            if fails.on:
                with pytest.raises(ArithmeticError):
                    step(one, env.rank, k)
            else:
                step(one, env.rank, k)
    assert_same(full_grads(model), full_grads(plain), 0.0, 0.0)


def test_a_step_that_fails_leaves_the_next_one_alone(pool2: Pool) -> None:
    pool2.run(_fails_and_goes_on)


def _starts_without_gradients(env: RankEnv) -> None:
    """Blocks that a first forward in inference mode, or one on the meta device's account, made are written again later."""
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    model, plain = (
        shard(seeded(Deep), mesh, comm_policy=hsdp.CommPolicy(shared_memory=shared)) for shared in (True, False)
    )
    for one in (model, plain):
        with torch.inference_mode(), torch.device("meta"):
            one(torch.ones(2, 6, dtype=torch.float64, device="cpu"))
        for k in range(2):
            step(one, env.rank, k)
    assert_same(full_grads(model), full_grads(plain), 0.0, 0.0)


def test_the_first_forward_may_be_in_inference_mode(pool2: Pool) -> None:
    pool2.run(_starts_without_gradients)
