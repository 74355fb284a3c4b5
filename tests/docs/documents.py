"""README and docs as programs: their code blocks, commands, tables of output and links.

    python -m tests.docs.documents        # rewrites what commands print, wherever a page shows it

A block is what stands between two fences. Its first line says what it is:

    ```python title="train.py"       a file that the reader saves under this name
    ```sh                            commands that the reader pastes
    ```python                        lines that the reader pastes behind those of the same page before
    ```console                       a command after "$ ", and below it what it prints
"""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
PAGES = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("**/*.md"))]

_FENCED = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """What stands between two fences of a page."""

    page: Path
    line: int
    language: str
    title: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Run:
    """A command that starts a Python file, once for each of its processes."""

    processes: int
    file: str
    arguments: tuple[str, ...]


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """The blocks of a page, in order; those of one language, if it is given."""
    text = page.read_text()
    found = []
    for match in _FENCED.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, match[1], match[2], match[3]))
    return [block for block in found if language in (None, block.language)]


def commands(block: Block) -> list[str]:
    """The commands of a block that the reader pastes: lines, joined where they end in a backslash."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def run_of(command: str) -> Run | None:
    """What a command starts, if that is a Python file alone or under torchrun on one node."""
    words = [word for word in shlex.split(command, comments=True) if word != "&"]
    program = Path(words[0]).name
    if program == "python" and words[1].endswith(".py"):
        return Run(0, words[1], tuple(words[2:]))
    files = [i for i, word in enumerate(words) if word.endswith(".py")]
    if program != "torchrun" or not files:
        return None
    options = dict(itertools.pairwise(words[: files[0]]))
    nodes = int(options.get("--nnodes", "1").split(":")[-1])
    processes = nodes * int(options["--nproc-per-node"])
    return Run(processes, words[files[0]], tuple(words[files[0] + 1 :]))


def shown(block: Block) -> Iterator[tuple[str, str]]:
    """The commands of a console block, and what the page says that each prints."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def printed(command: str) -> str:
    """What a command prints; `python` is this one. Blanks at the end of a line and of the output are left out."""
    words = shlex.split(command)
    assert words[0] == "python", f"{command}: only Python's commands are run"
    done = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line.rstrip() for line in (done.stdout or done.stderr).splitlines()]
    return "\n".join(lines).rstrip() + "\n"


def links(page: Path) -> list[str]:
    """Targets of a page's links and pictures, outside of its blocks."""
    text = re.sub(r"`[^`\n]*`", "", _FENCED.sub("", page.read_text()))
    return re.findall(r"\]\(([^)\s]+)\)", text)


def anchors(page: Path) -> set[str]:
    """The names under which the headings of a page can be reached."""
    headings = re.findall(r"^#+ (.+)$", _FENCED.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in plain}


def rewrite(page: Path) -> bool:
    """Puts what commands print now into the console blocks of a page; says whether that changed it."""
    text = page.read_text()
    new = text
    for block in blocks(page, "console"):
        told = "".join(f"$ {command}\n{printed(command)}" for command, _ in shown(block))
        new = new.replace(f"```console\n{block.text}```", f"```console\n{told}```")
    if new != text:
        page.write_text(new)
    return new != text


if __name__ == "__main__":
    for _page in PAGES:
        if rewrite(_page):
            print(f"{_page.relative_to(ROOT)}: rewritten")
