"""Parameters of published models' last blocks: names and shapes, their routed experts on their own."""

from __future__ import annotations

from hsdp.planning import PRESETS
from hsdp.planning.presets import Block, Shapes


def _last_block(name: str) -> Block:
    return PRESETS[name]().blocks[-1]


BLOCKS: dict[str, Shapes] = {
    "Llama-3 8B": _last_block("llama3-8b").shapes,
    "DeepSeek-V3": _last_block("deepseek-v3").shapes,
    "GPT-OSS 120B": _last_block("gpt-oss-120b").shapes,
}
EXPERTS: dict[str, Shapes] = {
    "DeepSeek-V3 experts": _last_block("deepseek-v3").experts,
    "GPT-OSS 120B experts": _last_block("gpt-oss-120b").experts,
    "Mixtral 8x7B experts": _last_block("mixtral-8x7b").experts,
}
