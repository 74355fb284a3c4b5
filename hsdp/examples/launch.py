"""One process of the job: its rank and device, the process group, what ranks agree on, and how a run ends.

A user's mistake and an interrupt end every rank with an exit code and one line from rank 0; anything else is
a bug and keeps its traceback.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from hsdp.examples.rendezvous import find_store

T = TypeVar("T")

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, what a shell expects


class JobError(Exception):
    """Something the user can put right: its text is all that is printed."""


def rank() -> int:
    """This process's number in the job; torchrun sets it, and a lone process is rank 0."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of processes in the job."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def choose_device(name: str) -> torch.device:
    """The device of this rank for `auto`, `cpu` or `cuda`; on CUDA it is also made the current one."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and num_gpus < local_world_size):
        return torch.device("cpu")
    if num_gpus < local_world_size:
        raise JobError(
            f"--device cuda needs one GPU per process, but there are {num_gpus} for {local_world_size}; "
            "start fewer processes or use --device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


@contextmanager
def process_group(device: torch.device, timeout: float = 300.0) -> Iterator[None]:
    """The default process group, NCCL on CUDA and gloo elsewhere; destroyed however the body ends.

    After `timeout` seconds a collective gives up waiting for a rank.
    """
    on_cuda = device.type == "cuda"
    patience = timedelta(seconds=timeout)
    store = find_store(rank(), world_size(), patience)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=store,
        rank=-1 if store is None else rank(),
        world_size=-1 if store is None else world_size(),
        timeout=patience,
        device_id=device if on_cuda else None,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_rank_zero(action: Callable[[], T]) -> T:
    """Does `action` on rank 0 alone and returns its result on every rank.

    This is for files: ranks must not come to different views of a folder that one of them is writing to.

    Raises:
        JobError: on every rank, if `action` raised a `JobError` or an `OSError` on rank 0.
    """
    answer: list[tuple[T | None, str | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            answer = [(action(), None)]
        except (JobError, OSError) as error:
            answer = [(None, str(error))]
    dist.broadcast_object_list(answer, src=0)
    result, mistake = answer[0]
    if mistake is not None:
        raise JobError(mistake)
    return result  # type: ignore[return-value]  # None only where T is None


def sum_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Adds up each of the values over all ranks, in float64."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return [float(value) for value in total.tolist()]


class StopSignal:
    """Turns Ctrl-C and SIGTERM into a request that the loop answers between two steps.

    A Python exception in the middle of a step would leave the other ranks waiting inside a collective. The first signal
    says so at once, whatever the job is doing; the second raises `KeyboardInterrupt`, for those who cannot wait.
    """

    def __init__(self) -> None:
        self._received = threading.Event()

    def __enter__(self) -> StopSignal:
        self._previous = {number: signal.signal(number, self._on_signal) for number in _STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self._received.set()
        if rank() == 0:
            again = "press again" if number == signal.SIGINT else "send it again"
            # Not print: the signal may have come in the middle of one, whose lock this thread holds.
            os.write(2, f"\nstopping after this step, {again} to stop now\n".encode())

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._received.is_set()

    def wait(self, seconds: float) -> None:
        """Waits for a signal, but not for longer than `seconds`."""
        self._received.wait(seconds)


_MESSAGE_SECONDS = 30.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_job(name: str, job: Callable[[StopSignal], int]) -> int:
    """Runs `job` and returns the exit code of this process."""
    with StopSignal() as stop:
        try:
            return job(stop)
        except JobError as mistake:
            _say(f"{name}: error: {mistake}")
            if rank() > 0:
                # When one rank exits, torchrun ends the others, so the one with the message goes first.
                stop.wait(_MESSAGE_SECONDS)
            return EXIT_BAD_INPUT
        except KeyboardInterrupt:
            _say(f"{name}: interrupted")
            return EXIT_INTERRUPTED
        except RuntimeError:
            # A rank that could not wait has gone, and this one noticed in a collective: the same event.
            if not stop.requested:
                raise
            _say(f"{name}: interrupted")
            return EXIT_INTERRUPTED


def say_step(step: int, num_steps: int, words: str) -> None:
    """Prints, from rank 0 and ten times in a run, how far it is. `step` counts from 0 and is done."""
    tenth = -(-num_steps // 10)
    if rank() == 0 and ((step + 1) % tenth == 0 or step + 1 == num_steps):
        print(f"step {step + 1:>{len(str(num_steps))}}/{num_steps}  {words}", flush=True)


def leave(exit_code: int) -> NoReturn:
    """Ends this process without tearing the interpreter down, once its own threads are done: one may save a checkpoint.

    A worker thread of gloo may still be letting go of the tensors of the last collective. It needs the GIL for
    that, and in an interpreter that is going away this aborts the process after all work was done (PyTorch issue
    190489). `destroy_process_group` does not join those threads while a mesh refers to their group.
    """
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _say(line: str) -> None:
    if rank() == 0:
        print(line, file=sys.stderr, flush=True)
