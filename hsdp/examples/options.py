"""The flags of `train_lm`: one frozen dataclass, and every check that needs no other process."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hsdp.examples.launch import JobError
from hsdp.examples.llama import LlamaConfig
from hsdp.examples.logs import LOGS

FINAL_LR_FRACTION = 0.05


@dataclass(frozen=True)
class Options:
    """What a run is asked to do, after the mesh has been settled for the world size."""

    replicate: int
    shard: int
    device: str
    elastic: str | None
    dtype: str
    timeout: float
    steps: int
    batch: int
    accumulate: int
    seq_len: int
    optimizer: str
    lr: float
    muon_lr: float
    warmup: int
    weight_decay: float
    seed: int
    corpus_bytes: int
    width: int
    layers: int
    heads: int
    hidden: int
    out: Path
    log_every: int
    log: list[str]
    checkpoint_dir: Path | None
    save_every: int
    keep: int
    async_save: bool
    trace: Path | None
    sample: bool
    prompt: str

    @property
    def world_size(self) -> int:
        """Number of ranks the mesh takes."""
        return self.replicate * self.shard

    @property
    def model(self) -> LlamaConfig:
        """The sizes of the model."""
        return LlamaConfig(width=self.width, layers=self.layers, heads=self.heads, hidden=self.hidden, max_len=self.seq_len)

    @property
    def peak_lrs(self) -> tuple[float, ...]:
        """Of the optimizer's groups: Muon's first one has the blocks' matrices."""
        return (self.muon_lr, self.lr) if self.optimizer == "muon" else (self.lr,)

    def share_of_lr(self, step: int) -> float:
        """Of each group's peak, in `step`, counted from 0: a linear warm-up, then half a cosine down to a twentieth."""
        warm = min(1.0, (step + 1) / (self.warmup + 1))
        cosine = 0.5 * (1.0 + math.cos(math.pi * step / self.steps))
        return warm * (FINAL_LR_FRACTION + (1.0 - FINAL_LR_FRACTION) * cosine)


class _Parser(argparse.ArgumentParser):
    """Reports mistakes as exceptions, because under torchrun only one of the ranks should print them."""

    def error(self, message: str) -> NoReturn:
        raise JobError(f"{message} (--help lists the flags)")


def parse_options(argv: list[str] | None, world_size: int) -> Options:
    """Parses and checks the command line for a job of `world_size` processes.

    Raises:
        JobError: naming the flag, its value and what would be accepted.
    """
    values = vars(_parser().parse_args(argv))
    if values["elastic"] is not None:
        if not values["elastic"].isidentifier() and not values["elastic"].isdigit():
            raise JobError(f"--elastic {values['elastic']!r} must be a name of letters, digits and underscores")
        if values["replicate"] not in (None, 1) or values["async_save"]:
            raise JobError("--elastic goes with neither --replicate, as each replica is a job of its own, nor --async-save")
        values["replicate"] = 1
        values["out"] = values["out"] / f"replica_{values['elastic']}"
    values["replicate"], values["shard"] = _mesh_shape(values["replicate"], values["shard"], world_size)
    options = Options(**values)
    rows = world_size * options.accumulate
    if options.batch % rows:
        raise JobError(
            f"--batch {options.batch} must be a multiple of {rows} "
            f"({world_size} processes x --accumulate {options.accumulate})"
        )
    if not options.prompt:
        raise JobError("--prompt must have at least one character")
    try:
        _ = options.model
    except ValueError as mistake:
        raise JobError(str(mistake)) from None
    return options


def _mesh_shape(replicate: int | None, shard: int | None, world_size: int) -> tuple[int, int]:
    """Fills in the axis that was not given; with neither, two replicas where both axes can be 2 or more."""
    if replicate is None and shard is None:
        replicate = 2 if world_size >= 4 and world_size % 2 == 0 else 1
    if replicate is None:
        replicate = max(1, world_size // (shard or 1))
    if shard is None:
        shard = max(1, world_size // replicate)
    if replicate * shard != world_size:
        raise JobError(
            f"--replicate {replicate} x --shard {shard} makes {replicate * shard} ranks, "
            f"but the number of processes is {world_size}"
        )
    return replicate, shard


def positive(text: str) -> int:
    """Parses a number of things of which there is at least one."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, not {value}")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to below 1, not {value}")
    return value


def _not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, but is {value}")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**64:
        raise argparse.ArgumentTypeError(f"must have 64 bits, as PyTorch's generators take it, not {value}")
    return value


# argparse puts a type's name into "invalid int value"; these are numbers to the user, not functions.
positive.__name__ = _not_negative.__name__ = _seed.__name__ = "int"
_positive_float.__name__ = _fraction.__name__ = "float"


class _Defaults(argparse.HelpFormatter):
    """Every option ends with its default, in words where it is no value."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        plain = action.default is None or action.nargs == 0 or action.default is argparse.SUPPRESS or action.default == []
        return text if plain else f"{text} (default: %(default)s)"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="train_lm",
        description="Train a byte-level Llama on CPython's own sources with hybrid-sharded data parallelism.",
        formatter_class=_Defaults,
        allow_abbrev=False,
    )
    mesh = parser.add_argument_group("mesh (the product must be the number of processes)")
    mesh.add_argument("--replicate", type=positive, help="replicas (default: 2 from four processes on, else 1)")
    mesh.add_argument("--shard", type=positive, help="ranks that share one replica (default: the rest)")
    mesh.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if there is one each")
    mesh.add_argument(
        "--elastic",
        metavar="NAME",
        help="this job is the replica NAME among jobs that come and go, each with its batch; TORCHFT_LIGHTHOUSE tells "
        "where they meet (default: there is no other job)",
    )
    mesh.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16 computes, fp32 reduces")

    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=positive, default=160, help="optimizer steps in all")
    training.add_argument("--batch", type=positive, default=32, help="sequences per step over all ranks")
    training.add_argument("--accumulate", type=positive, default=1, help="micro-batches per step")
    training.add_argument("--seq-len", type=positive, default=128, help="bytes per sequence")
    training.add_argument(
        "--optimizer", choices=("adamw", "muon"), default="adamw", help="muon: for the blocks' matrices, AdamW for the rest"
    )
    training.add_argument("--lr", type=_positive_float, default=5e-3, help="peak of the cosine schedule")
    training.add_argument("--muon-lr", type=_positive_float, default=0.05, help="the same, of matrices that Muon steps")
    training.add_argument("--warmup", type=_not_negative, default=30, help="steps of linear warm-up")
    training.add_argument("--weight-decay", type=_fraction, default=0.1, help="of AdamW")
    training.add_argument("--seed", type=_seed, default=0, help="of the weights, the data order and the sample")
    training.add_argument("--corpus-bytes", type=positive, default=12_000_000, help="text to use at most")

    model = parser.add_argument_group("model")
    model.add_argument("--width", type=positive, default=128, help="of the residual stream")
    model.add_argument("--layers", type=positive, default=3, help="blocks, each a unit")
    model.add_argument("--heads", type=positive, default=4, help="of attention")
    model.add_argument("--hidden", type=positive, default=384, help="inner width of the SwiGLU")

    output = parser.add_argument_group("output")
    output.add_argument("--out", type=Path, default=Path("runs/train_lm"), help="folder of metrics.jsonl and loss.svg")
    output.add_argument("--log-every", type=positive, default=20, help="steps between progress lines")
    output.add_argument(
        "--log", choices=LOGS, nargs="+", default=[], help="send the figures there too (default: metrics.jsonl only)"
    )
    output.add_argument(
        "--trace", type=Path, metavar="DIR", help="write a picture and a Perfetto file of one step there (default: none)"
    )
    output.add_argument(
        "--no-sample", dest="sample", action="store_false", help="generate no text at the end (default: generate some)"
    )
    output.add_argument("--prompt", default="def ", help="what the generated text starts with")

    survival = parser.add_argument_group("survival")
    survival.add_argument(
        "--checkpoint-dir", type=Path, help="save there, and go on from the last one in it (default: no checkpoints)"
    )
    survival.add_argument("--save-every", type=positive, default=40, help="steps; one more is saved at the end")
    survival.add_argument("--keep", type=positive, default=2, help="checkpoints that remain")
    survival.add_argument(
        "--async-save", action="store_true", help="train on while a checkpoint is written (default: wait)"
    )
    survival.add_argument("--timeout", type=_positive_float, default=300, help="seconds to wait for a lost process")
    return parser
