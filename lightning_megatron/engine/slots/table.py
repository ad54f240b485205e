"""Which changes to the engine are active while a strategy runs?"""

from __future__ import annotations

from lightning_megatron.engine.patching import Patch
from lightning_megatron.engine.slots.cross_entropy import CROSS_ENTROPY_PATCHES
from lightning_megatron.engine.slots.multi_tensor import COPY_PATCHES, MULTI_TENSOR_PATCHES
from lightning_megatron.engine.slots.optimizers import ADAM_PATCHES, SGD_PATCHES
from lightning_megatron.engine.slots.report import DeviceType, fillers
from lightning_megatron.engine.slots.rope import ROPE_PATCHES
from lightning_megatron.engine.slots.shards import SHARD_PATCHES
from lightning_megatron.engine.slots.swiglu import SWIGLU_PATCHES
from lightning_megatron.engine.slots.wgrad import WGRAD_PATCHES


def patches(device_type: DeviceType) -> tuple[Patch, ...]:
    """Every row that fills a slot on ``device_type``, for ``lightning_megatron.engine.patching.active``.

    They must be active from the construction of the model to the last optimizer step.
    """
    choice = fillers(device_type)
    rows = SGD_PATCHES + SHARD_PATCHES + COPY_PATCHES + CROSS_ENTROPY_PATCHES
    if choice.native_adam:
        rows += ADAM_PATCHES
    if choice.native_multi_tensor:
        rows += MULTI_TENSOR_PATCHES
    if choice.native_wgrad:
        rows += WGRAD_PATCHES
    if choice.compiled_rope:
        rows += ROPE_PATCHES
    if choice.liger:
        rows += SWIGLU_PATCHES
    return rows
