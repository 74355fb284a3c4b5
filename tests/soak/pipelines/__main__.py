"""The command, in a module that is not `__main__`: the workers find by its module's name what is sent to them."""

from __future__ import annotations

import sys

from tests.soak.pipelines import soak

sys.exit(min(soak.main(), 100))
