"""Shapes of well-known models, as their authors published them, so that they can be planned without their code.

Weights of linear layers are (out, in). Experts are stacked, one tensor for all of a block, as training code keeps them, and
are a unit of their own inside the block's. Rotary tables and other buffers are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from hsdp.params.param import PlacementFn
from hsdp.params.placement import least_padding
from hsdp.planning.facts import ParamFacts, UnitFacts, cut_by
from hsdp.policies import CommPolicy, MixedPrecisionPolicy

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Block:
    """Parameters of a block by name; `experts` are its routed ones, of which a token uses the part `active`.

    `attention` is the width of what attention computes with: heads times their size.
    """

    shapes: Shapes
    experts: Shapes = field(default_factory=dict)
    active: float = 1.0
    attention: float = 0


@dataclass(frozen=True)
class ModelShapes:
    """A model: its blocks in order, and what is around them."""

    root: Shapes
    blocks: list[Block]

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        every = [self.root, *(shapes for block in self.blocks for shapes in (block.shapes, block.experts))]
        return sum(math.prod(shape) for shapes in every for shape in shapes.values())


def _root(dim: int, vocab: int) -> Shapes:
    return {"embedding": (vocab, dim), "norm": (dim,), "head": (vocab, dim)}


def _gqa(dim: int, heads: int, kv_heads: int, head: int) -> Shapes:
    """Grouped-query attention and the norms of a block."""
    return {
        "attention_norm": (dim,),
        "wq": (heads * head, dim),
        "wk": (kv_heads * head, dim),
        "wv": (kv_heads * head, dim),
        "wo": (dim, heads * head),
        "ffn_norm": (dim,),
    }


def _swiglu(dim: int, hidden: int) -> Shapes:
    return {"w1": (hidden, dim), "w2": (dim, hidden), "w3": (hidden, dim)}


def _experts(count: int, dim: int, hidden: int) -> Shapes:
    return {"gate": (count, hidden, dim), "up": (count, hidden, dim), "down": (count, dim, hidden)}


def mixtral() -> ModelShapes:
    """Mixtral 8x7B: 8 experts, of which a token uses 2 (arXiv:2401.04088)."""
    dim, hidden = 4096, 14336
    block = Block(_gqa(dim, 32, 8, 128) | {"router": (8, dim)}, _experts(8, dim, hidden), 2 / 8, 32 * 128)
    return ModelShapes(_root(dim, 32000), [block] * 32)


def llama3(dim: int, hidden: int, layers: int, heads: int) -> ModelShapes:
    """Llama 3 and 3.1: 8 key-value heads of 128 (arXiv:2407.21783, table 3)."""
    block = Block(_gqa(dim, heads, 8, 128) | _swiglu(dim, hidden), attention=heads * 128)
    return ModelShapes(_root(dim, 128256), [block] * layers)


def llama2(dim: int, hidden: int, layers: int, heads: int, kv_heads: int) -> ModelShapes:
    """Llama 2: heads of 128 (arXiv:2307.09288)."""
    block = Block(_gqa(dim, heads, kv_heads, 128) | _swiglu(dim, hidden), attention=heads * 128)
    return ModelShapes(_root(dim, 32000), [block] * layers)


def olmo2(dim: int, hidden: int, layers: int, heads: int, kv_heads: int) -> ModelShapes:
    """OLMo 2: heads of 128, norms of all queries and keys, an untied head (arXiv:2501.00656, table 3)."""
    norms: Shapes = {"q_norm": (heads * 128,), "k_norm": (kv_heads * 128,)}
    block = Block(_gqa(dim, heads, kv_heads, 128) | norms | _swiglu(dim, hidden), attention=heads * 128)
    return ModelShapes(_root(dim, 100352), [block] * layers)


def qwen3(dim: int, hidden: int, layers: int, heads: int, kv_heads: int = 8, experts: int = 0) -> ModelShapes:
    """Qwen3 with an untied head, dense or with `experts` of which a token uses 8 (arXiv:2505.09388)."""
    shapes = _gqa(dim, heads, kv_heads, 128) | {"q_norm": (128,), "k_norm": (128,)}
    if experts:
        routed = shapes | {"router": (experts, dim)}
        block = Block(routed, _experts(experts, dim, hidden), 8 / experts, heads * 128)
    else:
        block = Block(shapes | _swiglu(dim, hidden), attention=heads * 128)
    return ModelShapes(_root(dim, 151936), [block] * layers)


def deepseek_v3() -> ModelShapes:
    """DeepSeek-V3 without its multi-token prediction: 3 dense blocks, then 58 of 256 experts (arXiv:2412.19437)."""
    dim, heads, q_rank, kv_rank, rope, nope, value, expert = 7168, 128, 1536, 512, 64, 128, 128, 2048
    attention: Shapes = {
        "attention_norm": (dim,),
        "q_a": (q_rank, dim),
        "q_a_norm": (q_rank,),
        "q_b": (heads * (nope + rope), q_rank),
        "kv_a": (kv_rank + rope, dim),
        "kv_a_norm": (kv_rank,),
        "kv_b": (heads * (nope + value), kv_rank),
        "o": (dim, heads * value),
        "ffn_norm": (dim,),
    }
    routed: Shapes = {
        "router": (256, dim),
        "shared_gate": (expert, dim),
        "shared_up": (expert, dim),
        "shared_down": (dim, expert),
    }
    width = heads * (nope + rope + value) / 2  # scores and the sum of values differ in theirs
    dense = Block(attention | _swiglu(dim, 18432), attention=width)
    sparse = Block(attention | routed, _experts(256, dim, expert), 8 / 256, width)
    return ModelShapes(_root(dim, 129280), [dense] * 3 + [sparse] * 58)


def gpt_oss(layers: int, experts: int) -> ModelShapes:
    """GPT-OSS: 64 query and 8 key-value heads of 64 with biases and sinks, 4 experts of those chosen (arXiv:2508.10925)."""
    dim, heads, kv_heads, head = 2880, 64, 8, 64
    qkv = (heads + 2 * kv_heads) * head
    shapes: Shapes = {
        "attention_norm": (dim,),
        "sinks": (heads,),
        "qkv": (qkv, dim),
        "qkv_bias": (qkv,),
        "out": (dim, heads * head),
        "out_bias": (dim,),
        "mlp_norm": (dim,),
        "router": (experts, dim),
        "router_bias": (experts,),
    }
    routed: Shapes = {
        "mlp1": (experts, 2 * dim, dim),
        "mlp1_bias": (experts, 2 * dim),
        "mlp2": (experts, dim, dim),
        "mlp2_bias": (experts, dim),
    }
    return ModelShapes(_root(dim, 201088), [Block(shapes, routed, 4 / experts, heads * head)] * layers)


PRESETS: dict[str, Callable[[], ModelShapes]] = {
    "llama2-7b": lambda: llama2(4096, 11008, 32, 32, 32),
    "llama2-13b": lambda: llama2(5120, 13824, 40, 40, 40),
    "llama2-70b": lambda: llama2(8192, 28672, 80, 64, 8),
    "llama3-8b": lambda: llama3(4096, 14336, 32, 32),
    "llama3-70b": lambda: llama3(8192, 28672, 80, 64),
    "llama3-405b": lambda: llama3(16384, 53248, 126, 128),
    "olmo2-7b": lambda: olmo2(4096, 11008, 32, 32, 32),
    "olmo2-13b": lambda: olmo2(5120, 13824, 40, 40, 40),
    "olmo2-32b": lambda: olmo2(5120, 27648, 64, 40, 8),
    "qwen3-8b": lambda: qwen3(4096, 12288, 36, 32),
    "qwen3-32b": lambda: qwen3(5120, 25600, 64, 64),
    "qwen3-30b-a3b": lambda: qwen3(2048, 768, 48, 32, kv_heads=4, experts=128),
    "qwen3-235b-a22b": lambda: qwen3(4096, 1536, 94, 64, kv_heads=4, experts=128),
    "deepseek-v3": deepseek_v3,
    "mixtral-8x7b": mixtral,
    "gpt-oss-20b": lambda: gpt_oss(24, 32),
    "gpt-oss-120b": lambda: gpt_oss(36, 128),
}
"""Models by the names that the command line knows."""


def preset(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    mp_policy: MixedPrecisionPolicy | None = None,
    comm_policy: CommPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = least_padding,
) -> list[UnitFacts]:
    """The units of a well-known model: one per block, one for its experts, and the root.

    Args:
        name: one of `PRESETS`.
        dtype: of the sharded parameters.
        mp_policy: None: computes in bf16, reduces in fp32.
        comm_policy, reshard_after_forward: as for `fully_shard`; the latter for all units but the root, which stays whole.
        shard_placement_fn: as for `fully_shard`; the default pads few experts on many ranks least.

    Raises:
        ValueError: there is no such preset.
    """
    if name not in PRESETS:
        raise ValueError(f"preset({name!r}): not known; choose one of {', '.join(PRESETS)}")
    mp_policy = mp_policy or MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    comm_policy = comm_policy or CommPolicy()
    model = PRESETS[name]()

    def unit(title: str, shapes: Shapes, parent: int | None, active: float = 1.0, attention: float = 0) -> UnitFacts:
        params = []
        for key, shape in shapes.items():
            cut = None if shard_placement_fn is None else cut_by(shard_placement_fn, shape, key, title)
            table = key == "embedding"
            params.append(ParamFacts(key, shape, dtype, active=0.0 if table else active, looked_up=table, cut=cut))
        after = None if parent is None else reshard_after_forward
        return UnitFacts(
            title, tuple(params), parent, mp_policy, comm_policy, reshard_after_forward=after, attention=attention
        )

    units = [unit(f"{name} (root)", model.root, None)]
    for index, block in enumerate(model.blocks):
        units.append(unit(f"layers.{index}", block.shapes, 0, attention=block.attention))
        if block.experts:
            units.append(unit(f"layers.{index}.experts", block.experts, len(units) - 1, block.active))
    return units
