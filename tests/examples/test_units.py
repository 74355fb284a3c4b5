"""The parts of `hsdp.examples` that need no process group: text and baselines, model, picture, flags, report."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor

from hsdp.examples import corpus as corpus_module
from hsdp.examples.bar import ProgressBar
from hsdp.examples.corpus import (
    Corpus,
    CorpusError,
    batch_windows,
    consecutive_windows,
    load_corpus,
    ngram_cross_entropy,
)
from hsdp.examples.launch import EXIT_BAD_INPUT, EXIT_INTERRUPTED, JobError, StopSignal, run_job
from hsdp.examples.llama import Llama, LlamaConfig, _rotate, _rotations, generate
from hsdp.examples.logs import open_log
from hsdp.examples.options import FINAL_LR_FRACTION, parse_options
from hsdp.examples.picture import Curve, Level, loss_picture
from hsdp.examples.report import Baselines, Progress, Report, prepare_folder

SMALL = LlamaConfig(vocab=17, width=16, layers=2, heads=2, hidden=24, max_len=12)


def _stream(text: bytes) -> Tensor:
    return torch.tensor(list(text), dtype=torch.uint8)


def _corpus(train: bytes, held_out: bytes) -> Corpus:
    return Corpus(_stream(train), _stream(held_out), 1, 1)


def _write_sources(root: Path, num_files: int) -> None:
    for index in range(num_files):
        path = root / f"package{index % 3}" / f"module{index}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# file {index:03d}\n")


class TestCorpus:
    def test_split_is_by_whole_files_and_repeatable(self, tmp_path: Path) -> None:
        _write_sources(tmp_path, 100)
        first, second = load_corpus(10**6, tmp_path), load_corpus(10**6, tmp_path)
        assert torch.equal(first.train, second.train)
        assert torch.equal(first.held_out, second.held_out)
        assert (first.num_train_files + first.num_held_out_files, first.num_held_out_files > 0) == (100, True)
        train = set(bytes(first.train.tolist()).decode().splitlines())
        held_out = set(bytes(first.held_out.tolist()).decode().splitlines())
        assert train.isdisjoint(held_out)
        assert train | held_out == {f"# file {index:03d}" for index in range(100)}

    def test_a_new_file_moves_no_other_across_the_split(self, tmp_path: Path) -> None:
        _write_sources(tmp_path, 60)
        before = set(bytes(load_corpus(10**6, tmp_path).held_out.tolist()).decode().splitlines())
        _write_sources(tmp_path, 100)
        after = set(bytes(load_corpus(10**6, tmp_path).held_out.tolist()).decode().splitlines())
        assert before == {line for line in after if int(line.split()[-1]) < 60}

    def test_what_is_not_the_library_s_text_is_left_out(self, tmp_path: Path) -> None:
        _write_sources(tmp_path, 50)
        plain = load_corpus(10**7, tmp_path)
        for folder in ("test", "package0/tests", "site-packages/other", "encodings"):
            (tmp_path / folder).mkdir(parents=True)
            (tmp_path / folder / "unwanted.py").write_text("unwanted\n")
        (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
        (tmp_path / "generated.py").write_bytes(b"x" * (256 * 1024 + 1))
        (tmp_path / "_sysconfigdata_here.py").write_text("unwanted\n")
        (tmp_path / "notes.txt").write_text("unwanted\n")
        again = load_corpus(10**7, tmp_path)
        assert torch.equal(plain.train, again.train)
        assert torch.equal(plain.held_out, again.held_out)

    def test_the_cap_holds(self, tmp_path: Path) -> None:
        _write_sources(tmp_path, 100)
        capped = load_corpus(900, tmp_path)
        assert 900 - len("# file 000\n") < len(capped.train) + len(capped.held_out) <= 900

    def test_no_text_is_an_error_that_names_the_folder(self, tmp_path: Path) -> None:
        with pytest.raises(CorpusError, match=str(tmp_path)):
            load_corpus(10**6, tmp_path)

    def test_this_machine_has_a_standard_library(self) -> None:
        corpus = load_corpus(1_000_000)
        assert 500_000 < len(corpus.train) + len(corpus.held_out) <= 1_000_000
        assert corpus.train.dtype == torch.uint8

    def test_batches_depend_on_seed_and_step_alone(self) -> None:
        stream = torch.arange(200, dtype=torch.uint8)
        batch = batch_windows(stream, seed=1, step=5, batch=8, seq_len=10)
        assert (batch.shape, batch.dtype) == ((8, 11), torch.int64)
        assert torch.equal(batch, batch[:, :1] + torch.arange(11))  # windows of the stream
        assert torch.equal(batch, batch_windows(stream, seed=1, step=5, batch=16, seq_len=10)[:8])
        assert not torch.equal(batch, batch_windows(stream, seed=1, step=6, batch=8, seq_len=10))
        assert not torch.equal(batch, batch_windows(stream, seed=2, step=5, batch=8, seq_len=10))

    def test_every_byte_but_the_first_is_a_target_once(self) -> None:
        windows = consecutive_windows(torch.arange(21, dtype=torch.uint8), seq_len=5)
        assert windows[:, 1:].flatten().tolist() == list(range(1, 21))


def _naive_witten_bell(train: bytes, held_out: bytes, order: int) -> float:
    counts = [Counter(train[i : i + n] for i in range(len(train) - n + 1)) for n in range(order + 1)]

    def probability(gram: bytes) -> float:
        if not gram:
            return 1 / 256
        context = gram[:-1]
        successors = {other: count for other, count in counts[len(gram)].items() if other[:-1] == context}
        shorter = probability(gram[1:])
        if not successors:
            return shorter
        num_seen, num_different = sum(successors.values()), len(successors)
        return (successors.get(gram, 0) + num_different * shorter) / (num_seen + num_different)

    grams = [held_out[i : i + order] for i in range(len(held_out) - order + 1)]
    return -sum(math.log(probability(gram)) for gram in grams) / len(grams)


class TestNgrams:
    def test_a_text_that_can_be_done_by_hand(self) -> None:
        # Unigrams: 4 bytes, 2 different, b twice. Bigrams: a is followed by b twice, and by nothing else.
        shorter = (2 + 2 / 256) / (4 + 2)
        expected = -math.log((2 + 1 * shorter) / (2 + 1))
        assert ngram_cross_entropy(_corpus(b"abab", b"ab"), 2) == pytest.approx(expected, abs=1e-12)

    @pytest.mark.parametrize("order", [1, 2, 3])
    @pytest.mark.parametrize("chunk_bytes", [7, 2**20])
    def test_equals_the_naive_model(self, order: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(corpus_module, "_CHUNK_BYTES", chunk_bytes)
        train, held_out = b"the cat sat on the mat, the hat", b"that cat\xff ate the\x00 tea"
        found = ngram_cross_entropy(_corpus(train, held_out), order)
        assert found == pytest.approx(_naive_witten_bell(train, held_out, order), abs=1e-12)

    def test_bytes_never_seen_are_finite(self) -> None:
        entropy = ngram_cross_entropy(_corpus(b"aaaa", b"\x00\xff\x80"), 3)
        assert math.log(256) < entropy < 10

    def test_too_short_a_text_is_refused(self) -> None:
        with pytest.raises(ValueError, match="order 3"):
            ngram_cross_entropy(_corpus(b"abcd", b"ab"), 3)


class TestLlama:
    def test_shapes_and_dtype(self) -> None:
        model = Llama(SMALL)
        logits = model(torch.randint(SMALL.vocab, (3, 9)))
        assert (logits.shape, logits.dtype) == ((3, 9, SMALL.vocab), torch.float32)
        assert model.bfloat16()(torch.randint(SMALL.vocab, (1, 4))).dtype == torch.bfloat16

    def test_no_position_sees_what_comes_after_it(self) -> None:
        torch.manual_seed(0)
        model = Llama(SMALL).double()
        tokens = torch.randint(SMALL.vocab, (1, 10))
        changed = tokens.clone()
        changed[0, 6] = (changed[0, 6] + 1) % SMALL.vocab
        before, after = model(tokens)[0], model(changed)[0]
        # 1e-12 and not equal: a kernel may round differently where only masked values differ
        torch.testing.assert_close(before[:6], after[:6], rtol=0, atol=1e-12)
        assert all(not torch.equal(before[i], after[i]) for i in range(6, 10))

    def test_rotary_scores_depend_on_the_distance_alone(self) -> None:
        rotations = _rotations(SMALL)
        query, key = torch.randn(2, 1, 1, 1, 8).expand(2, 1, SMALL.max_len, 1, 8)
        turned_query, turned_key = _rotate(query, rotations)[0, :, 0], _rotate(key, rotations)[0, :, 0]
        scores = turned_query @ turned_key.T
        for distance in range(3):
            diagonal = scores.diagonal(distance)
            torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))

    def test_every_parameter_gets_a_gradient(self) -> None:
        model = Llama(SMALL)
        model(torch.randint(SMALL.vocab, (2, 8))).square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())

    def test_the_state_is_the_parameters(self) -> None:
        model = Llama(SMALL)
        assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}

    def test_bad_sizes_are_refused(self) -> None:
        with pytest.raises(ValueError, match="width 10 must be heads"):
            LlamaConfig(width=10, heads=2)
        with pytest.raises(ValueError, match="layers must be at least 1"):
            LlamaConfig(layers=0)
        with pytest.raises(ValueError, match="13 tokens are more than max_len 12"):
            Llama(SMALL)(torch.zeros(1, 13, dtype=torch.int64))

    def test_generation_is_repeatable_and_leaves_the_global_generator_alone(self) -> None:
        model = Llama(SMALL)
        prompt = torch.tensor([1, 2, 3])
        state = torch.get_rng_state()
        first = generate(model, prompt, num_tokens=20, window=SMALL.max_len, seed=7)
        second = generate(model, prompt, num_tokens=20, window=SMALL.max_len, seed=7)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(first, second)
        assert first[:3].tolist() == [1, 2, 3]
        assert len(first) == 23


_SVG = "{http://www.w3.org/2000/svg}"


class TestPicture:
    def _picture(self, *losses: float) -> ElementTree.Element:
        steps = range(20, 20 * len(losses) + 1, 20)
        text = loss_picture("a < b & c", curves=[Curve("held-out", steps, losses)], levels=[Level("bigram", 2.5)])
        return ElementTree.fromstring(text)

    def test_is_xml_with_axes_names_and_a_line_that_goes_down(self) -> None:
        picture = self._picture(5.25, 3.0, 1.75)
        texts = [text.text for text in picture.iter(f"{_SVG}text")]
        assert {"a < b & c", "nats per byte", "optimizer step", "held-out 1.75", "bigram 2.50"} <= set(texts)
        (line,) = picture.iter(f"{_SVG}polyline")
        points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        assert len(points) == 3
        assert points == sorted(points)  # to the right, and down: y grows downwards
        assert [y for _, y in points] == sorted(y for _, y in points)

    def test_everything_is_inside(self) -> None:
        picture = self._picture(5.25, 3.0, 1.75)
        width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
        for line in picture.iter(f"{_SVG}line"):
            assert all(0 <= float(line.attrib[name]) <= width for name in ("x1", "x2"))
            assert all(0 <= float(line.attrib[name]) <= height for name in ("y1", "y2"))

    @pytest.mark.parametrize("losses", [(2.5,), (2.5, 2.5), (1e-3, 1e3), (2.50001, 2.5)])
    def test_flat_single_and_wide_data_can_be_drawn(self, losses: tuple[float, ...]) -> None:
        labels = [text.text for text in self._picture(*losses).iter(f"{_SVG}text")]
        axis_labels = [label for label in labels if label and label.replace(".", "").replace(",", "").isdigit()]
        assert len(axis_labels) >= 4
        assert len(list(self._picture(*losses).iter(f"{_SVG}circle"))) == (len(losses) == 1)

    def test_names_never_overlap(self) -> None:
        levels = [Level(f"level {index}", 2.0 + index / 1000) for index in range(5)]
        text = loss_picture("title", curves=[Curve("train", [0, 9], [3.0, 2.0])], levels=levels)
        texts = list(ElementTree.fromstring(text).iter(f"{_SVG}text"))
        named = [one for one in texts if (one.text or "").startswith(("level", "train"))]
        heights = sorted(float(one.attrib["y"]) for one in named)
        assert len(heights) == 6
        assert all(high - low >= 15 for low, high in itertools.pairwise(heights))

    def test_what_cannot_be_drawn_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no curve has a point"):
            loss_picture("title", curves=[], levels=[])
        with pytest.raises(ValueError, match="not finite"):
            self._picture(1.0, float("nan"))


class TestOptions:
    @pytest.mark.parametrize(
        ("flags", "world_size", "shape"),
        [
            ("", 4, (2, 2)),
            ("", 8, (2, 4)),
            ("", 2, (1, 2)),
            ("", 1, (1, 1)),
            ("--replicate 4", 4, (4, 1)),
            ("--shard 4", 4, (1, 4)),
            ("--replicate 1 --shard 2", 2, (1, 2)),
        ],
    )
    def test_mesh_shapes(self, flags: str, world_size: int, shape: tuple[int, int]) -> None:
        options = parse_options(flags.split(), world_size)
        assert (options.replicate, options.shard) == shape
        assert options.world_size == world_size

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ("--replicate 3", "--replicate 3 x --shard 1 makes 3 ranks, but the number of processes is 4"),
            ("--shard 8", "makes 8 ranks"),
            ("--steps 0", "argument --steps: must be at least 1, not 0"),
            ("--steps many", "argument --steps: invalid int value: 'many'"),
            ("--save-every 0", "--save-every: must be at least 1, not 0"),
            ("--warmup -1", "--warmup: must not be negative"),
            ("--seed 99999999999999999999", "--seed: must have 64 bits"),
            ("--seed x", "argument --seed: invalid int value: 'x'"),
            ("--lr 0", "--lr: must be a positive number"),
            ("--lr nan", "--lr: must be a positive number"),
            ("--weight-decay 1", "--weight-decay: must be from 0 to below 1"),
            ("--dtype fp8", "--dtype: invalid choice"),
            ("--batch 6", "--batch 6 must be a multiple of 4"),
            ("--batch 12 --accumulate 2", "--batch 12 must be a multiple of 8"),
            ("--width 30", "width 30 must be heads"),
            ("--prompt=", "--prompt must have at least one character"),
            ("--stepz 3", "unrecognized arguments: --stepz 3"),
        ],
    )
    def test_bad_flags_are_named_on_one_line(self, flags: str, message: str) -> None:
        with pytest.raises(JobError) as caught:
            parse_options(flags.split(), 4)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


class TestEnding:
    def test_a_mistake_is_one_line_and_exit_code_2(self, capsys: pytest.CaptureFixture[str]) -> None:
        def job(stop: StopSignal) -> int:
            raise JobError("--batch is wrong")

        assert run_job("train_lm", job) == EXIT_BAD_INPUT
        assert capsys.readouterr().err == "train_lm: error: --batch is wrong\n"

    def test_only_rank_zero_speaks(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        def job(stop: StopSignal) -> int:
            os.kill(os.getpid(), signal.SIGTERM)  # as torchrun does when rank 0 has left
            raise JobError("--batch is wrong")

        monkeypatch.setenv("RANK", "1")
        assert run_job("train_lm", job) == EXIT_BAD_INPUT
        assert capfd.readouterr().err == ""

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_the_first_signal_asks_and_the_second_interrupts(
        self, capfd: pytest.CaptureFixture[str], number: signal.Signals
    ) -> None:
        asked = []

        def job(stop: StopSignal) -> int:
            os.kill(os.getpid(), number)
            asked.append(stop.requested)
            results.append(capfd.readouterr().err)
            os.kill(os.getpid(), number)
            raise AssertionError("the second signal was lost")

        results: list[str] = []

        before = signal.getsignal(signal.SIGINT)
        assert run_job("train_lm", job) == EXIT_INTERRUPTED
        assert asked == [True]
        assert signal.getsignal(signal.SIGINT) is before
        again = "press again" if number == signal.SIGINT else "send it again"
        assert results == [f"\nstopping after this step, {again} to stop now\n"], "at once, before the job looks"
        assert capfd.readouterr().err == "train_lm: interrupted\n"

    def test_a_save_in_the_background_is_completed(self, tmp_path: Path) -> None:
        script = (
            "import pathlib, sys, threading, time\nfrom hsdp.examples.launch import leave\n"
            "def save():\n    time.sleep(0.5)\n    pathlib.Path(sys.argv[1]).touch()\n"
            "threading.Thread(target=save).start()\nleave(3)\n"
        )
        command = [sys.executable, "-c", script, str(tmp_path / "saved")]
        assert subprocess.run(command, timeout=120, check=False).returncode == 3
        assert (tmp_path / "saved").exists()

    def test_a_bug_keeps_its_traceback(self) -> None:
        def job(stop: StopSignal) -> int:
            raise RuntimeError("a bug")

        with pytest.raises(RuntimeError, match="a bug"):
            run_job("train_lm", job)


def _progress(step: int, loss: float = 2.0) -> Progress:
    return Progress(step, loss, loss + 0.1, 0.5, 1e-3, 1000.0, 2**20)


class TestReport:
    def test_files_and_lines(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        report = Report(tmp_path, Baselines(2.5, 1.8))
        report.introduce()
        report.progress(_progress(20), 40)
        report.progress(_progress(40, 1.5), 40)
        report.conclude(1.7, num_steps=40, seconds=3.0)
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [20, 40]
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert summary == {"held_out_loss": 1.7, "steps": 40, "seconds": 3.0, "bigram": 2.5, "trigram": 1.8}
        ElementTree.fromstring((tmp_path / "loss.svg").read_text())
        printed = capsys.readouterr().out
        for word in (
            "bigram 2.500",
            "train 1.500",
            "held-out 1.600",
            "grad norm 0.50",
            "1,000 tokens/s",
            "1 MiB",
        ):
            assert word in printed
        assert "0.800 below the bigram, 0.100 below the trigram" in printed

    def test_a_resumed_run_keeps_what_was_before_the_checkpoint(self, tmp_path: Path) -> None:
        first = Report(tmp_path, Baselines(2.5, 1.8))
        for step in (10, 20, 30):
            first.progress(_progress(step), 40)
        with (tmp_path / "metrics.jsonl").open("a") as lines:
            lines.write('{"step": 15, "epoch": 2}\n[15]\n15\n{"step": 40, "train_lo')  # others wrote; killed while writing
        Report(tmp_path, Baselines(2.5, 1.8), resumed_at=20).progress(_progress(30, 1.0), 40)
        kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert [(line["step"], line["train_loss"]) for line in kept] == [(10, 2.0), (20, 2.0), (30, 1.0)]

    def test_a_folder_that_cannot_be_made_is_refused(self, tmp_path: Path) -> None:
        prepare_folder(tmp_path / "a" / "b")
        assert (tmp_path / "a" / "b").is_dir()
        (tmp_path / "file").write_text("")
        with pytest.raises(JobError, match=r"cannot make the folder .*file"):
            prepare_folder(tmp_path / "file")

    def test_other_ranks_are_silent(self, capsys: pytest.CaptureFixture[str]) -> None:
        report = Report(None, Baselines(2.5, 1.8))
        report.introduce()
        report.progress(_progress(1), 1)
        report.conclude(1.0, num_steps=1, seconds=1.0)
        assert capsys.readouterr().out == ""


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestProgressBar:
    def test_a_terminal_sees_a_line_that_is_drawn_over(self) -> None:
        terminal = _Terminal()
        bar = ProgressBar(40, 10, terminal)
        bar.step(20, "loss 2.000")
        bar.step(40, "loss 1.9")
        bar.clear()
        _, first, second, blank, end = terminal.getvalue().split("\r")
        assert first.startswith("20/40 [############------------] ") and first.endswith(" left  loss 2.000")
        assert second.startswith("40/40 [########################] 0:00 left  loss 1.9") and len(second) == len(first)
        assert blank.strip() == "" and end == ""

    def test_nobody_watches_a_file(self) -> None:
        file = io.StringIO()
        bar = ProgressBar(4, 0, file)
        bar.step(1, "loss")
        bar.clear()
        assert file.getvalue() == ""

    def test_the_time_that_remains_is_told_by_the_rate_of_this_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [100.0]
        monkeypatch.setattr(time, "perf_counter", lambda: now[0])
        bar = ProgressBar(1000, 10)
        assert bar.remaining(10) == "?", "there is no rate yet"
        now[0] += 5
        assert bar.remaining(15) == "16:25", "985 s: what was done before does not count"
        now[0] += 495
        assert bar.remaining(20) == "13:36:40"


class TestLogs:
    FIGURES: ClassVar = {"train_loss": 2.5, "held_out_loss": 2.75}

    def test_json_lines(self, tmp_path: Path) -> None:
        for step, resumed in ((10, False), (20, False), (40, True)):  # only a resumed run goes on in the same file
            log = open_log("jsonl", tmp_path, {}, resumed=resumed)
            log.write(step, self.FIGURES)
            log.close()
        lines = (tmp_path / "log.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [{"step": step, **self.FIGURES} for step in (20, 40)]

    def test_tensorboard(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        writer = mock.MagicMock()
        package = SimpleNamespace(SummaryWriter=mock.Mock(return_value=writer))
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", package)
        log = open_log("tensorboard", tmp_path, {"lr": 1}, resumed=False)
        log.write(20, self.FIGURES)
        log.close()
        package.SummaryWriter.assert_called_once_with(str(tmp_path / "tensorboard"), purge_step=0)
        assert writer.add_scalar.call_args_list == [mock.call(name, value, 20) for name, value in self.FIGURES.items()]
        writer.close.assert_called_once_with()

    def test_wandb_goes_on_with_its_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        package = mock.MagicMock()
        package.init.return_value.id = "abc"
        monkeypatch.setitem(sys.modules, "wandb", package)
        for resumed, before in ((False, None), (True, "abc"), (False, None)):
            log = open_log("wandb", tmp_path, {"lr": 1}, resumed=resumed)
            package.init.assert_called_with(dir=str(tmp_path), config={"lr": 1}, id=before, resume="allow")
            log.write(20, self.FIGURES)
            log.close()
        package.init.return_value.log.assert_called_with(self.FIGURES, step=20)
        assert package.init.return_value.finish.call_count == 3

    @pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
    def test_a_package_that_is_missing_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
    ) -> None:
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(JobError, match=rf"pip install 'hsdp\[{name}\]'"):
            open_log(name, tmp_path, {}, resumed=False)

    def test_a_report_sends_its_figures(self, tmp_path: Path) -> None:
        log = mock.Mock()
        report = Report(tmp_path, Baselines(2.5, 1.8), logs=[log])
        report.progress(_progress(20), 40)
        report.close()
        (step, figures), _ = log.write.call_args
        assert step == 20 and figures["train_loss"] == 2.0 and "step" not in figures
        log.close.assert_called_once_with()


def test_every_option_has_words_and_a_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--help"], 1)
    text = " ".join(capsys.readouterr().out.split())
    described = text[text.index("mesh (the product") :]
    entries = re.split(r" (?=--[a-z])", described)[1:]
    assert len(entries) > 25
    for entry in entries:
        assert re.search(r"[a-z]{2,} .*\(default: [^)]+\)", entry.split(" ", 1)[1]), entry
    assert "True" not in described and "None" not in described


def test_learning_rate_warms_up_and_ends_low() -> None:
    options = parse_options(["--warmup", "10", "--steps", "200"], 1)
    shares = [options.share_of_lr(step) for step in range(200)]
    assert shares[0] == pytest.approx(1 / 11)
    assert shares.index(max(shares)) == 10
    assert FINAL_LR_FRACTION < shares[-1] < FINAL_LR_FRACTION + 0.01
    assert parse_options(["--warmup", "0", "--steps", "1"], 1).share_of_lr(0) == 1.0
