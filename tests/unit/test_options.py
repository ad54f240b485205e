"""Options of every public class: absurd, infinite and misshapen values are refused by the constructor, in one line."""

import inspect
from typing import Any

import pytest

import lightning_megatron
from lightning_megatron import ConfigError, GPTTrainStep, IndexedDataModule, MegatronModule
from lightning_megatron.engine.optimizer_options import GroupMultipliers

_GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 8,
    "n_embd": 4,
    "n_layer": 1,
    "n_head": 1,
    "n_positions": 8,
}
_REQUIRED: dict[str, dict[str, Any]] = {
    "InstructionDataModule": {"data_path": "x", "tokenizer": "x"},
    "IndexedDataModule": {"data_path": "x"},
    "LoadFrom": {"path": "x"},
    "MegatronModule": {"model": _GPT2},
    "PreferenceDataModule": {"data_path": "x", "tokenizer": "x"},
    "SampleText": {"tokenizer": "x", "prompts": "x"},
    "StreamingTextDataModule": {"data_path": "x", "tokenizer": "x"},
    "TextEvaluationDataModule": {"data_path": "x", "tokenizer": "x"},
}
"""Arguments without which a class cannot be made."""
_WRONG: dict[str, tuple[Any, ...]] = {
    "bool": ("false", 1),
    "int": (
        10**20,
        -(10**20),
        1.5,
        "3",
        True,
    ),
    "float": (float("inf"), float("nan"), "1e-3", True),
    "str": (5,),
    "dict": (5, "x", ["x"]),
    "Mapping": (5, "x", ["x"]),
    "list": (5, "x"),
}
"""Values that no option of a type accepts."""
_OPTIONS = (
    "GenerationOptions",
    "GroupMultipliers",
    "Heartbeat",
    "LRSchedule",
    "LoRA",
    "LoadFrom",
    "MaskingOptions",
)
_OPTION_OBJECTS = (*_OPTIONS, "OptimizerOptions")
"""Classes of objects that hold options; a mapping of their fields will do, a number or a flag will not."""


def _classes() -> list[Any]:
    public = (getattr(lightning_megatron, name) for name in lightning_megatron.__all__)
    named = [
        each for each in public if inspect.isclass(each) and hasattr(each.__init__, "__wrapped__")
    ]
    return [*named, GroupMultipliers]


def _wrong_values(annotation: str) -> tuple[Any, ...]:
    names = annotation.split(" | ")
    if set(names) & set(_OPTION_OBJECTS):
        return (
            60,
            1.5,
            True,
            *(() if "str" in names else ("soon",)),
        )
    return _WRONG.get(names[0].partition("[")[0], ()) if len({*names} - {"None"}) == 1 else ()


def test_every_class_of_options_checks_their_types() -> None:
    checked = {cls.__name__ for cls in _classes()}
    assert {
        *_OPTION_OBJECTS,
        "IndexedDataModule",
        "MegatronModule",
        "MegatronStrategy",
        "SpikeGuard",
    } <= checked


@pytest.mark.parametrize(
    "cls",
    _classes(),
    ids=lambda cls: cls.__name__,
)
def test_wrong_value_is_refused_by_its_option(cls: Any) -> None:
    for name, parameter in inspect.signature(cls).parameters.items():
        for value in _wrong_values(str(parameter.annotation)):
            with pytest.raises(ConfigError) as error:
                cls(
                    **{
                        **_REQUIRED.get(cls.__name__, {}),
                        name: value,
                    }
                )
            assert name in str(error.value)
            assert "\n" not in str(error.value)


def test_train_step_is_a_name_or_an_object() -> None:
    for step in (GPTTrainStep, print, 3):
        with pytest.raises(ConfigError, match="expected the name or an object of a TrainStep"):
            MegatronModule(model=_GPT2, train_step=step)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "rampup",
    [
        [1, 0, 10],
        ["4", 1, 2],
        [0, 1, 2],
        [1, 2],
    ],
)
def test_ramp_up_of_the_batch_is_three_counts(rampup: list[Any]) -> None:
    with pytest.raises(ConfigError, match="rampup_batch_size"):
        IndexedDataModule(data_path="x", rampup_batch_size=rampup)
