"""Runs on several hosts that are killed or disconnected and continue with other numbers of hosts.

Each step must have the loss of an uninterrupted run in one process. ``nox -s hosts`` prints the times until faults were
noticed and training continued.
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
from tests.hosts.network import Network, missing_requirement, python
from tests.launch.test_started_by import slurm_variables
from tests.pages import blocks
from tests.ranks import ROOT

if reason := missing_requirement():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.timeout(900)
_GLOBAL_BATCH = 12
"""Microbatches of one row per step; divisible among 1, 2 and 3 hosts."""


class Cluster:
    """A run on the hosts of a network, and its output."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        devices: int,
        max_steps: int,
        cache: str = "cache",
    ) -> None:
        self.network = network
        self.folder = folder
        self._files = ExitStack()
        num_nodes = len(network.hosts)
        num_microbatches = _GLOBAL_BATCH // (num_nodes * devices)
        options = {"num_nodes": num_nodes, "devices": devices, "num_microbatches": num_microbatches}
        self.options = {**options, "max_steps": max_steps, "cache": cache}

    def start(
        self,
        host: str,
        command: list[str],
        **environment: str,
    ) -> subprocess.Popen[bytes]:
        log = self._files.enter_context((self.folder / f"{host}.log").open("a"))
        script = [str(ROOT / "tests" / "hosts" / "train.py"), json.dumps(self.options)]
        return self.network.run(
            host,
            [*command, *script],
            log,
            **environment,
        )

    def torchrun(self, host: str) -> subprocess.Popen[bytes]:
        """Start an agent with the two lines of docs/several_hosts.md, other sizes and our script."""
        export, line = blocks("docs/several_hosts.md", "bash")[0].replace("\\\n", "").splitlines()
        sizes = {"1:2": f"1:{self.options['num_nodes']}", "8": str(self.options["devices"])}
        words = shlex.split(line)
        options = [sizes.get(word, word) for word in words[1 : words.index("-m")]]
        name, value = export.removeprefix("export ").split("=")
        return self.start(
            host,
            python("-m", "torch.distributed.run", *options),
            **{name: value},
        )

    def task(self, host: str, **more: str) -> subprocess.Popen[bytes]:
        """Start the task of one of two hosts with the variables of SLURM."""
        variables = slurm_variables(int(host[-1]) - 1, 2, "host[1-2]")
        return self.start(host, python(), **variables, **more)

    def lines(self, name: str) -> list[Any]:
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(
        self,
        condition: Callable[[], bool],
        seconds: float = 240,
    ) -> float:
        """Wait until ``condition`` holds; return the seconds that it took."""
        begin = time.monotonic()
        while not condition():
            assert time.monotonic() < begin + seconds, (
                f"nothing after {seconds} s\n{self.log_tails()}"
            )
            time.sleep(0.1)
        return time.monotonic() - begin

    def wait_for_step(
        self, step: int, seconds: float = 240, world_size: int | None = None
    ) -> float:
        def is_done() -> bool:
            return any(
                done >= step and world_size in (None, size)
                for done, _, size, _ in self.lines("steps")
            )

        return self.wait_for(is_done, seconds)

    def logs(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def log_tails(self) -> str:
        return "\n".join(
            f"---- {path.name}\n{path.read_text()[-6000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def check_losses(self) -> None:
        """Check every loss against the run in one process, which sums fp32 in another order."""
        expected = _losses_of_one_process(self.options["max_steps"])
        for step, loss, *_ in self.lines("steps"):
            assert loss == pytest.approx(expected[step], rel=2e-5), f"step {step}"


@cache
def _losses_of_one_process(max_steps: int) -> dict[int, float]:
    """Loss of each step; the sample order depends on the number of samples of the complete run."""
    sizes = {"num_nodes": 1, "devices": 1, "num_microbatches": _GLOBAL_BATCH}
    options = {**sizes, "max_steps": max_steps, "cache": "cache"}
    with TemporaryDirectory() as folder:
        command = python(train.__file__, json.dumps(options))
        subprocess.run(
            command,
            cwd=folder,
            env=_environment(),
            check=True,
            timeout=300,
            capture_output=True,
        )
        return {
            step: loss
            for step, loss, *_ in map(json.loads, (Path(folder) / "steps").read_text().splitlines())
        }


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "STEP_SECONDS": "0",
    }


@pytest.fixture
def network(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Network]:
    with Network(request.param, tmp_path) as network:
        yield network


def print_time(text: str) -> None:
    print(f"\n>>> {text}", flush=True)


@pytest.mark.parametrize("network", [2, 3], indirect=True)
def test_torchrun_continues_without_a_host_and_readmits_it(
    network: Network, tmp_path: Path
) -> None:
    hosts = network.hosts
    lost = network.hosts[-1]
    cluster = Cluster(network, tmp_path, devices=1, max_steps=100)
    agents = {host: cluster.torchrun(host) for host in hosts}
    cluster.wait_for_step(3, world_size=len(hosts))

    network.unplug(lost)
    begin = time.monotonic()
    done = len(cluster.lines("steps"))
    time.sleep(10)
    network.plug(lost)
    cluster.wait_for(lambda: len(cluster.lines("steps")) > done + 2)
    print_time(
        f"{len(hosts)} hosts, cable pulled for 10 s: next step after {time.monotonic() - begin:.0f} s"
    )
    assert len(cluster.lines("begins")) == len(hosts), cluster.log_tails()  # the same processes

    network.unplug(lost)
    network.kill(lost)
    begin = time.monotonic()
    done = len(cluster.lines("steps"))
    noticed = cluster.wait_for(lambda: "failed (exitcode" in cluster.logs())
    cluster.wait_for(
        lambda: (
            len(cluster.lines("steps")) > done + 1 and cluster.lines("steps")[-1][2] < len(hosts)
        )
    )
    without = time.monotonic() - begin
    print_time(
        f"{len(hosts)} hosts, one without power: noticed after {noticed:.0f} s, next step after {without:.0f} s"
    )

    network.plug(lost)
    begin = time.monotonic()
    agents[lost] = cluster.torchrun(lost)
    cluster.wait_for(lambda: cluster.lines("steps")[-1][2] == len(hosts))
    print_time(
        f"{len(hosts)} hosts, one is back: step on all after {time.monotonic() - begin:.0f} s"
    )
    assert {agent.wait(240) for agent in agents.values()} == {0}, cluster.log_tails()
    assert cluster.lines("steps")[-1][0] == 100
    cluster.check_losses()
    assert cluster.logs().count("Building the index") == 1  # by one host, in the shared directory
    assert "interface eth0" in cluster.logs()


@pytest.mark.parametrize("network", [2], indirect=True)
def test_wrong_network_interface_is_named(network: Network, tmp_path: Path) -> None:
    cluster = Cluster(network, tmp_path, devices=1, max_steps=2)
    ranks = [cluster.task(host, GLOO_SOCKET_IFNAME="lo") for host in network.hosts]
    # In gloo, a rank that accepts connections waits five times a collective's timeout, unless its launcher ends it.
    assert all(rank.wait(400) != 0 for rank in ranks)
    assert (
        "GLOO_SOCKET_IFNAME=lo: expected the network interface of this host that the 2 hosts"
        in cluster.logs()
    )
