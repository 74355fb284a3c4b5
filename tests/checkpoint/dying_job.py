"""`train_lm`, of which a rank dies by SIGKILL: in one life while it trains; with HSDP_FULL=1 in the next while it saves.

torchrun --nproc-per-node 2 --max-restarts 3 -m tests.checkpoint.dying_job --checkpoint-dir DIR ...
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any
from unittest import mock

from hsdp.checkpoint import store
from hsdp.examples import train_lm
from hsdp.examples.launch import leave, rank
from tests.support.share import FULL


def _dies_after(number: int, victim: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, after whose `number`-th call rank `victim` is gone."""
    left = number

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        result = call(*args, **kwargs)
        left -= 1
        if left == 0 and rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return counted


LIVES = [
    mock.patch.object(train_lm, "train_step", _dies_after(7, 1, train_lm.train_step)),
    # The files of the first checkpoint of this life are written, its name is not given yet.
    mock.patch.object(store, "check_sizes", _dies_after(1, 0, store.check_sizes)),
][: 2 if FULL else 1]

if __name__ == "__main__":
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if life < len(LIVES):
        LIVES[life].start()
    leave(train_lm.main())
