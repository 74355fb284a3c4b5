"""A soak of other people's models: those that transformers' auto classes name, tiny, in float64, beside their plain twins.

    python -m tests.soak.zoo --log zoo.log                                     causal language models
    python -m tests.soak.zoo --mapping MODEL_MAPPING_NAMES --checkpoints       all base models, with gradient checkpointing
    python -m tests.soak.zoo --units leaves --only llama qwen3                 every module without children is a unit

Needs the extra `ecosystem`; nothing is downloaded. Each model is made from its configuration with every known size cut
down, its blocks are units, and it trains for three steps of SGD on two ranks, by turns on (2), (1, 2) and (2, 1). The twin
adds the gradients of both ranks' batches on one device. "not run": the model cannot be made so small, or does not train in
float64 or the same way twice without hsdp. Exits with 1 if a model ended with other weights, or not at all.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import math
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import hsdp
from tests.support.facts import header
from tests.support.rig import Pool, PoolTimeout, RankEnv, RemoteError
from tests.support.sharded import mesh_id

STEPS, VOCAB, LENGTH, RATE = 3, 64, 12, 0.05
MOST_PARAMETERS = 30e6
TOLERANCE = 1e-5
"""Of weights, relative to the largest of a tensor: some models compute parts in float32 whatever their dtype."""
SHAPES = [(2,), (1, 2), (2, 1)]
SIZES = {
    32: "hidden_size d_model n_embd dim embed_dim emb_dim hidden_dim embedding_size word_embed_proj_dim projection_dim "
    "image_size",
    48: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner",
    16: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank qk_head_dim",
    8: "d_kv head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim patch_size state_size",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts time_step_rank",
    2: "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers num_encoder_layers "
    "num_key_value_heads num_experts_per_tok n_groups",
    VOCAB: "vocab_size max_position_embeddings n_positions max_target_positions max_source_positions n_ctx",
}
AT_MOST = {name: size for size, names in SIZES.items() for name in names.split()}


class NotRunError(Exception):
    """What a model cannot do without hsdp."""


@dataclass(frozen=True)
class Zoo:
    """Where models come from: functions of modules, which workers find by name.

    Attributes:
        made: the tiny model of a kind and a class, in float64, without dropout.
        batch_of: a batch for a model, drawn with a seed.
        checkpoint: turns its gradient checkpointing on.
    """

    made: Callable[[str, str], Any]
    batch_of: Callable[[Any, int], dict[str, Tensor]]
    checkpoint: Callable[[Any], None]


def cut_down(config: Any, depth: int = 0) -> None:
    """Makes the sizes of a configuration, and of those inside of it, small, and turns dropout off."""
    for name, value in list(vars(config).items()):
        new: Any = None
        if type(value) is int and value > AT_MOST.get(name, value):
            new = AT_MOST[name]
        elif name.endswith("_token_id") and type(value) is int and value >= VOCAB:
            new = 1
        elif isinstance(value, float) and "drop" in name:
            new = 0.0
        elif name == "layer_types" and isinstance(value, list):
            new = value[: AT_MOST["num_layers"]]
        elif hasattr(value, "to_dict") and depth < 3:
            cut_down(value, depth + 1)
        if new is not None:
            with suppress(Exception):  # some are properties
                setattr(config, name, new)


def settled(make: Callable[[], Any]) -> Any:
    """The model that `make` makes, in float64 and without dropout; first on the meta device, in case that it is large."""
    with torch.device("meta"):
        total = sum(param.numel() for param in make().parameters())
    if total > MOST_PARAMETERS:
        raise NotRunError(f"{total / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = make()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.double().train()


def made(kind: str, cls: str) -> Any:
    """The tiny model of class `cls` for configurations of `kind`, in float64."""
    import transformers

    config = transformers.CONFIG_MAPPING[kind]()
    cut_down(config)
    config.use_cache = False
    for one in (config, getattr(config, "text_config", None)):
        if one is not None:
            one._experts_implementation = "eager"  # torch's grouped products have no float64
    return settled(lambda: getattr(transformers, cls)(copy.deepcopy(config)))


def batch_of(model: Any, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCAB - 4, (2, LENGTH), generator=generator)
    main, names = model.main_input_name, inspect.signature(model.forward).parameters
    if main == "pixel_values":
        vision = getattr(model.config, "vision_config", model.config)
        size = getattr(vision, "image_size", 32) or 32
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        shape = 2, getattr(vision, "num_channels", 3), height, width
        images = {"pixel_values": torch.randn(shape, dtype=torch.float64, generator=generator)}
        return images | ({"input_ids": tokens} if "input_ids" in names and hasattr(model.config, "text_config") else {})
    if main != "input_ids":
        raise NotRunError(f"its input is {main!r}")
    return {main: tokens} | ({"decoder_input_ids": tokens} if "decoder_input_ids" in names else {})


def checkpoint(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def loss_of(model: Any, batch: dict[str, Tensor], seed: int) -> Tensor:
    """The mean squares of all outputs that carry gradients."""
    torch.manual_seed(seed)
    out = model(**batch)
    leaves = tree_leaves(dict(out) if hasattr(out, "keys") else out)
    squares = [
        x.double().pow(2).mean() for x in leaves if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad
    ]
    if not squares:
        raise NotRunError("no output carries gradients")
    return torch.stack(squares).sum()


def train(zoo: Zoo, model: Any, ranks: Sequence[int], share: float) -> list[float]:
    """Three steps with the batches of `ranks`, each loss times `share`; returns the losses."""
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=RATE)
    losses = []
    for step in range(STEPS):
        for rank in ranks:
            seed = 100 * step + rank
            loss = loss_of(model, zoo.batch_of(model, seed), seed) * share
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def twin_of(zoo: Zoo, model: Any, ranks: int, checkpoints: bool) -> Any:
    """A copy of the model that was trained on one device."""
    twins = [copy.deepcopy(model) for _ in range(2)]
    if checkpoints:
        zoo.checkpoint(twins[1])
    losses = [train(zoo, twin, range(ranks), 1.0 / ranks) for twin in twins]
    if not all(map(math.isfinite, losses[0])):
        raise NotRunError("its losses are not finite")
    first, second = (twin.state_dict().values() for twin in twins)
    if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        raise NotRunError("it ends otherwise each time")
    return twins[0]


def shard(model: nn.Module, env: RankEnv, shape: tuple[int, ...], units: str) -> None:
    if units == "leaves":
        chosen = {id(m) for m in model.modules() if not list(m.children()) and next(m.parameters(), None) is not None}
    else:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        members = [block for blocks in lists for block in blocks if block is not None]
        chosen = {id(block) for block in members if type(block).forward is not nn.Module.forward}
        if not chosen:  # vision models have theirs in sequences
            stages = [module for module in model.modules() if isinstance(module, nn.Sequential)]
            chosen = {id(block) for blocks in stages for block in blocks if list(block.children())}
    chosen -= _tied_outside(model, chosen)
    if not chosen:
        hsdp.fully_shard(model, mesh=env.mesh(shape))
        return
    hsdp.shard_units(model, lambda module: id(module) in chosen, mesh=env.mesh(shape))


def _tied_outside(model: nn.Module, chosen: set[int]) -> set[int]:
    """Those chosen modules with a parameter that a module outside of them has, too: both are left to the unit above."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in chosen:
            names.setdefault(id(module), []).append(f"{name}.")
    places: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        places.setdefault(param, []).append(name)
    return {
        block
        for block, prefixes in names.items()
        for found in places.values()
        if 0 < sum(place.startswith(tuple(prefixes)) for place in found) < len(found)
    }


def play(
    env: RankEnv, zoo: Zoo, kind: str, cls: str, shape: tuple[int, ...], units: str, checkpoints: bool
) -> tuple[str, str]:
    """On a worker: trains a model and its twin; returns how it ended, and what is to be told."""
    try:
        model = zoo.made(kind, cls)
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():  # some models leave what they do not use as memory had it
                dist.broadcast(tensor.detach(), 0)
        twin = twin_of(zoo, model, env.world_size, checkpoints)
        if checkpoints:
            zoo.checkpoint(model)
    except Exception as error:
        return "not run", f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    try:
        shard(model, env, shape, units)
        train(zoo, model, [env.rank], 1.0)
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()[-2000:]}"
    worst, where = 0.0, ""
    others = dict(twin.named_parameters())
    for name, param in model.named_parameters():
        mine = param.full_tensor() if hasattr(param, "full_tensor") else param
        if mine.numel():
            largest = max(1e-3, others[name].abs().max().item())
            off = (mine - others[name]).abs().max().item() / largest
            if not off <= worst:
                worst, where = off, name
    return "equal" if worst <= TOLERANCE else "wrong", f"off by {worst:.1e} {where}".rstrip()


def run(pool: Pool, *case: Any) -> tuple[str, str]:
    try:
        found = pool.run(play, *case, timeout=200.0)
    except (RemoteError, PoolTimeout) as error:
        pool.close()  # what it left in the processes is not to show in another model
        return "failed", str(error)[:2000]
    return max(found, key=lambda one: ["equal", "not run", "failed", "wrong"].index(one[0]))


def options_of(description: str) -> argparse.ArgumentParser:
    """What every zoo is told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--units", choices=["blocks", "leaves"], default="blocks")
    parser.add_argument("--checkpoints", action="store_true", help="with gradient checkpointing")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each N-th from the first one on")
    parser.add_argument("--only", nargs="*", default=[], metavar="KIND", help="model types, or modules of timm.models")
    parser.add_argument("--log", help="a file to write to, too")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the soak; returns the exit status."""
    parser = options_of("transformers' models, tiny, beside their plain twins")
    parser.add_argument("--mapping", default="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", help="of transformers' modeling_auto")
    options = parser.parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers.models.auto import modeling_auto

    models = sorted(getattr(modeling_auto, options.mapping).items())
    chosen = [
        (kind, classes if isinstance(classes, str) else classes[0])
        for kind, classes in models[options.first :: options.every]
        if not options.only or kind in options.only
    ]
    return soak(Zoo(made, batch_of, checkpoint), chosen, options)


def soak(zoo: Zoo, models: Sequence[tuple[str, str]], options: argparse.Namespace) -> int:
    """Trains models of (kind, class) in turn, tells how each ended, and returns the exit status."""
    log = open(options.log, "a", buffering=1) if options.log else None  # noqa: SIM115  (open until the end)

    def tell(text: str) -> None:
        print(text, flush=True)
        if log is not None:
            print(text, file=log)

    tell(str(header()))
    ends: Counter[str] = Counter()
    with Pool(2, group_timeout=60.0) as pool:
        for at, (kind, cls) in enumerate(models):
            shape = SHAPES[at % len(SHAPES)]
            end, told = run(pool, zoo, kind, cls, shape, options.units, options.checkpoints)
            ends[end] += 1
            tell(f"{end:8s} {cls:45s} {mesh_id(shape):5s} {told}")
    tell(", ".join(f"{ends[end]} {end}" for end in ("equal", "wrong", "failed", "not run")))
    return int(ends["wrong"] + ends["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
