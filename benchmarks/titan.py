"""torchtitan's debug models trained with hsdp in the place of FSDP2, by one call: are losses and norms equal?

    OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 4 -m benchmarks.titan NAME

Needs the extra `ecosystem`. Both libraries train in the same processes, one after the other, from the same weights. Text
and tokenizer are made here; nothing is downloaded. torchtitan has no CPU device of its own: what it asks its device module
for is answered by `_Host`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.attention.flex_attention import AuxOutput, create_block_mask, create_mask

import hsdp
from hsdp.integrations import replace_fsdp2

STEPS = 10


class _Host:
    """`torch.cpu`, and what torchtitan's metrics ask an accelerator for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: Any) -> str:
        return "host"

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(total_memory=1 << 34)

    def reset_peak_memory_stats(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def memory_stats(self, device: Any) -> dict[str, int]:
        return {}


def _attention(q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any) -> tuple[Any, Any]:
    """In the place of flex attention, which torch does not differentiate on the CPU."""
    mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], "cpu")
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return out, AuxOutput(lse=None, max_scores=None)


def _full_ac(config: Any) -> None:
    config.activation_checkpoint = _module("distributed.activation_checkpoint").FullAC.Config()


def _pipeline(schedule: str, layers_per_stage: int) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        _degrees(pipeline_parallel_degree=2)(config)
        config.parallelism.pipeline_parallel_schedule = schedule
        config.parallelism.pipeline_parallel_layers_per_stage = layers_per_stage
        config.parallelism.pipeline_parallel_microbatch_size = 1
        config.training.local_batch_size = 4

    return change


def _degrees(**degrees: int) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        for name, value in degrees.items():
            setattr(config.parallelism, name, value)

    return change


def _compile(config: Any) -> None:
    config.compile.enable = True
    config.compile.backend = "aot_eager"


def _resume(config: Any) -> None:
    config.checkpoint.enable = True
    config.checkpoint.interval = STEPS // 2


def _both(*changes: Callable[[Any], None]) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        for one in changes:
            one(config)

    return change


def _annotated(config: Any) -> None:
    """torchtitan's default: parameters of tensor and expert parallelism are plain, with annotations of spmd_types."""
    config.parallelism.spmd_backend = "spmd_types"


def _selective_ac(config: Any) -> None:
    config.activation_checkpoint = _module("distributed.activation_checkpoint").SelectiveAC.Config()


def _split_backward(config: Any) -> None:
    """Of schedules that run backward twice: selective checkpointing refuses it; FSDP2 loses gradients if it reshards."""
    config.activation_checkpoint = None
    config.parallelism.fsdp_reshard_after_forward = "never"


def _loss_at_once(config: Any) -> None:
    """Not chunk by chunk, for which torchtitan reshards the group of norm and head behind each micro-batch."""
    config.loss = _module("models.llama3.config_registry").llama3_debugmodel_ce_loss().loss


def _exact_sums(config: Any) -> None:
    """Gradients are reduced in float64, in which the order of four terms from bf16 makes no difference."""
    _module("config").TORCH_DTYPE_MAP["float64"] = torch.float64
    config.training.mixed_precision_reduce = "float64"


LLAMA, DEEPSEEK, QWEN = "llama3", "deepseek_v3", "qwen3"
CONFIGS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "1-D": (LLAMA, lambda config: None),
    "HSDP 2 x 2": (LLAMA, _degrees(data_parallel_replicate_degree=2, data_parallel_shard_degree=2)),
    "TP 2 x 2": (LLAMA, _degrees(tensor_parallel_degree=2)),
    "PP 1F1B": (LLAMA, _pipeline("1F1B", 4)),
    "PP interleaved": (LLAMA, _pipeline("Interleaved1F1B", 2)),
    "PP zero-bubble": (LLAMA, _both(_pipeline("InterleavedZeroBubble", 2), _split_backward)),
    "PP zero-bubble, loss at once": (
        LLAMA,
        _both(_pipeline("InterleavedZeroBubble", 2), _split_backward, _loss_at_once),
    ),
    "PP interleaved, no AC": (LLAMA, _both(_pipeline("Interleaved1F1B", 2), _split_backward)),
    "full AC": (LLAMA, _full_ac),
    "selective AC": (LLAMA, _selective_ac),
    "compile": (LLAMA, _compile),
    "DCP resume": (LLAMA, _resume),
    "deepseek EP 2": (DEEPSEEK, _degrees(expert_parallel_degree=2)),
    "deepseek EP 2, exact sums": (DEEPSEEK, _both(_degrees(expert_parallel_degree=2), _exact_sums)),
    "qwen3": (QWEN, lambda config: None),
    "TP 2 x 2, annotated": (LLAMA, _both(_degrees(tensor_parallel_degree=2), _annotated)),
}
"""Selective activation checkpointing is what the other configurations have of themselves."""


def _module(name: str) -> Any:
    return importlib.import_module(f"torchtitan.{name}")


def _make_assets(root: Path) -> None:
    """A text of numbers spelt out, and a tokenizer of single bytes, where the debug configurations look for them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    (root / "tests/assets/c4_test").mkdir(parents=True)
    (root / "tests/assets/tokenizer").mkdir()
    lines = [json.dumps({"text": " ".join(str(n * n % 997) for n in range(i, i + 120))}) for i in range(2000)]
    (root / "tests/assets/c4_test/data.json").write_text("\n".join(lines))
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(special + alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(root / "tests/assets/tokenizer/tokenizer.json"))
    content = {"bos_token": special[0], "eos_token": special[1], "add_bos_token": True, "add_eos_token": True}
    (root / "tests/assets/tokenizer/tokenizer_config.json").write_text(json.dumps(content))


def _sums(model: Any) -> None:
    """What torchtitan has there, and for FSDP2 on gloo, which cannot divide in a collective: sums without that."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _train(name: str, fully_shard: Any, folder: Path) -> list[tuple[float, float]]:
    """Losses and gradient norms of all steps."""
    there = _module("distributed.fsdp")
    replace_fsdp2(fully_shard is hsdp.fully_shard)
    assert there.fully_shard is fully_shard
    there.disable_fsdp_gradient_division = _sums
    family, change = CONFIGS[name]
    results: list[tuple[float, float]] = []
    steps = [STEPS // 2, STEPS] if name == "DCP resume" else [STEPS]
    for last in steps:
        config = getattr(_module(f"models.{family}.config_registry"), f"{family}_debugmodel")()
        config.training.seq_len = 32
        config.training.local_batch_size = 1
        config.training.steps = last
        config.lr_scheduler.total_steps = STEPS
        config.checkpoint.enable = False
        config.validator.enable = False
        config.debug.seed = 1
        config.training.disable_cuda_graphs = True
        config.parallelism.spmd_backend = "partial_dtensor"
        config.dump_folder = str(folder)
        change(config)
        trainer = config.build()
        plain = trainer.metrics_processor.log

        def log(step: int, loss: float, *args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            results.append((loss, float(kwargs["grad_norm"] if "grad_norm" in kwargs else args[1])))
            return plain(step, loss, *args, **kwargs)

        trainer.metrics_processor.log = log
        trainer.train()
        trainer.close()
    return results


def _compare(name: str, folder: Path) -> str:
    try:
        theirs = _train(name, torch_fully_shard, folder / "fsdp2")
        ours = _train(name, hsdp.fully_shard, folder / "hsdp")
    except Exception as error:  # on all ranks alike, or the others run into their time-outs
        traceback.print_exc()
        return f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:160]}"
    rows = [f"{name}: {len(ours)} steps, {'equal' if ours == theirs else 'different'}"]
    for step, (a, b) in enumerate(zip(theirs, ours, strict=True), 1):
        rows.append(f"  {step:>2}  FSDP2 {a[0]:.8f} {a[1]:.8f}   hsdp {b[0]:.8f} {b[1]:.8f}")
    return "\n".join(rows)


def main(name: str) -> None:
    """Trains configuration `name` with both libraries; the rank that knows the losses prints a row for each step."""
    warnings.filterwarnings("ignore")
    utils = _module("tools.utils")
    utils.device_type, utils.device_module = "cpu", _Host()
    attention = _module("models.common.attention")
    attention.FlexAttention._compiled_flex_attn = staticmethod(_attention)
    attention._compiled_create_block_mask = create_block_mask
    root = Path(tempfile.gettempdir()) / f"titan-{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        _make_assets(root)
    dist.barrier()
    os.chdir(root)
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does where it starts the process group itself
    results = _compare(name, root)
    if dist.get_rank() == dist.get_world_size() - 1:
        print(results, flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
