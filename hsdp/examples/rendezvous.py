"""Where the processes of a job meet: a key-value store with nothing in it from before the last restart.

When a process dies torchrun starts all of them anew, but they meet in the store of those before (PyTorch issue 135712).
A rank that looks up another one's address before that one has written its new one would connect to the dead. So they
first make sure of each other, and then use keys that begin with a word no earlier process has known:

    rank r    says hello/r = its own word, waits for an answer to that very word, and says here/<word of rank 0>/r
    rank 0    answers every word that it finds, of the dead too, with its own, until all ranks have said where they are
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta

# They are public, but imported in an `if`, which mypy does not follow.
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

_LOOK_EVERY = 0.01  # seconds


def find_store(rank: int, world_size: int, timeout: timedelta) -> Store | None:
    """The store for `init_process_group`; None where that finds one by itself, as new as the processes are."""
    if "WORLD_SIZE" not in os.environ:
        return HashStore()  # a process alone: nobody to meet, so no address and no port either
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    port = int(os.environ["MASTER_PORT"])
    store = TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=timeout)
    return meet(store, rank, world_size, timeout)


def meet(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """The part of `store` that the present ranks share. Every rank calls it, once.

    Raises:
        RuntimeError: a rank did not come within `timeout`.
    """
    word = secrets.token_hex(8)
    if rank > 0:
        store.set(f"hello/{rank}", word)
        store.wait([f"welcome/{word}"], timeout)
        word = store.get(f"welcome/{word}").decode()
        store.set(f"here/{word}/{rank}", "")
        return PrefixStore(word, store)
    missing = set(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while missing := {other for other in missing if not store.check([f"here/{word}/{other}"])}:
        if time.monotonic() > deadline:
            raise RuntimeError(f"ranks {sorted(missing)} did not come within {timeout.total_seconds():g} s")
        for other in missing:
            if store.check([f"hello/{other}"]):
                store.set(f"welcome/{store.get(f'hello/{other}').decode()}", word)
        time.sleep(_LOOK_EVERY)
    return PrefixStore(word, store)
