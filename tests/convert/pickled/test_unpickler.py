"""Does a pickle give its data, and run nothing, whatever it says?"""

from __future__ import annotations

import argparse
import pickle
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_megatron.convert.pickled.unpickler import FilePart, load_pickled
from lightning_megatron.errors import CheckpointError


def _tensors() -> dict[str, torch.Tensor]:
    numbers = torch.arange(24, dtype=torch.float32)
    with_attributes = torch.nn.Parameter(numbers.view(4, 6)).detach().clone()
    with_attributes.tensor_model_parallel = True  # type: ignore[attr-defined]
    return {
        **{str(dtype): numbers.to(dtype) for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64)},
        **{str(dtype): numbers.to(dtype) for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)},
        "columns": numbers.view(4, 6)[:, 2:5],
        "transposed": numbers.view(4, 6).t(),
        "every second": numbers.view(2, 3, 4)[:, :, ::2],
        "shared": numbers[4:8],
        "parameter": torch.nn.Parameter(numbers.view(2, 12)),
        "with attributes": with_attributes,
        "number": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "complex": torch.ones(2, dtype=torch.complex64),
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("is_zip", [False, True])
def test_tensors_of_all_kinds(tmp_path: Path, is_zip: bool, protocol: int) -> None:
    file = tmp_path / "a.pt"
    tensors = _tensors()
    if is_zip:
        tensors |= {"uint16": torch.arange(3).to(torch.uint16), "float8": torch.ones(3).to(torch.float8_e4m3fn)}
    torch.save(tensors, file, pickle_protocol=protocol, _use_new_zipfile_serialization=is_zip)

    loaded = load_pickled(file)

    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tuple(tensor.shape))
        assert loaded[name].num_bytes == tensor.numel() * tensor.element_size()
        assert torch.equal(
            loaded[name].whole().view(-1).view(torch.uint8),
            tensor.detach().clone().contiguous().view(-1).view(torch.uint8),
        ), name
        if tensor.dim():
            assert torch.equal(loaded[name].rows(0, 0), tensor[0:0]) or tensor.dtype == torch.float8_e4m3fn
    for name in ("columns", "transposed", "every second", "parameter"):
        assert torch.equal(loaded[name].rows(1, 2), tensors[name][1:2])


# ---- hostile --------------------------------------------------------------------------------------------------------

_SHELL = b"cos\nsystem\n(S'touch {proof}'\ntR"


def _archive(path: Path, pickled: bytes, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
        for name, data in members.items():
            archive.writestr(f"a/{name.replace('__', '/')}", data)
    return path


HOSTILE = {
    "a call": (_SHELL + b".", "os.system"),
    "in a dictionary": (b"}S'model'\n" + _SHELL + b"s.", "os.system"),
    "in an ordered dictionary": (b"ccollections\nOrderedDict\n((lS'a'\n" + _SHELL + b"\x86atR.", "os.system"),
    "as state": (b"cargparse\nNamespace\n)\x81}S'a'\n" + _SHELL + b"sb.", "os.system"),
    "found on the stack": (b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x05touch\x85R.", "posix.system"),
    "found in the memo": (b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x9400h\x00h\x01\x93.", "posix.system"),
    "eval": (b"cbuiltins\neval\n(S'1'\ntR.", "builtins.eval"),
    "eval of Python 2": (b"c__builtin__\neval\n(S'1'\ntR.", "__builtin__.eval"),
    "an attribute": (b"cbuiltins\ngetattr\n(cargparse\nNamespace\nS'__init__'\ntR.", "builtins.getattr"),
    "a dotted name": (b"\x80\x04\x8c\x08argparse\x8c\x10Namespace.__init\x93.", "argparse.Namespace.__init"),
    "an attribute of an allowed module": (b"cargparse\n_os.system\n.", "argparse._os.system"),
    "torch's loader": (b"ctorch.storage\n_load_from_bytes\n(S''\ntR.", "torch.storage._load_from_bytes"),
    "torch's other functions": (b"ctorch\nload\n.", "torch.load"),
    "lazy modules of torch": (b"ctorch\n_dynamo\n.", "torch._dynamo"),
    "another function in a tensor's place": (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(ctypes\nSimpleNamespace\nN)NtR.", "types.SimpleNamespace"
    ),
    "named like Megatron": (b"cmegatronx\nrun\n.", "megatronx.run"),
    "an instance of Python 2": (b"(S'touch'\nios\nsystem\n.", "instruction INST"),
    "an object of Python 2": (b"(cargparse\nNamespace\no.", "instruction OBJ"),
    "extension 1": (b"\x82\x01.", "instruction EXT1"),
    "extension 4": (b"\x84\x01\x00\x00\x00.", "instruction EXT4"),
    "a named buffer": (b"\x97.", "instruction NEXT_BUFFER"),
    "a change of a class": (b"cargparse\nNamespace\nN}S'__setstate__'\nI1\ns\x86b.", "changes argparse.Namespace"),
    "a change of a function": (b"ctorch._utils\n_rebuild_tensor\n}b.", "changes torch._utils._rebuild_tensor"),
    "a call of data": (b"cargparse\nNamespace\n)R)R.", "it calls a Namespace"),
    "a call of a dtype": (b"ctorch\nfloat32\n)R.", "it calls a dtype"),
    "named arguments": (b"\x80\x04cargparse\nNamespace\n)}S'a'\nI1\ns\x92.", "from named arguments"),
    "a builtin": (b"c__builtin__\nint\n(S'1'\ntR.", "__builtin__.int"),
    "an unknown codec": (b"c_codecs\nencode\n(S'a'\nS'zip'\ntR.", "codec zip"),
    "a module": (b"(S'module'\nI1\ntQ.", "refers to something that is no tensor"),
}  # fmt: skip


@pytest.mark.parametrize("is_zip", [False, True])
@pytest.mark.parametrize("case", HOSTILE)
def test_nothing_runs_and_the_name_is_said(tmp_path: Path, case: str, is_zip: bool) -> None:
    pickled, reason = HOSTILE[case]
    pickled = pickled.replace(b"{proof}", str(tmp_path / "proof").encode())
    file = tmp_path / "a.pt"
    if is_zip:
        _archive(file, pickled)
    else:
        header = [pickle.dumps(each, 2) for each in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
        file.write_bytes(b"".join(header) + pickled)

    with pytest.raises(CheckpointError) as error:
        load_pickled(file)

    assert reason in str(error.value)
    assert "do not trust its source" in str(error.value)
    assert not (tmp_path / "proof").exists()


def _tensor(shape: bytes, stride: bytes, first: bytes = b"0", items: bytes = b"4") -> bytes:
    storage = b"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI" + items + b"\ntQ"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"I" + first + b"\n" + shape + stride + b"I00\n}tR."


DAMAGED = {
    "nothing": b"",
    "an empty stack": b".",
    "a mark only": b"(.",
    "no end": b"}",
    "an unknown instruction": b"\xff.",
    "a missing memo": b"h\x07.",
    "half a pair": b"}(S'a'\nu.",
    "a list as a key": b"}]I1\ns.",
    "tuples in each other as keys": b"}I1\n" + b"\x85" * 200 + b"I1\ns.",
    "a text of 16 exabytes": b"\x8d\xff\xff\xff\xff\xff\xff\xff\x0fab.",
    "bytes of 4 gigabytes": b"B\xff\xff\xff\xffab.",
    "a number of 2 gigabytes": b"\x8b\xff\xff\xff\x7fab.",
    "a negative length": b"\x8b\xff\xff\xff\xff.",
    "a number of many digits": b"I" + b"9" * 100_000 + b"\n.",
    "items behind a list's place": b"I1\nI2\na.",
    "a state that is no dictionary": b"cargparse\nNamespace\n)\x81I1\nb.",
    "numbers as names of attributes": b"cargparse\nNamespace\n)\x81}I1\nI2\nsb.",
    "a huge tensor": _tensor(b"(I1000000\nI1000000\nt", b"(I1000000\nI1\nt"),
    "a tensor repeated by its stride": _tensor(b"(I1000000000000\nt", b"(I0\nt"),
    "a negative stride": _tensor(b"(I2\nt", b"(I-1\nt"),
    "a tensor before its storage": _tensor(b"(I2\nt", b"(I1\nt", first=b"-2"),
    "a tensor behind its storage": _tensor(b"(I2\nt", b"(I1\nt", first=b"3"),
    "a storage larger than its file": _tensor(b"(I2\nt", b"(I1\nt", items=b"1000000000000"),
    "more strides than axes": _tensor(b"(I2\nt", b"(I1\nI1\nt"),
    "a shape of texts": _tensor(b"(S'2'\nt", b"(I1\nt"),
    "the same copy again and again": b"("
    + b"I1\n" * 300_000
    + b"tq\x000"
    + b"ctorch\nSize\nh\x00\x85R0" * 1000
    + b"N.",
}


@pytest.mark.parametrize("case", DAMAGED)
def test_nonsense_is_one_line_soon_and_takes_no_memory(tmp_path: Path, case: str) -> None:
    import tracemalloc

    file = _archive(tmp_path / "a.pt", DAMAGED[case], data__0=b"\0" * 16)
    start = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="is damaged, or no file of torch.save") as error:
            load_pickled(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300 + len(str(file))
    assert peak < 64 << 20
    assert time.process_time() - start < 10


def test_a_billion_laughs_stay_small(tmp_path: Path) -> None:
    """Thirty dictionaries, each with the next one twice, are a billion entries for whoever walks them."""
    from lightning_megatron.convert.legacy.rank_state import load_rank

    pickled = b"}q\x000" + b"".join(
        b"}q" + bytes([level]) + b"(S'a'\nh" + bytes([level - 1]) + b"S'b'\nh" + bytes([level - 1]) + b"u0"
        for level in range(1, 31)
    )
    file = _archive(tmp_path / "model_optim_rng.pt", pickled + b"}S'model'\nh\x1es.")

    assert len(load_pickled(file)) == 1
    with pytest.raises(CheckpointError, match="its dictionaries are more than 16 deep"):
        load_rank(FilePart.whole(file))
    wide = b"}q\x000}(" + b"".join(b"S'%d'\nh\x00" % number for number in range(3000)) + b"uq\x010}("
    wide += b"".join(b"S'%d'\nh\x01" % number for number in range(3000)) + b"uq\x020}S'model'\nh\x02s."
    with pytest.raises(CheckpointError, match="more than 1,000,000 entries"):
        load_rank(FilePart.whole(_archive(tmp_path / "wide.pt", wide)))


def _saved(tmp_path: Path, is_zip: bool) -> bytes:
    file = tmp_path / "good.pt"
    state = {"args": argparse.Namespace(a=np.float64(1)), "model": {"w": torch.arange(6.0).view(2, 3)}}
    torch.save(state, file, _use_new_zipfile_serialization=is_zip)
    return file.read_bytes()


@pytest.mark.parametrize("is_zip", [False, True])
def test_truncated_files_are_damaged(tmp_path: Path, is_zip: bool) -> None:
    good = _saved(tmp_path, is_zip)
    for length in range(0, len(good), 3 if len(good) < 600 else 7):
        (tmp_path / "cut.pt").write_bytes(good[:length])
        with pytest.raises(CheckpointError, match="is damaged"):
            load_pickled(tmp_path / "cut.pt")


@pytest.mark.parametrize("length", [4, 5, 30, 1000])
def test_half_a_zip_file_is_damaged_whatever_its_bytes_would_say_as_a_pickle(tmp_path: Path, length: int) -> None:
    torch.save({"model": torch.full((300,), 10, dtype=torch.uint8)}, tmp_path / "cut.pt")  # 10 ends a line
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:length])
    with pytest.raises(CheckpointError, match="is damaged.*it ends too early"):
        load_pickled(tmp_path / "cut.pt")
