"""Checkpoints in object stores: saved, resumed, replaced and removed as on a disk, and never half.

The store is a file system of fsspec that is none of the operating system's: a folder under addresses, without links or
renames of folders, as an object store has none. Several processes see the same, as ``memory://`` does not.
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

from tests.checkpoint.runs import Run, Trace, callback, checkpoints_at, differences, fit, train
from tests.parity.training import refusal
from tests.ranks import run_ranks

PROTOCOL = "shared"


class SharedFileSystem(LocalFileSystem):
    """``shared:///tmp/x`` is the folder ``/tmp/x``."""

    protocol = PROTOCOL
    copies_left: int | None = None
    """Files that may yet be copied before the store fails; None for any number."""

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


def _kept(address: str, is_async: bool) -> tuple[Trace, Trace, list[str], list[str]]:
    """A run of 4 steps, the resumed one to 6, and the checkpoints in the store after each."""
    register()
    options = {"save_top_k": 2, "monitor": "step", "mode": "max", "save_last": True}
    run = RUN.but(strategy={"async_save": is_async})
    first = fit(run.but(trainer={"max_steps": 4}), checkpoints_at(address, **options))[1]  # type: ignore[arg-type]
    names = _checkpoints(address)  # beside them the other rank may be trying already whether it can write
    resumed = fit(run.but(ckpt_path="last"), checkpoints_at(address, **options))[1]  # type: ignore[arg-type]
    return first, resumed, names, _checkpoints(address)


def _checkpoints(address: str) -> list[str]:
    from lightning_megatron.files import as_path

    return sorted(each.name for each in as_path(address).iterdir() if each.suffix == ".ckpt")


def _resumed_elsewhere(path: str) -> Trace:
    register()
    return train(RUN.but(strategy={"tp": 1}, ckpt_path=path))


def _check(address: str, is_async: bool) -> Trace:
    """What another layout makes of a checkpoint, after all else is compared."""
    whole = run_ranks(train, 2, RUN)
    for uninterrupted, (first, resumed, *names) in zip(whole, run_ranks(_kept, 2, address, is_async), strict=True):
        assert {**first.steps, **resumed.steps} == uninterrupted.steps
        assert differences(uninterrupted.state, resumed.state) == []
        for steps, found in zip(((3, 4), (5, 6)), names, strict=True):
            assert found == ["last.ckpt", *(f"step={step}.ckpt" for step in steps)]
    (elsewhere,) = run_ranks(_resumed_elsewhere, 1, f"{address}/step=5.ckpt")
    assert elsewhere.steps[6]["tokens"] == whole[0].steps[6]["tokens"]
    assert elsewhere.state["global_step"] == 6
    return elsewhere


@pytest.mark.parametrize("is_async", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_run_is_kept_in_a_store_as_on_a_disk(tmp_path: Path, is_async: bool) -> None:
    of_store = _check(f"shared://{tmp_path}/run", is_async)
    (of_disk,) = run_ranks(_resumed_elsewhere, 1, f"{tmp_path}/run/step=5.ckpt")
    assert differences(of_disk.state, of_store.state) == []


def _replaced_half(address: str) -> list[str]:
    """What is left of a name under which a second checkpoint was being published when the store failed."""
    from lightning_megatron.checkpoint.files import find_newest
    from lightning_megatron.errors import CheckpointError
    from lightning_megatron.files import as_path

    register()
    run = Run(trainer={"max_steps": 2})

    def fail_from_now_on(trainer: Any, *_: Any) -> None:
        SharedFileSystem.copies_left = 2 if trainer.global_step == 2 else None

    keeper = checkpoints_at(address, filename="same", save_top_k=1, enable_version_counter=False)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="the store is gone"):
        fit(run, callback(on_train_batch_end=fail_from_now_on), keeper)
    path = as_path(address) / "same.ckpt"
    found = [f"{find_newest(path).step} of {sorted(each.name for each in as_path(address).iterdir())}"]
    SharedFileSystem.copies_left = None
    resumed = fit(run.but(trainer={"max_steps": 3}, ckpt_path=str(path)), checkpoints_at(address, filename="same"))  # type: ignore[arg-type]
    found.append(f"{resumed[0].global_step} of {sorted(each.name for each in as_path(address).iterdir())}")
    (path / "meta.pt").unlink()
    try:
        find_newest(path)
    except CheckpointError as error:
        found.append(str(error))
    return found


def test_a_checkpoint_that_is_half_replaced_is_found_whole_and_half_of_one_is_none(tmp_path: Path) -> None:
    (found,) = run_ranks(_replaced_half, 1, f"shared://{tmp_path}/run")
    assert found[:2] == ["2 of ['same.ckpt', 'same.ckpt.partial']", "3 of ['same.ckpt']"]
    assert "lacks its file meta.pt: it was never finished" in found[2]


def test_inspect_and_convert_read_from_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lightning_megatron.cli.inspect import inspect_path
    from lightning_megatron.hub import local_folder

    register()
    run_ranks(train, 1, Run(trainer={"max_steps": 1}), tmp_path / "one.ckpt")
    inspect_path(f"shared://{tmp_path}/one.ckpt")
    of_store = capsys.readouterr().out
    inspect_path(tmp_path / "one.ckpt")
    assert of_store.split("\n")[1:] == capsys.readouterr().out.split("\n")[1:]
    copy = local_folder(Path(f"shared://{tmp_path}/one.ckpt"), "model")
    assert sorted(each.name for each in copy.iterdir()) == sorted(
        each.name for each in (tmp_path / "one.ckpt").iterdir()
    )
    assert copy.name == "one.ckpt"
    assert copy.parent.parent != tmp_path


@pytest.fixture
def s3_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of a server of the protocol, on this machine."""
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
def test_a_run_is_kept_in_s3(s3_bucket: str, is_async: bool) -> None:
    _check(f"{s3_bucket}/run", is_async)


@NEEDS_S3
@pytest.mark.exhaustive
def test_a_bucket_that_is_not_there_and_a_server_that_is_gone_are_told(s3_bucket: str) -> None:
    (missing,) = run_ranks(_refused, 1, "s3://nobucket/run")
    assert missing.startswith("checkpoints cannot be saved in s3://nobucket/run: "), missing
    os.environ["AWS_ENDPOINT_URL"] = "http://127.0.0.1:9"
    (gone,) = run_ranks(_refused, 1, "s3://bucket/run")
    assert "127.0.0.1:9" in gone, gone


def _refused(address: str) -> str:
    return refusal(fit, Run(trainer={"max_steps": 1}), checkpoints_at(address))  # type: ignore[arg-type]
