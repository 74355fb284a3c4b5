"""The far half of the test rig: what runs inside each worker process (the near half is `rig.py`).

A worker answers each command with one pickled `Outcome`. A thread reads the commands, so that the worker
ends, whatever its main thread waits for, as soon as the pipe closes because pytest died.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import os
import pickle
import queue
import random
import resource
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, _collective_utils, _redistribute
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tests.support import device as emulator

_AXIS_NAMES = {1: ("shard",), 2: ("replicate", "shard")}
_CONNECT_TIMEOUT = 60.0  # for making a group: on a busy machine longer than a test's own short timeout
_IN_STEP_TIMEOUT = 3.0


@dataclass(frozen=True)
class Outcome:
    """What one rank did in one run.

    `error` is None when the function returned; else the exception's class name, or "Died" (the process
    ended), "Hung" (stopped by the rig), "Unraisable" (from a finalizer or thread: Python only prints it).
    """

    rank: int
    value: Any = None
    error: str | None = None
    message: str = ""
    traceback: str = ""
    output: str = ""  # what the rank printed; only filled in when it failed
    warnings: tuple[str, ...] = ()  # "Category: text", every one, also repeated ones
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.error is None


class RankEnv:
    """What a test function gets as its first argument: its place in the world, and meshes over it."""

    def __init__(self, rank: int, world_size: int, device: str = "cpu") -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._meshes: dict[tuple[tuple[int, ...], tuple[str, ...]], DeviceMesh] = {}

    def mesh(self, shape: int | Sequence[int], names: Sequence[str] | None = None) -> DeviceMesh:
        """A mesh of this shape on the pool's device, made once; every rank must ask for the same ones in the same order."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        names = tuple(names or _AXIS_NAMES[len(shape)])
        if (shape, names) not in self._meshes:
            self._meshes[shape, names] = init_device_mesh(self.device, shape, mesh_dim_names=names)
        return self._meshes[shape, names]

    def groups(self) -> list[dist.ProcessGroup]:
        """The default group and this rank's groups of every mesh made so far."""
        found = [dist.group.WORLD]
        for mesh in self._meshes.values():
            if mesh.get_coordinate() is not None:
                found += mesh.get_all_groups()
        return list(dict.fromkeys(found))


class _Worker:
    """The commands. Each returns a picklable value or raises."""

    def __init__(self, rank: int, world_size: int, port: int, grouped: bool, device: str) -> None:
        self.env = RankEnv(rank, world_size, device)
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self.grouped = grouped
        self._frozen = 0

    def regroup(self, generation: int, timeout: float) -> None:
        """Throw away every process group and mesh; make a new default group unless the pool has none."""
        if dist.is_initialized():
            dist.destroy_process_group()
            forget_meshes()
            gc.unfreeze()  # groups and meshes were frozen with the imports: no collection would see them
            self._freeze()  # here, or the collections behind this command and before the next call would see everything
        self.env = RankEnv(self.env.rank, self.env.world_size, self.env.device)
        backends = use_device(self.env.device, self.env.rank, self.env.world_size)
        if not self.grouped:
            return
        # Groups made without a timeout (meshes, the library's own) would otherwise wait for 30 minutes.
        distributed_c10d.default_pg_timeout = timedelta(seconds=timeout)
        dist.init_process_group(
            backends,
            store=dist.PrefixStore(f"generation{generation}", self.store),
            rank=self.env.rank,
            world_size=self.env.world_size,
            timeout=timedelta(seconds=_CONNECT_TIMEOUT),
        )
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout))

    def call(self, payload: bytes) -> Any:
        """Run the test function that `payload` names."""
        function, args = pickle.loads(payload)
        self._freeze_imports()
        torch.manual_seed(0)
        random.seed(0)
        return function(self.env, *args)

    def _freeze_imports(self) -> None:
        """Takes what was imported since the last call out of the garbage collector's sight.

        A module is no garbage, and with the tests' modules in sight the collection behind each run takes 40 to 100 ms.
        """
        if len(sys.modules) != self._frozen:
            self._freeze()

    def _freeze(self) -> None:
        gc.collect()  # first: what is frozen is never collected
        gc.freeze()
        self._frozen = len(sys.modules)

    def check(self) -> int:
        """Raise if the last run left global state changed, or the process groups out of step; count the groups."""
        left = restore_globals()
        if self.grouped:
            for group in self.env.groups():
                _check_in_step(group, self.env.device)
        if left:
            raise AssertionError("the run left changed: " + ", ".join(left))
        return len(distributed_c10d._world.pg_names)


def _check_in_step(group: dist.ProcessGroup, device: str) -> None:
    if device == "cpu":
        dist.monitored_barrier(group, timeout=timedelta(seconds=_IN_STEP_TIMEOUT))
        return
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones, group=group)
    assert ones.item() == group.size(), f"a group of {group.size()} ranks is out of step: it counted {ones.item():g}"


def use_device(device: str, rank: int, world_size: int) -> str:
    """Makes `device` the rank's own and known to torch; returns the backends of a process group for it.

    Ranks that share a device communicate by gloo, unless NCCL is told to put several ranks on one, which 2.30 and newer do.
    """
    if device == "cpu":
        return "gloo"
    if device == emulator.NAME:
        emulator.load()
    module = torch.get_device_module(device)
    module.set_device(rank % module.device_count())
    if device == emulator.NAME:
        from hsdp.comm import backends  # not before the debug mode has been chosen

        backends.MULTIPLIES |= {"emulccl"}  # as NCCL does, for which it stands
        return emulator.BACKENDS
    if module.device_count() >= world_size or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"
    _gather_singly(device)
    return f"cpu:gloo,{device}:gloo"


@functools.cache
def _gather_singly(device: str) -> None:
    """Gives DTensor a gather that gloo can do on a device. torch's, a coalesced one, ends in a segmentation fault there."""

    def gather(mine: torch.Tensor, size: int, name: str) -> torch.Tensor:
        whole = mine.new_empty((mine.shape[0] * size, *mine.shape[1:]))
        dist.all_gather_into_tensor(whole, mine, group=distributed_c10d._resolve_process_group(name))
        return whole

    _mended.append(torch.library.Library("_c10d_functional", "IMPL"))
    _mended[-1].impl("all_gather_into_tensor", gather, device.upper())


_mended: list[torch.library.Library] = []
"""What replaces torch's operators lives as long as its library object."""


def forget_meshes() -> None:
    """Makes DTensor forget the meshes that it has seen: to it, meshes of other groups with the same ranks are equal."""
    # DTensor caches output specs with their mesh, whose groups it finds by name; new groups get the same names anew. Every
    # cache goes, as each holds groups, whose threads do not rest.
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor"):
            for one in list(vars(module).values()):
                if isinstance(one, functools._lru_cache_wrapper):
                    one.cache_clear()
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    if hasattr(torch._C, "_clear_DTensor_sharding_propagator_cache"):
        torch._C._clear_DTensor_sharding_propagator_cache()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):
        _redistribute.clear_redistribute_planner_cache()
    if hasattr(_collective_utils, "MeshTopoInfo"):
        _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()


def restore_globals() -> list[str]:
    """Put torch's global state back to its defaults; returns what was found changed."""
    left = []
    if torch.get_default_dtype() != torch.float32:
        left.append(f"default dtype ({torch.get_default_dtype()})")
        torch.set_default_dtype(torch.float32)
    if not torch.is_grad_enabled():
        left.append("grad mode (off)")
        torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():
        left.append("deterministic algorithms (on)")
        torch.use_deterministic_algorithms(False)
    if modes := _get_current_dispatch_mode_stack():
        left.append(f"dispatch modes ({', '.join(type(mode).__name__ for mode in modes)})")
        for mode in reversed(modes):
            mode.__exit__(None, None, None)
    return left


def attempt(rank: int, body: Callable[[], Any]) -> Outcome:
    """Run `body` and collect the garbage it leaves; nothing it does escapes but as part of the outcome."""
    failure: tuple[str, str, str] | None = None
    value = b""
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught, _unraisables() as lost:
        warnings.simplefilter("always")
        try:
            value = pickle.dumps(body())
        except BaseException as error:  # SystemExit and pytest's outcomes too: the worker goes on
            failure = (type(error).__name__, str(error), _format(error))
        seconds = time.perf_counter() - start
        gc.collect()
    if failure is None and lost:
        failure = ("Unraisable", lost[0].strip().splitlines()[-1], "\n".join(lost))
    told = tuple(f"{one.category.__name__}: {one.message}" for one in caught)
    if failure is not None:
        return Outcome(rank, None, *failure, warnings=told, seconds=seconds)
    return Outcome(rank, value, warnings=told, seconds=seconds)


def _format(error: BaseException) -> str:
    """The traceback from the first frame that is not the rig's own."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__ and frames.tb_next:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


@contextlib.contextmanager
def _unraisables() -> Iterator[list[str]]:
    """Collect what Python would only print: exceptions in finalizers and in threads."""
    lost: list[str] = []

    def finalizer_hook(args: Any) -> None:
        told = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
        lost.append(f"{args.err_msg or 'Exception ignored in'}: {args.object!r}\n{''.join(told)}")

    def thread_hook(args: Any) -> None:
        told = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
        lost.append(f"Exception in thread {args.thread and args.thread.name}\n{''.join(told)}")

    before = sys.unraisablehook, threading.excepthook
    sys.unraisablehook, threading.excepthook = finalizer_hook, thread_hook
    try:
        yield lost
    finally:
        sys.unraisablehook, threading.excepthook = before


def worker_main(
    pipe: Connection, rank: int, world_size: int, port: int, grouped: bool, log_path: str, device: str = "cpu"
) -> None:
    """A worker process, from its first to its last line."""
    commands: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(pipe, commands), daemon=True).start()
    log = _redirect_output(log_path)
    faulthandler.enable(log, all_threads=True)  # the rig ends a hung worker by SIGABRT
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # of C++, before Python's: gloo's threads have no others
    if not os.environ.get("HSDP_KEEP_CORES"):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then closes the pipe
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may resolve to nothing
    if device == emulator.NAME:
        # The debug mode makes the host wait for the device, which hides races; the emulator poisons memory itself.
        os.environ["HSDP_DEBUG"] = "0"
    loaded = sys.modules.get("hsdp.debug")  # a command's main module is imported here first, and hsdp with it
    wanted = os.environ.get("HSDP_DEBUG", "0") not in ("", "0")
    assert loaded is None or wanted == loaded.ON, "hsdp was imported before its debug mode was chosen: unset HSDP_DEBUG"
    torch.set_num_threads(1)
    if os.environ.get("HSDP_WATCH_LENT_MEMORY"):
        from tests.support import lent_memory  # imports hsdp

        lent_memory.watch()
    worker = _Worker(rank, world_size, port, grouped, device)
    while True:
        name, *args = commands.get()
        outcome = attempt(rank, lambda name=name, args=args: getattr(worker, name)(*args))
        sys.stdout.flush()
        pipe.send_bytes(pickle.dumps(outcome))


def _read_commands(pipe: Connection, commands: queue.SimpleQueue[tuple[Any, ...]]) -> None:
    try:
        while True:
            commands.put(pickle.loads(pipe.recv_bytes()))
    except (EOFError, OSError):
        os._exit(0)


def _redirect_output(path: str) -> TextIO:
    """Send everything this process prints, C++ included, to `path`; returns the open file."""
    log = open(path, "a", buffering=1)  # noqa: SIM115  (lives as long as the process)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    return log
