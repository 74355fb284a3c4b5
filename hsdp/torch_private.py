"""What hsdp asks of torch's engine, storages, process groups, meshes and dynamo, and torch has no public name for.

Beside each: what hsdp needs it for, who else relies on it, and what breaks without it. torch 2.11 to 2.15 have all of them;
`tests/test_floors.py` finds uses of these elsewhere. Not here are private names of DTensor, and attributes of tensors and
modules that begin with an underscore (`_base`, `_version`, `_parameters`): they stand where they are used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from operator import attrgetter, methodcaller
from typing import Any, TypeVar

import torch
import torch._C._distributed_c10d as c10d
import torch._C._functorch as functorch
import torch.distributed as dist
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup
from torch.distributed._composable.contract import REGISTRY_KEY as REGISTRY_KEY
from torch.distributed._composable.contract import STATE_KEY as STATE_KEY
from torch.distributed._composable.contract import RegistryItem as RegistryItem
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

T = TypeVar("T")

# -- autograd's engine: DDP, FSDP2 and activation checkpointing in PyTorch itself rely on these names -----------------

NO_TASK = -1
"""What `graph_task` returns outside of every backward."""

graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the graph task, one call of `backward` or `autograd.grad`, that runs on this thread."""

queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Has a function called at the end of the present graph task. If that raises, the function is dropped instead."""

will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the present graph task will run a node: which gradients will come, and which parameters were not used.

Raises RuntimeError for inputs of `autograd.grad`, about which the engine does not tell.
"""

retains_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the present graph task keeps its graph (`retain_graph=True`), so that there may be another one through it."""

keeping_versions: Callable[[Any], AbstractContextManager[None]] = torch.autograd.grad_mode._unsafe_preserve_version_counter
"""Inside it, writing to these tensors does not count as a change that a backward would object to."""

outside_transforms: Callable[[], AbstractContextManager[None]] = torch._C._DisableFuncTorch
"""Inside it operators compute as if no transform of `torch.func` were under way: torch.fx and the random generators of
devices rely on it. Without it a gather inside `torch.func.jvp` could not copy what came into whole parameters."""


is_wrapped: Callable[[Tensor], bool] = functorch.is_functorch_wrapped_tensor
"""Whether a transform of `torch.func` wraps a tensor: see `tensors_behind`."""


def tensors_behind(tensor: Tensor) -> list[Tensor]:
    """The tensors through whose nodes gradients enter what made `tensor`, where a transform or a dual number hides them.

    `vmap` and `jvp` of `torch.func` wrap outputs: the node is that of the tensor inside. A tangent has a node of its own,
    and a loss may be made of it alone. What `torch.func.grad` wraps has a node that its own backward goes through, beside
    that of the tensor inside, through which a loss is trained that is made of the gradient.
    """
    layer = functorch.peek_interpreter_stack() if is_wrapped(tensor) else None
    if layer is None:
        return [tensor, *_tangent_of(tensor)]
    wrapped = functorch.maybe_get_level(tensor) == layer.level()
    found = [tensor]
    if wrapped and layer.key() == functorch.TransformType.Jvp:
        found += _tangent_of(tensor)
    own = found if wrapped and layer.key() == functorch.TransformType.Grad else []
    with temporarily_pop_interpreter_stack():
        inside = [functorch.get_unwrapped(t) if functorch.maybe_get_level(t) == layer.level() else t for t in found]
        return own + [behind for t in inside for behind in tensors_behind(t)]


def _tangent_of(tensor: Tensor) -> list[Tensor]:
    tangent = None if forward_ad._current_level < 0 else forward_ad.unpack_dual(tensor, level=0).tangent
    return [] if tangent is None else [tangent]


next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number of the autograd node that this thread makes next. Of nodes that one thread made, the engine runs those with
higher numbers first. Each thread counts its own: on a device, a recomputation runs on a thread of the engine."""

sequence_number: Callable[[Any], int] = methodcaller("_sequence_nr")
"""The number of an autograd node. Without it nobody can tell which outputs were made inside a forward."""


def running_node() -> int:
    """The number of the autograd node that runs on this thread, inside of a backward; 0 behind the last one.

    `torch.autograd.graph` and torch's debug mode ask for it. Without it ranks whose losses use different units could not
    tell, in a recomputation, which units are over.
    """
    node = torch._C._current_autograd_node()
    return 0 if node is None else int(node._sequence_nr())


def runs_all_leaves() -> bool:
    """Whether the present graph task accumulates into all leaves behind the node that runs: that of `backward()` does.

    That of `autograd.grad` or `backward(inputs=...)` leaves some of them out, and for inputs of the former `will_execute`
    raises. DDP walks a graph in the same way, for unused parameters. Ends at the first leaf that is left out; if there is
    none, it visits each node once.
    """
    found, seen = False, set()
    left: list[Any] = [torch._C._current_autograd_node()]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        behind = node.next_functions
        if not behind:
            if not will_execute(node):
                return False
            found = True
        left += [other for other, _ in behind]
    return found


set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = torch._C._autograd._unsafe_set_version_counter
"""Sets version counters (`torch.autograd._unsafe_preserve_version_counter` does it with this). Without it a backward that
reads memory which no gather has filled would not be refused."""

plain_access: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Inside it, attributes of tensor subclasses are read and set as those of plain tensors. DTensor overrides none, and torch
finds that out at every access to `.grad`, `.requires_grad` or a version, which takes longer than the access.
torch's profiler and masked tensors use it; without it hsdp's host time grows by a tenth."""

chunk_cat: Callable[..., Tensor] = torch._chunk_cat
"""`chunk_cat(tensors, 0, n, out=(n, m))`: row r is the r-th of n parts of each tensor, cut on dim 0 and padded with zeros.

All of one dtype. FSDP2 fills the input of its reduce-scatter with it; without it the host makes a view and a copy of each
gradient, which takes it three times as long.
"""


is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether torch's profiler runs in this thread; its public classes ask it too. Without it labels would cost the host."""


def in_fake_mode() -> bool:
    """Whether `FakeTensorMode` is on, in which tensors have no values. `torch.compile` asks so; no public function does."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


# -- storages ---------------------------------------------------------------------------------------------------------

has_storage: Callable[[Tensor], bool] = torch._C._has_storage
"""Whether a tensor has a storage at all; FakeTensor and CUDA graph trees ask it."""


storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""A number that two storages share if they are one and the same. `torch.multiprocessing` and DCP use it."""


def stands_for_zeros(tensor: Tensor) -> bool:
    """Whether a tensor has no memory and is read as zeros, as those that forward-mode autograd makes."""
    return tensor._is_zerotensor()


def storage_uses(tensor: Tensor) -> int:
    """How many tensors share the memory of `tensor`, itself included. CUDA graph trees count so.

    Without it every gradient would be copied before it is summed in place.
    """
    storage = tensor.untyped_storage()  # counts as one
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def are_alone(tensors: Iterable[Tensor]) -> bool:
    """Whether `storage_uses` of each is one, without a call of Python's for each: every backward asks for all gradients."""
    storages = map(storage_key, map(Tensor.untyped_storage, tensors))
    return max(map(torch._C._storage_Use_Count, storages), default=0) <= 2


def _prove_storage_uses() -> None:
    # A count that is too low would let hsdp write into memory that others read: gradients would be wrong in silence.
    tensor = torch.empty(2)
    alone, view = storage_uses(tensor), tensor.view(1, 2)
    if (alone, storage_uses(tensor), storage_uses(view), are_alone([tensor])) != (1, 2, 2, False):
        raise ImportError(
            f"hsdp does not fit torch {torch.__version__}: the number of tensors that share a storage is counted otherwise "
            "than in the versions that it was written for; install one of those (see pyproject.toml)"
        )


_prove_storage_uses()

# -- process groups: FSDP2, DTensor and torchtitan use the same ---------------------------------------------------------

AllgatherOptions = c10d.AllgatherOptions
"""Options of an all-gather; those of the other collectives are public."""


multiplied_sum: Callable[[float], Any] = c10d._make_nccl_premul_sum
"""The sum of what every rank multiplies with a factor, as an operator of NCCL's reductions. FSDP2 divides
gradients so; without it a kernel of its own follows each reduction."""


def compares_arguments() -> bool:
    """Whether torch compares what ranks pass to collectives, as TORCH_DISTRIBUTED_DEBUG=DETAIL makes it do."""
    return bool(c10d.get_debug_level() == c10d.DebugLevel.DETAIL)


def own_client() -> tuple[Any, bool]:
    """The store of the default group, with a client of its own if it has such; and whether nobody else uses the client."""
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        mine = store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):
        return store, False
    return mine, _innermost(mine) is not _innermost(store)


def _innermost(store: Any) -> Any:
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return store


def named_group(name: str, ranks: Iterable[int], timeout: timedelta | None, backend: str | None) -> ProcessGroup:
    """A process group of some ranks, this one among them, which all call it. Nobody else has used its name.

    `dist.new_group(use_local_synchronization=True)` makes a name of how many groups this rank is in. Ranks of which one is
    in more than another (`dist.new_group([0])` is enough) would wait for each other under different names, for good.
    Libraries of reinforcement learning make their groups by the same function of torch.

    Args:
        name: its name.
        ranks: their numbers in the default group.
        timeout: of its collectives; None: the backend's.
        backend: of the group; None: that of the default group.
    """
    made: Any = dist.distributed_c10d
    world: Any = made._get_default_group()
    kind, store = made._world.pg_map[world]
    kind, ranks = dist.Backend(backend or kind), sorted(ranks)
    timeout = timeout or made._get_default_timeout(kind)
    if kind == dist.Backend.MPI or hasattr(world, "new_group"):  # make groups in a way of their own
        group: Any = dist.new_group(ranks, timeout, kind, use_local_synchronization=True)
    else:
        place = len(ranks), ranks.index(world.rank()), ranks
        options = {"timeout": timeout, "device_id": world.bound_device_id}
        group, _ = made._new_process_group_helper(*place, kind, store, name, **options)
        made._world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    assert isinstance(group, ProcessGroup), "this rank is one of the ranks"
    return group


def is_alive(group: ProcessGroup) -> bool:
    """Whether nobody has destroyed a process group."""
    return group in dist.distributed_c10d._world.pg_map


def backend_of(group: ProcessGroup, device: torch.device) -> Any:
    """The backend that serves a device in a group.

    Raises:
        RuntimeError: none does.
    """
    return group._get_backend(device)


def timeout_of_backend(backend: Any) -> timedelta | None:
    """After which time a backend gives a collective up, if it tells."""
    return getattr(getattr(backend, "options", None), "_timeout", None)


# -- meshes: torchtitan builds its own with these -----------------------------------------------------------------------


def concatenated(meshes: Iterable[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes of all of them, which stem from one root."""
    return DeviceMesh._concatenate(list(meshes))


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The axes of a mesh as one."""
    return mesh._flatten(name)


def unflattened(mesh: DeviceMesh, axis: int, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """An axis of a mesh as several."""
    if mesh.mesh_dim_names is None:  # torch cuts axes that have names; its groups are the same
        groups: Any = [mesh.get_group(other) for other in range(mesh.ndim)]
        if mesh.ndim == 1:
            (groups,) = groups
        axes = tuple(f"axis_{other}" for other in range(mesh.ndim))
        mesh = DeviceMesh.from_group(groups, mesh.device_type, mesh.mesh, mesh_dim_names=axes)
    return mesh._unflatten(axis, sizes, names)


# -- modules and optimizers ---------------------------------------------------------------------------------------------


set_compiler: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame
"""Makes its argument what compiles the frames that this thread enters from now on, None: nothing; returns what did.

`torch.compile` and `torch.compiler.disable` work by it. Without it everything below a sharded module inside of a compiled
function would run uncompiled, or hsdp's own frames would be compiled.
"""


def runs_as_it_is(function: Callable[..., T]) -> Callable[..., T]:
    """Has dynamo run a function that it would compile, and compile what that calls; in what it traces it still goes on."""
    frames: Any = torch._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function


_left_out: list[str] = []


def leave_out_of_graphs() -> None:
    """Has dynamo run hsdp's own frames as they are: collectives, hooks and what keeps count cannot be traced.

    A function that is compiled around a backward, a clip or a step breaks its graph there. Called when dynamo may have been
    imported since, which this does not: it takes longer than the rest of hsdp. Sharded modules break graphs by themselves,
    and their class is in `hsdp.api`: dynamo would not compile what they call.
    """
    if not _left_out and "torch._dynamo" in sys.modules:
        _left_out.extend(f"hsdp.{name}" for name in ("clip", "comm", "optim", "params", "schedule", "unit", "weights"))
        for name in _left_out:
            sys.modules["torch._dynamo"].trace_rules.add(name)


def rewrap_step(optimizer: torch.optim.Optimizer) -> None:
    """Puts torch's hooks around the `step` of an optimizer's new class. Learning rate schedulers do it too."""
    optimizer._patch_step_function()


# -- dispatch modes: selective checkpoints, and every mode of users', are on this stack ------------------------------------

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many dispatch modes are on."""


def is_selective() -> bool:
    """Whether a selective checkpoint keeps operators' results, or gives kept ones in place of what operators compute.

    It tells operators by their order: those of a gather, which a recomputation may not need, are not to be among them.
    """
    return any(isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack())


_SELECTIVE = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


@contextmanager
def without_modes() -> Iterator[list[TorchDispatchMode]]:
    """Turns dispatch modes off; gives them, the innermost first."""
    modes = [_pop_mode() for _ in range(dispatch_modes())]
    try:
        yield modes
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


@contextmanager
def with_modes(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Turns dispatch modes on that `without_modes` gave."""
    for mode in reversed(modes):
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()
