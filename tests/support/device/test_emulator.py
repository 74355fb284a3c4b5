"""The emulated device itself: it reports what is a race, and torch's own FSDP2 is clean and right on it."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import fsdp

from tests.support import device as emulator
from tests.support.models import make_case
from tests.support.rig import Pool, RankEnv
from tests.support.twin import adamw, assert_close_to_twin, train, twin_of


def _races(env: RankEnv) -> None:
    module = torch.get_device_module(env.device)
    side = module.Stream()

    def found(share: bool) -> list[str]:
        x = torch.ones(1000, device=env.device)
        if share:
            side.wait_stream(module.current_stream())
        with module.stream(side):
            y = x * 2
        module.synchronize()
        del x, y
        return emulator.races()

    assert found(share=True) == []
    assert "read after write" in found(share=False)[0]


def test_a_missing_wait_is_reported(device2: Pool) -> None:
    device2.run(_races)


def _early_free(env: RankEnv) -> None:
    module = torch.get_device_module(env.device)
    side = module.Stream()
    x = torch.ones(1000, device=env.device)
    side.wait_stream(module.current_stream())
    with module.stream(side):
        release = emulator.load().hold()
        y = x * 2
    del x  # the side stream still reads it: the next of its size takes its memory
    z = torch.zeros(1000, device=env.device)
    module.current_stream().synchronize()
    release()
    module.synchronize()
    assert not y.eq(2).any()
    assert "write after read" in emulator.races()[0]
    del z


def test_memory_freed_too_early_holds_something_else(device2: Pool) -> None:
    device2.run(_early_free)


def _gone(env: RankEnv) -> None:
    x = torch.ones(1000, device=env.device)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="whose memory is gone"):
        x.add_(1)


def test_a_kernel_on_freed_storage_is_refused(device2: Pool) -> None:
    device2.run(_gone)


def _fsdp2(env: RankEnv, shape: tuple[int, ...], mode: str) -> None:
    case = make_case("transformer", torch.float32)
    twin = twin_of(case, env.world_size, 3, adamw)
    with emulator.watched(mode):
        model = case.model().to(env.device)
        for block in model.blocks:
            fsdp.fully_shard(block, mesh=env.mesh(shape))
        fsdp.fully_shard(model, mesh=env.mesh(shape))
        train(model, case, env.rank, 3, adamw(model.parameters()), device=env.device)
    assert_close_to_twin(model, twin, 1e-4, 1e-5)


@pytest.mark.parametrize("mode", ["none", "all", "slow compute"])
def test_fsdp2_is_right_and_clean(device2: Pool, mode: str) -> None:
    device2.run(_fsdp2, (2,), mode)
