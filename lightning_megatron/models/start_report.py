"""What should the log say when a run starts? The padded vocabulary, what each rank holds, and what fills each slot."""

from __future__ import annotations

from lightning_megatron.accounting.parameters import parameter_lines, vocabulary_line
from lightning_megatron.accounting.t5 import t5_parameter_lines
from lightning_megatron.engine.slots.report import DeviceType, one_line, slot_report
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.t5_layout import OVERRIDE, t5_layout
from lightning_megatron.models.transformer_config import EngineSettings


def start_lines(model: ModelConfig, settings: EngineSettings) -> list[str]:
    """Lines for rank 0's log; arithmetic only."""
    device: DeviceType = "cuda" if settings.device.type == "cuda" else "cpu"
    parallel = settings.parallel
    if model.architecture == "t5":
        layout = t5_layout(model, parallel, settings.overrides.get(OVERRIDE))
        counts = [vocabulary_line(model, parallel.tp)]
        counts += t5_parameter_lines(model, layout, tp=parallel.tp, pp=parallel.pp)
    else:
        counts = parameter_lines(model, tp=parallel.tp, pp=parallel.pp, vpp=parallel.vpp)
    return [*counts, f"Engine slots: {one_line(slot_report(device))}"]
