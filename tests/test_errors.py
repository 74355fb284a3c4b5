"""Error types live in one module, and docs/troubleshooting.md tells what to do about each."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import hsdp
from hsdp import errors

ROOT = Path(__file__).parents[1]


def _types() -> dict[str, type]:
    return {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}


def test_error_types_live_in_one_module() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in (ROOT / "hsdp").rglob("*.py")
        if "examples" not in path.parts and path.name != "errors.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases)
    }
    assert found == set()


def test_every_error_type_is_public_and_in_the_troubleshooting_table() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    listed = set(re.findall(r"^\| `(\w+Error)`", page, re.MULTILINE))
    assert listed == set(_types()) - {"HSDPError"}
    headings = " ".join(re.findall(r"^## .+$", page, re.MULTILINE))
    assert all(name in headings for name in listed - {"ExtensionError"}), "each has a section"
    for name, kind in _types().items():
        assert getattr(hsdp, name) is kind
        assert issubclass(kind, hsdp.HSDPError)
        assert issubclass(kind, RuntimeError)
