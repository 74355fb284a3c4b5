"""README and docs do what they say: scripts run as pasted, commands print what is shown, links lead somewhere.

Scripts run on the ranks of one pool, in the environment that torchrun gives them. With HSDP_FULL=1 the commands themselves
are pasted into a shell, in a fresh clone with a fresh environment, set-up included: `test_pasted.py`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hsdp
import hsdp.planning
from hsdp.planning import Plan
from hsdp.tracing import Summary
from tests.docs.documents import (
    PAGES,
    README,
    ROOT,
    TUTORIAL,
    Block,
    Run,
    anchors,
    blocks,
    commands,
    links,
    printed,
    run_of,
    shown,
)
from tests.support.rig import Pool, RankEnv
from tests.support.worker import forget_meshes

RANKS = 4
DOCS = ROOT / "docs"
MOST_README_LINES = 130
PASTED = [block for page in PAGES for block in blocks(page, "python") if block.title is None]
"""Blocks that are pasted one behind the other; no page of files has any."""


def play(env: RankEnv, directory: str, file: str, arguments: tuple[str, ...], processes: int, port: int) -> str | None:
    """Runs a file as one of `processes` under torchrun (0: without it); returns what it printed, None without a rank."""
    if env.rank >= max(1, processes):
        return None
    content = {"RANK": env.rank, "LOCAL_RANK": env.rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    content |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    output = io.StringIO()
    modules, path = set(sys.modules), list(sys.path)
    with contextlib.ExitStack() as undo:
        undo.enter_context(_directory(directory))
        undo.enter_context(_environment({name: str(value) for name, value in content.items()} if processes else {}))
        undo.enter_context(contextlib.redirect_stdout(output))
        sys.path.insert(0, directory)
        sys.argv[:], before = [file, *arguments], list(sys.argv)
        try:
            runpy.run_path(str(Path(directory, file)), run_name="__main__")
        finally:
            sys.argv[:], sys.path[:] = before, path
            for name in set(sys.modules) - modules:  # the reader's files; another page has others of these names
                if str(getattr(sys.modules[name], "__file__", "")).startswith(directory):
                    del sys.modules[name]
            if dist.is_initialized():
                dist.destroy_process_group()
            forget_meshes()
    return output.getvalue()


@contextlib.contextmanager
def _directory(directory: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    """Processes without a group: the scripts make it."""
    with Pool(RANKS, grouped=False) as pool:
        yield pool


def run(pool: Pool, directory: Path, told: Run) -> str:
    """What rank 0 of a run prints."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's
    result: list[Any] = pool.run(play, str(directory), told.file, told.arguments, told.processes, store.port, timeout=120)
    assert isinstance(result[0], str)
    return result[0]


def paste(pool: Pool, page: Path, directory: Path) -> list[tuple[Run, str]]:
    """Saves the files of a page and runs what its commands start, in order; returns what each run printed."""
    results = []
    for block in blocks(page):
        if block.title is not None:
            (directory / block.title).parent.mkdir(parents=True, exist_ok=True)
            (directory / block.title).write_text(block.text)
        elif block.language == "sh":
            found = [one for command in commands(block) if (one := run_of(command)) is not None]
            # A line that is pasted on each of two nodes is one run, to the script any of that size.
            results += [(one, run(pool, directory, one)) for one in found if one not in dict(results)]
    return results


def losses(output: str) -> list[float]:
    """The losses that a script printed."""
    return [float(number) for number in re.findall(r"loss (\d+\.\d+)", output)]


def test_the_script_of_the_readme_trains_saves_and_goes_on(ranks: Pool, tmp_path: Path) -> None:
    (_, began), (again, went_on) = paste(ranks, README, tmp_path)
    assert losses(began)[-1] < losses(began)[0] - 1
    assert "step 10: " in went_on and "step 0:" not in went_on, "it goes on"
    assert again.processes == 3 and losses(went_on)[0] < losses(began)[5], "with what it has learned, on other ranks"
    script = next(block for block in blocks(README) if block.title == "train.py").text
    assert len([line for line in script.splitlines() if line.strip()]) <= 35


def test_the_steps_of_the_tutorial_lead_on_from_one_another(ranks: Pool, tmp_path: Path) -> None:
    told = paste(ranks, TUTORIAL, tmp_path)
    headings = re.findall(r"^## (\d)\. ", TUTORIAL.read_text(), re.MULTILINE)
    assert headings == [str(number) for number in range(1, 8)]
    by_file: dict[str, list[str]] = {}
    for one, output in told:
        by_file.setdefault(one.file, []).append(output)
    alone, *_ = by_file["one.py"]
    assert losses(alone)[-1] < losses(alone)[0] - 1
    # The page says that these print the same losses: one device, two shards, two replicas of two shards.
    for name in ("sharded.py", "hybrid.py"):
        assert losses(by_file[name][0]) == pytest.approx(losses(alone), abs=2e-3), name
    for name, (output, *_) in by_file.items():
        assert losses(output)[-1] < losses(output)[0], f"{name} learns"
    evaluations = [
        float(found[1]) for text in by_file["resumed.py"] if (found := re.search(r"evaluation: (\d+\.\d+)", text))
    ]
    assert len(evaluations) == 2 and evaluations[1] < evaluations[0], "the second run evaluates a better model"
    last = hsdp.checkpoint.verify(tmp_path / "runs" / "tutorial" / "step-000020")
    assert last.extra["scheduler"]["last_epoch"] == 20, "the second run resumed the scheduler"


def test_commands_of_tutorial_and_readme_are_all_run() -> None:
    for page in (README, TUTORIAL):
        for block in blocks(page, "sh"):
            for command in commands(block):
                known = run_of(command) is not None or any(word in command for word in PASTED_ONLY)
                assert known, f"{block}: {command} is not run by a test"
        assert not [block for block in PASTED if block.page == page], "every block of these is a file"


PASTED_ONLY = ("-m venv", "source .venv")
"""What only `test_pasted.py` runs: it takes the network and minutes."""


@pytest.mark.parametrize("page", sorted({block.page for block in PASTED}), ids=lambda page: page.stem)
def test_lines_of_a_page_run_when_pasted_in_order(ranks: Pool, tmp_path: Path, page: Path) -> None:
    (tmp_path / "page.py").write_text("\n".join(block.text for block in PASTED if block.page == page))
    run(ranks, tmp_path, Run(RANKS, "page.py", ()))


CONSOLES = [block for page in PAGES for block in blocks(page, "console")]


@pytest.mark.parametrize("block", CONSOLES, ids=str)
def test_commands_print_what_is_shown(block: Block) -> None:
    for command, output in shown(block):
        assert printed(command) == output, f"{block} has drifted: run python -m tests.docs.documents"


def test_messages_that_troubleshooting_explains_are_hsdps() -> None:
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "hsdp").rglob("*.py")))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # literals that stand below each other are one
    text = " ".join((DOCS / "troubleshooting.md").read_text().split())
    messages = re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", text)
    assert len(messages) >= 7
    for message in messages:
        for part in message.split("..."):
            assert part.strip("() ") in sources, f"no message of hsdp says {part!r}"


def test_pages_show_what_commands_print() -> None:
    assert CONSOLES
    for page in PAGES:  # a block without a language is a drawing: no command hides in it
        for block in blocks(page, ""):
            assert not block.text.startswith("$ "), f"{block} shows what a command prints: make it a console block"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"https?://", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name}: {link}"
        assert ROOT in path.parents, f"{page.name}: {link} leaves the repository"
        if page.parent == DOCS:
            assert path.parent == page.parent or path.suffix != ".md", f"{page.name}: {link} is not on the site"
        if anchor:
            assert anchor in anchors(path), f"{page.name}: {link}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, todo = set(), [README]
    while todo:
        page = todo.pop()
        reached.add(page)
        for link in links(page):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.exists() and target not in reached:
                todo.append(target)
    assert not set(PAGES) - reached - {ROOT / "CHANGELOG.md"}
    navigation = (ROOT / ".mkdocs.yml").read_text()
    for page in PAGES:
        if page.parent == DOCS:
            assert page.name in navigation, f".mkdocs.yml does not name {page.name}"


def test_the_readme_is_short_and_has_two_commands_to_set_up() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= MOST_README_LINES
    setup = text.partition("## Set up")[2].partition("\n## ")[0]
    lines = re.findall(r"^```sh\n(.+)\n```$", setup, re.MULTILINE)
    assert lines == [block.text.strip() for block in blocks(DOCS / "index.md", "sh")], "the site has the same ones"
    assert len(lines) == setup.count("```") // 2 == 2
    assert all(line.startswith("python3 -m venv .venv && .venv/bin/pip install") for line in lines)
    assert lines[0].endswith("-m hsdp.examples.train_lm") and lines[1].endswith("-m pytest")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_that_pages_use_exist(page: Path) -> None:
    text = page.read_text()
    for name in set(re.findall(r"\bhsdp\.((?:checkpoint|optim|planning|errors)\.\w+|[A-Za-z_]\w+)\b(?!/|\.py)", text)):
        owner, _, member = name.rpartition(".")
        if (ROOT / "hsdp" / name.replace(".", "/")).exists() or (ROOT / "hsdp" / f"{name.replace('.', '/')}.py").exists():
            continue  # a package or a file
        value: Any = __import__(f"hsdp.{owner}", fromlist=[member]) if owner else hsdp
        assert hasattr(value, member), f"{page.name}: there is no hsdp.{name}"


@pytest.mark.parametrize("page", [README, DOCS / "index.md", DOCS / "migrating.md", DOCS / "performance.md"], ids=str)
def test_tables_say_to_call_what_exists(page: Path) -> None:
    owners = (hsdp, hsdp.HSDPModule, hsdp.Trace, hsdp.checkpoint, hsdp.optim, hsdp.planning, Summary, Plan)
    theirs = (torch, torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
    for row in re.findall(r"^\|.+\|$", page.read_text(), re.MULTILINE):
        told = row.strip("|").replace("\\|", "/").split("|")[-1]
        for name in re.findall(r"(\w+)\(", " ".join(re.findall(r"`([^`]+)`", told))):
            known = name == "AdamW" or any(hasattr(owner, name) for owner in owners + theirs)
            assert known, f"{page.name} says to call {name}: {row}"


def test_pages_name_the_versions_that_pip_accepts() -> None:
    (bounds,) = re.findall(r'"torch>=2\.(\d+),<2\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    said = f"torch 2.{bounds[0]} to 2.{int(bounds[1]) - 1}"
    for page in (README, DOCS / "limits.md", DOCS / "versions.md"):
        assert said in page.read_text(), f"{page.name} does not say {said}"
