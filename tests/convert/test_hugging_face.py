"""Hugging Face model directories: reading weight files, loading into the model, saving."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_megatron.convert import hugging_face_saving
from lightning_megatron.convert.weight_files import open_weights, write_weight_file
from lightning_megatron.errors import CheckpointError
from tests.convert.directories import (
    Format,
    save_as,
    save_pickled,
    tensors_in,
    tiny_bert,
    tiny_gpt2,
    tiny_llama,
)
from tests.convert.weights import assert_same_weights, weights_of
from tests.families.parity import pretrained_module
from tests.parity.comparison import assert_same
from tests.parity.training import DP2, FOUR_RANKS, PP2, TP2, Case, Layout, Sentences, trainer_of
from tests.ranks import RankError, run_ranks

Change = Callable[[Path], object]
Tensors = dict[str, torch.Tensor]


# ---- files ----------------------------------------------------------------------------------------------------------


class _RunsCode:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def _without_two_files(folder: Path) -> None:
    for file in sorted(folder.glob("model-*.safetensors"))[:2]:
        file.unlink()


def _tensor_in_two_files(folder: Path) -> None:
    for file in sorted(folder.glob("model-*.safetensors")):
        tensors = load_file(file)
        if "model.norm.weight" not in tensors:
            save_file(tensors | {"model.norm.weight": torch.ones(32)}, file)
            return


def _index(text: str) -> Change:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


def _index_to(file: str) -> Change:
    return _index(json.dumps({"weight_map": {"lm_head.weight": file}}))


def _cut(name: str, kept: int) -> Change:
    return lambda folder: os.truncate(
        folder / name, kept if kept >= 0 else (folder / name).stat().st_size - 1
    )


def _header(content: bytes) -> Change:
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


def _pickle(content: Any, is_new: bool = True) -> Change:
    return lambda folder: torch.save(
        content(folder), folder / "pytorch_model.bin", _use_new_zipfile_serialization=is_new
    )


_HEADER = b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}'
_DAMAGED = ("model.safetensors.index.json", "fetch it again")
_CODE_ERROR = ("pytorch_model.bin", "is not loaded: it holds more than data")
DAMAGE: dict[str, tuple[str | None, Change, tuple[str, ...]]] = {
    "no folder": (None, lambda folder: folder.rmdir(), ("got none",)),
    "nothing": (None, lambda _: None, ("model.safetensors", "pytorch_model.bin", "pretrained=False")),
    "two files less": ("sharded_safetensors", _without_two_files, ("model-00001-of-", "model-00002-of-", "fetch")),
    **{f"index to {file}": (None, _index_to(file), ("lm_head.weight", "outside"))
       for file in ("../other.safetensors", "/etc/passwd", "C:/b")},
    **{f"index {text[:20]}": (None, _index(text), _DAMAGED) for text in ("", "{}", "[" * 9**6, '{"weight_map": []}')},
    **{f"safetensors of {kept}": ("safetensors", _cut("model.safetensors", kept), ("fetch it again",))
       for kept in (0, 100, -1)},
    **{f"pickle of {kept}": ("bin", _cut("pytorch_model.bin", kept), ("use another copy",)) for kept in (0, 100, -1)},
    "header of another file": (None, _header(len(_HEADER).to_bytes(8, "little") + _HEADER + bytes(8)), ("fetch it",)),
    **{f"code, {is_new}": (None, _pickle(lambda folder: {"x": _RunsCode(folder / "it_ran")}, is_new), _CODE_ERROR)
       for is_new in (True, False)},
    "a tensor in two files": ("sharded_safetensors", _tensor_in_two_files, ("one tensor that is 'model.norm.weight'",)),
    "no values": (None, _pickle(lambda _: {"x": torch.ones(2, 3, device="meta")}), ("shape [2, 3] without values",)),
    "a nested dict": (None, _pickle(lambda _: {"state_dict": {"x": torch.ones(2)}}), ("state_dict()",)),
}  # fmt: skip
"""Saved format, damage done to it, and parts of the error message."""


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_weight_files_are_refused(tmp_path: Path, case: str) -> None:
    kind, change, words = DAMAGE[case]
    folder = tmp_path / "model"
    if kind is None:
        folder.mkdir()
    else:
        save_as(tiny_llama() if kind.startswith("sharded") else tiny_gpt2(), folder, kind)  # type: ignore[arg-type]
    change(folder)
    with pytest.raises(CheckpointError) as caught:
        open_weights(folder)
    assert [word for word in (str(folder), *words) if word not in str(caught.value)] == []
    assert not (folder / "it_ran").exists()


# ---- weights of another model, head or release ----------------------------------------------------------------------


def _rewrite(directory: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _only_the_output_layer(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")


def _with_a_buffer(tensors: Tensors) -> None:
    tensors["transformer.h.0.attn.bias"] = torch.ones(
        1,
        1,
        4,
        4,
    ).bool()


@pytest.mark.parametrize("change", [None, _only_the_output_layer, _with_a_buffer, "headless"])
def test_tensor_names_of_other_releases_are_read(
    tmp_path: Path, change: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Both names of a tied output layer, only its own, saved buffers, and the model without its head."""
    model = tiny_gpt2()
    save_as(model, tmp_path / "current", "safetensors")
    if change == "headless":
        model.transformer.save_pretrained(tmp_path / "model")
    else:
        save_as(model, tmp_path / "model", "bin" if change is None else "safetensors")
    if callable(change):
        _rewrite(tmp_path / "model", change)
    assert_same_weights(weights_of(tmp_path / "model"), weights_of(tmp_path / "current"))
    assert "left out" not in caplog.text


@pytest.mark.parametrize("other", ["norm.weight", "layers.2.mlp.up_proj.weight"])
def test_two_tensors_that_are_one_of_the_model_are_an_error(tmp_path: Path, other: str) -> None:
    save_as(tiny_llama(), tmp_path / "model", "safetensors")
    _rewrite(
        tmp_path / "model",
        lambda tensors: tensors.update({other: tensors[f"model.{other}"] + 1}),
    )
    with pytest.raises(
        CheckpointError, match=f"expected one tensor that is 'model.{other}', got two"
    ):
        weights_of(tmp_path / "model")


@pytest.mark.parametrize(
    ("model", "lost"),
    [(tiny_bert, "classifier.bias"), (tiny_llama, "lm_head.weight")],
    ids=["half a head", "a head"],
)
def test_missing_head_tensor_is_an_error(tmp_path: Path, model: Any, lost: str) -> None:
    arguments = ["SequenceClassification"] if model is tiny_bert else []
    save_as(model(*arguments), tmp_path / "model", "safetensors")
    _rewrite(tmp_path / "model", lambda tensors: tensors.pop(lost))
    with pytest.raises(CheckpointError, match=f"1 problem: '{lost}' is missing"):
        weights_of(tmp_path / "model")


def _damage_six_tensors(tensors: Tensors) -> None:
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["foreign.weight"] = torch.ones(3)
    tensors["model.embed_tokens.weight"] = torch.ones(88, 32)
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.ones(48, 32)
    tensors["model.layers.2.self_attn.q_proj.weight"] = torch.ones(32, 32, dtype=torch.int8)
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.float8_e4m3fn)


def test_all_problems_are_listed_on_every_rank(tmp_path: Path) -> None:
    save_as(tiny_llama(), tmp_path / "model", "safetensors")
    _rewrite(tmp_path / "model", _damage_six_tensors)
    with pytest.raises(RankError) as caught:
        run_ranks(
            load_and_save,
            4,
            str(tmp_path / "model"),
            str(tmp_path / "saved"),
            FOUR_RANKS,
        )
    assert caught.value.error_type == "CheckpointError"
    lines = [line for line in str(caught.value).splitlines() if "Error: " in line]
    assert all("CheckpointError: " in line for line in lines), "a rank raised another error"
    for problem in (
        "6 problems",
        "'model.layers.0.mlp.up_proj.weight' is missing",
        "'foreign.weight' is not part of the model",
        "'model.embed_tokens.weight' has the shape [88, 32], not [83, 32]",
        "'model.layers.1.mlp.down_proj.weight' has the shape [48, 32], not [32, 48]",
        "'model.layers.2.self_attn.q_proj.weight' is int8",
        "'model.norm.weight' is float8_e4m3fn",
    ):
        assert problem in lines[-1]


def test_different_tied_tensors_are_an_error(tmp_path: Path) -> None:
    tensors = save_as(tiny_gpt2(), tmp_path / "model", "bin")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].clone()
    tensors["lm_head.weight"][50] += 1
    save_pickled(tensors, tmp_path / "model", "bin")
    with pytest.raises(
        CheckpointError,
        match=r"'lm_head.weight' differs from 'transformer.wte.weight'.*tie_word_embe",
    ):
        weights_of(tmp_path / "model")


# ---- on the ranks ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Limit files to 20 kB, as a full disk would."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@contextlib.contextmanager
def _killed() -> Iterator[None]:
    """Kill rank 0 after it has written some of the files."""
    from unittest.mock import patch

    def write_and_die(folder: Path, name: str, tensors: Tensors) -> None:
        write_weight_file(folder, name, tensors)
        if any(key.endswith("layers.1.mlp.down_proj.weight") for key in tensors):
            os._exit(9)

    with patch.object(hugging_face_saving, "write_weight_file", write_and_die):
        yield


_FAILURES: dict[str, Any] = {
    "": contextlib.nullcontext,
    "full disk": full_disk,
    "killed": _killed,
}


def load_and_save(
    source: str,
    target: str,
    layout: Layout,
    precision: str = "32-true",
    task: str | None = None,
    size: str | int = "5GB",
    failure: str = "",
    accelerator: str = "cpu",
) -> dict[str, Any]:
    """Load ``source``, train a step with learning rate 0, save it as ``target``; this rank's log messages and error."""
    import logging

    from torch.utils.data import DataLoader

    result: dict[str, Any] = {"messages": [], "error": ""}
    handler = logging.Handler()
    handler.emit = lambda record: result["messages"].append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_megatron.convert.hugging_face").addHandler(handler)
    module = pretrained_module(source, task=task, lr=0.0)
    rows = [Sentences(4)[i] for i in range(4)]
    if module.model_config.architecture == "bert":
        rows = [{"input_ids": row["input_ids"], "labels": torch.tensor(0)} for row in rows]
    case: Any = Case(layout=layout, precision=precision, steps=1, accelerator=accelerator)  # type: ignore[arg-type]
    trainer_of(case).fit(module, DataLoader(rows, batch_size=4 // layout.dp))  # type: ignore[arg-type]
    try:
        with _FAILURES[failure]():
            module.save_pretrained(target, max_shard_size=size)
    except CheckpointError as error:
        result["error"] = str(error)
    return {**result, "is_on_gpu": all(parameter.is_cuda for parameter in module.parameters())}


def _save_on_ranks(
    folder: Path,
    layout: Layout,
    *options: Any,
    source: str = "source",
    target: str = "target",
) -> Any:
    """Run ``load_and_save``; rank 0's result. Other ranks must log nothing and raise if rank 0 does."""
    first, *others = run_ranks(
        load_and_save,
        layout.world_size,
        str(folder / source),
        str(folder / target),
        layout,
        *options,
    )
    assert not any(other["messages"] for other in others)
    assert all(bool(other["error"]) == bool(first["error"]) for other in others)
    return first


@pytest.mark.parametrize(
    ("kind", "dtype", "precision", "layout"),
    [
        ("sharded_bin", torch.float16, "32-true", FOUR_RANKS),
        ("safetensors", torch.float64, "bf16-mixed", TP2),
        ("safetensors", torch.bfloat16, "bf16-mixed", Layout(dp=2, distributed_optimizer=False)),
    ],
)
def test_saved_files_have_the_run_dtype_and_shard_size(
    tmp_path: Path,
    kind: Format,
    dtype: torch.dtype,
    precision: str,
    layout: Layout,
) -> None:
    """Master weights have the same values: the optimizer step has copied them into the weights."""
    expected = save_as(tiny_llama().to(dtype), tmp_path / "source", kind)
    (tmp_path / "source" / "generation_config.json").write_text(
        '{"temperature": 0.7, "do_sample": true}'
    )
    _save_on_ranks(tmp_path, layout, precision, None, "20KB")
    rounded = torch.float32 if precision == "32-true" else torch.bfloat16
    target = tmp_path / "target"
    assert_same(tensors_in(target), {name: tensor.to(rounded) for name, tensor in expected.items()})
    assert json.loads((target / "config.json").read_text())["dtype"] == str(rounded)[6:]
    sizes = [
        sum(each.nbytes for each in load_file(file).values())
        for file in target.glob("model-*.safetensors")
    ]
    assert len(sizes) > 1
    assert max(sizes) <= 20_000
    assert json.loads((target / "model.safetensors.index.json").read_text())["metadata"][
        "total_size"
    ] == sum(sizes)
    assert json.loads((target / "generation_config.json").read_text())["temperature"] == 0.7


def test_output_layer_of_a_headless_model_is_newly_initialised(tmp_path: Path) -> None:
    tiny_llama().model.save_pretrained(tmp_path / "source")
    (message,) = _save_on_ranks(tmp_path, TP2)["messages"]
    assert "newly initialised: lm_head.weight" in message
    assert tensors_in(tmp_path / "target")["lm_head.weight"].std() > 0


def test_classifier_of_a_pretrained_bert_is_newly_initialised(tmp_path: Path) -> None:
    expected = save_as(tiny_bert("PreTraining"), tmp_path / "source", "safetensors")
    ignored, new = _save_on_ranks(tmp_path, FOUR_RANKS, "32-true", "sequence_classification")[
        "messages"
    ]
    assert new.endswith("newly initialised: classifier.weight, classifier.bias")
    assert "cls.predictions.transform.dense.weight" in ignored
    assert "cls.seq_relationship.weight" in ignored
    saved = tensors_in(tmp_path / "target")
    weight = saved.pop("classifier.weight")
    bias = saved.pop("classifier.bias")
    assert weight.std() > 0
    assert (bias == 0).all()
    assert_same(
        saved, {name: tensor for name, tensor in expected.items() if name.startswith("bert.")}
    )


def test_saving_into_a_directory_keeps_unrelated_files(tmp_path: Path) -> None:
    save_as(tiny_llama(), tmp_path / "source", "safetensors")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    # Found in old configs: transformers loads this field, but refuses to save it.
    (tmp_path / "source" / "config.json").write_text(json.dumps({**config, "max_length": 30}))
    save_as(tiny_llama(hidden_size=64), tmp_path / "target", "sharded_safetensors")
    (tmp_path / "target" / "tokenizer.json").write_text("{}")
    for size in ("30KB", 10**6):
        _save_on_ranks(tmp_path, Layout(), "32-true", None, size)
    names = {file.name for file in (tmp_path / "target").iterdir()}
    assert names == {"model.safetensors", "config.json", "tokenizer.json", "generation_config.json"}
    assert load_file(tmp_path / "target" / "model.safetensors")["model.norm.weight"].shape == (32,)


def test_full_disk_is_an_error_and_keeps_the_old_model(tmp_path: Path) -> None:
    save_as(tiny_llama(), tmp_path / "source", "safetensors")
    expected = save_as(tiny_llama(hidden_size=64), tmp_path / "target", "safetensors")
    error = _save_on_ranks(tmp_path, FOUR_RANKS, "32-true", None, "5GB", "full disk")["error"]
    assert "is not written" in error
    assert "File too large" in error
    names = {file.name for file in (tmp_path / "target").iterdir()}
    assert names == {"model.safetensors", "config.json", "generation_config.json"}
    assert_same(tensors_in(tmp_path / "target"), expected)


def test_killed_save_changes_no_final_file(tmp_path: Path) -> None:
    save_as(tiny_llama(), tmp_path / "source", "safetensors")
    save_as(tiny_llama(hidden_size=64), tmp_path / "old", "sharded_safetensors")
    before = {file.name: file.read_bytes() for file in (tmp_path / "old").iterdir()}
    for target in ("old", "new"):
        with pytest.raises(RankError, match="died without a result"):
            _save_on_ranks(tmp_path, TP2, "32-true", None, "20KB", "killed", target=target)
    assert not (tmp_path / "new").exists()
    files = [file for file in (tmp_path / "old").iterdir() if file.is_file()]
    assert {file.name: file.read_bytes() for file in files} == before
    _save_on_ranks(tmp_path, TP2, "32-true", None, "20KB", target="new")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "old", "new"}


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "layout",
    [TP2, PP2, DP2],
    ids=str,
)
@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama])
def test_weights_round_trip_through_gpus(tmp_path: Path, make: Any, layout: Layout) -> None:
    expected = save_as(
        make().to(torch.bfloat16),
        tmp_path / "source",
        "safetensors",
    )
    assert _save_on_ranks(tmp_path, layout, "bf16-mixed", None, "20KB", "", "gpu")["is_on_gpu"]
    assert_same(tensors_in(tmp_path / "target"), expected)
