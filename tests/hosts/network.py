"""A network of hosts: network namespaces, each with a virtual cable to one switch.

Each host has its own name, address and loopback and, as on Debian, 127.0.1.1 for its own name. File systems are shared,
as in a cluster with a common disk.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import IO, Self

from tests.ranks import ROOT

_OURS = f"lm{os.getpid()}"
"""Prefix of the names of this process's devices and namespaces, so that two processes can test at once."""
_SWITCH = f"{_OURS}s"
_BOOT = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'


def missing_requirement() -> str | None:
    """Reason why this machine cannot create such hosts, or None."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    try:
        with TemporaryDirectory() as folder, Network(1, Path(folder)):
            return None
    except FileNotFoundError:
        return "needs the program ip (package iproute2)"
    except subprocess.CalledProcessError as error:
        return f"needs the right to make network namespaces: {error.stderr.strip()}"


class Network:
    """Hosts ``host1``, ``host2``, ... that exist within the context; on exit their processes are killed."""

    def __init__(self, num_hosts: int, folder: Path) -> None:
        """Create nothing yet.

        Args:
            num_hosts: Number of hosts.
            folder: Directory for their ``/etc/hosts`` files.
        """
        self.hosts = [f"host{number}" for number in range(1, num_hosts + 1)]
        self._folder = folder

    def __enter__(self) -> Self:
        try:
            self._connect()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _connect(self) -> None:
        _ip("link", "add", _SWITCH, "type", "bridge")
        _ip("link", "set", _SWITCH, "up")
        addresses = {host: f"10.77.0.{number}" for number, host in enumerate(self.hosts, 1)}
        for host, address in addresses.items():
            _ip("netns", "add", _space(host))
            _ip(
                "link",
                "add",
                _cable(host),
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                _space(host),
            )
            _ip("link", "set", _cable(host), "master", _SWITCH, "up")
            _ip("-n", _space(host), "addr", "add", f"{address}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _ip("-n", _space(host), "link", "set", interface, "up")
            others = "".join(
                f"{address} {other}\n" for other, address in addresses.items() if other != host
            )
            self._names(host).write_text(f"127.0.0.1 localhost\n127.0.1.1 {host}\n{others}")

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for host in self.hosts:
            self.kill(host)
            for arguments in (("netns", "del", _space(host)), ("link", "del", _cable(host))):
                subprocess.run(
                    ["ip", *arguments],
                    stderr=subprocess.DEVNULL,
                    check=False,
                )
        subprocess.run(
            ["ip", "link", "del", _SWITCH],
            stderr=subprocess.DEVNULL,
            check=False,
        )

    def run(
        self,
        host: str,
        command: Sequence[str],
        log: IO[str],
        **environment: str,
    ) -> subprocess.Popen[bytes]:
        """Start ``command`` on a host."""
        inherited = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        boot = [
            "unshare",
            "--mount",
            "--uts",
            "sh",
            "-c",
            _BOOT,
            str(self._names(host)),
            host,
            *command,
        ]
        return subprocess.Popen(
            ["ip", "netns", "exec", _space(host), *boot],
            cwd=log.name.rpartition("/")[0],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={
                **inherited,
                "HOME": os.environ.get("HOME", "/root"),
                **environment,
            },
        )

    def unplug(self, host: str) -> None:
        """Pull the cable: packets are lost without notice."""
        _ip("link", "set", _cable(host), "down")

    def plug(self, host: str) -> None:
        """Reconnect the cable."""
        _ip("link", "set", _cable(host), "up")

    def kill(self, host: str) -> None:
        """Kill every process of a host; if it is unplugged, no connection is closed, as in a loss of power."""
        listed = subprocess.run(
            [
                "ip",
                "netns",
                "pids",
                _space(host),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        for pid in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def _names(self, host: str) -> Path:
        return self._folder / f"names_of_{host}"


def python(*arguments: str) -> list[str]:
    """The command that runs this Python."""
    return [sys.executable, *arguments]


def _space(host: str) -> str:
    return f"{_OURS}{host}"


def _cable(host: str) -> str:
    return f"{_OURS}c{host.removeprefix('host')}"


def _ip(*arguments: str) -> None:
    subprocess.run(
        ["ip", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
