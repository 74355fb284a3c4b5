"""The main job: a small Llama learns CPython's standard library, byte by byte, on a hybrid-sharded mesh.

    torchrun --nproc-per-node 4 -m hsdp.examples.train_lm
    torchrun --nproc-per-node 4 --max-restarts 3 -m hsdp.examples.train_lm --checkpoint-dir runs/checkpoints

What hsdp adds to a plain PyTorch loop is in `build` and two lines of `train_step`. The data of a step depends on the seed,
the step and the global batch, never on the mesh, so a run that finds a checkpoint in its directory, left on whatever mesh,
goes on as if it had not stopped: after Ctrl-C with the same command, after the loss of a process by torchrun's restart, on
fewer machines as well as on more.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from hsdp import HSDPModule, MixedPrecisionPolicy, checkpoint, clip_grad_norm_, elastic, fully_shard, optim, trace
from hsdp.examples.corpus import (
    Corpus,
    CorpusError,
    batch_windows,
    consecutive_windows,
    load_corpus,
    ngram_cross_entropy,
)
from hsdp.examples.launch import (
    EXIT_INTERRUPTED,
    JobError,
    StopSignal,
    choose_device,
    leave,
    on_rank_zero,
    process_group,
    run_job,
    sum_over_ranks,
    world_size,
)
from hsdp.examples.llama import Llama, generate
from hsdp.examples.logs import Log, open_log
from hsdp.examples.options import Options, parse_options
from hsdp.examples.replicas import join_replicas
from hsdp.examples.report import Baselines, Progress, Report, peak_memory_bytes, prepare_folder

NUM_QUICK_WINDOWS = 128  # held-out windows behind each progress line; the last figure takes all of them
EVAL_WINDOWS_PER_RANK = 32  # in one forward
MAX_GRAD_NORM = 1.0
STEPS_BEFORE_TRACE = 5  # the first ones record orders and ask other ranks; of fewer steps the last one is traced
NUM_SAMPLE_BYTES = 240
SAMPLE_TEMPERATURE = 0.8


def main(argv: list[str] | None = None) -> int:
    """Runs the job on this rank and returns its exit code."""
    return run_job("train_lm", lambda stop: _main(argv, stop))


def _main(argv: list[str] | None, stop: StopSignal) -> int:
    options = parse_options(argv, world_size())
    device = choose_device(options.device)
    with process_group(device, options.timeout):
        return run(options, device, stop)


@dataclass(frozen=True)
class Job:
    """What a run is made of on this rank."""

    options: Options
    device: torch.device
    corpus: Corpus
    model: Llama
    optimizer: Optimizer
    replicas: elastic.ElasticOptimizer | None
    report: Report
    first_step: int


def run(options: Options, device: torch.device, stop: StopSignal) -> int:
    """Trains, evaluates on all held-out text, shows a sample. Every rank calls it; returns the exit code."""
    started = time.perf_counter()
    corpus = _load_corpus(options)
    model, optimizer = build(options, device)
    name = options.elastic
    replicas = None if name is None else join_replicas(name, device, options.timeout, model, optimizer)
    first_step = _resume(options, model, optimizer, replicas)
    report = _open_report(options, corpus, first_step)
    job = Job(options, device, corpus, model, optimizer, replicas, report, first_step)
    _introduce(job)

    try:
        return _train_and_show(job, stop, started)
    finally:
        job.report.close()


def _train_and_show(job: Job, stop: StopSignal, started: float) -> int:
    options, corpus, model, device = job.options, job.corpus, job.model, job.device
    first_step = job.first_step
    num_done = train(job, first_step, stop)
    if options.checkpoint_dir is not None and num_done > first_step and (path := _save(job, num_done, False)) is not None:
        job.report.say(f"checkpoint: {path}")
    if job.replicas is not None:
        dist.barrier()  # rank 0 serves all of this replica: it answers the last vote of each before it leaves
        job.replicas.manager.shutdown(wait=False)  # type: ignore[attr-defined]  # the others need not wait for it
    if num_done < options.steps:
        resumable = options.checkpoint_dir is not None
        job.report.say(f"interrupted after step {num_done}" + "; the same command goes on from there" * resumable)
        return EXIT_INTERRUPTED

    loss = evaluate(model, consecutive_windows(corpus.held_out, options.seq_len), device, stop)
    if loss is None:
        job.report.say(f"interrupted while evaluating, after step {num_done} of {options.steps}")
        return EXIT_INTERRUPTED
    job.report.conclude(loss, num_steps=num_done, seconds=time.perf_counter() - started)
    if options.sample:
        return _show_sample(job, stop)
    return 0


def build(options: Options, device: torch.device) -> tuple[Llama, Optimizer]:
    """The sharded model and its optimizer, which is PyTorch's own, or Muon: parameters are DTensors."""
    torch.manual_seed(options.seed)  # the same values on every rank and every mesh
    model = Llama(options.model).to(device)
    mesh = init_device_mesh(device.type, (options.replicate, options.shard), mesh_dim_names=("replicate", "shard"))
    precision = MixedPrecisionPolicy()
    if options.dtype == "bf16":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model, _make_optimizer(options, model)


def _make_optimizer(options: Options, model: Llama) -> Optimizer:
    adamw: dict[str, Any] = {"lr": options.lr, "betas": (0.9, 0.95), "weight_decay": options.weight_decay, "fused": True}
    if options.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), **adamw)
    matrices = [param for param in model.blocks.parameters() if param.ndim == 2]
    among = set(matrices)
    others = [param for param in model.parameters() if param not in among]
    return optim.Muon(
        [{"params": matrices}, {"params": others, "algorithm": "adamw", **adamw}],
        lr=options.muon_lr,
        weight_decay=options.weight_decay,
    )


def train(job: Job, first_step: int, stop: StopSignal) -> int:
    """Trains up to `--steps` or until any rank is asked to stop; returns the number of steps done."""
    options, device, model = job.options, job.device, job.model
    quick_windows = _spread(consecutive_windows(job.corpus.held_out, options.seq_len), NUM_QUICK_WINDOWS)
    losses: list[float] = []
    since = time.perf_counter()
    step, num_attempts, num_replicas = first_step, 0, 1
    attempt_to_trace = min(STEPS_BEFORE_TRACE, options.steps - first_step - 1)
    while step < options.steps:
        share = options.share_of_lr(step)
        for group, peak_lr in zip(job.optimizer.param_groups, options.peak_lrs, strict=True):
            # Both as the options say: a checkpoint, or another replica, gave the groups the settings of its own run.
            group.update(lr=share * peak_lr, weight_decay=options.weight_decay)
        rows = _rank_rows(job, _begin_step(job, step)).to(device)
        if options.trace is not None and num_attempts == attempt_to_trace:
            loss, grad_norm, took = _traced_step(job, rows, options.trace)
        else:
            loss, grad_norm, took = train_step(model, job.replicas or job.optimizer, rows)
        num_attempts += 1
        # One small sum tells all ranks the loss of the global batch, and lets them stop after the same step.
        loss_sum, num_stopping = sum_over_ranks([loss.item(), float(stop.requested)], device)
        if job.replicas is not None:
            manager = job.replicas.manager
            if not took:
                job.report.say(f"step {step + 1} is taken again: a replica was lost")
                continue
            if num_replicas != manager.num_participants():
                num_replicas = manager.num_participants()
                job.report.say(f"step {manager.current_step()}: {num_replicas} replicas take part")
            step = manager.current_step() - 1  # a replica that joined has come to where the others are
        losses.append(loss_sum / options.world_size)
        job.report.step(step + 1, losses[-1])
        _check_finite("loss", losses[-1], step + 1, options)
        step = num_done = step + 1
        if num_done % options.log_every == 0 or num_done == options.steps:
            num_tokens = len(losses) * options.batch * options.seq_len
            tokens_per_second = num_tokens / (time.perf_counter() - since)
            held_out_loss = evaluate(model, quick_windows, device)
            assert held_out_loss is not None, "without a signal to look for it goes on to the end"
            # Weights may be lost in a step whose own loss, taken before it, was finite still.
            _check_finite("held-out loss", held_out_loss, num_done, options)
            progress = Progress(
                step=num_done,
                train_loss=sum(losses) / len(losses),
                held_out_loss=held_out_loss,
                grad_norm=grad_norm.item(),
                learning_rate=share * options.lr,
                tokens_per_second=tokens_per_second,
                peak_memory_bytes=peak_memory_bytes(device),
            )
            job.report.progress(progress, options.steps)
            losses, since = [], time.perf_counter()
        if num_stopping:
            return num_done
        if options.checkpoint_dir is not None and num_done % options.save_every == 0 and num_done < options.steps:
            _save(job, num_done, options.async_save)
    return options.steps


def _check_finite(what: str, loss: float, num_done: int, options: Options) -> None:
    """Every rank calls it with the loss of all ranks, so that they end together."""
    if not math.isfinite(loss):
        raise JobError(f"the {what} is {loss} in step {num_done}; try a lower --lr than {options.lr}")


def train_step(
    model: Llama, optimizer: Optimizer | elastic.ElasticOptimizer, micro_batches: Tensor
) -> tuple[Tensor, Tensor, bool]:
    """One optimizer step on this rank's `int64 [accumulate, rows, seq_len + 1]`.

    Returns this rank's mean loss, the norm of the whole gradient before clipping, and whether the step was taken.
    """
    assert isinstance(model, HSDPModule)
    num_micro_batches = len(micro_batches)
    loss_sum = torch.zeros((), device=micro_batches.device)
    for index, windows in enumerate(micro_batches):
        with model.accumulate(last=index == num_micro_batches - 1):  # replicas are summed once, with the last one
            loss = next_byte_loss(model, windows) / num_micro_batches
            loss.backward()
        loss_sum += loss.detach()
    grad_norm = clip_grad_norm_(model, MAX_GRAD_NORM)
    took = optimizer.step()
    model.zero_grad()
    return loss_sum, grad_norm, took is not False


def _begin_step(job: Job, step: int) -> int:
    """The number of the batch that a step takes: with replicas that come and go, that of this one."""
    if job.replicas is None:
        return step
    job.replicas.zero_grad()
    return elastic.batch_index(job.replicas.manager)


def _traced_step(job: Job, rows: Tensor, folder: Path) -> tuple[Tensor, Tensor, bool]:
    """A step whose trace each rank writes to `folder`, rank 0 with its summary."""
    dist.barrier()  # or what ranks did before it shows as waiting
    with trace(job.model) as traced:
        result = train_step(job.model, job.replicas or job.optimizer, rows)
    prepare_folder(folder)
    traced.to_chrome(folder / f"rank{dist.get_rank()}.json")
    traced.to_svg(folder / f"rank{dist.get_rank()}.svg")
    job.report.say(str(traced.summary()))
    return result


def next_byte_loss(model: Llama, windows: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats of each byte but the first of `int64 [rows, seq_len + 1]`."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def evaluate(model: Llama, windows: Tensor, device: torch.device, stop: StopSignal | None = None) -> float | None:
    """Nats per byte over all `windows`, shared out among the ranks; None if `stop` came on any. Every rank calls it."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    loss_sum, num_bytes = 0.0, 0
    for chunk in windows.split(num_ranks * EVAL_WINDOWS_PER_RANK):
        if stop is not None and _any_stops(stop, device):
            return None
        mine = chunk[rank::num_ranks]
        # A forward is a collective: a rank for which no window is left joins in with another's, uncounted.
        loss = next_byte_loss(model, (mine if len(mine) else chunk[:1]).to(device), reduction="sum")
        if len(mine):
            loss_sum += loss.item()
            num_bytes += mine[:, 1:].numel()
    total_loss, total_bytes = sum_over_ranks([loss_sum, float(num_bytes)], device)
    return total_loss / total_bytes


def _any_stops(stop: StopSignal, device: torch.device) -> bool:
    """Whether any rank was asked to stop, the same answer on all of them."""
    return sum_over_ranks([float(stop.requested)], device)[0] > 0


def _rank_rows(job: Job, step: int) -> Tensor:
    """This rank's part of the global batch: `int64 [accumulate, rows, seq_len + 1]`."""
    options = job.options
    windows = batch_windows(job.corpus.train, seed=options.seed, step=step, batch=options.batch, seq_len=options.seq_len)
    return windows.view(options.accumulate, options.world_size, -1, options.seq_len + 1)[:, dist.get_rank()]


def _spread(windows: Tensor, num_wanted: int) -> Tensor:
    """At most `num_wanted` of the windows, at even distances."""
    return windows[:: math.ceil(len(windows) / num_wanted)]


def _load_corpus(options: Options) -> Corpus:
    try:
        corpus = load_corpus(options.corpus_bytes)
    except CorpusError as error:
        raise JobError(str(error)) from None
    shortest = min(len(corpus.train), len(corpus.held_out))
    if shortest <= options.seq_len:
        raise JobError(
            f"--seq-len {options.seq_len} needs more text than the {shortest} bytes of "
            f"the smaller side of the split; raise --corpus-bytes {options.corpus_bytes}"
        )
    return corpus


_IDENTITY = ("seed", "batch", "corpus_bytes", "seq_len", "width", "layers", "heads", "hidden")
"""What must be the same for a run to go on from a checkpoint: with other values its data or its model would differ."""


def _identity(options: Options) -> dict[str, int]:
    return {name: getattr(options, name) for name in _IDENTITY}


def _resume(options: Options, model: Llama, optimizer: Optimizer, replicas: elastic.ElasticOptimizer | None = None) -> int:
    """Loads the last checkpoint, if there is one, and returns the number of steps behind it."""
    if options.checkpoint_dir is None:
        return 0
    try:
        if replicas is None:
            loaded = checkpoint.resume(options.checkpoint_dir, model, optimizer)
        else:
            loaded = elastic.resume(options.checkpoint_dir, replicas)
    except checkpoint.CheckpointError as error:
        # Parameters of other shapes are many errors with one reason.
        raise JobError(on_rank_zero(lambda: _other_run(options)) or str(error)) from error
    if loaded is None:
        return 0
    if mistake := _mistaken(options, loaded):
        raise JobError(mistake)
    if loaded.extra["step"] > options.steps:
        raise JobError(f"{loaded.path} is past --steps {options.steps}")
    checkpoint.set_rng_state(loaded.extra["rng"])
    return int(loaded.extra["step"])


def _mistaken(options: Options, loaded: checkpoint.Loaded) -> str | None:
    """What is wrong with going on from a checkpoint with these options."""
    asked = _identity(options)
    if not _is_of_this_job(loaded.extra):
        is_elastic = isinstance(loaded.extra, dict) and _is_of_this_job(loaded.extra.get("extra"))  # of elastic.save
        origin = "with --elastic; use that, or" if is_elastic else "by another program; use"
        return f"{loaded.path} was saved {origin} another --checkpoint-dir"
    saved = loaded.extra["run"]
    differing = [f"--{name.replace('_', '-')} {saved[name]}" for name in asked if saved[name] != asked[name]]
    return (
        f"{loaded.path} was made with {' '.join(differing)}; use that, or another --checkpoint-dir" if differing else None
    )


def _is_of_this_job(extra: object) -> bool:
    """Whether a checkpoint has what `_save` puts beside the model; other programs may train the same one."""
    if not isinstance(extra, dict) or not extra.keys() >= {"step", "run", "rng"}:
        return False
    return isinstance(extra["run"], dict) and extra["run"].keys() >= set(_IDENTITY)


def _other_run(options: Options) -> str | None:
    """The same for one that could not be loaded; None if it cannot be read, or is not of this job."""
    try:
        found = checkpoint.verify(options.checkpoint_dir or "")
        return _mistaken(options, found) if _is_of_this_job(found.extra) else None
    except checkpoint.CheckpointError:
        return None


def _save(job: Job, num_done: int, in_background: bool) -> Path | checkpoint.RemotePath | None:
    """Saves a checkpoint; returns where, or None on replicas that leave it to another."""
    options = job.options
    assert options.checkpoint_dir is not None, "the caller has asked"
    # Nothing here draws from the generators (the data follows from seed and step, dropout there is none), but with the
    # first layer that does they belong here.
    extra = {"step": num_done, "run": _identity(options), "rng": checkpoint.rng_state()}
    if job.replicas is not None:
        return elastic.save(options.checkpoint_dir, job.replicas, extra, keep=options.keep)
    return checkpoint.save(
        options.checkpoint_dir, job.model, job.optimizer, extra, step=num_done, keep=options.keep, async_=in_background
    ).path


def _open_report(options: Options, corpus: Corpus, first_step: int) -> Report:
    logs: list[Log] = []

    def measure() -> Baselines:
        # Folders first: a path that cannot be written should not cost the user a run.
        for folder in filter(None, (options.out, options.checkpoint_dir, options.trace)):
            prepare_folder(folder)
        logs.extend(open_log(name, options.out, asdict(options), resumed=first_step > 0) for name in options.log)
        return Baselines(ngram_cross_entropy(corpus, 2), ngram_cross_entropy(corpus, 3))

    baselines = on_rank_zero(measure)
    out = options.out if dist.get_rank() == 0 else None
    return Report(out, baselines, resumed_at=first_step, num_steps=options.steps, logs=logs)


def _introduce(job: Job) -> None:
    options, corpus, report = job.options, job.corpus, job.report
    num_parameters = sum(parameter.numel() for parameter in job.model.parameters())
    report.say(
        f"{num_parameters:,} parameters, {options.dtype}, on {options.world_size} x {job.device.type}, "
        f"mesh (replicate={options.replicate}, shard={options.shard})"
    )
    report.say(
        f"text: {len(corpus.train):,} bytes in {corpus.num_train_files} files; "
        f"held out {len(corpus.held_out):,} bytes in {corpus.num_held_out_files} whole files"
    )
    if job.first_step:
        report.say(f"going on from step {job.first_step}, the last checkpoint in {options.checkpoint_dir}")
    report.introduce()


def _show_sample(job: Job, stop: StopSignal) -> int:
    prompt = torch.tensor(list(os.fsencode(job.options.prompt)), device=job.device)
    text = generate(
        job.model,
        prompt,
        num_tokens=NUM_SAMPLE_BYTES,
        window=job.options.seq_len,
        seed=job.options.seed,
        temperature=SAMPLE_TEMPERATURE,
        stops=lambda: _any_stops(stop, job.device),
    )
    job.report.say("sample:")
    job.report.say(bytes(text.tolist()).decode("utf-8", errors="replace"))
    return EXIT_INTERRUPTED if len(text) < len(prompt) + NUM_SAMPLE_BYTES else 0


if __name__ == "__main__":
    leave(main())
