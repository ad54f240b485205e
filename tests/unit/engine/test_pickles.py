"""``read_pickle``: loads data from ``torch.save`` files, executes nothing, and refuses decompression bombs."""

import argparse
import io
import pickle
import resource
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_megatron.checkpoint.pickles import StandIn, read_pickle
from lightning_megatron.errors import CheckpointError


def _called(name: str, *arguments: object) -> tuple[types.ModuleType, Any]:
    """Module and an object that unpickles by calling ``name``."""
    module, _, last = name.rpartition(".")
    owner = types.ModuleType(module)
    cls: Any = type(last, (), {"__module__": module, "__qualname__": last})
    cls.__reduce__ = lambda self: (cls, arguments)
    setattr(owner, last, cls)
    return owner, cls()


def _save(
    value: object,
    file: Path,
    is_zip: bool,
    *modules: types.ModuleType,
) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            for end in range(1, len(parts := module.__name__.split(".")) + 1):
                name = ".".join(parts[:end])
                patch.setitem(
                    __import__("sys").modules,
                    name,
                    module if end == len(parts) else types.ModuleType(name),
                )
        torch.save(value, file, _use_new_zipfile_serialization=is_zip)
    return file


@pytest.mark.parametrize("is_zip", [False, True])
def test_every_kind_of_tensor_is_loaded(tmp_path: Path, is_zip: bool) -> None:
    values = torch.arange(24, dtype=torch.float32)
    with_attributes = torch.nn.Parameter(values.view(4, 6)).detach().clone()
    with_attributes.tensor_model_parallel = True  # type: ignore[attr-defined]
    tensors = {
        **{
            str(dtype): values.to(dtype)
            for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64)
        },
        **{
            str(dtype): values.to(dtype)
            for dtype in (torch.int32, torch.int8, torch.uint8, torch.bool)
        },
        "transposed": values.view(4, 6).t(),
        "shared": values[4:8],
        "parameter": torch.nn.Parameter(values.view(2, 12)),
        "with attributes": with_attributes,
        "number": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
    }
    if is_zip:
        tensors |= {
            "uint16": torch.arange(3).to(torch.uint16),
            "float8": torch.ones(3).to(torch.float8_e4m3fn),
        }
    torch.save(tensors, tmp_path / "a.pt", _use_new_zipfile_serialization=is_zip)
    loaded = read_pickle(tmp_path / "a.pt")
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert torch.equal(loaded[name].float(), tensor.detach().float()), name


@pytest.mark.parametrize("is_zip", [False, True])
def test_other_contents_of_megatron_lm_checkpoints_are_loaded(tmp_path: Path, is_zip: bool) -> None:
    enums, model_type = _called("megatron.core.enums.ModelType", 1)
    fp16, scaler = _called("apex.amp.scaler.LossScaler")
    arguments = argparse.Namespace(
        num_layers=2,
        eps=np.float64(1e-5),
        model_type=model_type,
        tied=np.bool_(True),
    )
    random = np.random.RandomState(1).get_state()
    state = {
        "args": arguments,
        "model": {"w": torch.arange(6.0)},
        "optimizer": {"loss_scaler": scaler},
        "rng": random,
    }
    loaded = read_pickle(_save(state, tmp_path / "a.pt", is_zip, enums, fp16))
    assert (loaded["args"].num_layers, loaded["args"].eps, loaded["args"].tied) == (2, 1e-5, True)
    assert type(loaded["args"].eps) is float
    assert repr(loaded["args"].model_type) == "ModelType(1,)"
    assert isinstance(loaded["optimizer"]["loss_scaler"], StandIn)
    assert isinstance(loaded["rng"][1], StandIn)
    assert torch.equal(loaded["model"]["w"], torch.arange(6.0))
    with pytest.raises(CheckpointError, match="a.pt is not loaded: it holds more than data"):
        read_pickle(tmp_path / "a.pt", foreign=False)


# ---- hostile --------------------------------------------------------------------------------------------------------


def _archive(path: Path, pickled: bytes, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/version", "3\n")
        for name, data in members.items():
            archive.writestr(f"a/{name.replace('__', '/')}", data)
    return path


def _before_zip(path: Path, pickled: bytes) -> Path:
    header = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
    path.write_bytes(
        b"".join(pickle.dumps(each, 2) for each in header) + pickled + pickle.dumps([], 2)
    )
    return path


_SHELL = b"cposix\nsystem\nX\x07\x00\x00\x00touch a\x85R"
HOSTILE = {
    "a call": (_SHELL + b".", "posix.system"),
    "as state": (b"cargparse\nNamespace\n)\x81}X\x01\x00\x00\x00a" + _SHELL + b"sb.", "posix.system"),
    "eval of Python 2": (b"c__builtin__\neval\n.", "(eval)"),
    "an attribute of an allowed module": (b"cargparse\n_os.system\n.", "argparse._os.system"),
    "NumPy's test runner": (b"cnumpy.testing\nrundocs\n.", "numpy.testing.rundocs"),
    "torch's loader": (b"ctorch.storage\n_load_from_bytes\n.", "torch.storage._load_from_bytes"),
    "torch's functions": (b"ctorch\nload\n.", "torch.load"),
    "named like Megatron": (b"cmegatronx\nrun\n.", "megatronx.run"),
    "a reservation of memory": (b"cbuiltins\nbytearray\n\x8a\x06\0\0\0\0\0\x01\x85R.", "for a bytearray"),
    "a change of a class": (b"capex.amp\nA\n}b.", "damaged"),
    "a state for a class": (b"capex.amp\nA\nN}X\x01\x00\x00\x00aNs\x86b.", "damaged"),
    "a call of data": (b"cargparse\nNamespace\n)R)R.", "damaged"),
    "an instance of Python 2": (b"(X\x01\x00\x00\x00aios\nsystem\n.", "damaged"),
    "an extension": (b"\x82\x01.", "damaged"),
    "a module": (b"(X\x06\x00\x00\x00moduleK\x01tQ.", "damaged"),
    "names on the stack": (b"\x8c\x05posix\x8c\x06system\x93.", "protocol 4"),
    "an unending list": (b"]q\x00h\x00a.", "without end"),
}  # fmt: skip


@pytest.mark.parametrize("is_zip", [False, True])
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_pickle_is_refused_without_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, is_zip: bool
) -> None:
    pickled, reason = HOSTILE[case]
    monkeypatch.chdir(tmp_path)
    file = (_archive if is_zip else _before_zip)(tmp_path / "w.pt", b"\x80\x02" + pickled)
    for foreign in (True, False):
        with pytest.raises(CheckpointError, match=r"w\.pt is ") as error:
            read_pickle(file, foreign=foreign)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 300 + len(str(file))
        assert not foreign or reason in str(error.value)
    assert not (tmp_path / "a").exists()


def _tensor(items: int, shape: int, stride: int) -> bytes:
    items_, shape_, stride_ = (
        b"\x8a\x06" + number.to_bytes(6, "little") for number in (items, shape, stride)
    )
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu" + items_
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + b"%sQK\0"
        + shape_
        + b"\x85"
        + stride_
        + b"\x85\x89}tR."
    )


@pytest.mark.parametrize("is_zip", [False, True])
@pytest.mark.parametrize(
    ("items", "shape", "stride"),
    [
        (10**12, 10**12, 1),
        (10**9, 10**9, 1),
        (4, 10**12, 0),
        (4, 10, 1),
    ],
    ids=["terabytes", "gigabytes", "repeated by its stride", "beyond its storage"],
)
def test_declared_tensor_size_allocates_no_memory(
    tmp_path: Path, is_zip: bool, items: int, shape: int, stride: int
) -> None:
    pickled = b"\x80\x02" + _tensor(items, shape, stride).replace(b"%s", b"t" if is_zip else b"Nt")
    file = tmp_path / "w.pt"
    if is_zip:
        _archive(file, pickled, data__0=b"\0" * 16)
    else:
        _before_zip(file, pickled)
        file.write_bytes(
            file.read_bytes()[: -len(pickle.dumps([], 2))]
            + pickle.dumps(["0"], 2)
            + b"\4"
            + b"\0" * 23
        )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"w\.pt is (damaged|not loaded: it has a tensor)"):
        read_pickle(file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize("overlapping", [False, True])
def test_zip_bomb_is_refused(tmp_path: Path, overlapping: bool) -> None:
    torch.save({"x": torch.zeros(100_000)}, tmp_path / "saved.pt")
    method = zipfile.ZIP_STORED if overlapping else zipfile.ZIP_DEFLATED
    with (
        zipfile.ZipFile(tmp_path / "saved.pt") as saved,
        zipfile.ZipFile(tmp_path / "w.pt", "w") as packed,
    ):
        for name in saved.namelist():
            packed.writestr(name, saved.read(name), method)
        largest = max(packed.infolist(), key=lambda member: member.file_size)
        for member in packed.infolist() if overlapping else ():
            member.file_size = member.compress_size = largest.file_size
            member.header_offset = largest.header_offset
    with pytest.raises(
        CheckpointError, match=r"w\.pt is not loaded: its [\d,]+ bytes would become"
    ):
        read_pickle(tmp_path / "w.pt")


@pytest.mark.parametrize(
    ("width", "depth"),
    [
        (2, 60),
        (1, 150),
        (1000, 4),
    ],
)
def test_exponentially_nested_containers_are_refused(
    tmp_path: Path, width: int, depth: int
) -> None:
    """Sixty lists that each contain the next one twice expand to 10^18 entries."""
    value: list[object] = []
    for _ in range(depth):
        value = [value] * width
    torch.save({"model": value}, tmp_path / "w.pt")
    with pytest.raises(
        CheckpointError, match=r"w\.pt is not loaded: its containers hold each other without end"
    ):
        read_pickle(tmp_path / "w.pt")


@pytest.mark.parametrize("is_zip", [False, True])
def test_truncated_files_are_damaged(tmp_path: Path, is_zip: bool) -> None:
    state = {
        "args": argparse.Namespace(a=np.float64(1)),
        "model": {"w": torch.arange(6.0).view(2, 3)},
    }
    torch.save(state, tmp_path / "good.pt", _use_new_zipfile_serialization=is_zip)
    good = (tmp_path / "good.pt").read_bytes()
    for length in range(0, len(good), 3 if len(good) < 600 else 29):
        (tmp_path / "cut.pt").write_bytes(good[:length])
        with pytest.raises(CheckpointError, match=r"cut\.pt is damaged"):
            read_pickle(tmp_path / "cut.pt")
        with pytest.raises(CheckpointError, match="^its entry w is damaged"):
            read_pickle(io.BytesIO(good[:length]), name="its entry w")


def test_safe_globals_apply_to_own_files_only(tmp_path: Path) -> None:
    torch.save(
        {
            "x": types.SimpleNamespace(a=1),
            "y": torch.ones(1).expand(100_000),
        },
        tmp_path / "a.pt",
    )
    with torch.serialization.safe_globals([types.SimpleNamespace, types.MethodType]):
        assert read_pickle(tmp_path / "a.pt", foreign=False)["x"].a == 1
        with pytest.raises(CheckpointError, match=r"a tensor of shape \[100000\]"):
            read_pickle(tmp_path / "a.pt")
        assert types.MethodType in torch.serialization.get_safe_globals()
