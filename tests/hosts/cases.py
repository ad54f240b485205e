"""Runs on several hosts: they begin, are killed and cut off, and go on with other numbers of hosts.

Each step must have the loss that it has in one process without an incident. ``nox -s hosts`` prints what was noticed,
and after how long.
"""

import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.hosts import train
from tests.hosts.network import Network, python, what_is_missing
from tests.launch.test_started_by import slurm_variables
from tests.pages import blocks
from tests.ranks import ROOT

if reason := what_is_missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.timeout(900)
_GLOBAL_BATCH = 12
"""Microbatches of one row; hosts 1, 2 and 3 share them evenly."""


class Cluster:
    """A run on the hosts of a network, and what it has written so far."""

    def __init__(self, network: Network, folder: Path, devices: int, max_steps: int, cache: str = "cache") -> None:
        self.network, self.folder, self._files = network, folder, ExitStack()
        num_nodes = len(network.hosts)
        num_microbatches = _GLOBAL_BATCH // (num_nodes * devices)
        options = {"num_nodes": num_nodes, "devices": devices, "num_microbatches": num_microbatches}
        self.options = {**options, "max_steps": max_steps, "cache": cache}

    def start(self, host: str, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        log = self._files.enter_context((self.folder / f"{host}.log").open("a"))
        script = [str(ROOT / "tests" / "hosts" / "train.py"), json.dumps(self.options)]
        return self.network.run(host, [*command, *script], log, **environment)

    def torchrun(self, host: str) -> subprocess.Popen[bytes]:
        """The two lines of docs/several_hosts.md, with other sizes and our script."""
        export, line = blocks("docs/several_hosts.md", "bash")[0].replace("\\\n", "").splitlines()
        sizes = {"1:2": f"1:{self.options['num_nodes']}", "8": str(self.options["devices"])}
        words = shlex.split(line)
        options = [sizes.get(word, word) for word in words[1 : words.index("-m")]]
        name, value = export.removeprefix("export ").split("=")
        return self.start(host, python("-m", "torch.distributed.run", *options), **{name: value})

    def task(self, host: str, **more: str) -> subprocess.Popen[bytes]:
        """The task of one of two hosts, with the variables of SLURM."""
        variables = slurm_variables(int(host[-1]) - 1, 2, "host[1-2]")
        return self.start(host, python(), **variables, **more)

    def lines(self, name: str) -> list[Any]:
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, what: Callable[[], bool], seconds: float = 240) -> float:
        """Until ``what`` is so; the seconds that it took."""
        begin = time.monotonic()
        while not what():
            assert time.monotonic() < begin + seconds, f"nothing after {seconds} s\n{self.told()}"
            time.sleep(0.1)
        return time.monotonic() - begin

    def wait_for_step(self, step: int, seconds: float = 240, world_size: int | None = None) -> float:
        def is_done() -> bool:
            return any(done >= step and world_size in (None, size) for done, _, size, _ in self.lines("steps"))

        return self.wait_for(is_done, seconds)

    def said(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def told(self) -> str:
        return "\n".join(f"---- {path.name}\n{path.read_text()[-6000:]}" for path in sorted(self.folder.glob("*.log")))

    def check_losses(self) -> None:
        """Every step was computed as without incidents; fp32 is summed in another order."""
        expected = _losses_of_one_process(self.options["max_steps"])
        for step, loss, *_ in self.lines("steps"):
            assert loss == pytest.approx(expected[step], rel=2e-5), f"step {step}"


@cache
def _losses_of_one_process(max_steps: int) -> dict[int, float]:
    """Of each step; the order of samples depends on how many the whole run takes."""
    sizes = {"num_nodes": 1, "devices": 1, "num_microbatches": _GLOBAL_BATCH}
    options = {**sizes, "max_steps": max_steps, "cache": "cache"}
    with TemporaryDirectory() as folder:
        command = python(train.__file__, json.dumps(options))
        subprocess.run(command, cwd=folder, env=_environment(), check=True, timeout=300, capture_output=True)
        return {step: loss for step, loss, *_ in map(json.loads, (Path(folder) / "steps").read_text().splitlines())}


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "STEP_SECONDS": "0"}


@pytest.fixture
def network(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Network]:
    with Network(request.param, tmp_path) as made:
        yield made


def _print(news: str) -> None:
    print(f"\n>>> {news}", flush=True)


@pytest.mark.parametrize("network", [2, 3], indirect=True)
def test_torchrun_goes_on_without_a_host_and_takes_it_back(network: Network, tmp_path: Path) -> None:
    hosts, lost = network.hosts, network.hosts[-1]
    cluster = Cluster(network, tmp_path, devices=1, max_steps=100)
    agents = {host: cluster.torchrun(host) for host in hosts}
    cluster.wait_for_step(3, world_size=len(hosts))

    network.unplug(lost)
    begin, done = time.monotonic(), len(cluster.lines("steps"))
    time.sleep(10)
    network.plug(lost)
    cluster.wait_for(lambda: len(cluster.lines("steps")) > done + 2)
    _print(
        f"{len(hosts)} hosts, cable pulled for 10 s: steps again {time.monotonic() - begin:.0f} s after it was pulled"
    )
    assert len(cluster.lines("begins")) == len(hosts), cluster.told()  # the same processes

    network.unplug(lost)
    network.kill(lost)
    begin, done = time.monotonic(), len(cluster.lines("steps"))
    noticed = cluster.wait_for(lambda: "failed (exitcode" in cluster.said())
    cluster.wait_for(lambda: len(cluster.lines("steps")) > done + 1 and cluster.lines("steps")[-1][2] < len(hosts))
    without = time.monotonic() - begin
    _print(f"{len(hosts)} hosts, one without power: noticed after {noticed:.0f} s, steps again after {without:.0f} s")

    network.plug(lost)
    begin = time.monotonic()
    agents[lost] = cluster.torchrun(lost)
    cluster.wait_for(lambda: cluster.lines("steps")[-1][2] == len(hosts))
    _print(f"{len(hosts)} hosts, one is back: steps of all after {time.monotonic() - begin:.0f} s")
    assert {agent.wait(240) for agent in agents.values()} == {0}, cluster.told()
    assert cluster.lines("steps")[-1][0] == 100
    cluster.check_losses()
    assert cluster.said().count("Building the index") == 1  # by one host, in the shared folder
    assert "interface eth0" in cluster.said()


@pytest.mark.parametrize("network", [2], indirect=True)
def test_a_wrong_interface_is_named(network: Network, tmp_path: Path) -> None:
    cluster = Cluster(network, tmp_path, devices=1, max_steps=2)
    ranks = [cluster.task(host, GLOO_SOCKET_IFNAME="lo") for host in network.hosts]
    # A rank to which others connect waits for five times a collective's timeout in gloo, unless its launcher ends it.
    assert all(rank.wait(400) != 0 for rank in ranks)
    assert "GLOO_SOCKET_IFNAME=lo: expected the network interface of this host that the 2 hosts" in cluster.said()
