"""A job of a real SLURM on two hosts: signals, requeues, a rank and a host that are lost; each time it goes on.

The job is the script of docs/several_hosts.md. ``nox -s hosts`` prints what followed after how long.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts import train
from tests.hosts.cases import Cluster, _print, network
from tests.hosts.network import Network
from tests.pages import blocks

__all__ = ["network"]
if shutil.which("slurmctld") is None or shutil.which("slurmd") is None:
    pytest.skip("needs SLURM (Debian: slurmctld slurmd slurm-client)", allow_module_level=True)

_CONF = """
ClusterName=test
SlurmctldHost=host1
NodeName=host[1-2] CPUs=2
PartitionName=all Nodes=ALL Default=YES
SlurmUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
SelectType=select/linear
MpiDefault=none
SlurmdTimeout=20
StateSaveLocation=.
SlurmdSpoolDir={0}/spool_%n
SlurmctldPidFile={0}/slurmctld.pid
SlurmdPidFile={0}/%n.pid
"""


class Slurm(Cluster):
    """A job on the hosts of a network, a task on each."""

    def __init__(self, network: Network, folder: Path) -> None:
        super().__init__(network, folder, devices=1, max_steps=60, cache="cache of HOST")
        self._conf = str(folder / "slurm.conf")
        Path(self._conf).write_text(_CONF.format(folder))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # or slurmd wants the one that is mounted
        self.daemon("host1", "slurmctld", "-D")
        for host in network.hosts:
            self.daemon(host, "slurmd", "-D", "-N", host)
        self.wait_for(lambda: "idle 2" in self.ask("sinfo -h -o", "%t %D"), 60)

    def daemon(self, host: str, *command: str) -> subprocess.Popen[bytes]:
        log = self._files.enter_context((self.folder / f"{command[0]}_{host}.txt").open("a"))
        return self.network.run(host, command, log, SLURM_CONF=self._conf)

    def ask(self, command: str, *more: str) -> str:
        """What a command of SLURM's prints."""
        with (self.folder / "answer.txt").open("w+") as answer:
            self.network.run("host1", [*command.split(), *more], answer, SLURM_CONF=self._conf).wait(60)
            answer.seek(0)
            return answer.read()

    def submit(self) -> None:
        """The second script of the page, with other sizes and our program; it may go on with one host."""
        script = blocks("docs/several_hosts.md", "bash")[1]
        program = script[script.index("srun ") + len("srun ") : script.index(" || ")]
        for shown, ours in {
            program: shlex.join([sys.executable, train.__file__, json.dumps(self.options)]),
            "--nodes 2": "--nodes 1-2",
            "--ntasks-per-node 8": "--ntasks-per-node 1",
            "#SBATCH --gpus-per-node 8\n": "#SBATCH --output host1.log\n#SBATCH --open-mode append\n",
        }.items():
            assert script.count(shown) == 1, f"the page no longer shows {shown} once"
            script = script.replace(shown, ours)
        (self.folder / "job.sh").write_text(script)
        assert self.ask("sbatch job.sh") == "Submitted batch job 1\n"

    def goes_on_after(self, what: str, happens: Callable[[], object]) -> None:
        """Have something happen, and wait until the job has been started again and takes steps."""
        begun, begin = len(self.lines("begins")), time.monotonic()
        happens()
        self.wait_for(lambda: self.ask("squeue -h -o", "%T %r").split() == ["PENDING", "BeginTime"])
        queued = time.monotonic() - begin
        self.ask("scontrol update JobId=1 StartTime=now")  # SLURM gives a requeued job two minutes
        self.wait_for(lambda: len(self.lines("begins")) > begun)
        again = time.monotonic() - begin - queued
        _print(f"SLURM, {what}: in the queue again after {queued:.0f} s, trains {again:.0f} s after that")
        done = len(self.lines("steps"))
        self.wait_for(lambda: len(self.lines("steps")) >= done + 6)


@pytest.mark.parametrize("network", [2], indirect=True)
def test_slurm_starts_a_job_again_that_goes_on_to_the_last_bit(network: Network, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = Cluster(network, tmp_path / "whole", devices=1, max_steps=60)
    assert [task.wait(240) for task in [whole.task(host, STEP_SECONDS="0") for host in network.hosts]] == [0, 0]
    expected = {step: loss for step, loss, *_ in whole.lines("steps")}
    job = Slurm(network, tmp_path)
    job.submit()
    job.wait_for_step(6)
    job.goes_on_after("its signal before time is over", lambda: job.ask("scancel --signal USR1 1"))
    job.goes_on_after("scontrol requeue", lambda: job.ask("scontrol requeue 1"))
    job.goes_on_after("a rank is killed", lambda: os.kill(job.lines("begins")[-1][4], signal.SIGKILL))
    job.goes_on_after("a cable is pulled for ever", lambda: network.unplug("host2"))
    job.wait_for(lambda: not job.ask("squeue -h"))
    begins, steps = job.lines("begins"), job.lines("steps")
    assert [world_size for _, world_size, *_ in begins] == [2] * 8 + [1], job.told()
    assert "Restarts=4" in job.ask("scontrol show job 1")
    assert steps[-1][0] == 60
    assert begins[2][0] >= 6  # nothing was lost: SLURM's signals come between two steps
    assert begins[4][0] > begins[2][0] + 6
    job.check_losses()
    on_both = [(step, loss) for step, loss, world_size, _ in steps if world_size == 2]
    assert [step for step, loss in on_both if expected[step] != loss] == []
    assert "num_microbatches=12 instead of 6 keeps the batch" in job.said()
    assert job.said().count("Building the index") == 2  # once on each host
