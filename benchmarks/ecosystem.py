"""Models of transformers, diffusers, timm and torchvision, trained by hsdp, by FSDP2 and on one device: are numbers equal?

    OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.ecosystem [NAME ...]
    OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 4 -m benchmarks.ecosystem [NAME ...]

Needs the extra `ecosystem`. Weights are random and configurations tiny; nothing is downloaded. Every model is trained for
three steps of AdamW on two ranks, or on 2 x 2: in fp32, and under a bf16 policy with gradient checkpointing. Losses,
gradients and parameters of all steps are compared. The twin is the plain model on one device, with the mean of all ranks'
gradients.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import hsdp

STEPS = 3
MESHES: dict[int, Callable[[], DeviceMesh]] = {
    2: lambda: init_device_mesh("cpu", (2,)),
    4: lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
}
VOCAB = 64
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
GPT = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEQ2SEQ = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
IMAGES = {**DECODER, "image_size": 32, "patch_size": 8, "num_labels": 4}

CAUSAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "gemma", "phi", "phi3", "olmo", "olmo2", "cohere", "granite"), DECODER),
    **dict.fromkeys(("stablelm", "starcoder2", "gpt_neox", "falcon", "bloom"), DECODER),
    **{name: {**DECODER, "head_dim": 8} for name in ("qwen3", "gemma2", "gemma3_text", "glm")},
    "mixtral": {**DECODER, "num_local_experts": 4},
    "qwen2_moe": {**DECODER, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**DECODER, **EXPERTS, "head_dim": 8},
    "gpt2": GPT,
    "gptj": {**GPT, "rotary_dim": 4},
    "gpt_neo": {**DECODER, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "opt": {**DECODER, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "mamba": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "pad_token_id": 0},
}
MASKED = {
    **dict.fromkeys(("bert", "roberta", "deberta-v2"), DECODER),
    "electra": {**DECODER, "embedding_size": 16},
    "albert": {**DECODER, "embedding_size": 16},
    "distilbert": {"vocab_size": VOCAB, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
}
SEQ2SEQS = {"t5": T5, "mt5": T5, "bart": SEQ2SEQ, "marian": {**SEQ2SEQ, "pad_token_id": 0, "decoder_start_token_id": 0}}
CLASSIFIERS = dict.fromkeys(("vit", "beit", "dinov2"), IMAGES)

Batch = dict[str, Tensor]
Model = tuple[Callable[[], nn.Module], Callable[[torch.Generator], Batch]]


def _of_transformers(auto: str, kind: str, config: dict[str, Any]) -> Model:
    def build() -> nn.Module:
        transformers = importlib.import_module("transformers")
        model: nn.Module = getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(kind, **config))
        return model

    def images(generator: torch.Generator) -> Batch:
        return {"pixel_values": _floats(generator, 2, 3, 32, 32), "labels": _integers(generator, 4, 2)}

    def tokens(generator: torch.Generator) -> Batch:
        ids = _integers(generator, VOCAB - 3, 2, 12) + 3
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}

    return build, images if "Image" in auto else tokens


def _of_diffusers(cls: str, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Model:
    def build() -> nn.Module:
        model: nn.Module = getattr(importlib.import_module("diffusers"), cls)(**config)
        return model

    def batch(generator: torch.Generator) -> Batch:
        made = {name: _floats(generator, *shape) for name, shape in shapes.items()}
        if "timestep" in made:
            made["timestep"] = _integers(generator, 1000, *shapes["timestep"])
        if "class_labels" in made:
            made["class_labels"] = _integers(generator, 4, *shapes["class_labels"])
        return made

    return build, batch


def _of_pictures(module: str, function: str, *args: str, **config: Any) -> Model:
    def build() -> nn.Module:
        model: nn.Module = getattr(importlib.import_module(module), function)(*args, **config)
        return model

    return build, lambda generator: {"": _floats(generator, 2, 3, 64, 64)}


def _floats(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def _integers(generator: torch.Generator, high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=generator)


UNET = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}
CONDITIONED = {
    **UNET,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
}
DIT = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "patch_size": 2}
SAMPLE = {"sample": (2, 4, 8, 8), "timestep": (2,)}
PATCHES = {"hidden_states": (2, 4, 8, 8), "timestep": (2,)}
CODER = {"in_channels": 3, "block_out_channels": (16, 32), "norm_num_groups": 4, "latent_channels": 4}
CODER |= {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}

MODELS: dict[str, Model] = {
    **{name: _of_transformers("AutoModelForCausalLM", name, config) for name, config in CAUSAL.items()},
    **{name: _of_transformers("AutoModelForMaskedLM", name, config) for name, config in MASKED.items()},
    **{name: _of_transformers("AutoModelForSeq2SeqLM", name, config) for name, config in SEQ2SEQS.items()},
    **{name: _of_transformers("AutoModelForImageClassification", name, config) for name, config in CLASSIFIERS.items()},
    "diffusers UNet2D": _of_diffusers("UNet2DModel", {**UNET, "in_channels": 4, "out_channels": 4}, SAMPLE),
    "diffusers UNet2DCondition": _of_diffusers(
        "UNet2DConditionModel", CONDITIONED, {**SAMPLE, "encoder_hidden_states": (2, 5, 16)}
    ),
    "diffusers AutoencoderKL": _of_diffusers("AutoencoderKL", CODER, {"sample": (2, 3, 16, 16)}),
    "diffusers DiT": _of_diffusers(
        "DiTTransformer2DModel",
        {**DIT, "in_channels": 4, "out_channels": 4, "num_embeds_ada_norm": 8, "norm_num_groups": 4},
        {**PATCHES, "class_labels": (2,)},
    ),
    "diffusers SD3": _of_diffusers(
        "SD3Transformer2DModel",
        {**DIT, "in_channels": 4, "joint_attention_dim": 16, "caption_projection_dim": 16, "pooled_projection_dim": 16},
        {**PATCHES, "encoder_hidden_states": (2, 5, 16), "pooled_projections": (2, 16)},
    ),
    "diffusers PixArt": _of_diffusers(
        "PixArtTransformer2DModel",
        {
            **DIT,
            "in_channels": 4,
            "out_channels": 4,
            "caption_channels": 16,
            "cross_attention_dim": 16,
            "norm_num_groups": 4,
        },
        {**PATCHES, "encoder_hidden_states": (2, 5, 16)},
    ),
    "timm vit": _of_pictures("timm", "create_model", "vit_tiny_patch16_224", img_size=64, depth=2, num_classes=4),
    "timm convnext": _of_pictures("timm", "create_model", "convnext_atto", depths=(1, 1, 1, 1), num_classes=4),
    "timm mixer": _of_pictures("timm", "create_model", "mixer_s32_224", img_size=64, num_classes=4),
    "torchvision vit": _of_pictures(
        "torchvision.models.vision_transformer",
        "VisionTransformer",
        image_size=64,
        patch_size=16,
        num_layers=2,
        num_heads=2,
        hidden_dim=32,
        mlp_dim=48,
        num_classes=4,
    ),
    "torchvision swin": _of_pictures("torchvision.models", "swin_t", num_classes=4),
}


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """What lies in the outermost lists of modules, if it can be called and has parameters."""
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1:
            yield from (block for block in child if _can_shard(block))
        else:
            yield from _blocks(child)


def _can_shard(block: nn.Module) -> bool:
    return type(block).forward is not nn.Module.forward and any(True for _ in block.parameters())


def _recomputes(model: Any) -> None:
    """Switches the model's own gradient checkpointing on; those without do without."""
    if hasattr(model, "gradient_checkpointing_enable") and model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif hasattr(model, "enable_gradient_checkpointing") and model._supports_gradient_checkpointing:
        model.enable_gradient_checkpointing()
    elif hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing()


def _loss(model: nn.Module, batch: Batch, seed: int) -> Tensor:
    torch.manual_seed(seed)  # masks of dropout
    out: Any = model(batch[""]) if "" in batch else model(**batch)
    if getattr(out, "loss", None) is not None:
        loss: Tensor = out.loss
        return loss
    out = out if isinstance(out, Tensor) else out[0] if not hasattr(out, "sample") else out.sample
    found: Tensor = out.float().square().mean()
    return found


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def _train(model: nn.Module, batch_of: Callable[[torch.Generator], Batch], ranks: list[int]) -> list[Tensor]:
    """Losses, gradients and parameters of all steps, with the mean over `ranks` of the batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    told = []
    for step in range(STEPS):
        losses = []
        for rank in ranks:
            seed = 100 * step + rank
            loss = _loss(model, batch_of(torch.Generator().manual_seed(seed)), seed)
            (loss / len(ranks)).backward()
            losses.append(loss.detach().float())
        told.append(torch.stack(losses) if len(ranks) > 1 else _of_both(losses[0]))
        told += [torch.zeros(()) if p.grad is None else _whole(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return told + [_whole(param) for param in model.parameters()]


def _of_both(loss: Tensor) -> Tensor:
    gathered = [torch.zeros_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, loss)
    return torch.stack(gathered)


def _sharded(library: Any, plain: nn.Module, mesh: DeviceMesh, bf16: bool) -> nn.Module:
    model = copy.deepcopy(plain).train()
    if bf16:
        _recomputes(model)
    policy = BF16 if bf16 else MixedPrecisionPolicy()
    for block in list(_blocks(model)):
        library(block, mesh=mesh, mp_policy=policy)
    sharded: nn.Module = library(model, mesh=mesh, mp_policy=policy)
    return sharded


def _run(call: Callable[[], list[Tensor]]) -> list[Tensor] | str:
    """What `call` returns, or how it failed: on all ranks alike, as all do the same."""
    try:
        return call()
    except Exception as error:
        text = str(error).strip()
        return f"{type(error).__name__}: {text.splitlines()[0][:90] if text else ''}"


def _compare(ours: list[Tensor] | str, theirs: list[Tensor] | str) -> str:
    if isinstance(ours, str) or isinstance(theirs, str):
        return "both fail" if isinstance(ours, str) and isinstance(theirs, str) else "one fails"
    same, apart, size = True, 0.0, 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape and (a.ndim == 0 or b.ndim == 0):  # no gradient beside zeros
            a, b = torch.broadcast_tensors(a, b)
        same = same and torch.equal(a, b)
        apart += float((a.double() - b.double()).square().sum())
        size += float(b.double().square().sum())
    return "equal" if same else f"{(apart / size) ** 0.5:.1e}"


def _row(name: str, mesh: DeviceMesh) -> list[str]:
    build, batch_of = MODELS[name]
    torch.manual_seed(0)
    plain = build()
    rank, failures = dist.get_rank(), []
    twin = _run(lambda: _train(copy.deepcopy(plain).train(), batch_of, list(range(dist.get_world_size()))))
    results = []
    for bf16 in (False, True):
        for library in (torch_fully_shard, hsdp.fully_shard):
            told = _run(lambda: _train(_sharded(library, plain, mesh, bf16), batch_of, [rank]))
            results.append(told)
            if isinstance(told, str):
                who = "hsdp" if library is hsdp.fully_shard else "FSDP2"
                failures.append(f"{who}, {'bf16' if bf16 else 'fp32'}: {told}")
    if isinstance(twin, str):
        failures.append(f"plain: {twin}")
    theirs, ours, theirs_bf16, ours_bf16 = results
    count = f"{sum(param.numel() for param in plain.parameters()):,}"
    compared = [_compare(theirs, twin), _compare(ours, twin), _compare(ours, theirs), _compare(ours_bf16, theirs_bf16)]
    return [name, count, *compared, "; ".join(failures)]


def main(names: list[str]) -> None:
    """Prints a row for each model, all of them unless some are named."""
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    assert dist.get_world_size() in MESHES, "two ranks, whose mean is the same in any order, or 2 x 2"
    mesh = MESHES[dist.get_world_size()]()
    line = "{:<26} {:>10}  {:>12}  {:>12}  {:>12}  {:>12}  {}"
    if dist.get_rank() == 0:
        libraries = [f"torch {torch.__version__}"]
        print(f"mesh {' x '.join(map(str, mesh.shape))}")
        for library in ("transformers", "diffusers", "timm", "torchvision"):
            if importlib.util.find_spec(library):
                libraries.append(f"{library} {importlib.import_module(library).__version__}")
        print(", ".join(libraries), flush=True)
        print(
            "Relative difference of all losses, gradients and parameters of 3 steps taken together; equal: bit by bit",
            flush=True,
        )
        print(line.format("", "", "fp32 FSDP2", "fp32 hsdp", "fp32 hsdp", "bf16 hsdp", ""), flush=True)
        print(line.format("model", "parameters", "to twin", "to twin", "to FSDP2", "to FSDP2", "failed"), flush=True)
    for name in names or MODELS:
        library = name.split()[0] if " " in name else "transformers"
        if importlib.util.find_spec(library) is None:
            continue
        row = _run(lambda: _row(name, mesh))  # type: ignore[arg-type,return-value]
        row = [name, "", "", "", "", "", row] if isinstance(row, str) else row
        if dist.get_rank() == 0:
            print(line.format(*row).rstrip(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
