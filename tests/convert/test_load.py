"""Weights of another model, another head or another precision become what transformers makes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_megatron.errors import CheckpointError
from tests.convert.directories import Format, save_as, save_pickled, tiny_bert, tiny_gpt2, tiny_llama
from tests.convert.weights import assert_same_weights, weights_of
from tests.families.parity import pretrained_module
from tests.parity.training import Case, Layout, Sentences, trainer_of
from tests.ranks import RankError, run_ranks

FOUR_RANKS = Layout(tp=2, pp=2, num_microbatches=2)
TWO_RANKS = Layout(tp=2)


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def loaded(directory: str, layout: Layout, precision: str = "32-true", task: str | None = None) -> dict[str, Any]:
    """Load in a fit of one step; what rank 0 then has under Hugging Face's names, its warnings and master weights."""
    import logging

    from lightning.pytorch import Callback
    from torch.utils.data import DataLoader

    from lightning_megatron.convert.shards import Gathering

    seen: dict[str, Any] = {"messages": []}

    class Recorder(Callback):
        """Looks at the weights before the first step."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            with pl_module.megatron.engine():
                gathered = Gathering(pl_module.model_chunks, pl_module.model_config).tensors()
                seen["tensors"] = {name: tensor.clone() for name, tensor in gathered if tensor is not None}
            weights = pl_module.model_chunks.named_parameters()
            masters = [(name, weight) for name, weight in weights if getattr(weight, "main_param", None) is not None]
            seen["num_masters"] = len(masters)
            seen["masters_differ"] = [
                name for name, weight in masters if not torch.equal(weight.main_param.view(-1), weight.float().view(-1))
            ]

    handler = logging.Handler()
    handler.emit = lambda record: seen["messages"].append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_megatron.convert.hugging_face").addHandler(handler)
    module, rows = pretrained_module(directory, task=task), [Sentences(4)[i] for i in range(4)]
    if module.model_config.architecture == "bert":
        rows = [{"input_ids": row["input_ids"], "labels": torch.tensor(0)} for row in rows]
    case: Any = Case(layout=layout, precision=precision, steps=1)
    trainer_of(case, callbacks=[Recorder()]).fit(module, DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
    return seen


def _loaded(directory: Path, layout: Layout, *options: Any) -> dict[str, Any]:
    answers: list[dict[str, Any]] = run_ranks(loaded, layout.world_size, str(directory), layout, *options)
    assert not any(answer["masters_differ"] for answer in answers)
    assert not any(answer["messages"] for answer in answers[1:])
    return answers[0]


def _refusal(directory: Path) -> str:
    with pytest.raises(RankError) as caught:
        run_ranks(loaded, 4, str(directory), FOUR_RANKS)
    assert caught.value.error_type == "CheckpointError"
    assert "killed" not in str(caught.value)
    lines = [line for line in str(caught.value).splitlines() if "Error: " in line]
    assert all("CheckpointError: " in line for line in lines), "a rank failed otherwise"
    return lines[-1].split("CheckpointError: ")[1]


def _change(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


# ---- what is loaded ------------------------------------------------------------------------------------------------


def _only_the_output_layer(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")


def _with_a_buffer(tensors: dict[str, torch.Tensor]) -> None:
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 4, 4).bool()


@pytest.mark.parametrize("change", [None, _only_the_output_layer, _with_a_buffer, "headless"])
def test_files_of_other_days_are_the_same_model(tmp_path: Path, change: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A tied output layer twice, alone, buffers, and the model without its head."""
    model = tiny_gpt2()
    save_as(model, tmp_path / "today", "safetensors")
    if change == "headless":
        model.transformer.save_pretrained(tmp_path / "model")
    else:
        save_as(model, tmp_path / "model", "bin" if change is None else "safetensors")
    if callable(change):
        _change(tmp_path / "model", change)
    assert_same_weights(weights_of(tmp_path / "model"), weights_of(tmp_path / "today"))
    assert "left out" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "dtype", "precision", "layout"),
    [
        ("sharded_bin", torch.float16, "32-true", FOUR_RANKS),
        ("safetensors", torch.float64, "32-true", TWO_RANKS),
        ("safetensors", torch.float32, "bf16-mixed", TWO_RANKS),
        ("safetensors", torch.bfloat16, "bf16-mixed", Layout(dp=2, distributed_optimizer=False)),
    ],
)
def test_files_of_any_precision_are_rounded_to_the_models(
    tmp_path: Path, kind: Format, dtype: torch.dtype, precision: str, layout: Layout
) -> None:
    """And master weights are the same numbers."""
    expected = save_as(tiny_llama().to(dtype), tmp_path / "model", kind)
    result = _loaded(tmp_path / "model", layout, precision)
    rounded = torch.float32 if precision == "32-true" else torch.bfloat16
    assert result["tensors"].keys() == expected.keys()
    assert all(torch.equal(result["tensors"][name], expected[name].to(rounded)) for name in expected)
    assert (result["num_masters"] > 0) == (precision == "bf16-mixed")


# ---- heads ----------------------------------------------------------------------------------------------------------


def test_an_output_layer_that_a_headless_model_lacks_is_new(tmp_path: Path) -> None:
    tiny_llama().model.save_pretrained(tmp_path / "model")
    result = _loaded(tmp_path / "model", TWO_RANKS)
    (message,) = result["messages"]
    assert "newly initialised: lm_head.weight" in message
    assert result["tensors"]["lm_head.weight"].std() > 0


def test_a_classifier_on_a_pretrained_bert_is_new_and_said_so(tmp_path: Path) -> None:
    model = tiny_bert("PreTraining")
    expected = save_as(model, tmp_path / "model", "safetensors")
    result = _loaded(tmp_path / "model", FOUR_RANKS, "32-true", "sequence_classification")
    ignored, new = result["messages"]
    assert new.endswith("newly initialised: classifier.weight, classifier.bias")
    assert "cls.predictions.transform.dense.weight" in ignored
    assert "cls.seq_relationship.weight" in ignored
    body = {name for name in expected if name.startswith("bert.")}
    assert result["tensors"].keys() == body | {"classifier.weight", "classifier.bias"}
    assert all(torch.equal(result["tensors"][name], expected[name]) for name in body)
    assert result["tensors"]["classifier.weight"].std() > 0
    assert (result["tensors"]["classifier.bias"] == 0).all()


@pytest.mark.parametrize(
    ("model", "lost"), [(tiny_bert, "classifier.bias"), (tiny_llama, "lm_head.weight")], ids=["half a head", "a head"]
)
def test_a_lost_part_of_a_head_is_an_error(tmp_path: Path, model: Any, lost: str) -> None:
    arguments = ["SequenceClassification"] if model is tiny_bert else []
    save_as(model(*arguments), tmp_path / "model", "safetensors")
    _change(tmp_path / "model", lambda tensors: tensors.pop(lost))
    with pytest.raises(CheckpointError, match=f"1 problem: '{lost}' is missing"):
        weights_of(tmp_path / "model")


# ---- files of another model -----------------------------------------------------------------------------------------


def test_all_problems_are_named_at_once_on_all_ranks(tmp_path: Path) -> None:
    save_as(tiny_llama(), tmp_path / "model", "safetensors")

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.0.mlp.up_proj.weight"]
        del tensors["model.layers.3.self_attn.k_proj.weight"]
        tensors["model.layers.4.mlp.up_proj.weight"] = torch.ones(48, 32)
        tensors["foreign.weight"] = torch.ones(3)
        tensors["model.embed_tokens.weight"] = torch.ones(88, 32)
        tensors["model.layers.1.mlp.down_proj.weight"] = torch.ones(48, 32)
        tensors["model.layers.2.self_attn.q_proj.weight"] = torch.ones(32, 32, dtype=torch.int8)
        tensors["model.norm.weight"] = torch.ones(32, dtype=torch.float8_e4m3fn)

    _change(tmp_path / "model", spoil)
    message = _refusal(tmp_path / "model")
    for problem in (
        "8 problems",
        "'model.layers.0.mlp.up_proj.weight' is missing",
        "'model.layers.3.self_attn.k_proj.weight' is missing",
        "'model.layers.4.mlp.up_proj.weight' is not part of the model",
        "'foreign.weight' is not part of the model",
        "'model.embed_tokens.weight' has the shape [88, 32], not [83, 32]",
        "'model.layers.1.mlp.down_proj.weight' has the shape [48, 32], not [32, 48]",
        "'model.layers.2.self_attn.q_proj.weight' is int8",
        "'model.norm.weight' is float8_e4m3fn",
    ):
        assert problem in message


def test_tied_tensors_that_differ_are_an_error(tmp_path: Path) -> None:
    tensors = save_as(tiny_gpt2(), tmp_path / "model", "bin")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].clone()
    tensors["lm_head.weight"][50] += 1
    save_pickled(tensors, tmp_path / "model", "bin")
    message = _refusal(tmp_path / "model")
    assert "'lm_head.weight' differs from 'transformer.wte.weight'" in message
    assert "tie_word_embeddings" in message


def test_damaged_files_are_an_error_on_all_ranks(tmp_path: Path) -> None:
    save_as(tiny_llama(), tmp_path / "model", "sharded_safetensors")
    file = sorted((tmp_path / "model").glob("model-*.safetensors"))[2]
    file.write_bytes(file.read_bytes()[:-10])
    assert f"{file} is truncated" in _refusal(tmp_path / "model")
