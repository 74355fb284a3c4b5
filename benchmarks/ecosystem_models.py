"""The models that `benchmarks.ecosystem` trains: tiny, with random weights, each with a maker of batches."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 64
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
