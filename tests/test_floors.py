"""The house: imports only go down, one file starts the engine's collectives, files stay readable, the frame is there."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

import hsdp

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hsdp"
MOST_LINES = 450

ORDER = [
    *("debug", "errors", "format", "policies", "offload", "torch_private"),
    *("buffers", "comm", "params", "unit", "schedule", "weights"),
    *("clip", "optim", "checkpoint", "api", "elastic", "integrations", "planning", "tracing"),
    *("doctor", "__init__", "__main__", "examples"),
]
"""The entries of hsdp's top floor from the ground up: each imports only from those before it."""

MOST_ENTRIES = 25
MOST_FUNCTION_LINES = 90
SIDE_DOORS = {"checkpoint", "elastic", "integrations", "optim"}
"""Modules that users import by name, beside the names of `hsdp` itself."""


def _imports(tree: ast.AST, modules: Collection[str], roots: Collection[str] = ("hsdp",)) -> Iterator[str]:
    """Dotted names of what is imported from `roots`, wherever in the file, as far as `modules` has them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in roots)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "everything imports absolutely"
            assert node.module is not None
            if node.module.split(".")[0] in roots:
                for alias in node.names:  # `from hsdp.buffers import layout` imports a file
                    below = f"{node.module}.{alias.name}"
                    yield below if below in modules else node.module


def _graph(files: dict[str, str], roots: Collection[str] = ("hsdp",)) -> dict[str, list[str]]:
    """What each module imports from `roots`, by dotted names; `files` has the same names -> sources."""
    return {name: sorted(set(_imports(ast.parse(text), files, roots)) - {name}) for name, text in files.items()}


def _entry(name: str) -> str:
    """The entry of the top floor that a module belongs to."""
    parts = name.split(".")
    entry = parts[1] if len(parts) > 1 else "__init__"
    assert entry in ORDER, f"hsdp/{entry} is on no floor: add it to ORDER"
    return entry


def _upward(files: dict[str, str]) -> list[str]:
    """Imports between entries of the top floor that do not go down, as "a -> b"."""
    return [
        f"{name} -> {other}"
        for name, others in _graph(files).items()
        for other in others
        if _entry(other) != _entry(name) and ORDER.index(_entry(other)) > ORDER.index(_entry(name))
    ]


def _circles(graph: dict[str, list[str]]) -> list[list[str]]:
    """Circles of imports, each as the modules on the way."""
    done: set[str] = set()
    found: list[list[str]] = []

    def walk(name: str, path: list[str]) -> None:
        if name in path:
            found.append([*path[path.index(name) :], name])
        elif name not in done:
            for other in graph.get(name, ()):
                walk(other, [*path, name])
            done.add(name)

    for name in graph:
        walk(name, [])
    return found


def _sources(*folders: str) -> dict[str, str]:
    """Every module of some folders, of hsdp if none is told, by its dotted name; a package goes by its own."""
    found = {}
    for path in sorted(path for folder in folders or ("hsdp",) for path in (ROOT / folder).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = path.read_text()
    return found


def _path(name: str) -> Path:
    """The file of a module, by its dotted name."""
    path = ROOT / name.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def test_imports_only_go_down() -> None:
    assert _upward(_sources()) == []


def test_no_circle_of_imports() -> None:
    assert _circles(_graph(_sources())) == []


def _storey(name: str) -> int:
    """Of a module of tests or benchmarks: what all stand on, what measures, what tests both."""
    return 0 if name.startswith("tests.support") else 1 if name.startswith("benchmarks") else 2


def _climbing(graph: dict[str, list[str]]) -> list[str]:
    """Imports of tests and benchmarks from a storey above their own, as "a -> b"."""
    return [f"{name} -> {other}" for name, others in graph.items() for other in others if _storey(other) > _storey(name)]


def test_tests_stand_on_benchmarks_and_both_on_the_support_of_tests() -> None:
    graph = _graph(_sources("tests", "benchmarks"), ("tests", "benchmarks"))
    assert _climbing(graph) == []
    assert _circles(graph) == []
    others = _graph(_sources(), ("tests", "benchmarks"))
    assert not any(others.values()), f"hsdp imports its own tests: {others}"


def test_what_these_tests_forbid_would_be_seen() -> None:
    unit = "if TYPE_CHECKING:\n    from hsdp.schedule.runtime import Runtime\ndef f():\n    import hsdp.params.param\n"
    files = {"hsdp.unit.unit": unit, "hsdp.schedule.runtime": "from hsdp.unit import unit", "hsdp.params.param": ""}
    assert _upward(files) == ["hsdp.unit.unit -> hsdp.schedule.runtime"]
    assert _circles(_graph(files)) == [["hsdp.unit.unit", "hsdp.schedule.runtime", "hsdp.unit.unit"]]
    seen = {"tests.support.rig": ["benchmarks.harness"], "benchmarks.host": ["tests.test_clip", "tests.support.rig"]}
    assert _climbing(seen) == ["tests.support.rig -> benchmarks.harness", "benchmarks.host -> tests.test_clip"]
    writes = "a, unit.calls = 1, 2\nself.unit.lent: bool = True\nunit.settings.drains = unit.open\nunits[0].key += 1"
    assert sorted(_writes_to_units(writes)) == ["self.unit.lent", "unit.calls", "units[0].key"]
    with pytest.raises(AssertionError, match="no floor"):
        _upward({"hsdp.unit.unit": "import hsdp.attic"})


def test_no_import_is_hidden() -> None:
    for name, source in _sources().items():
        assert "TYPE_CHECKING" not in source, f"{name} hides an import"
        for function in _functions(ast.parse(source)):
            assert not list(_imports(function, ())), f"{name}: {function.name} imports hsdp when it is called"


def _writes_to_units(source: str) -> list[str]:
    """Assignments to attributes of what is called a unit, however deep below it, but to those of its settings."""
    targets = [
        target
        for node in ast.walk(ast.parse(source))
        for target in (node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)])
    ]
    parts = [part for target in targets if target is not None for part in getattr(target, "elts", [target])]
    written = [ast.unparse(part) for part in parts if isinstance(part, ast.Attribute)]
    return [name for name in written if re.search(r"(^|\.)(unit|units\[.*\]|other|u)\.(?!settings\.)", name)]


def test_units_are_written_to_by_their_own_package_only() -> None:
    found = {
        name: writes
        for name, source in _sources().items()
        if not name.startswith("hsdp.unit.") and (writes := _writes_to_units(source))
    }
    assert not found, f"units are told by their methods: {found}"


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def test_the_top_floor_is_small() -> None:
    entries = [path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert len(entries) <= MOST_ENTRIES, entries
    assert {name.removesuffix(".py") for name in entries} - {"py.typed"} == set(ORDER)


def test_examples_use_public_names_only() -> None:
    public = _public_names() | SIDE_DOORS | {"examples"}
    for name, source in _sources().items():
        if name.startswith("hsdp.examples."):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hsdp":
                    parts = (node.module or "").split(".")[1:] or [alias.name for alias in node.names]
                    assert parts[0] in public, f"{name} imports {node.module}"


def _public_names() -> set[str]:
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
    floor = ORDER.index("schedule")
    engine = {name: source for name, source in _sources().items() if ORDER.index(_entry(name)) <= floor}
    assert _TALKING.search(engine.pop("hsdp.comm.collectives"))
    assert engine.pop("hsdp.comm.compressed")  # what a user could have written: custom collectives
    for part in ("transports", "compare", "uneven", "host_meeting"):  # it alone calls what they start
        engine.pop(f"hsdp.comm.{part}")
    only_there = ("import start_", ", start_", "host_memory_of", "transport_of")
    assert not [name for name, source in engine.items() if any(word in source for word in only_there)]
    assert [name for name, source in engine.items() if _TALKING.search(source)] == []


_PRIVATE = re.compile(
    r"""torch\._C\b | \b_C\._ | \._cdata\b | _sequence_nr | \bdistributed_c10d\b | \._composable\b | torch\._dynamo
    | \._get_backend\b | \._concatenate\b | \._unflatten\( | \._flatten\( | _patch_step_function | _unsafe_ | _compiled_call
    | _execution_engine""",
    re.VERBOSE,
)


def test_one_file_uses_torch_s_private_names() -> None:
    sources = _sources()
    assert _PRIVATE.search(sources.pop("hsdp.torch_private"))
    found = {name: sorted(set(_PRIVATE.findall(text))) for name, text in sources.items() if _PRIVATE.search(text)}
    assert not found, f"private names of torch outside of torch_private.py: {found}"


def test_the_engine_reads_no_environment_and_has_no_device_ifs() -> None:
    for name, source in _sources().items():
        if not name.startswith(("hsdp.examples", "hsdp.doctor")):
            told = name == "hsdp.debug"  # once, at import
            assert told or ("environ" not in source and "getenv" not in source), f"{name} reads the environment"
            if name not in ("hsdp.comm.streams", "hsdp.comm.collectives"):
                assert not re.search(r"is_cuda|torch\.cuda\b", source), f"{name} has a device's own code"


_REGISTRY = re.compile(
    r"^(?P<name>\w+): (?:weakref\.)?(?:dict|list|set|Weak\w+)"
    r"\b[^=]*(?:= *(?:\{\}|\[\]|set\(\)|(?:weakref\.)?Weak\w+\(\)))?$"
    r"|^    (?P<of_class>\w+): ClassVar\[(?!type|str)",
    re.MULTILINE,
)


def test_what_lives_as_long_as_the_process_is_told() -> None:
    """Registries of modules and classes: docs/architecture.md says of each what it knows and when entries end."""
    told = (ROOT / "docs" / "architecture.md").read_text()
    for name, text in _sources().items():
        for found in _REGISTRY.finditer(text):
            registry = found["name"] or found["of_class"]
            path = _path(name).relative_to(PACKAGE).as_posix()
            row = next((line for line in told.splitlines() if f"`{path}: " in line and registry in line), None)
            assert row is not None or registry.strip("_").isupper(), (
                f"{path}: {registry} is in no row of docs/architecture.md"
            )


def test_files_and_functions_stay_readable() -> None:
    sources = _sources()
    long = {name: lines for name, text in sources.items() if (lines := text.count("\n")) > MOST_LINES}
    assert not long, f"longer than {MOST_LINES} lines: {long}"
    for name, text in sources.items():
        for function in _functions(ast.parse(text)):
            lines = (function.end_lineno or 0) - function.lineno + 1
            assert lines <= MOST_FUNCTION_LINES, f"{name}: {function.name} has {lines} lines"


@pytest.mark.parametrize("package", ["api", "optim", "weights", "schedule", "unit", "params", "comm", "buffers"])
def test_the_engine_s_packages_name_their_files(package: str) -> None:
    text = ast.get_docstring(ast.parse((PACKAGE / package / "__init__.py").read_text())) or ""
    files = {path.name for path in (PACKAGE / package).glob("*.py")} - {"__init__.py"}
    assert set(re.findall(r"\b\w+\.py\b", text)) == files


@pytest.mark.parametrize(("name", "text"), _sources().items(), ids=_sources())
def test_every_file_says_what_it_owns(name: str, text: str) -> None:
    assert ast.get_docstring(ast.parse(text)), f"{name} has no first lines that say what it owns"


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
    assert "torch>=2.11,<2.16" in project["dependencies"]
    assert any(need.startswith("pytest") for need in project["optional-dependencies"]["test"])
    assert project["license"] == "Apache-2.0"
    assert config["tool"]["mypy"]["strict"] is True
    assert project["version"] == hsdp.__version__
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text().replace("[", "").replace("]", "")


def test_commands_in_readme_and_docs_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "-m hsdp.examples.train_lm" in readme, "README has the main job's command"
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for module in set(re.findall(r"-m ((?:hsdp|benchmarks|tests)[\w.]*)", page.read_text())):
            assert importlib.util.find_spec(module) is not None, f"{page.name} runs {module}, which does not exist"
    assert re.search(r"pytest|\.ci/run", readme), "README tells how to run the tests"


def test_names_imported_in_readme_and_docs_are_public() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        lists = re.findall(r"from hsdp import (?:\(([\w\s,]+)\)|([\w ,]+(?:,\n[\w ,]+)*))", page.read_text())
        named = [name.strip() for pair in lists for name in "".join(pair).split(",")]
        assert named or page.name not in ("README.md", "tutorial.md"), f"{page.name} shows how to import it"
        assert [name for name in named if name and name not in _public_names() | SIDE_DOORS] == []


def test_text_files_have_one_encoding_in_every_locale() -> None:
    calls = re.compile(r"\.(?:read_text|write_text)\((?!.*encoding=)|\.open\(\"[awr]\"\)")
    lines = [(file.name, line.strip()) for file in PACKAGE.rglob("*.py") for line in file.read_text().splitlines()]
    assert not [told for told in lines if calls.search(told[1])]
