"""A soak of timm's image models, the smallest of each architecture, in float64, beside their plain twins.

    python -m tests.soak.zoo_timm --log zoo_timm.log
    python -m tests.soak.zoo_timm --units leaves --only resnet efficientnet

As `tests.soak.zoo`, which trains and judges: convolutions, batch norms with statistics of each rank's batch, activations in
place, weights that are standardised in each forward, and modules that are called in loops.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from tests.soak.zoo import Zoo, options_of, settled, soak

SMALL = ["_test_", "_atto", "_femto", "_pico", "_nano", "xxs", "xx_small", "_xs", "x_small", "_tiny", "_ti", "_035", "_050"]
SMALL += ["_0", "_b0", "_18", "_s", "_small"]
SIZE = 64


def candidates(module: str) -> list[str]:
    """Models of a module of timm, those first whose names tell that they are small."""
    import timm

    def rank(name: str) -> tuple[int, int, str]:
        return next((at for at, word in enumerate(SMALL) if word in f"_{name}"), len(SMALL)), len(name), name

    return sorted(timm.list_models(module=module), key=rank)


def made(kind: str, cls: str) -> Any:
    """The model `cls` of timm, for small images if it can be made for them, without anything random."""
    import timm

    kwargs: dict[str, Any] = {"pretrained": False, "drop_rate": 0.0, "drop_path_rate": 0.0, "num_classes": 10}
    return settled(lambda: _create(timm, cls, kwargs))


def _create(timm: Any, name: str, kwargs: dict[str, Any]) -> Any:
    for more in ({"img_size": SIZE}, {"input_size": (3, SIZE, SIZE)}, {}):
        for left_out in ((), ("drop_path_rate",), ("drop_path_rate", "drop_rate")):
            try:
                model = timm.create_model(name, **{k: v for k, v in kwargs.items() if k not in left_out}, **more)
            except (TypeError, AssertionError, ValueError, RuntimeError) as error:
                last = error
                continue
            fixed = not more and model.default_cfg.get("fixed_input_size", False)
            model.image_size = model.default_cfg["input_size"][-1] if fixed else SIZE
            return model
    raise last


def batch_of(model: Any, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(2, 3, model.image_size, model.image_size, dtype=torch.float64, generator=generator)}


def checkpoint(model: Any) -> None:
    model.set_grad_checkpointing(True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the soak; returns the exit status."""
    options = options_of("timm's models beside their plain twins").parse_args(argv)
    import timm

    models = [
        ("timm", candidates(module)[0]) for module in timm.list_modules() if module in options.only or not options.only
    ]
    chosen = models[options.first :: options.every]
    return soak(Zoo(made, batch_of, checkpoint), chosen, options)


if __name__ == "__main__":
    sys.exit(main())
