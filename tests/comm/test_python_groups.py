"""Process groups written in Python: ranks as threads, and groups that know the public collectives under some names only."""

from __future__ import annotations

import threading
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hsdp import optim
from hsdp.comm.groups import backend_name
from tests.support.models import make_case
from tests.support.rig import Pool, RankEnv, run_procs
from tests.support.sharded import check_rest, shard
from tests.support.twin import Twin, sgd, train, twin_of
from tests.support.worker import forget_meshes

CASE = make_case("odd")


STEPS = 2


def _train(plain: nn.Module, rank: int, mesh: Any, twin: Twin, **options: Any) -> nn.Module:
    """Compares losses and shards: `full_tensor` needs a C++ backend, and DTensor's operators are slow in threads."""
    model = shard(plain, mesh, **options)
    losses = train(model, CASE, rank, STEPS, optim.local(sgd(model.parameters())))
    torch.testing.assert_close(losses, twin.losses[:, rank], rtol=1e-11, atol=1e-11)
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        ranks, at = param.device_mesh.size(-1), param.device_mesh.get_local_rank(-1)
        parts, local = (
            torch.chunk(twin.params[name], ranks) if param.ndim else [twin.params[name]] * ranks,
            param.to_local(),
        )
        expected = parts[at] if at < len(parts) else parts[0][:0]
        torch.testing.assert_close(local, expected, rtol=1e-11, atol=1e-11)
    check_rest(model)
    return model


# -- torch's threaded groups -----------------------------------------------------------------------------------------


def check_threads(env: Any, twin: Twin) -> None:
    """Four ranks in one process, on meshes of two shapes; a smaller group after forward, a group of its own to scatter."""
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store, errors = dist.HashStore(), []
    models = [CASE.model() for _ in range(8)]  # not in the threads, which share the random generator that it seeds

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=4, store=store)
            torch.autograd.set_multithreading_enabled(False)
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            assert backend_name(mesh.get_group("shard"), mesh_device) == "threaded"
            _train(models.pop(), rank, mesh, twin)
            model: Any = _train(models.pop(), rank, None, twin, reshard_after_forward=2)
            model.set_separate_reduce_scatter_group()
            groups = {unit.scatter_comm.group for unit in model._units()} | {u.part_comm.group for u in model._units()}
            assert all(dist.get_rank(group) == rank % group.size() for group in groups), "another thread's group"
        except BaseException:
            errors.append(traceback.format_exc())
            threaded.ProcessLocalGroup.exception_handle(None)

    mesh_device = torch.device("cpu")
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, "\n".join(errors)
    assert not any(thread.is_alive() for thread in threads)


def test_ranks_that_are_threads_train_as_the_twin() -> None:
    run_procs(check_threads, 1, twin_of(CASE, 4, STEPS, sgd), grouped=False)


# -- groups of users -------------------------------------------------------------------------------------------------


class Basic(dist.ProcessGroup):
    """Hands the collectives that every group has over to gloo, and counts them."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.calls: dict[str, int] = {}

    def _pass(self, name: str, *args: Any) -> Any:
        self.calls[name] = self.calls.get(name, 0) + 1
        return getattr(self.gloo, name)(*args)

    def getBackendName(self) -> str:
        return "gloo"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        return self._pass("allgather", outputs, inputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        return self._pass("reduce_scatter", outputs, inputs)

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        return self._pass("allreduce", tensors)

    def broadcast(self, tensors: Any, options: Any) -> Any:
        return self._pass("broadcast", tensors, options)

    def alltoall(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        rank, size = self.gloo.rank(), self.gloo.size()
        for root in range(size):
            received = outputs[root].clone()
            sent = [[one.clone() for one in inputs]] if root == rank else []
            scatter = dist.ScatterOptions()
            scatter.rootRank = root
            self._pass("scatter", [received], sent, scatter).wait()
            outputs[root].copy_(received)
        return self._pass("allreduce", [torch.zeros(1)])


class OldNames(Basic):
    """Has them under the names that torch 2.11 has, as groups written for that version do."""

    def _allgather_base(self, output: Any, mine: Any, options: Any = None) -> Any:
        self.calls["old"] = self.calls.get("old", 0) + 1
        return self.allgather([list(output.tensor_split(self.size()))], [mine])

    def _reduce_scatter_base(self, output: Any, whole: Any, options: Any = None) -> Any:
        self.calls["old"] = self.calls.get("old", 0) + 1
        return self.reduce_scatter([output], [list(whole.tensor_split(self.size()))])


def check_users_group(env: RankEnv, kind: type[Basic], twin: Twin) -> None:
    name = kind.__name__.lower()
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, lambda *told: kind(*told), devices=["cpu"])
    ranks = list(range(env.world_size))
    group: Any = dist.new_group(ranks, backend=name)
    assert type(group) is kind and backend_name(group, torch.device("cpu")) == name, "gloo's habits are not its own"
    mesh = dist.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    model: Any = _train(CASE.model(), env.rank, mesh, twin)
    assert {"allgather", "reduce_scatter"} <= set(group.calls), group.calls
    assert ("old" in group.calls) == (kind is OldNames)
    comm = model._units()[0].shard_comm
    received = torch.empty(2)
    comm.all_to_all(model._units()[0], 1, [received], [torch.arange(2.0) + 10 * env.rank]).wait()
    assert received.tolist() == [env.rank, 10 + env.rank]
    forget_meshes()


@pytest.mark.parametrize("kind", [Basic, OldNames])
def test_a_user_s_group_trains_as_the_twin(pool2: Pool, kind: type[Basic]) -> None:
    pool2.run(check_users_group, kind, twin_of(CASE, 2, STEPS, sgd))
