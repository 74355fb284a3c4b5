"""accelerate, transformers and TRL train with FSDP2, with hsdp in its place, and alone; test_huggingface.py compares.

torchrun --nproc-per-node 2 -m tests.api.huggingface_run trainer
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import hsdp
from hsdp.examples.launch import leave
from hsdp.integrations import replace_fsdp2
from tests.docs.documents import ROOT, blocks

STEPS, ROWS, LENGTH, VOCAB = 10, 4, 12, 64
ADAMW = {"lr": 1e-2, "weight_decay": 0.0}
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOLD = ("FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_")
"""How the variables begin by which accelerate's launcher tells processes their configuration."""

# What docs/integrations.md tells readers to write: the configuration, and what to add for HSDP.
CONFIG, TWO_AXES = (block.text for block in blocks(ROOT / "docs" / "integrations.md", "yaml"))


def build(seed: int = 0, tied: bool = False) -> Any:
    """A small llama in float64."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model("llama", tie_word_embeddings=tied, **SMALL)
    return AutoModelForCausalLM.from_config(config).to(torch.float64)


def row(index: int) -> Tensor:
    """The tokens of a row of data, int64 [LENGTH]."""
    return torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(index))


def batch(step: int, rows: slice = slice(0, ROWS)) -> dict[str, Tensor]:
    """Of the rows of a step those that a rank is asked for, as arguments of a model."""
    tokens = torch.stack([row(ROWS * step + i) for i in range(ROWS)[rows]])
    return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def own_rows() -> slice:
    """What of a step's rows this rank trains on."""
    each = ROWS // dist.get_world_size()
    return slice(dist.get_rank() * each, (dist.get_rank() + 1) * each)


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, rows: int = STEPS * ROWS) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        tokens = row(index)
        return {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": torch.ones_like(tokens)}


def mean(loss: Tensor) -> float:
    """Of all ranks' losses."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


def sizes(model: Any) -> dict[str, float]:
    """The squared norm of each whole parameter, by its name in the plain model."""
    names = {name.replace("_checkpoint_wrapped_module.", ""): param.detach() for name, param in model.named_parameters()}
    whole = {name: param.full_tensor() if hasattr(param, "full_tensor") else param for name, param in names.items()}
    return {name: float(value.double().square().sum()) for name, value in whole.items()}


def kind(model: nn.Module) -> str:
    """Which library sharded it, and over what: "hsdp 2 x 2"."""
    if not isinstance(model, FSDPModule):
        return "plain"
    mesh: Any = next(model.parameters()).device_mesh  # type: ignore[union-attr]
    return f"{'hsdp' if isinstance(model, hsdp.HSDPModule) else 'FSDP2'} {' x '.join(map(str, mesh.shape))}"


def plain(model: Any, clip: float = 1.0) -> dict[str, Any]:
    """The twin: one process, all rows of each step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)
    losses, norms, evaluated = [], [], []
    for step in range(STEPS):
        loss = model(**batch(step)).loss
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step % (STEPS // 2) == STEPS // 2 - 1:
            evaluated.append(sum(float(model(**batch(i)).loss.detach()) for i in range(2)) / 2)
    options = {"losses": losses, "norms": norms, "resumed": losses[STEPS // 2 :], "evaluated": evaluated}
    return {**options, "params": sizes(model), "kind": "plain"}


# -- accelerate ------------------------------------------------------------------------------------------------------


def allow_cpus() -> None:
    """accelerate has FSDP on accelerators only: it takes this plugin on CPUs from now on."""
    from accelerate import state
    from accelerate.utils import DistributedType

    init = state.AcceleratorState.__init__

    def and_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        first = not state.AcceleratorState._shared_state
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if first and fsdp_plugin is not None:
            self.distributed_type = state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    state.AcceleratorState.__init__ = and_fsdp


def forget() -> None:
    """accelerate starts anew: it keeps its state, and what launchers and arguments say, for the process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith(TOLD)]:
        del os.environ[name]


def configured(config: str, folder: Path) -> None:
    """Sets the variables that `accelerate launch --config_file` sets for the processes that it starts."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = folder / f"config{dist.get_rank()}.yaml"
    path.write_text(config)
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(path), "train.py"]))
    told = prepare_multi_gpu_env(args)
    os.environ.update({name: value for name, value in told.items() if name.startswith(TOLD)})


def accelerate(folder: Path, efficient: bool = False) -> dict[str, Any]:
    """A training loop around `Accelerator`, which is told by its configuration file to use FSDP2."""
    from accelerate import Accelerator

    loading = "fsdp_cpu_ram_efficient_loading: "
    config = CONFIG + (TWO_AXES if dist.get_world_size() == 4 else "")
    configured(config.replace(f"{loading}true", f"{loading}{str(efficient).lower()}"), folder)
    losses: list[float] = []
    norms: list[float] = []

    def start(seed: int) -> tuple[Any, Any, Any]:
        accelerator = Accelerator(cpu=True)
        model = build(seed)
        if efficient and not accelerator.is_main_process:
            for param in model.parameters():
                param.data.zero_()
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), **ADAMW))

    def train(accelerator: Any, model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            loss = model(**batch(step, own_rows())).loss
            accelerator.backward(loss)
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean(loss))

    half = STEPS // 2
    accelerator, model, optimizer = start(0)
    train(accelerator, model, optimizer, range(half))
    accelerator.save_state(str(folder / "state"))
    train(accelerator, model, optimizer, range(half, STEPS))
    params = sizes(model)
    accelerator, model, optimizer = start(1)
    accelerator.load_state(str(folder / "state"))
    train(accelerator, model, optimizer, range(half, STEPS))
    assert sizes(model) == params
    options = {"losses": losses[:STEPS], "norms": norms[:STEPS], "resumed": losses[STEPS:]}
    return {**options, "params": params, "kind": kind(model)}


def efficient(folder: Path) -> dict[str, Any]:
    """As `accelerate`, with weights on the main process alone (`fsdp_cpu_ram_efficient_loading`)."""
    return accelerate(folder, efficient=True)


# -- transformers' Trainer, TRL's SFTTrainer -------------------------------------------------------------------------


def arguments(folder: Path, states: str, **options: Any) -> dict[str, Any]:
    """Of both trainers; `options` are FSDP2's."""
    from accelerate.parallelism_config import ParallelismConfig

    world = dist.get_world_size()
    fsdp = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": states, **options}
    two_axes = {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=world // 2)}
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "fsdp": True,
        "fsdp_config": fsdp,
        "max_steps": STEPS,
        "per_device_train_batch_size": ROWS // world,
        "learning_rate": ADAMW["lr"],
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_steps": STEPS // 2,
        "report_to": [],
        "disable_tqdm": True,
        **(two_axes if world == 4 else {}),
    }


def train_and_resume(make: Callable[[int], Any], folder: Path) -> dict[str, Any]:
    """What a trainer logs in a run, and in one with other weights that goes on from the checkpoint in its middle."""
    logged: list[list[dict[str, float]]] = []
    for seed, path in ((0, None), (1, str(folder / f"checkpoint-{STEPS // 2}"))):
        trainer = make(seed)
        trainer.train(resume_from_checkpoint=path)
        logged.append([entry for entry in trainer.state.log_history if "loss" in entry])
    return {
        "losses": [entry["loss"] for entry in logged[0]],
        "norms": [float(entry["grad_norm"]) for entry in logged[0]],
        "resumed": [entry["loss"] for entry in logged[1]][-(STEPS - STEPS // 2) :],
        "evaluated": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
        "params": sizes(trainer.model),
        "kind": kind(trainer.model),
    }


def trainer(folder: Path, bf16: bool = False) -> dict[str, Any]:
    """transformers' `Trainer`, with checkpoints as full state dicts and an evaluation beside each."""
    from transformers import Trainer, TrainingArguments

    def make(seed: int) -> Any:
        forget()
        args = arguments(folder, "FULL_STATE_DICT", activation_checkpointing=bf16)
        args |= {"eval_strategy": "steps", "eval_steps": STEPS // 2, "per_device_eval_batch_size": 1, "bf16": bf16}
        if bf16:
            args |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
        return Trainer(build(seed), TrainingArguments(**args), train_dataset=Rows(), eval_dataset=Rows(2 * ROWS))

    return train_and_resume(make, folder)


def trainer_bf16(folder: Path) -> dict[str, Any]:
    """`Trainer` under a bf16 policy, with accumulation and activation checkpointing: no twin has its numbers, FSDP2 has."""
    return trainer(folder, bf16=True)


def tokenizer() -> Any:
    """Of single characters; nothing is downloaded."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *(chr(48 + i) for i in range(VOCAB - 3))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def sft(folder: Path, lora: bool = False) -> dict[str, Any]:
    """TRL's `SFTTrainer` on tied embeddings, with checkpoints in shards."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_dict({"input_ids": [row(i).tolist() for i in range(STEPS * ROWS)]})

    def make(seed: int) -> Any:
        forget()
        args = SFTConfig(**arguments(folder, "SHARDED_STATE_DICT"), max_length=LENGTH, bf16=False)
        model = adapted() if lora else build(seed, tied=True)
        return SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer())

    return train_and_resume(make, folder)


def adapted() -> Any:
    """A frozen base with adapters, the same at every call."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))
    return model.to(torch.float64)


def sft_lora(folder: Path) -> dict[str, Any]:
    """`SFTTrainer` with adapters of peft."""
    return sft(folder, lora=True)


def dpo(folder: Path) -> dict[str, Any]:
    """`DPOTrainer`, which shards a reference model too: no twin here has its numbers, FSDP2 has."""
    from datasets import Dataset
    from tokenizers import pre_tokenizers
    from trl import DPOConfig, DPOTrainer

    words = tokenizer()
    words.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    parts = {"prompt": slice(0, 4), "chosen": slice(4, 8), "rejected": slice(8, 12)}
    rows = [words.convert_ids_to_tokens(row(i).tolist()) for i in range(STEPS * ROWS)]
    data = Dataset.from_dict({name: [" ".join(tokens[part]) for tokens in rows] for name, part in parts.items()})

    def make(seed: int) -> Any:
        forget()
        args = DPOConfig(**arguments(folder, "SHARDED_STATE_DICT"), bf16=False)
        made = DPOTrainer(build(seed), ref_model=build(2), args=args, train_dataset=data, processing_class=words)
        assert kind(made.ref_model) != "plain"
        return made

    return train_and_resume(make, folder)


def from_pretrained(folder: Path) -> dict[str, Any]:
    """A model that transformers shards while it loads it, by its own plan."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if dist.get_rank() == 0:
        build().save_pretrained(folder / "plain")
    dist.barrier()
    world = dist.get_world_size()
    mesh = {"fsdp_size": 2, "dp_replicate_size": 2} if world == 4 else {"fsdp_size": world}
    losses: list[float] = []
    norms: list[float] = []

    def load(path: Path) -> Any:
        config = DistributedConfig(**mesh)
        return AutoModelForCausalLM.from_pretrained(path, distributed_config=config, dtype=torch.float64)

    def train(model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            loss = model(**batch(step, own_rows())).loss
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean(loss))

    model = load(folder / "plain")
    train(model, torch.optim.AdamW(model.parameters(), **ADAMW), range(STEPS))
    params = sizes(model)
    model.save_pretrained(folder / "trained")
    dist.barrier()
    again = load(folder / "trained")
    assert sizes(again) == params
    return {"losses": losses, "norms": norms, "resumed": losses[STEPS // 2 :], "params": params, "kind": kind(again)}


RECIPES: dict[str, tuple[Callable[[Path], dict[str, Any]], Callable[[], Any]]] = {
    "accelerate": (accelerate, build),
    "efficient": (efficient, build),
    "trainer": (trainer, build),
    "trainer_bf16": (trainer_bf16, build),
    "sft": (sft, lambda: build(tied=True)),
    "sft_lora": (sft_lora, adapted),
    "dpo": (dpo, build),
    "from_pretrained": (from_pretrained, build),
}


def main(name: str) -> None:
    """Trains with both libraries and with none; rank 0 prints what each told as a line of JSON."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    allow_cpus()
    recipe, model = RECIPES[name]
    content = {"plain": plain(model())}
    for library in ("FSDP2", "hsdp"):
        replace_fsdp2(library == "hsdp")
        with tempfile.TemporaryDirectory() as own:
            folder = [own]
            dist.broadcast_object_list(folder)
            forget()
            content[library] = recipe(Path(folder[0]))
            dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(content), flush=True)
    leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
