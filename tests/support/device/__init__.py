"""An emulated accelerator: torch device "emul", with asynchronous streams, a poisoning allocator and a race detector.

The C++ extension beside this file is built when it is first asked for, into torch's extension cache. `load()` makes
the device known to torch, which cannot be undone: processes of the test rig do it (`Pool(..., device="emul")`), pytest's
own process does not.

What it is: streams are threads that run the CPU's kernels; memory that is handed out again holds NaNs; collectives have the
stream semantics of NCCL; races are found from the order of calls, whatever the timing. What it is not: fast.
What it cannot show: NCCL itself, splitting of blocks in the allocator, graphs.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NAME = "emul"
BACKENDS = "cpu:gloo,emul:emulccl"

_EXTENSION = "hsdp_emulated_device"
_SOURCES = Path(__file__).with_name("csrc")

MODES: dict[str, dict[str, tuple[float, int]]] = {
    # kind of stream -> (probability of a delay before a kernel, its longest in microseconds)
    "none": {},
    "all": {"compute": (0.05, 800), "side": (0.3, 1500), "comm": (0.5, 1500)},
    "compute": {"compute": (0.15, 2000)},
    "side": {"side": (0.6, 2500)},
    "comm": {"side": (0.05, 300), "comm": (1.0, 3000)},
    "slow compute": {"compute": (0.4, 3000)},
    "slow comm": {"side": (0.1, 3000), "comm": (1.0, 12000)},
}


def why_not() -> str | None:
    """Why the device cannot be had here, or None."""
    if sys.platform != "linux":
        return "the emulated device is for Linux"
    if torch.__version__ < "2.13":
        return "the emulated device needs torch 2.13"
    if not shutil.which(os.environ.get("CXX", "g++")):
        return "the emulated device needs a C++ compiler (g++, or $CXX)"
    if not (shutil.which("ninja") or Path(sys.executable).with_name("ninja").exists()):
        return "the emulated device needs ninja (pip install ninja)"
    return None


def _built() -> Path:
    """The folder, in torch's extension cache, for these sources, this torch and this Python."""
    from torch.utils import cpp_extension

    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.read_bytes())
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    return Path(root, f"{_EXTENSION}_{digest.hexdigest()[:16]}")


@functools.cache
def start_build() -> subprocess.Popen[bytes] | None:
    """Begins to compile the extension, in a process of its own, unless these sources were. It takes a minute or two."""
    if (reason := why_not()) is not None:
        raise RuntimeError(reason)
    if (_built() / "done").exists():
        return None
    root = Path(__file__).parents[3]
    return subprocess.Popen([sys.executable, "-m", __name__], cwd=root, stdout=subprocess.DEVNULL)


def build() -> None:
    """Has the extension compiled when it returns."""
    builder = start_build()
    if builder is not None and builder.wait(timeout=900):
        raise RuntimeError(f"the emulated device could not be built: exit status {builder.returncode}")


def compile_here() -> None:
    """Compiles the extension in this process, and loads it."""
    from torch.utils import cpp_extension

    folder = _built()
    folder.mkdir(parents=True, exist_ok=True)
    # One translation unit: nearly all that the compiler reads is torch's headers, which it would read for each source.
    everything = folder / "everything.cpp"
    everything.write_text("".join(f'#include "{path}"\n' for path in sorted(_SOURCES.glob("*.cpp"))))
    flags = ["-O1", "-g0", "-w", "-DUSE_C10D_GLOO"]
    cpp_extension.load(_EXTENSION, [str(everything)], extra_cflags=flags, build_directory=str(folder))
    (folder / "done").touch()


@functools.cache
def load() -> Any:
    """Makes the device known to torch, and its backend to torch.distributed; returns the extension module."""
    build()
    sys.path.insert(0, str(_built()))
    extension = importlib.import_module(_EXTENSION)
    sys.path.pop(0)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module(extension))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    extension.set_tracer(_stack)

    def backend(store: Any, rank: int, size: int, timeout: Any) -> Any:
        inner = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        return extension.make_backend(inner, int(timeout.total_seconds() * 1000))

    dist.Backend.register_backend("emulccl", backend, devices=[NAME])
    return extension


def slow(mode: str, seed: int = 0) -> None:
    """Chooses which streams lag, of `MODES`."""
    kinds = [MODES[mode].get(kind, (0.0, 0)) for kind in ("compute", "side", "comm")]
    load().set_delays([share for share, _ in kinds], [longest for _, longest in kinds], seed)


def checks(*, poison_reuse: bool = True, poison_free: bool = False, detect: bool = True, trace: bool = False) -> None:
    """Chooses what is looked for. `poison_free` is stricter than CUDA; `trace` adds Python stacks to races."""
    load().set_checks(poison_reuse, poison_free, detect, trace)


def races() -> list[str]:
    """The races found since the last call."""
    return [f"{what} ({count} times)\n{text if chr(10) in text else ''}".rstrip() for what, count, text in load().races()]


@contextmanager
def watched(mode: str = "none", seed: int = 0, *, poison_free: bool = False, trace: bool = False) -> Iterator[None]:
    """Runs the body with this delay mode, waits for the device, and raises AssertionError if there was a race."""
    load().races()
    slow(mode, seed)
    checks(poison_free=poison_free, trace=trace)
    try:
        yield
        torch.get_device_module(NAME).synchronize()
        found = races()
        assert not found, f"{len(found)} races\n" + "\n".join(found[:12])
    finally:
        slow("none")
        checks()
        load().races()


def _index(device: Any = None) -> int:
    extension = load()
    if device is None:
        return int(extension.current_device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(extension.current_device()) if index is None else index


def _device_module(extension: Any) -> types.ModuleType:
    """What `torch.emul` offers, modelled on `torch.cuda`."""

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Any:
            if "stream_id" in known:
                return super().__new__(cls, **known)
            return super().__new__(cls, torch.device(NAME, _index(device)), priority=priority)

    def event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
        return torch.Event(torch.device(NAME, _index()), enable_timing=enable_timing)  # elapsed_time wants this very type

    class Device:
        def __init__(self, device: Any) -> None:
            self.index = _index(device)

        def __enter__(self) -> None:
            self.before = _index()
            extension.set_device(self.index)

        def __exit__(self, *exc: object) -> None:
            extension.set_device(self.before)

    def current_stream(device: Any = None) -> Any:
        return torch._C._accelerator_getStream(_index(device))

    def set_stream(stream: Any) -> None:
        torch._C._accelerator_setStream(stream)

    @contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        if stream is None:
            yield
            return
        with Device(stream.device):
            before = current_stream(stream.device)
            set_stream(stream)
            try:
                yield
            finally:
                set_stream(before)

    def seed_all(seed: int) -> None:
        for index in range(extension.device_count()):
            extension.default_generator(index).manual_seed(seed)

    def memory_stats(device: Any = None) -> dict[str, int]:
        stats = extension.memory()
        return {
            "allocated_bytes.all.current": stats["allocated"],
            "allocated_bytes.all.peak": stats["peak"],
            "active_bytes.all.peak": stats["peak"],
            "reserved_bytes.all.current": stats["reserved"],
            "reserved_bytes.all.peak": stats["reserved"],
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    module = types.ModuleType(f"torch.{NAME}")
    module.__dict__.update(
        Stream=Stream,
        Event=event,
        StreamContext=on_stream,
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
        current_device=extension.current_device,
        current_stream=current_stream,
        default_stream=lambda device=None: Stream(stream_id=0, device_index=_index(device), device_type=20),
        device=Device,
        device_count=extension.device_count,
        empty_cache=lambda: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16, torch.float32],
        get_rng_state=lambda device=NAME: extension.default_generator(_index(device)).get_state(),
        init=lambda: None,
        is_available=lambda: True,
        is_initialized=lambda: True,
        manual_seed=lambda seed: extension.default_generator(_index()).manual_seed(seed),
        manual_seed_all=seed_all,
        max_memory_allocated=lambda device=None: extension.memory()["peak"],
        memory_allocated=lambda device=None: extension.memory()["allocated"],
        memory_stats=memory_stats,
        reset_peak_memory_stats=lambda device=None: extension.reset_peak(),
        set_device=lambda device: extension.set_device(_index(device)),
        set_rng_state=lambda state, device=NAME: extension.default_generator(_index(device)).set_state(state),
        set_stream=set_stream,
        stream=on_stream,
        synchronize=lambda device=None: extension.synchronize(_index(device)),
    )
    return module


def _stack() -> str:
    """The Python stack of a kernel's launch, for reports of races: this project's frames."""
    results = []
    for frame in reversed(traceback.extract_stack()[:-1]):
        if f"{os.sep}torch{os.sep}" not in frame.filename and __file__ != frame.filename:
            results.append(f"    {Path(frame.filename).name}:{frame.lineno} {frame.name}")
    return "\n".join(results[:10])
