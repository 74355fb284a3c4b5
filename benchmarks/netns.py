"""Two emulated nodes on one machine: network namespaces joined by a veth pair whose rate is limited.

    namespace a: rank 0, rank 1  --veth, tbf--  namespace b: rank 2, rank 3

Ranks of one namespace reach each other over its loopback, fast; ranks of different ones share the link, as the GPUs of
two hosts share a network card. Needs root and iproute2; takes away what it made, whatever happens.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

BURST = "256kb"
"""Of the token bucket. Larger than the 64 KiB packets that veth passes, small beside any transfer."""


class Nodes:
    """Two namespaces and the link between them; `two_nodes` makes one."""

    def __init__(self) -> None:
        # Interface names are at most 15 characters.
        self.names = [f"hsdp{os.getpid()}{side}" for side in "ab"]
        self._children: list[subprocess.Popen[bytes]] = []

    def limit(self, rate: str | None) -> None:
        """Limits each direction of the link to `rate` (as tc writes it: "1gbit"); None: as fast as the machine is."""
        for name in self.names:
            tc = ["ip", "netns", "exec", name, "tc", "qdisc"]
            subprocess.run([*tc, "del", "dev", name, "root"], capture_output=True, check=False)
            if rate is not None:
                _do([*tc, "add", "dev", name, "root", "tbf", "rate", rate, "burst", BURST, "latency", "200ms"])

    def run(self, commands: Sequence[tuple[int, Sequence[str]]], logs: Path, timeout: float) -> None:
        """Runs commands, each on a node (0 or 1), beside one another.

        Raises:
            RuntimeError: one of them failed, or they took longer than `timeout` seconds; the others are ended.
        """
        self._children = []
        paths = [logs / f"{i}.log" for i in range(len(commands))]
        for (node, command), path in zip(commands, paths, strict=True):
            name = self.names[node]
            # Otherwise gloo takes the address of the host name, which no other namespace reaches.
            environment = os.environ | {"GLOO_SOCKET_IFNAME": name, "OMP_NUM_THREADS": "1"}
            with path.open("wb") as log:
                inside = ["ip", "netns", "exec", name, *command]
                child = subprocess.Popen(inside, stdout=log, stderr=log, env=environment)
                self._children.append(child)
        try:
            for child, path in zip(self._children, paths, strict=True):
                if child.wait(timeout):
                    raise RuntimeError(f"{' '.join(map(str, child.args))} failed:\n{path.read_text()[-4000:]}")  # type: ignore[arg-type,union-attr]
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{error}\n{paths[0].read_text()[-4000:]}") from error
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends what `run` started."""
        for child in self._children:
            if child.poll() is None:
                child.kill()
            child.wait()


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """The nodes, taken away at the end.

    Raises:
        RuntimeError: this process may not make namespaces, or the tools are missing.
    """
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise RuntimeError("emulated nodes need root and iproute2 (apt-get install iproute2)")
    nodes = Nodes()
    a, b = nodes.names
    # So that a plain kill, too, runs what is below `finally`.
    before = signal.signal(signal.SIGTERM, lambda *_: exit(1))
    try:
        for name in nodes.names:
            _do(["ip", "netns", "add", name])
        # Both ends are born inside: nothing shows up among the machine's own interfaces.
        _do(["ip", "link", "add", a, "netns", a, "type", "veth", "peer", "name", b, "netns", b])
        for number, name in enumerate(nodes.names, 1):
            _do(["ip", "-n", name, "addr", "add", f"10.213.77.{number}/24", "dev", name])
            for interface in ("lo", name):
                _do(["ip", "-n", name, "link", "set", interface, "up"])
        yield nodes
    finally:
        nodes.stop()
        for name in nodes.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        signal.signal(signal.SIGTERM, before)


def _do(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
