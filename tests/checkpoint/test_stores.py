"""Checkpoints in object stores are saved, resumed, replaced and removed as on a disk, and are always complete.

The store is an fsspec file system over a directory, without links and without renames of directories, like an object
store. Unlike ``memory://``, several processes share it.
"""

import os
import re
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from tests.checkpoint.runs import (
    Run,
    Trace,
    assert_exact_resume,
    callback,
    checkpoints_at,
    differences,
    fit,
    names_in,
    train,
)
from tests.marks import exhaustive
from tests.parity.training import refusal
from tests.ranks import run_ranks
from tests.recording import recorded_warnings

PROTOCOL = "shared"


class SharedFileSystem(LocalFileSystem):
    """Store in which ``shared:///tmp/x`` is the directory ``/tmp/x``."""

    protocol = PROTOCOL
    copies_left: int | None = None
    """Number of copies until the store fails; None for no failure."""
    refused: str | None = None
    """Name of the operation that this process's store refuses; None for no failure."""
    written: list[str] = []
    """Paths that were opened for writing."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "auto_mkdir": True})

    @classmethod
    def refuse(cls, name: str) -> None:
        """Raise what the store raises if it refuses the operation ``name``."""
        if name == cls.refused:
            raise RefusedError(f"{name} was refused")

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return "/" + str(path).removeprefix(f"{PROTOCOL}://").strip("/")

    def copy(self, path1: str, path2: str, **options: Any) -> None:
        if SharedFileSystem.copies_left is not None:
            if SharedFileSystem.copies_left == 0:
                raise OSError("the store is gone")
            SharedFileSystem.copies_left -= 1
        super().cp_file(
            self._strip_protocol(path1),
            self._strip_protocol(path2),
            **options,
        )


class RefusedError(Exception):
    """What a store's client raises: no ``OSError``, like botocore's errors."""


class _RefusingFile:
    """File of the store whose writes or whose end are refused."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        SharedFileSystem.refuse(name)
        return getattr(self._file, name)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def _refusing(name: str) -> Any:
    original = getattr(LocalFileSystem, name)

    def method(self: Any, *args: Any, **options: Any) -> Any:
        SharedFileSystem.refuse(name)
        result = original(self, *args, **options)
        if name != "open" or "r" in (args[1:] or (options.get("mode", "rb"),))[0]:
            return result
        SharedFileSystem.written.append(str(args[0]))
        return _RefusingFile(result)

    return method


OPERATIONS = ("exists", "info", "ls", "isdir", "isfile", "open", "rm")
"""Methods of a file system that Lightning or this package calls, and that a test lets the store refuse."""
for _name in OPERATIONS:
    setattr(SharedFileSystem, _name, _refusing(_name))


def register() -> None:
    fsspec.register_implementation(PROTOCOL, SharedFileSystem, clobber=True)


RUN = Run(strategy={"tp": 2}, trainer={"max_steps": 6})
NEEDS_S3 = pytest.mark.skipif(
    find_spec("moto") is None or find_spec("s3fs") is None, reason="needs moto and s3fs"
)


def _train_and_resume(address: str, is_async: bool) -> tuple[Trace, list[str], list[str]]:
    """Train 4 steps, resume to step 6; return its trace and the checkpoints in the store after each run."""
    register()
    options = {"save_top_k": 2, "monitor": "step", "mode": "max", "save_last": True}
    run = RUN.but(strategy={"async_save": is_async})
    fit(run.but(trainer={"max_steps": 4}), checkpoints_at(address, **options))
    names = _checkpoints(address)  # the other rank may already have files of its write test there
    resumed = fit(run.but(ckpt_path="last"), checkpoints_at(address, **options))[1]
    return resumed, names, _checkpoints(address)


def _checkpoints(address: str) -> list[str]:
    from lightning_megatron.storage.paths import as_path

    return sorted(path.name for path in as_path(address).iterdir() if path.suffix == ".ckpt")


def _resume_at_tp1(path: str) -> Trace:
    register()
    return train(RUN.but(strategy={"tp": 1}, ckpt_path=path))


def _check(address: str, is_async: bool) -> Trace:
    """Compare a run in the store with an uninterrupted one; return the trace of a resume at another layout."""
    uninterrupted = run_ranks(train, 2, RUN)
    results = run_ranks(_train_and_resume, 2, address, is_async)
    assert_exact_resume(uninterrupted, [resumed for resumed, *_ in results], 5)
    for _, *names in results:
        for steps, found in zip(((3, 4), (5, 6)), names, strict=True):
            assert found == ["last.ckpt", *(f"step={step}.ckpt" for step in steps)]
    at_tp1: Trace
    (at_tp1,) = run_ranks(_resume_at_tp1, 1, f"{address}/step=5.ckpt")
    assert at_tp1.steps[6]["tokens"] == uninterrupted[0].steps[6]["tokens"]
    assert at_tp1.state["global_step"] == 6
    return at_tp1


@pytest.mark.parametrize(
    "is_async",
    [True, exhaustive(False)],
)
def test_checkpoints_in_a_store_resume_as_from_a_disk(tmp_path: Path, is_async: bool) -> None:
    from_store = _check(f"shared://{tmp_path}/run", is_async)
    (from_disk,) = run_ranks(_resume_at_tp1, 1, f"{tmp_path}/run/step=5.ckpt")
    assert differences(from_disk.state, from_store.state) == []


def _fail_during_replacement(address: str) -> list[str]:
    """Let the store fail while a checkpoint is replaced; return the files and the errors afterwards."""
    from lightning_megatron.checkpoint.find import find_newest
    from lightning_megatron.errors import CheckpointError
    from lightning_megatron.storage.paths import as_path

    register()
    run = Run(trainer={"max_steps": 2})

    def limit_copies(trainer: Any, *_: Any) -> None:
        SharedFileSystem.copies_left = 2 if trainer.global_step == 2 else None

    saver = checkpoints_at(address, filename="same", save_top_k=1, enable_version_counter=False)
    with pytest.raises(CheckpointError, match="the store is gone"):
        fit(run, callback(on_train_batch_end=limit_copies), saver)
    path = as_path(address) / "same.ckpt"
    results = [f"{find_newest(path).step} of {names_in(as_path(address))}"]
    SharedFileSystem.copies_left = None
    again = run.but(trainer={"max_steps": 3}, ckpt_path=str(path))
    trainer, _ = fit(again, checkpoints_at(address, filename="same"))
    results.append(f"{trainer.global_step} of {names_in(as_path(address))}")
    (path / "meta.pt").unlink()
    try:
        find_newest(path)
    except CheckpointError as error:
        results.append(str(error))
    return results


def test_interrupted_replacement_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    (results,) = run_ranks(_fail_during_replacement, 1, f"shared://{tmp_path}/run")
    assert results[:2] == ["2 of ['same.ckpt', 'same.ckpt.partial']", "3 of ['same.ckpt']"]
    assert "lacks its file meta.pt: it was never finished" in results[2]


def _save_while_the_store_refuses(
    address: str, victim: int
) -> tuple[list[int], list[str], list[str]]:
    """Refuse another operation in each step, on one rank; return the steps, the warnings and the checkpoints."""
    register()
    operations = (
        "exists",
        "info",
        "ls",
        "isdir",
        "open",
        "write",
        "close",
        None,
        "rm",
        None,
    )

    def refuse(trainer: Any, *_: Any) -> None:
        trainer.strategy.barrier()
        SharedFileSystem.refused = (
            operations[trainer.global_step] if trainer.global_rank == victim else None
        )

    saver = checkpoints_at(address, save_top_k=1)
    run = RUN.but(trainer={"max_steps": len(operations)})
    with recorded_warnings("refused") as texts:
        _, trace = fit(run, callback(on_train_batch_start=refuse), saver)
    return list(trace.steps), texts, _checkpoints(address)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_store_that_refuses_any_operation_fails_the_save_and_not_the_run(
    tmp_path: Path, victim: int
) -> None:
    (steps, texts, found), (other_steps, *_) = run_ranks(
        _save_while_the_store_refuses, 2, f"shared://{tmp_path}/run", victim
    )
    assert steps == other_steps == list(range(1, 11))
    assert f"step={len(steps)}.ckpt" in found
    expected = ["exists", "info", "ls", "isdir", "open", "write", "close", "rm"]
    pattern = (
        r"checkpoint \S+ (is not written|could not be removed): RefusedError: (\w+) was refused"
    )
    matches = [re.match(pattern, text) for text in texts]
    assert all(matches), texts
    found_operations = [match[2] for match in matches if match is not None]
    if victim == 0:
        assert found_operations == expected
    else:
        # Rank 0 alone looks for files and removes them; whether rank 1 finds its directory is a matter of time.
        assert {"exists", "open", "write", "close"} <= set(found_operations) <= set(expected)


def _start_beside_unfinished_checkpoints(address: str) -> tuple[Trace, list[str]]:
    register()
    saver = checkpoints_at(address, save_last=True)
    with recorded_warnings() as texts:
        _, trace = fit(RUN.but(trainer={"max_steps": 2}, ckpt_path="last"), saver)
    return trace, texts


def test_a_run_that_was_killed_in_its_first_save_starts_again(tmp_path: Path) -> None:
    """On a disk the files have another name until they are complete."""
    for name, file in {
        "step=1.ckpt": "rng_00001.pt",
        "last.ckpt": "__0_0.distcp",
        "step=2.ckpt": ".metadata",
    }.items():
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / file).write_bytes(b"unfinished")
    (trace, texts), _ = run_ranks(
        _start_beside_unfinished_checkpoints, 2, f"shared://{tmp_path}/run"
    )
    assert list(trace.steps) == [1, 2]
    assert any("step=1.ckpt" in text and "is ignored" in text for text in texts), texts
    register()
    from lightning_megatron.checkpoint.find import find_newest

    assert find_newest(f"shared://{tmp_path}/run").step == 2


def test_a_run_writes_nothing_while_other_ranks_look_for_checkpoints(tmp_path: Path) -> None:
    """Before the ranks are connected: a rank that lists a directory would see another's file come and go."""
    import lightning.pytorch as pl

    from lightning_megatron import MegatronStrategy
    from lightning_megatron.checkpoint.find import list_checkpoints
    from lightning_megatron.storage.paths import as_path

    register()
    strategy = MegatronStrategy()
    saver = checkpoints_at(f"shared://{tmp_path}/run")
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        callbacks=[saver],
        strategy=strategy,
    )
    SharedFileSystem.written.clear()
    assert strategy.checkpointing.resolve_ckpt_path(trainer, "last") == "last"
    assert SharedFileSystem.written == []
    folder: Any = as_path(f"shared://{tmp_path}/run")
    with patch.object(SharedFileSystem, "isdir", return_value=True):
        assert list_checkpoints(folder) == []  # it was there, and is gone


def test_inspect_and_convert_read_from_a_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lightning_megatron.cli.inspect import inspect_path
    from lightning_megatron.storage.hub import local_folder

    register()
    run_ranks(
        train,
        1,
        Run(trainer={"max_steps": 1}),
        tmp_path / "one.ckpt",
    )
    inspect_path(f"shared://{tmp_path}/one.ckpt")
    from_store = capsys.readouterr().out
    inspect_path(tmp_path / "one.ckpt")
    assert from_store.split("\n")[1:] == capsys.readouterr().out.split("\n")[1:]
    copy = local_folder(Path(f"shared://{tmp_path}/one.ckpt"), "model")
    assert names_in(copy) == names_in(tmp_path / "one.ckpt")
    assert copy.name == "one.ckpt"
    assert copy.parent.parent != tmp_path


@pytest.fixture
def s3_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Bucket of a local S3 server."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    secrets = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in {**secrets, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{uuid.uuid4().hex}"  # buckets outlive their server
    boto3.client("s3").create_bucket(Bucket=bucket)
    yield f"s3://{bucket}"
    server.stop()


@NEEDS_S3
@pytest.mark.exhaustive
@pytest.mark.parametrize("is_async", [True, False])
def test_checkpoints_in_s3_resume_exactly(s3_bucket: str, is_async: bool) -> None:
    _check(f"{s3_bucket}/run", is_async)


@NEEDS_S3
@pytest.mark.exhaustive
def test_missing_bucket_and_server_are_refused(s3_bucket: str) -> None:
    (missing,) = run_ranks(_refuse_address, 1, "s3://nobucket/run")
    assert missing.startswith("checkpoints cannot be saved in s3://nobucket/run: "), missing
    os.environ["AWS_ENDPOINT_URL"] = "http://127.0.0.1:9"
    (gone,) = run_ranks(_refuse_address, 1, "s3://bucket/run")
    assert "127.0.0.1:9" in gone, gone


def _refuse_address(address: str) -> str:
    return refusal(fit, Run(trainer={"max_steps": 1}), checkpoints_at(address))
