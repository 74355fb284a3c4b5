"""The house: imports only go down, one file talks to `torch.distributed`, files stay readable, the frame is there."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hsdp"
MOST_LINES = 450

# Each floor from the ground up. A file may import from lower floors; within a floor, from files left of it only where
# the floor is ordered.
_UNORDERED: list[set[str]] = [
    {"debug"},
    {"autograd", "dtensors", "errors", "fingerprints", "layout", "memory", "mesh", "offload", "policies", "streams"}
    | {"wording"},
]
_SIDE_DOORS = ["units", "clip", "checkpoint", "init", "describe", "planning", "tracing", "optim", "compressed"]
_ORDERED: list[list[str]] = [
    ["agreement", "subclass", "inner", "placement", "param", "custom", "flight", "collectives", "shadows"],
    [
        "registry",
        "training_state",
        "lane",
        "extension",
        "reduce_plan",
        "witness",
        "undo",
        "landing",
        "gradients",
        "replicas",
    ]
    + ["settings", "whole_guard", "whole_params", "unit", "pipeline"],
    ["order", "turns", "root", "backward", "runtime", "stepping", "outputs", "state"],
    ["whole", "buffers", "verification", "full_params", "compat", "module", "selection", "api", *_SIDE_DOORS],
]
_TOP = {"__init__", "__main__"}


def _place(name: str) -> tuple[int, int]:
    """Where a file stands: (floor, order on it)."""
    for floor, names in enumerate(_UNORDERED):
        if name in names:
            return floor, 0
    for floor, ordered in enumerate(_ORDERED, len(_UNORDERED)):
        if name in ordered:
            return floor, ordered.index(name)
    if name in _TOP or name == "examples":
        return len(_UNORDERED) + len(_ORDERED), 0
    raise AssertionError(f"hsdp/{name}.py stands on no floor: add it to the table here")


def _imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all modules imported, but for those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "hsdp imports absolutely"
            assert node.module is not None
            # `from hsdp import layout` imports a file too.
            yield from (f"hsdp.{a.name}" for a in node.names) if node.module == "hsdp" else (node.module,)
        else:
            yield from _imports(node)


def _upward(files: dict[str, str]) -> list[str]:
    """Imports that do not go down, as "a -> b"; `files` has names without suffix -> source."""
    found = []
    for name, source in files.items():
        owner = name.split("/")[0]
        for dotted in _imports(ast.parse(source)):
            parts = dotted.split(".")
            if parts[0] != "hsdp" or parts[1] == owner or not (parts[1] in files or _package(parts[1], files)):
                continue  # from elsewhere, from a package's own files, or a public name
            if _place(parts[1]) >= _place(owner):
                found.append(f"{name} -> {parts[1]}")
    return found


def _package(name: str, files: dict[str, str]) -> bool:
    return any(file.startswith(f"{name}/") for file in files)


def _sources() -> dict[str, str]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).with_suffix("").as_posix(): path.read_text() for path in paths}


def test_imports_only_go_down() -> None:
    assert _upward(_sources()) == []


def test_an_import_that_goes_up_would_be_seen() -> None:
    unit = "if TYPE_CHECKING:\n    from hsdp.runtime import Runtime\ndef f():\n    from hsdp.pipeline import Stage\n"
    files = {"unit": unit, "pipeline": "from hsdp.unit import Unit", "runtime": "import torch", "layout": ""}
    assert _upward(files) == ["unit -> pipeline"]
    assert _upward({"layout": "from hsdp import errors", "errors": ""}) == ["layout -> errors"]
    assert _upward({"api": "import hsdp.checkpoint.ranks", "checkpoint/ranks": "import hsdp.lane", "lane": ""}) == [
        "api -> checkpoint"
    ]
    with pytest.raises(AssertionError, match="no floor"):
        _upward({"layout": "import hsdp.attic", "attic": ""})


def test_examples_use_public_names_only() -> None:
    public = _public_names()
    for name, source in _sources().items():
        if name.startswith("examples/"):
            for dotted in _imports(ast.parse(source)):
                parts = dotted.split(".")
                allowed = parts[0] != "hsdp" or parts[1] in public | {*_SIDE_DOORS, "examples"}
                assert allowed, f"hsdp/{name}.py imports {dotted}"


def _public_names() -> set[str]:
    import hsdp

    return set(hsdp.__all__)


def test_public_names_are_sorted_and_exist() -> None:
    import hsdp

    assert list(hsdp.__all__) == sorted(hsdp.__all__)
    for name in hsdp.__all__:
        assert getattr(hsdp, name).__doc__, f"{name} has no docstring"


_TALKING = re.compile(
    r"""\b(?:dist|group|c10d|distributed_c10d)\.\s*
    (?:_?all_?(?:gather|reduce|to_all)|_?reduce_scatter|broadcast|barrier|monitored_barrier|i?send|i?recv|scatter|gather)""",
    re.VERBOSE,
)


def test_only_one_file_of_the_engine_starts_collectives() -> None:
    engine = {name: source for name, source in _sources().items() if _place(name.split("/")[0])[0] < 5}
    assert _TALKING.search(engine.pop("collectives"))
    assert [name for name, source in engine.items() if _TALKING.search(source)] == []


def test_the_engine_reads_no_environment_and_has_no_device_ifs() -> None:
    for name, source in _sources().items():
        if not name.startswith("examples/"):
            told = name == "debug"  # once, at import
            assert told or ("environ" not in source and "getenv" not in source), f"hsdp/{name}.py reads the environment"
            if name not in ("streams", "collectives"):
                assert not re.search(r"is_cuda|torch\.cuda\b", source), f"hsdp/{name}.py has a device's own code"


def test_files_stay_readable() -> None:
    long = {name: lines for name, text in _sources().items() if (lines := text.count("\n")) > MOST_LINES}
    assert not long, f"longer than {MOST_LINES} lines: {long}"


@pytest.mark.parametrize("name", _sources())
def test_every_file_says_what_it_owns(name: str) -> None:
    assert ast.get_docstring(ast.parse(_sources()[name])), f"hsdp/{name}.py has no first lines that say what it owns"


def test_the_frame_is_there() -> None:
    for name in ("README.md", "CHANGELOG.md", "LICENSE", ".ci/run", ".gitignore", "hsdp/py.typed"):
        assert (ROOT / name).exists(), f"{name} is missing"
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_pyproject_names_the_package_and_its_torch() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        config = tomllib.load(file)
    project = config["project"]
    assert project["name"] == "hsdp"
    assert "torch>=2.11,<2.14" in project["dependencies"]
    assert any(need.startswith("pytest") for need in project["optional-dependencies"]["test"])
    assert project["license"] == "Apache-2.0"
    assert config["tool"]["mypy"]["strict"] is True
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text().replace("[", "").replace("]", "")


def test_commands_in_the_readme_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    modules = set(re.findall(r"-m ((?:hsdp|benchmarks)[\w.]*)", readme))
    assert "hsdp.examples.train_lm" in modules, "README has the main job's command"
    for module in modules:
        assert importlib.util.find_spec(module) is not None, f"README runs {module}, which does not exist"
    assert re.search(r"pytest|\.ci/run", readme), "README tells how to run the tests"


def test_names_imported_in_the_readme_are_public() -> None:
    readme = (ROOT / "README.md").read_text()
    lists = re.findall(r"from hsdp import (?:\(([\w\s,]+)\)|([\w ,]+))", readme)
    named = [name.strip() for pair in lists for name in "".join(pair).split(",")]
    assert named, "README shows how to import it"
    assert [name for name in named if name and name not in _public_names() | {*_SIDE_DOORS}] == []
