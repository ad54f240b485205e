"""Lightning's ``load_from_checkpoint``, which calls what a file names, is closed for every class."""

import inspect
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule

import lightning_megatron
from lightning_megatron.errors import ConfigError

CLASSES = [
    cls
    for cls in (getattr(lightning_megatron, name) for name in lightning_megatron.__all__)
    if inspect.isclass(cls) and issubclass(cls, (LightningDataModule, LightningModule))
]


@pytest.mark.parametrize("cls", CLASSES)
def test_no_class_has_lightnings_reader(cls: type) -> None:
    assert any("load_from_checkpoint" in vars(base) for base in cls.__mro__ if _is_ours(base))


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith("lightning_megatron.")


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if issubclass(cls, LightningDataModule)])
def test_data_module_refuses_a_checkpoint_with_the_reason(
    cls: type[LightningDataModule], tmp_path: Path
) -> None:
    path = tmp_path / "x.ckpt"
    torch.save({"datamodule_hyper_parameters": {"_instantiator": "os.system"}}, path)
    with pytest.raises(ConfigError, match="holds the position in the samples, not the arguments"):
        cls.load_from_checkpoint(path)
