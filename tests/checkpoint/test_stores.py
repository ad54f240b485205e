"""Checkpoints in object stores are saved, resumed, replaced and removed as on a disk, and are always complete.

The store is an fsspec file system over a directory, without links and without renames of directories, like an object
store. Unlike ``memory://``, several processes share it.
"""

import os
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from tests.checkpoint.runs import Run, Trace, assert_exact_resume, callback, checkpoints_at, differences, fit, train
from tests.parity.training import refusal
from tests.ranks import run_ranks

PROTOCOL = "shared"


class SharedFileSystem(LocalFileSystem):
    """Store in which ``shared:///tmp/x`` is the directory ``/tmp/x``."""

    protocol = PROTOCOL
    copies_left: int | None = None
    """Number of copies until the store fails; None for no failure."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "auto_mkdir": True})

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return "/" + str(path).removeprefix(f"{PROTOCOL}://").strip("/")

    def copy(self, path1: str, path2: str, **options: Any) -> None:  # type: ignore[override]
        if SharedFileSystem.copies_left is not None:
            if SharedFileSystem.copies_left == 0:
                raise OSError("the store is gone")
            SharedFileSystem.copies_left -= 1
        super().cp_file(self._strip_protocol(path1), self._strip_protocol(path2), **options)


def register() -> None:
    fsspec.register_implementation(PROTOCOL, SharedFileSystem, clobber=True)


RUN = Run(strategy={"tp": 2}, trainer={"max_steps": 6})
NEEDS_S3 = pytest.mark.skipif(find_spec("moto") is None or find_spec("s3fs") is None, reason="needs moto and s3fs")


def _train_and_resume(address: str, is_async: bool) -> tuple[Trace, list[str], list[str]]:
    """Train 4 steps, resume to step 6; return its trace and the checkpoints in the store after each run."""
    register()
    options = {"save_top_k": 2, "monitor": "step", "mode": "max", "save_last": True}
    run = RUN.but(strategy={"async_save": is_async})
    fit(run.but(trainer={"max_steps": 4}), checkpoints_at(address, **options))  # type: ignore[arg-type]
    names = _checkpoints(address)  # the other rank may already have files of its write test there
    resumed = fit(run.but(ckpt_path="last"), checkpoints_at(address, **options))[1]  # type: ignore[arg-type]
    return resumed, names, _checkpoints(address)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _checkpoints(address: str) -> list[str]:
    from lightning_megatron.files import as_path

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
    (at_tp1,) = run_ranks(_resume_at_tp1, 1, f"{address}/step=5.ckpt")
    assert at_tp1.steps[6]["tokens"] == uninterrupted[0].steps[6]["tokens"]
    assert at_tp1.state["global_step"] == 6
    return at_tp1


@pytest.mark.parametrize("is_async", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_checkpoints_in_a_store_resume_as_from_a_disk(tmp_path: Path, is_async: bool) -> None:
    from_store = _check(f"shared://{tmp_path}/run", is_async)
    (from_disk,) = run_ranks(_resume_at_tp1, 1, f"{tmp_path}/run/step=5.ckpt")
    assert differences(from_disk.state, from_store.state) == []


def _fail_during_replacement(address: str) -> list[str]:
    """Let the store fail while a checkpoint is replaced; return the files and the errors afterwards."""
    from lightning_megatron.checkpoint.files import find_newest
    from lightning_megatron.errors import CheckpointError
    from lightning_megatron.files import as_path

    register()
    run = Run(trainer={"max_steps": 2})

    def limit_copies(trainer: Any, *_: Any) -> None:
        SharedFileSystem.copies_left = 2 if trainer.global_step == 2 else None

    saver = checkpoints_at(address, filename="same", save_top_k=1, enable_version_counter=False)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="the store is gone"):
        fit(run, callback(on_train_batch_end=limit_copies), saver)
    path = as_path(address) / "same.ckpt"
    results = [f"{find_newest(path).step} of {_names(as_path(address))}"]
    SharedFileSystem.copies_left = None
    resumed = fit(run.but(trainer={"max_steps": 3}, ckpt_path=str(path)), checkpoints_at(address, filename="same"))  # type: ignore[arg-type]
    results.append(f"{resumed[0].global_step} of {_names(as_path(address))}")
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


def test_inspect_and_convert_read_from_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lightning_megatron.cli.inspect import inspect_path
    from lightning_megatron.hub import local_folder

    register()
    run_ranks(train, 1, Run(trainer={"max_steps": 1}), tmp_path / "one.ckpt")
    inspect_path(f"shared://{tmp_path}/one.ckpt")
    from_store = capsys.readouterr().out
    inspect_path(tmp_path / "one.ckpt")
    assert from_store.split("\n")[1:] == capsys.readouterr().out.split("\n")[1:]
    copy = local_folder(Path(f"shared://{tmp_path}/one.ckpt"), "model")
    assert _names(copy) == _names(tmp_path / "one.ckpt")
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
    secrets = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
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
    return refusal(fit, Run(trainer={"max_steps": 1}), checkpoints_at(address))  # type: ignore[arg-type]
