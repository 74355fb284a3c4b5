"""Builds the emulated device's extension: `python -m tests.support.device`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.device import compile_here

# An interpreter that is called by its path need not have its folder, where pip puts ninja, on PATH.
os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
os.environ.setdefault("MAX_JOBS", "2")
compile_here()
