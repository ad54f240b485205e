"""The table of patches: each is applied, undone, and selected by what is installed."""

from typing import Any

import pytest
import torch

from lightning_megatron.engine.ops.report import DeviceType, ops_report
from lightning_megatron.engine.patches import patches, replacements
from lightning_megatron.engine.runtime import patched


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_every_patch_is_applied_and_undone(device_type: DeviceType) -> None:
    if device_type == "cuda":
        pytest.importorskip("triton")
    targets = replacements(patches(device_type))

    def values() -> list[Any]:
        # vars() instead of getattr(): a method must be restored as the same object.
        return [vars(owner).get(name, "absent") for owner, name, _ in targets]

    before = values()
    with patched(targets):
        during = values()
    assert all(a is not b for a, b in zip(before, during, strict=True))
    assert all(a is b for a, b in zip(before, values(), strict=True))
    # A module imported during a run may say ``torch.cuda.Stream | None``.
    of_torch = [
        (a, b)
        for (owner, *_), a, b in zip(targets, before, during, strict=True)
        if owner is torch.cuda
    ]
    assert all(isinstance(a, type) == isinstance(b, type) for a, b in of_torch)


def test_kernels_are_used_on_cuda_only() -> None:
    implementations: dict[DeviceType, str] = {"cuda": "Triton kernel", "cpu": "Megatron-Core"}
    for device_type, used in implementations.items():
        patched_names = {row.attribute for row in patches(device_type)}
        assert ("SwiGLUFunction" in patched_names) == (device_type == "cuda")
        assert ("SwiGLU", used) in {
            (op, implementation) for op, implementation, _ in ops_report(device_type)
        }
