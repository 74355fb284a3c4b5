"""Parameters of published models' blocks: names and shapes, as their checkpoints have them.

Weights of linear layers are (out, in). Experts are stacked, one tensor for all, as training code keeps them; they are
listed on their own.
"""

from __future__ import annotations

Shapes = dict[str, tuple[int, ...]]


def llama3_8b() -> Shapes:
    """A block of Llama-3 8B: 32 query heads and 8 key-value heads of 128."""
    dim, hidden, kv = 4096, 14336, 1024
    return {
        "attention_norm": (dim,),
        "wq": (dim, dim),
        "wk": (kv, dim),
        "wv": (kv, dim),
        "wo": (dim, dim),
        "ffn_norm": (dim,),
        "w1": (hidden, dim),
        "w2": (dim, hidden),
        "w3": (hidden, dim),
    }


def deepseek_v3() -> Shapes:
    """A mixture-of-experts block of DeepSeek-V3 without its routed experts: latent attention, router, shared expert."""
    dim, heads, q_rank, kv_rank, rope, nope, value, expert = 7168, 128, 1536, 512, 64, 128, 128, 2048
    return {
        "attention_norm": (dim,),
        "q_a": (q_rank, dim),
        "q_a_norm": (q_rank,),
        "q_b": (heads * (nope + rope), q_rank),
        "kv_a": (kv_rank + rope, dim),
        "kv_a_norm": (kv_rank,),
        "kv_b": (heads * (nope + value), kv_rank),
        "o": (dim, heads * value),
        "ffn_norm": (dim,),
        "router": (256, dim),
        "shared_gate": (expert, dim),
        "shared_up": (expert, dim),
        "shared_down": (dim, expert),
    }


def deepseek_v3_experts() -> Shapes:
    """Its 256 routed experts."""
    dim, expert, count = 7168, 2048, 256
    return {"gate": (count, expert, dim), "up": (count, expert, dim), "down": (count, dim, expert)}


def gpt_oss_120b() -> Shapes:
    """A block of GPT-OSS 120B without its experts: 64 query heads and 8 key-value heads of 64, with biases and sinks."""
    dim, heads, kv_heads, head = 2880, 64, 8, 64
    return {
        "attention_norm": (dim,),
        "sinks": (heads,),
        "qkv": ((heads + 2 * kv_heads) * head, dim),
        "qkv_bias": ((heads + 2 * kv_heads) * head,),
        "out": (dim, heads * head),
        "out_bias": (dim,),
        "mlp_norm": (dim,),
        "router": (128, dim),
        "router_bias": (128,),
    }


def gpt_oss_120b_experts() -> Shapes:
    """Its 128 experts: gate and up in one, then down."""
    dim, count = 2880, 128
    return {
        "mlp1": (count, 2 * dim, dim),
        "mlp1_bias": (count, 2 * dim),
        "mlp2": (count, dim, dim),
        "mlp2_bias": (count, dim),
    }


def mixtral_8x7b_experts() -> Shapes:
    """A block's 8 experts of Mixtral 8x7B, stacked: the case of fewer experts than ranks."""
    dim, expert, count = 4096, 14336, 8
    return {"gate": (count, expert, dim), "up": (count, expert, dim), "down": (count, dim, expert)}


BLOCKS: dict[str, Shapes] = {
    "Llama-3 8B": llama3_8b(),
    "DeepSeek-V3": deepseek_v3(),
    "GPT-OSS 120B": gpt_oss_120b(),
}
EXPERTS: dict[str, Shapes] = {
    "DeepSeek-V3 experts": deepseek_v3_experts(),
    "GPT-OSS 120B experts": gpt_oss_120b_experts(),
    "Mixtral 8x7B experts": mixtral_8x7b_experts(),
}
