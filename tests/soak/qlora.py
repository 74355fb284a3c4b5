"""QLoRA on HSDP 2 x 2: adapters over a 4-bit base of torchao's NF4Tensor, against one device.

The twin is in fp32, with the base's values as NF4Tensor gives them back: both sides round alike, and differ by sums' order.

    python -m tests.soak.qlora          needs torchao with NF4Tensor (0.14 has it, 0.18 has not)

Prints, for each rank, how many bytes of the base it holds, and the largest differences from the twin.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from hsdp.params.subclass import parts_of
from tests.support.models import Case, mse
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_rest, shard
from tests.support.twin import sgd, train

WIDTH, RANK, LAYERS, STEPS = 256, 4, 3, 5


class Linear(nn.Module):
    """A frozen weight in NF4 and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        from torchao.dtypes.nf4tensor import to_nf4

        weight = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
        self.base = nn.Parameter(to_nf4(weight, block_size=64, scaler_block_size=16), requires_grad=False)
        self.down = nn.Parameter(torch.randn(RANK, WIDTH) / WIDTH**0.5)
        self.up = nn.Parameter(torch.randn(WIDTH, RANK))

    def forward(self, x: Tensor) -> Tensor:
        from torchao.dtypes.nf4tensor import linear_nf4

        return linear_nf4(x, self.base) + x @ self.down.T @ self.up.T


class Net(nn.Module):
    """Layers with tanh between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Linear() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def _batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


CASE = Case("qlora", Net, _batch, mse, dtype=None)


def _bytes(param: Any) -> int:
    return sum(part.numel() * part.itemsize for part in parts_of(param))


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def twin(world: int) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses [steps][rank], and what was trained."""
    model = CASE.model()
    optimizer, losses = sgd(_trained(model)), []
    for step in range(STEPS):
        optimizer.zero_grad()
        values = [mse(model, CASE.batch(step, rank)) for rank in range(world)]
        torch.stack(values).mean().backward()
        optimizer.step()
        losses.append([float(value.detach()) for value in values])
    return losses, {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}


def run(env: RankEnv, losses: list[list[float]], params: dict[str, Tensor]) -> tuple[float, float, int, int]:
    """The largest differences of losses and parameters, and the bytes of the base that this rank holds, and in all."""
    plain = CASE.model()
    whole = sum(_bytes(block.base) for block in plain.blocks)  # type: ignore[union-attr]
    model: Any = shard(plain, env.mesh((2, 2)))
    found = train(model, CASE, env.rank, STEPS, sgd(_trained(model)))
    expected = torch.tensor([row[env.rank] for row in losses], dtype=torch.float64)
    differences = [float((found.view(-1) - expected).abs().max())]
    differences.append(max(float((model.get_parameter(n).full_tensor() - p).abs().max()) for n, p in params.items()))
    groups = [group for unit in model._units() for group in unit.dtype_groups if group.kind.composite]
    held = sum(group.shard.numel() for group in groups)
    check_rest(model)
    return differences[0], differences[1], held, whole


def main() -> int:
    """Runs it on four ranks; 1 if it differs from the twin by more than fp32 rounds."""
    expected = twin(4)
    with Pool(4) as pool:
        results = pool.run(run, *expected, timeout=300)
    print(f"torch {torch.__version__}, {STEPS} steps, {LAYERS} layers of {WIDTH} x {WIDTH}, HSDP 2 x 2")
    for rank, (loss, param, held, whole) in enumerate(results):
        print(
            f"rank {rank}: losses differ by {loss:.1e}, parameters by {param:.1e}; {held:,} of {whole:,} bytes of the base"
        )
    return int(any(max(loss, param) > 1e-5 for loss, param, _, _ in results))


if __name__ == "__main__":
    sys.exit(main())
