"""When and with what a number was found: the line at the head of every log of a benchmark or a soak."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch


def header() -> dict[str, str]:
    """When and with what it ran."""
    try:
        version = metadata.version("hsdp")
    except metadata.PackageNotFoundError:
        version = "not installed"
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hsdp": version,
        "commit": commit.stdout.strip() or "unknown",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def in_words(facts: Mapping[str, object]) -> str:
    """Facts such as the header's on one line."""
    return ", ".join(f"{key} {value}" for key, value in facts.items())
