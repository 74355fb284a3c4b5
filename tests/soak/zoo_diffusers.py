"""A soak of diffusers' models, as tiny as its own tests have them, in float64, beside their plain twins.

    git clone https://github.com/huggingface/diffusers
    python -m tests.soak.zoo_diffusers --checkout diffusers --log zoo_diffusers.log
    python -m tests.soak.zoo_diffusers --checkout diffusers --checkpoints --only flux wan

As `tests.soak.zoo`, which trains and judges. The checkout's tests give each model its sizes and its inputs, of which the
numbers are drawn anew for each batch; diffusers itself is imported from there, too. "not run" is also what diffusers'
tests cannot make or call.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests.soak.zoo import NotRunError, Zoo, options_of, settled, soak

CHECKOUT = "HSDP_DIFFUSERS"
"""The environment variable that tells workers where it is."""
ASKED = ("model_class", "get_init_dict", "get_dummy_inputs")
PACKAGE = "tests_of_diffusers"
"""What its `tests` are imported as: ours have that name already."""


def import_test(module: str) -> Any:
    """A module of diffusers' tests of models, by its name below tests/models."""
    root = Path(os.environ[CHECKOUT])
    if PACKAGE not in sys.modules:
        sys.path.insert(0, str(root / "src"))
        tests = root / "tests"
        spec = spec_from_file_location(PACKAGE, tests / "__init__.py", submodule_search_locations=[str(tests)])
        assert spec is not None and spec.loader is not None, "the checkout has tests"
        sys.modules[PACKAGE] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[PACKAGE])
    found = importlib.import_module(f"{PACKAGE}.models.{module}")
    torch.use_deterministic_algorithms(False)  # which tests turn on when they are imported
    return found


def found_in(module: str) -> list[str]:
    """The classes in a module of tests which say how a model is made and called: one for each class of models."""
    made: dict[Any, str] = {}
    try:
        tests = vars(import_test(module))
    except ImportError as error:
        print(f"left out {module}: {error}", flush=True)
        return []
    for name, cls in tests.items():
        if inspect.isclass(cls) and all(hasattr(cls, what) for what in ASKED):
            try:
                made.setdefault(cls().model_class, name)
            except (NotImplementedError, TypeError):  # a base class
                continue
    return list(made.values())


def made(kind: str, cls: str) -> Any:
    """The model that the tests in module `kind` which are called `cls` are about."""
    tests = getattr(import_test(kind), cls)()
    model = settled(lambda: tests.model_class(**tests.get_init_dict()))
    model.tests = tests
    return model


def batch_of(model: Any, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def drawn(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return torch.randn(tensor.shape, dtype=torch.float64, generator=generator)

    batch: dict[str, Any] = tree_map_only(Tensor, drawn, model.tests.get_dummy_inputs())
    return batch


def checkpoint(model: Any) -> None:
    if not model._supports_gradient_checkpointing:
        raise NotRunError("no gradient checkpointing")
    model.enable_gradient_checkpointing()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the soak; returns the exit status."""
    parser = options_of("diffusers' models beside their plain twins")
    parser.add_argument("--checkout", required=True, metavar="DIR", help="of diffusers' repository")
    options = parser.parse_args(argv)
    os.environ[CHECKOUT] = os.path.abspath(options.checkout)
    os.environ["HF_HUB_OFFLINE"] = "1"
    models = []
    for path in sorted(Path(options.checkout, "tests", "models").glob("*/test_models_*.py")):
        if not options.only or any(word in path.stem for word in options.only):
            module = f"{path.parent.name}.{path.stem}"
            models += [(module, name) for name in found_in(module)]
    return soak(Zoo(made, batch_of, checkpoint), models[options.first :: options.every], options)


if __name__ == "__main__":
    sys.exit(main())
