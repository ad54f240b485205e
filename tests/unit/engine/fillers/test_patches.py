"""The table of patches: each is made, undone, and chosen by what is installed."""

from typing import Any

import pytest
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from lightning_megatron.engine import patches as table
from lightning_megatron.engine.fillers import choice
from lightning_megatron.engine.fillers.choice import DeviceType, slot_report
from lightning_megatron.engine.patches import LIGHTNING, patches, replacements
from lightning_megatron.engine.runtime import patched


def _install(monkeypatch: pytest.MonkeyPatch, *, has_liger: bool) -> None:
    for module in (choice, table):
        monkeypatch.setattr(module, "has_liger", lambda: has_liger)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_every_change_is_made_and_undone(device_type: DeviceType, monkeypatch: pytest.MonkeyPatch) -> None:
    if device_type == "cuda":
        pytest.importorskip("triton")
    _install(monkeypatch, has_liger=False)  # liger-kernel's rows need a GPU
    places = replacements(patches(device_type))

    def values() -> list[Any]:
        # vars() and not getattr(): a method must come back as the very object that it was.
        return [vars(owner).get(name, "absent") for owner, name, _ in places]

    before = values()
    with patched(places):
        during = values()
    assert all(a is not b for a, b in zip(before, during, strict=True))
    assert all(a is b for a, b in zip(before, values(), strict=True))


def test_lightning_still_asks_for_sigterm_before_each_batch() -> None:
    (row,) = LIGHTNING
    assert row.attribute.split(".")[1] in _TrainingEpochLoop.advance.__code__.co_names


def test_liger_is_used_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, has_liger=True)
    fillers: dict[DeviceType, str] = {"cuda": "liger-kernel", "cpu": "Megatron-Core"}
    for device_type, filler in fillers.items():
        changed = {row.attribute for row in patches(device_type)}
        assert ("SwiGLUFunction" in changed) == (device_type == "cuda")
        assert ("SwiGLU", filler) in {(slot, used) for slot, used, _ in slot_report(device_type)}
