"""docs/launching.md: each file is read by its tool or run with stand-ins; torchrun's line, on two nodes, outlives one.

Two network namespaces stand in for two nodes. What takes minutes, root or another package runs with HSDP_FULL=1.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.netns import two_nodes
from hsdp.examples.options import parse_options
from tests.docs.documents import ROOT, blocks, commands
from tests.support.share import FULL

PAGE = ROOT / "docs" / "launching.md"
FILES = {block.title: block.text for block in blocks(PAGE) if block.title is not None}
SMALL = "--steps 60 --batch 8 --seq-len 16 --width 16 --layers 2 --heads 2 --hidden 24 --corpus-bytes 200000 --no-sample"
QUICK = "--rdzv-conf last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
"""As the page has it: torchrun notices a lost node in seconds."""

full = pytest.mark.skipif(not FULL, reason="takes minutes, root, or another tool: HSDP_FULL=1")


def test_every_tool_of_the_page_has_its_file() -> None:
    assert set(FILES) == {"train.sbatch", "pytorchjob.yaml", "ray_train.py", "train.sky.yaml"}
    assert f"`{QUICK}`" in PAGE.read_text()


def test_options_that_the_page_gives_to_the_example_exist() -> None:
    for text in [*FILES.values(), *(command for block in blocks(PAGE, "sh") for command in commands(block))]:
        found = re.search(r"hsdp\.examples\.train_lm\"?,?(.*)$", text.replace("\\\n", " "), re.MULTILINE)
        if found is not None:
            words = re.findall(r"[\w./$:{}-]+", found[1].replace('"', " "))
            parse_options([word if word.startswith("--") or word.isdigit() else "x" for word in words], 4)


def _bash(script: Path, **env: str) -> str:
    run = subprocess.run(["bash", str(script)], capture_output=True, text=True, cwd=script.parent, env=os.environ | env)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_the_slurm_script_starts_one_torchrun_per_node(tmp_path: Path) -> None:
    """With stand-ins for Slurm's commands: `srun` runs its command here, torchrun prints what it was given."""
    script = tmp_path / "train.sbatch"
    script.write_text(FILES["train.sbatch"])
    for name, body in {
        "scontrol": '[ "$*" = "show hostnames node[7-8]" ] && printf "node7\\nnode8\\n"',
        "srun": '"$@"',
        "torchrun": 'echo "torchrun $*"',
    }.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "42", "SLURM_GPUS_ON_NODE": "8"}
    told = _bash(script, PATH=f"{tmp_path}:{os.environ['PATH']}", CHECKPOINTS="/shared/c", **slurm)
    assert told.strip() == (
        "torchrun --nnodes 2 --nproc-per-node 8 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint node7:29400 "
        "--rdzv-id 42 -m hsdp.examples.train_lm --checkpoint-dir /shared/c"
    )
    options = re.findall(r"^#SBATCH --([\w-]+)", FILES["train.sbatch"], re.MULTILINE)
    assert " ".join(options) == "job-name nodes ntasks-per-node gpus-per-node cpus-per-task time requeue"


def _needs(package: str) -> Any:
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package} is not installed")
    return importlib.import_module(package)


@full
def test_the_kubernetes_file_is_a_pytorchjob() -> None:
    """Kubeflow's own client makes its objects of it, which refuse unknown and missing fields."""
    training, yaml = _needs("kubeflow.training"), _needs("yaml")
    content = yaml.safe_load(FILES["pytorchjob.yaml"])
    client = training.ApiClient()
    job = client.deserialize(SimpleNamespace(data=json.dumps(content)), training.KubeflowOrgV1PyTorchJob)
    assert client.sanitize_for_serialization(job) == content, "a field is unknown, or of another type"
    assert job.spec.pytorch_replica_specs["Worker"].template.spec.containers[0].name == "pytorch", "what the operator wants"
    assert job.spec.pytorch_replica_specs["Worker"].replicas == job.spec.elastic_policy.max_replicas


@full
def test_the_skypilot_file_is_a_task() -> None:
    sky, yaml = _needs("sky"), _needs("yaml")
    from sky.utils import schemas  # type: ignore[import-not-found]

    config = yaml.safe_load(FILES["train.sky.yaml"])
    _needs("jsonschema").validate(config, schemas.get_task_schema())
    task = sky.Task.from_yaml_config({name: value for name, value in config.items() if name != "file_mounts"})
    assert task.num_nodes == 2 and "torchrun" in task.run
    subprocess.run(["bash", "-n"], input=f"{config['setup']}\n{config['run']}", text=True, check=True)


@full
def test_the_ray_script_trains_and_goes_on(tmp_path: Path) -> None:
    _needs("ray")
    (tmp_path / "ray_train.py").write_text(FILES["ray_train.py"])
    results = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "ray_train.py", str(tmp_path / "storage")],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        results.append(done.stdout + done.stderr)
    assert "step 20: loss" in results[0] and "step 40: loss" in results[1]


@full
def test_torchrun_on_two_nodes_outlives_one(tmp_path: Path) -> None:
    """The page's line on both nodes; the second is taken away when there is a checkpoint, and the first ends the job."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    pasted = [command for block in blocks(PAGE, "sh") if block.title is None for command in commands(block)]
    (line,) = (command for command in pasted if "--nnodes" in command)
    line = line.replace("torchrun", f"{sys.executable} -m torch.distributed.run {QUICK}")  # and the patience of a test
    out, checkpoints = tmp_path / "out", tmp_path / "shared" / "checkpoints"
    line += f" {SMALL} --log-every 1 --out {out} --device cpu"
    with two_nodes() as nodes, _host_names(nodes.names):
        agents, logs = [], []
        for name, host in zip(nodes.names, HOSTS, strict=True):
            logs.append(tmp_path / f"{host}.log")
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": name, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            with logs[-1].open("w") as log:
                inside = ["unshare", "--uts", "bash", "-c", f"hostname {host}; exec {line}"]
                command = ["ip", "netns", "exec", name, *inside]
                agents.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log))
        try:
            _wait_until(lambda: any(checkpoints.glob("step-*")), agents, logs)
            inside = subprocess.run(["ip", "netns", "pids", nodes.names[1]], capture_output=True, text=True, check=True)
            for pid in inside.stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            assert agents[0].wait(600) == 0, logs[0].read_text()[-4000:]
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
    text = logs[0].read_text()
    assert "on 4 x cpu, mesh (replicate=2, shard=2)" in text and "on 2 x cpu, mesh (replicate=1, shard=2)" in text, text
    resumed = re.findall(r"going on from step (\d+)", text)
    assert resumed and 10 <= int(resumed[-1]) < 60, "the node was lost on the way"
    held_out = [float(loss) for loss in re.findall(r"held-out (\d+\.\d+)", text)]
    assert "step 60/60" in text and held_out[-1] < held_out[0] - 0.2, "both nodes, then one, learned"
    assert (out / "summary.json").exists()


HOSTS = ("node-a", "node-b")


@contextlib.contextmanager
def _host_names(nodes: list[str]) -> Iterator[None]:
    """`ip netns exec` puts these files in the place of /etc/hosts, so that the nodes find each other by name."""
    paths = [Path("/etc/netns", name) for name in nodes]
    addresses = [f"10.213.77.{number} {host}" for number, host in enumerate(HOSTS, 1)]
    try:
        for path in paths:
            path.mkdir(parents=True)
            (path / "hosts").write_text("\n".join(["127.0.0.1 localhost", *addresses]) + "\n")
        yield
    finally:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)


def _wait_until(done: Any, processes: list[Any], logs: list[Path]) -> None:
    deadline = time.monotonic() + 300
    while not done():
        assert time.monotonic() < deadline and all(one.poll() is None for one in processes), logs[0].read_text()[-4000:]
        time.sleep(0.05)
