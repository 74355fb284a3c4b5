"""The public names document themselves: a docstring each, which speaks of every parameter; `pydoc hsdp` shows them."""

from __future__ import annotations

import inspect
import pydoc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hsdp
import hsdp.errors

PROTOCOLS = (hsdp.AllGather, hsdp.ReduceScatter, hsdp.ReplicaReduce)
"""What they say of their methods holds for every class that has these."""

_SAID_ONCE = {"recurse"}
"""Parameters of methods that the class's docstring explains for all."""


def _functions() -> Iterator[tuple[str, Any]]:
    """Public functions, and public methods of public classes that hsdp itself defines, by dotted name."""
    for name in hsdp.__all__:
        public = getattr(hsdp, name)
        if inspect.isclass(public) and public.__name__ == name:  # not under other libraries' names too
            for base in public.__mro__:
                if base.__module__.startswith("hsdp."):
                    for key, member in vars(base).items():
                        if not key.startswith("_") and callable(inspect.unwrap(getattr(member, "__func__", member))):
                            yield f"{name}.{key}", getattr(public, key)
        elif inspect.isfunction(public):
            yield name, public


@pytest.mark.parametrize("name", hsdp.__all__)
def test_every_public_name_has_a_docstring_of_its_own(name: str) -> None:
    public = getattr(hsdp, name)
    text = inspect.cleandoc(public.__doc__ or "")
    assert len(text) > 20, f"{name} has no docstring"
    assert not text.startswith(f"{name}("), f"{name} has the docstring that dataclasses make"
    if inspect.isclass(public) and "__dataclass_fields__" in vars(public):
        untold = [field for field in public.__dataclass_fields__ if f"{field}:" not in text and field not in text]
        assert not untold, f"{name}'s docstring says nothing about {untold}"


FUNCTIONS = dict(_functions())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_tells_what_its_parameters_are(name: str) -> None:
    assert FUNCTIONS[name].__doc__, f"{name} has no docstring"
    owner, _, key = name.rpartition(".")
    # What a method's class or the method that it replaces says of a parameter need not be said again.
    bases = (*getattr(hsdp, owner).__mro__, *PROTOCOLS) if owner else ()
    text = " ".join(inspect.getdoc(one) or "" for one in (FUNCTIONS[name], *bases, *(getattr(b, key, None) for b in bases)))
    parameters = [p for p in inspect.signature(FUNCTIONS[name]).parameters if p not in {"self", *_SAID_ONCE}]
    if owner and len(parameters) < 2:
        return  # a setter's only argument is what its sentence is about
    untold = [parameter for parameter in parameters if parameter not in text]
    assert not untold, f"{name}'s docstring says nothing about {untold}"


def test_functions_that_refuse_tell_what_they_raise() -> None:
    """Who has a `raise` in the body has a section on errors; setters of `HSDPModule` have one together, in the class."""
    assert "is refused with a TypeError or ValueError" in " ".join(str(hsdp.HSDPModule.__doc__).split())
    silent = []
    for name, function in FUNCTIONS.items():
        if name.startswith("HSDPModule.set_"):
            continue
        source = inspect.getsource(inspect.unwrap(function))
        body = source.split('"""')[-1]
        if "raise " in body and "Raises" not in (inspect.getdoc(function) or ""):
            silent.append(name)
    assert not silent


def test_pydoc_begins_with_the_names_by_purpose() -> None:
    text = pydoc.plain(pydoc.render_doc(hsdp)).partition("PACKAGE CONTENTS")[0]
    for name in hsdp.__all__:
        assert re.search(rf"\b{name}\b", text), f"pydoc hsdp does not name {name} ahead of the details"
    for said in ("hybrid-sharded data-parallel", "from hsdp import fully_shard", "The training loop stays as it was"):
        assert said in text
    methods = pydoc.plain(pydoc.render_doc(hsdp.HSDPModule))
    assert "no_sync" in methods
    assert "micro-batch" in methods


def test_a_shell_completes_all_public_names_and_no_others() -> None:
    found = {name for name in dir(hsdp) if not name.startswith("__")}
    assert found == {*hsdp.__all__, "checkpoint", "elastic", "integrations", "optim"}


def test_every_rule_names_its_tests() -> None:
    root = Path(__file__).parents[2]
    rows = re.findall(r"^\| (\d+) \| .+ \| (`.+`|none yet) \|$", (root / "docs" / "rules.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    named = {path for _, told in rows for path in re.findall(r"`([^`]+)`", told)}
    assert not [path for path in named if not (root / path).is_file()]
    for path in sorted((root / "tests" / "rules").glob("test_rule_*.py")):
        assert path.relative_to(root).as_posix() in named, f"docs/rules.md does not name {path.name}"


def test_the_architecture_names_what_is_there() -> None:
    root = Path(__file__).parents[2]
    text = (root / "docs" / "architecture.md").read_text()
    package = root / "hsdp"
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", text))
    for name in named:
        assert (root / name if name.startswith("tests/") else package / name).exists(), f"{name} is not there"
    entries = {path.name + "/" * path.is_dir() for path in package.iterdir() if path.name[0] not in "_"} - {"py.typed"}
    assert entries <= named, f"not named: {entries - named}"
    sources = "\n".join(path.read_text() for path in package.rglob("*.py"))
    for owner, member in re.findall(r"\b([A-Z]\w+)\.([a-z_]\w+)", text):
        assert f"class {owner}" in sources, f"there is no {owner}"
        assert re.search(rf"\b(?:def {member}\b|{member}:)", sources), f"{owner} has no {member}"
    for path, names in re.findall(r"`([\w/]+\.py): ([\w.]+)`", text):
        source, last = (package / path).read_text(), names.split(".")[-1]
        assert re.search(rf"^ *(?:def )?{last}\b", source, re.MULTILINE), f"{path} has no {names}"
    for name in re.findall(r"`(?:\w+\.)?(_\w+|[a-z]+_\w+)`", text):
        assert re.search(rf"\b{name}\b", sources), f"there is no {name}"


def test_the_reference_has_every_public_name() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    listed = set(re.findall(r"^::: hsdp\.([\w.]+)$", page, re.MULTILINE))
    aliases = {"FSDPModule"}  # of HSDPModule, and errors come with their module
    missing = {name for name in hsdp.__all__ if name not in listed and not hasattr(hsdp.errors, name)} - aliases
    missing |= {f"optim.{name}" for name in hsdp.optim.__all__ if not name.isupper()} - listed
    assert not missing and "errors" in listed, missing
    for name in listed:
        owner, _, member = name.rpartition(".")
        assert hasattr(getattr(hsdp, owner) if owner else hsdp, member), f"docs/api.md: there is no hsdp.{name}"


def test_the_table_of_the_reference_has_exactly_the_public_names() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sorted(hsdp.__all__)
