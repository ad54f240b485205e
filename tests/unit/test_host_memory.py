"""Memory that a process may use of its host, and which runs the hosts can hold."""

import mmap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lightning_megatron.convert.registry import model_config
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.engine.settings import EngineSettings
from lightning_megatron.errors import ConfigError
from lightning_megatron.planning import host
from lightning_megatron.planning.devices import DEVICES, GIB
from lightning_megatron.planning.memory import host_bytes, memory
from lightning_megatron.planning.run import PlannedRun
from lightning_megatron.planning.shapes import SHAPES
from lightning_megatron.planning.startup import check_host_memory
from lightning_megatron.planning.step_time import step_time
from lightning_megatron.verify.memory import Need, check_memory

LLAMA_8B = PlannedRun(
    model=model_config(dict(SHAPES["llama-3-8b"])),
    lengths=(4096,),
    world_size=1,
    parallel=ParallelConfig(num_microbatches=32),
    micro_batch_size=2,
    offload_optimizer=1.0,
)
PARAMETERS = 8_030_261_248


def _files(folder: Path, contents: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/a/b", {}, (64, 40)),
        # The outer group is the smaller one; of its files 7 GiB can be read again, and 2 are in shared memory.
        (
            "0::/a/b",
            {
                "a": {
                    "memory.max": str(32 * GIB),
                    "memory.current": str(20 * GIB),
                    "memory.stat": f"anon 1\nfile {9 * GIB}\nshmem {2 * GIB}\n",
                },
                "a/b": {"memory.max": "max\n", "memory.current": "5", "memory.stat": "file 1\n"},
            },
            (32, 19),
        ),
        (
            "3:cpu:/x\n4:memory:/c",
            {
                "memory/c": {
                    "memory.limit_in_bytes": str(16 * GIB),
                    "memory.usage_in_bytes": str(15 * GIB),
                    "memory.stat": f"total_cache {GIB}\ntotal_shmem 0\n",
                }
            },
            (16, 2),
        ),
    ],
    ids=["no limit", "version 2", "version 1"],
)
def test_memory_is_that_of_the_host_or_of_the_smallest_container(
    own: str,
    files: dict[str, dict[str, str]],
    expected: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "own").write_text(own)
    for folder, contents in files.items():
        _files(tmp_path / folder, contents)
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(host, "_ZONES", tmp_path / "zoneinfo")
    machine: Any = type("Memory", (), {"total": 64 * GIB, "available": 40 * GIB})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    found = host.host_memory()
    assert (found.total / GIB, found.free / GIB) == expected


def test_memory_that_a_virtual_machine_has_not_used_yet_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = 40 * GIB // mmap.PAGESIZE
    zones = "Node 0, zone {}\n  pages free 5\n        spanned  {}\n        present  {}\n"
    text = zones.format("DMA32", 9, 2) + zones.format("Normal", 2 * pages, pages - 2)
    (tmp_path / "zoneinfo").write_text(text)
    monkeypatch.setattr(host, "_OWN_CGROUPS", tmp_path / "none")
    monkeypatch.setattr(host, "_ZONES", tmp_path / "zoneinfo")
    machine: Any = type("Memory", (), {"total": 10 * GIB, "available": 7 * GIB})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    found = host.host_memory()
    assert (found.total / GIB, found.free / GIB) == (40, 37)


def _check_weights() -> None:
    settings = EngineSettings(
        parallel=ParallelConfig(),
        params_dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    check_host_memory(LLAMA_8B.model, settings, 1)


def _check_state() -> None:
    host.check_host_state(LLAMA_8B, 1, copies_state=False)


def _check_verification() -> None:
    need = Need(what="tp2", num_bytes=2.0 * PARAMETERS)
    assert "Warning" not in check_memory([need], "cpu")


@pytest.mark.parametrize("check", [_check_weights, _check_state, _check_verification])
def test_every_check_of_the_hosts_memory_knows_the_container(
    check: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").write_text("0::/a")
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(host, "_ZONES", tmp_path / "zoneinfo")
    machine: Any = type("Memory", (), {"total": 512 * GIB, "available": 500 * GIB})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    check()
    limit = {"memory.max": str(8 * GIB), "memory.current": "0", "memory.stat": ""}
    _files(tmp_path / "a", limit)
    with pytest.raises(ConfigError, match=r"\b8(\.0)? GiB"):
        check()


@pytest.mark.parametrize(
    ("run", "ranks", "copies_state", "gib"),
    [
        (LLAMA_8B, 1, False, (12 + 2) * PARAMETERS / GIB),
        (LLAMA_8B, 1, True, (12 + 2 + 12) * PARAMETERS / GIB),
        (replace(LLAMA_8B, offload_optimizer=0.5), 1, False, (6 + 8) * PARAMETERS / GIB),
        # Each of four replicas has a quarter, and two of them share a host.
        (replace(LLAMA_8B, world_size=4), 2, False, (12 + 2) * PARAMETERS / 2 / GIB),
        (
            replace(LLAMA_8B, world_size=4, distributed_optimizer=False),
            2,
            False,
            (2 * 12 + 2 / 2) * PARAMETERS / GIB,
        ),
    ],
)
def test_hosts_must_hold_the_state_of_all_their_ranks(
    run: PlannedRun,
    ranks: int,
    copies_state: bool,
    gib: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(total: float, free: float) -> str | None:
        there = host.HostMemory(total=total * GIB, free=free * GIB)
        monkeypatch.setattr(host, "host_memory", lambda: there)
        return host.check_host_state(run, ranks, copies_state=copies_state)

    assert check(gib + 0.1, gib + 0.1) is None
    warning = check(gib + 0.1, gib - 0.1)
    assert warning is not None
    assert f"expected {gib:,.1f} GiB of host memory for {ranks} rank" in warning
    with pytest.raises(ConfigError, match=r"^offload_optimizer=\S+: expected .*; give a smaller"):
        check(gib - 0.1, gib - 0.1)


def test_state_moves_from_the_device_to_the_host_and_adds_its_way_to_a_step() -> None:
    plain = replace(LLAMA_8B, offload_optimizer=0.0)
    assert host_bytes(LLAMA_8B, 0) == 12 * PARAMETERS
    assert host_bytes(plain, 0) == 0
    slots = 4 * 3 * 4 * 2**23
    moved = memory(plain).optimizer - memory(LLAMA_8B).optimizer
    assert moved == 12 * PARAMETERS - slots
    device = DEVICES["h200"]
    added = step_time(LLAMA_8B, device).total - step_time(plain, device).total
    one_way = 12 * PARAMETERS / device.host_bandwidth
    assert 0.9 * one_way < added < 1.4 * one_way
    half = replace(LLAMA_8B, offload_optimizer=0.5)
    assert host_bytes(half, 0) == 6 * PARAMETERS
    assert step_time(half, device).total < step_time(LLAMA_8B, device).total
