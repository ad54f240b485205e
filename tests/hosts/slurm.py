"""A job of a real SLURM on two hosts resumes after signals, a requeue, and the loss of a rank and of a host.

The job is the script of docs/several_hosts.md. ``nox -s hosts`` prints the times until requeue and training.
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
from tests.hosts.cases import Cluster, network, print_time
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
    """A SLURM job with one task on each host of a network."""

    def __init__(self, network: Network, folder: Path) -> None:
        super().__init__(
            network,
            folder,
            devices=1,
            max_steps=60,
            cache="cache of HOST",
        )
        self._conf = str(folder / "slurm.conf")
        Path(self._conf).write_text(_CONF.format(folder))
        # Otherwise slurmd uses the mounted version.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self.daemon("host1", "slurmctld", "-D")
        for host in network.hosts:
            self.daemon(host, "slurmd", "-D", "-N", host)
        self.wait_for(lambda: "idle 2" in self.ask("sinfo -h -o", "%t %D"), 60)

    def daemon(self, host: str, *command: str) -> subprocess.Popen[bytes]:
        log = self._files.enter_context((self.folder / f"{command[0]}_{host}.txt").open("a"))
        return self.network.run(host, command, log, SLURM_CONF=self._conf)

    def ask(self, command: str, *more: str) -> str:
        """Output of a SLURM command."""
        with (self.folder / "answer.txt").open("w+") as answer:
            self.network.run(
                "host1",
                [*command.split(), *more],
                answer,
                SLURM_CONF=self._conf,
            ).wait(60)
            answer.seek(0)
            return answer.read()

    def submit(self) -> None:
        """Submit the second script of the page with other sizes and our program; one host suffices for a restart."""
        script = blocks("docs/several_hosts.md", "bash")[1]
        program = script[script.index("srun ") + len("srun ") : script.index(" || ")]
        for documented, replacement in {
            program: shlex.join(
                [
                    sys.executable,
                    train.__file__,
                    json.dumps(self.options),
                ]
            ),
            "--nodes 2": "--nodes 1-2",
            "--ntasks-per-node 8": "--ntasks-per-node 1",
            "#SBATCH --gpus-per-node 8\n": "#SBATCH --output host1.log\n#SBATCH --open-mode append\n",
        }.items():
            assert script.count(documented) == 1, f"the page no longer shows {documented} once"
            script = script.replace(documented, replacement)
        (self.folder / "job.sh").write_text(script)
        assert self.ask("sbatch job.sh") == "Submitted batch job 1\n"

    def check_restart(
        self,
        fault: str,
        cause: Callable[[], object],
    ) -> None:
        """Cause a fault, and wait until the job has been restarted and takes steps."""
        starts = len(self.lines("begins"))
        begin = time.monotonic()
        cause()
        self.wait_for(lambda: self.ask("squeue -h -o", "%T %r").split() == ["PENDING", "BeginTime"])
        queued = time.monotonic() - begin
        self.ask(
            "scontrol update JobId=1 StartTime=now"
        )  # SLURM delays a requeued job by two minutes
        self.wait_for(lambda: len(self.lines("begins")) > starts)
        restarted = time.monotonic() - begin - queued
        print_time(
            f"SLURM, {fault}: in the queue again after {queued:.0f} s, trains {restarted:.0f} s after that"
        )
        done = len(self.lines("steps"))
        self.wait_for(lambda: len(self.lines("steps")) >= done + 6)


@pytest.mark.parametrize("network", [2], indirect=True)
def test_restarted_slurm_job_resumes_exactly(network: Network, tmp_path: Path) -> None:
    (tmp_path / "uninterrupted").mkdir()
    uninterrupted = Cluster(network, tmp_path / "uninterrupted", devices=1, max_steps=60)
    tasks = [uninterrupted.task(host, STEP_SECONDS="0") for host in network.hosts]
    assert [task.wait(240) for task in tasks] == [0, 0]
    expected = {step: loss for step, loss, *_ in uninterrupted.lines("steps")}
    job = Slurm(network, tmp_path)
    job.submit()
    job.wait_for_step(6)
    job.check_restart("its signal before time is over", lambda: job.ask("scancel --signal USR1 1"))
    job.check_restart("scontrol requeue", lambda: job.ask("scontrol requeue 1"))
    job.check_restart(
        "a rank is killed",
        lambda: os.kill(job.lines("begins")[-1][4], signal.SIGKILL),
    )
    job.check_restart("a cable is pulled for ever", lambda: network.unplug("host2"))
    job.wait_for(lambda: not job.ask("squeue -h"))
    begins = job.lines("begins")
    steps = job.lines("steps")
    assert [world_size for _, world_size, *_ in begins] == [2] * 8 + [1], job.log_tails()
    assert "Restarts=4" in job.ask("scontrol show job 1")
    assert steps[-1][0] == 60
    assert begins[2][0] >= 6  # no step was lost: the signal is handled between steps
    assert begins[4][0] > begins[2][0] + 6
    job.check_losses()
    assert [
        step for step, loss, world_size, _ in steps if world_size == 2 and expected[step] != loss
    ] == []
    assert "num_microbatches=12 instead of 6 keeps the batch" in job.logs()
    assert job.logs().count("Building the index") == 2  # once on each host
