"""The rig itself: pools, the fake world, the twin and its cases."""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import fsdp

from tests.support import rig
from tests.support.models import CASES, make_case
from tests.support.rig import Pool, PoolTimeout, RankEnv, RemoteError, fake_world, run_procs
from tests.support.twin import Twin, adamw, assert_close_to_twin, assert_same, sgd, train, twin_of


def _sum_of_ranks(env: RankEnv, extra: int) -> tuple[int, int, float]:
    total = torch.tensor(float(env.rank + extra))
    dist.all_reduce(total)
    return env.rank, os.getpid(), total.item()


def test_runs_on_all_ranks_in_the_same_processes(pool2: Pool) -> None:
    first, second = pool2.run(_sum_of_ranks, 10), pool2.run(_sum_of_ranks, 20)
    assert [one[0] for one in first] == [0, 1]
    assert [one[2] for one in first + second] == [21.0, 21.0, 41.0, 41.0]
    assert [one[1] for one in first] == [one[1] for one in second]


def _sums_over_axes(env: RankEnv) -> tuple[int, int]:
    mesh = env.mesh((2, 2))
    assert mesh is env.mesh((2, 2))
    sums = []
    for axis in ("replicate", "shard"):
        total = torch.tensor(2**env.rank)
        dist.all_reduce(total, group=mesh.get_group(axis))
        sums.append(total.item())
    return sums[0], sums[1]


def _sums(env: RankEnv, count: int) -> float:
    return sum(_sum_of_ranks(env, 0)[2] for _ in range(count))


def test_ranks_that_are_stopped_now_and_then_go_on(pool2: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    kill = os.kill

    def note(pid: int, which: int) -> None:
        sent.append(which)
        kill(pid, which)

    monkeypatch.setattr(os, "kill", note)
    with pool2.stalling("0"):
        while sent.count(signal.SIGSTOP) < 3:
            assert pool2.run(_sums, 100) == [100.0, 100.0]
    assert sent.count(signal.SIGSTOP) == sent.count(signal.SIGCONT)


def test_meshes_have_the_ranks_of_their_axes(pool4: Pool) -> None:
    first, second = (0b0101, 0b1010), (0b0011, 0b1100)
    assert pool4.run(_sums_over_axes) == [(one, two) for two in second for one in first]


def _fail_on(env: RankEnv, ranks: tuple[int, ...]) -> int:
    print(f"a word from {env.rank}")
    if env.rank in ranks:
        raise LookupError(f"no luck on {env.rank}")
    return env.rank * 100


def _make_a_group(env: RankEnv, ranks: list[int]) -> int:
    if env.rank in ranks:
        dist.new_group(ranks, use_local_synchronization=True)
    return len(dist.distributed_c10d._world.pg_names)


def test_groups_that_some_ranks_made_do_not_outlive_their_run(pool2: Pool) -> None:
    """torch names a group by how many there are: ranks that differ would wait for each other under other names."""
    assert len(set(pool2.run(_make_a_group, [0]))) == 2
    assert len(set(pool2.run(_make_a_group, [0, 1]))) == 1


def test_errors_name_ranks_and_keep_the_processes(pool2: Pool) -> None:
    pool2.run(_sum_of_ranks, 0)
    starts = pool2.starts
    with pytest.raises(RemoteError, match="_fail_on failed on rank 1 of 2") as caught:
        pool2.run(_fail_on, (1,))
    text = str(caught.value)
    assert "LookupError: no luck on 1" in text
    assert "in _fail_on" in text
    assert "a word from 1" in text
    assert "support/worker.py" not in text
    outcomes = pool2.run_raw(_fail_on, (0,))
    assert (outcomes[0].error, outcomes[0].message) == ("LookupError", "no luck on 0")
    assert (outcomes[1].ok, outcomes[1].value) == (True, 100)
    assert pool2.run(_sum_of_ranks, 1)[0][2] == 3.0
    assert pool2.starts == starts


def _reduce_unless(env: RankEnv, rank: int) -> None:
    if env.rank == rank:
        raise LookupError("before the collective")
    dist.all_reduce(torch.zeros(1), group=env.mesh(2).get_group())


def test_short_group_timeout_reaches_mesh_groups(pool2: Pool) -> None:
    start = time.monotonic()
    outcomes = pool2.run_raw(_reduce_unless, 1, group_timeout=2)
    assert [one.error for one in outcomes] == ["RuntimeError", "LookupError"]
    assert time.monotonic() - start < 15
    assert pool2.run(_sum_of_ranks, 0)[0][2] == 1.0


def test_ranks_that_wait_for_a_failed_one_are_stopped(pool2: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig, "_PATIENCE", 0.2)
    with pytest.raises(RemoteError, match="_reduce_unless failed on ranks 0, 1 of 2") as caught:
        pool2.run(_reduce_unless, 1)
    assert type(caught.value) is RemoteError
    assert [one.error for one in caught.value.outcomes] == ["Hung", "LookupError"]
    text = str(caught.value)
    assert text.index("LookupError") < text.index("Hung"), "whose cause is the other's comes first"
    assert "all_reduce" in caught.value.outcomes[0].traceback


def _hang_on(env: RankEnv, rank: int) -> None:
    if env.rank == rank:
        threading.Event().wait()


def test_a_hang_shows_the_stack_and_replaces_the_pool() -> None:
    with Pool(2) as pool:
        pool.run(_hang_on, 7)
        with pytest.raises(PoolTimeout, match=r"_hang_on did not end within 0\.5 s") as caught:
            pool.run(_hang_on, 1, timeout=0.5)
        assert [one.error for one in caught.value.outcomes] == [None, "Hung"]
        assert "in _hang_on" in str(caught.value)
        assert "_read_commands" not in str(caught.value)
        assert pool.run(_sum_of_ranks, 0)[0][2] == 1.0
        assert pool.starts == 2


def _kill_self_on(env: RankEnv, rank: int) -> str:
    if env.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))
    return "reduced"


def test_a_killed_rank_is_told_and_the_pool_replaced() -> None:
    with Pool(2) as pool:
        outcomes = pool.run_raw(_kill_self_on, 0)
        assert (outcomes[0].error, outcomes[0].message) == ("Died", "exit code -9")
        assert outcomes[1].error == "RuntimeError"
        assert pool.run(_kill_self_on, 7) == ["reduced", "reduced"]
        assert pool.starts == 2


def _leave_float64(env: RankEnv) -> None:
    torch.set_default_dtype(torch.float64)


def _leave_a_collective(env: RankEnv) -> None:
    if env.rank == 0:
        env.work = dist.all_reduce(torch.zeros(1), async_op=True)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("body", "complaint"), [(_leave_float64, "default dtype"), (_leave_a_collective, "barrier")])
def test_what_a_run_leaves_behind_is_its_error(pool2: Pool, body: Any, complaint: str) -> None:
    with pytest.raises(RemoteError, match="left the ranks in a bad state") as caught:
        pool2.run(body)
    assert complaint in str(caught.value).lower()
    assert pool2.run(_sum_of_ranks, 0)[0][2] == 1.0


class _FailsWhenFreed:
    def __init__(self) -> None:
        self.me = self  # a cycle: only a collection frees it

    def __del__(self) -> None:
        raise ValueError("in a finalizer")


def _make_garbage(env: RankEnv) -> None:
    _FailsWhenFreed()


def test_errors_in_finalizers_fail_the_run(pool2: Pool) -> None:
    outcomes = pool2.run_raw(_make_garbage)
    assert {(one.error, one.message) for one in outcomes} == {("Unraisable", "ValueError: in a finalizer")}


def _warn_twice(env: RankEnv) -> None:
    for _ in range(2):
        warnings.warn("the same place", stacklevel=1)


def test_warnings_are_collected(pool2: Pool) -> None:
    for _ in range(2):
        assert pool2.run_raw(_warn_twice)[0].warnings == ("UserWarning: the same place",) * 2


def test_functions_without_a_name_are_refused(pool2: Pool) -> None:
    with pytest.raises(ValueError, match="top level"):
        pool2.run(lambda env: None)


def _fake_in_fresh_process(env: RankEnv) -> tuple[int, int]:
    with fake_world(64, rank=5) as fake:
        gathered = torch.empty(64)
        dist.all_gather_into_tensor(gathered, torch.zeros(1))
        return dist.get_rank(), fake.mesh((8, 8)).size(1)


def test_fake_world_in_a_fresh_process() -> None:
    assert run_procs(_fake_in_fresh_process, 1, grouped=False) == [(5, 8)]


def test_fake_world_here() -> None:
    for size in (8, 4):
        with fake_world(size):
            assert dist.get_world_size() == size
    assert not dist.is_initialized()


def _tell_and_hang(env: RankEnv, fifo: str) -> None:
    writer = open(fifo, "wb", buffering=0)  # noqa: SIM115  (held until the process ends)
    writer.write(b"x")
    threading.Event().wait()


def _hang_in_pool(fifo: str) -> None:
    Pool(2).run(_tell_and_hang, fifo)


def test_workers_die_with_pytest(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    body = f"from tests.support.test_rig import _hang_in_pool; _hang_in_pool({str(fifo)!r})"
    scratch = tempfile.TemporaryDirectory()  # what a killed owner leaves; not below tmp_path, sockets need short names
    environment = {**os.environ, "TMPDIR": scratch.name}
    owner = subprocess.Popen([sys.executable, "-c", body], cwd=Path(__file__).parents[2], env=environment)
    with open(os.open(fifo, os.O_RDONLY), "rb", buffering=0) as reader:
        told = b""
        while len(told) < 2:
            told += reader.read(2)
        owner.kill()
        owner.wait()
        # The pipe ends when the last process that holds its other end does.
        assert select.select([reader], [], [], 20)[0], "the workers outlive the process that started them"
        assert reader.read(1) == b""
    scratch.cleanup()


def _twin_by_all_reduce(env: RankEnv, name: str, accumulate: int, reduce: str, twin: Twin) -> None:
    case = make_case(name)
    model = case.model()
    optimizer = adamw(model.parameters())
    average = env.world_size if reduce == "mean" else 1

    def reduce_grads(*_: Any) -> None:
        for param in model.parameters():
            if param.requires_grad:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                dist.all_reduce(param.grad)
                param.grad /= average

    optimizer.register_step_pre_hook(reduce_grads)
    losses = train(model, case, env.rank, 3, optimizer, accumulate)
    torch.testing.assert_close(losses, twin.losses[:, env.rank], rtol=1e-11, atol=1e-11)
    assert_close_to_twin(model, twin, grads=True)


@pytest.mark.parametrize(
    ("name", "accumulate", "reduce"), [("mlp", 1, "mean"), ("transformer", 2, "sum"), ("frozen", 2, "mean")]
)
def test_twin_equals_plain_data_parallel(pool2: Pool, name: str, accumulate: int, reduce: Any) -> None:
    twin = twin_of(make_case(name), 2, 3, adamw, accumulate, reduce)
    assert twin.losses.shape == (3, 2, accumulate)
    pool2.run(_twin_by_all_reduce, name, accumulate, reduce, twin)


def _twin_by_fsdp(env: RankEnv, name: str, shape: tuple[int, ...], twin: Twin) -> None:
    case = make_case(name)
    model = case.model()
    for module in (*model.blocks, model):
        fsdp.fully_shard(module, mesh=env.mesh(shape))
    losses = train(model, case, env.rank, 3, adamw(model.parameters()))
    torch.testing.assert_close(losses, twin.losses[:, env.rank], rtol=1e-11, atol=1e-11)
    assert_close_to_twin(model, twin, grads=True)


def test_twin_equals_fsdp2(pool4: Pool) -> None:
    pool4.run(_twin_by_fsdp, "odd", (2, 2), twin_of(make_case("odd"), 4, 3, adamw))


def test_comparison_tells_every_difference() -> None:
    right: dict[str, Tensor | None] = {"a": torch.ones(3), "b": torch.ones(2, 2), "c": None, "d": torch.ones(1)}
    wrong: dict[str, Tensor | None] = {"a": torch.full((3,), 1.5), "b": torch.ones(4), "c": None, "d": None}
    assert_same(right, right)
    with pytest.raises(AssertionError, match=r"3 of 4(.|\n)*a: off by up to 0.5(.|\n)*b: shape(.|\n)*d: None"):
        assert_same(wrong, right)
    with pytest.raises(AssertionError, match="names differ"):
        assert_same({}, right)


@pytest.mark.parametrize("name", CASES)
def test_cases_train_and_are_the_same_each_time(name: str) -> None:
    case = make_case(name)
    twin = twin_of(case, 2, 2, sgd)
    assert twin.losses.isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(case.batch(1, 1), case.batch(1, 1), strict=True))
    assert not torch.equal(case.batch(1, 0)[0], case.batch(1, 1)[0])
    assert_same(dict(twin_of(pickle.loads(pickle.dumps(case)), 2, 2, sgd).params), dict(twin.params), 0, 0)
