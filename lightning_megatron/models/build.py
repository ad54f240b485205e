"""Which builder makes the chunks of a model?"""

from __future__ import annotations

import torch

from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.transformer_config import EngineSettings


def build_chunks(model: ModelConfig, settings: EngineSettings) -> torch.nn.ModuleList:
    """This rank's model chunks (one per virtual stage), on ``settings.device``, weights not yet filled.

    Every rank must call, after the process groups exist.

    Raises:
        ConfigError: If the model cannot be split as ``settings.parallel`` says.
    """
    if model.architecture == "bert":
        from lightning_megatron.models.bert import build_bert

        return build_bert(model, settings)
    if model.architecture == "t5":
        from lightning_megatron.models.t5 import build_t5

        return build_t5(model, settings)
    from lightning_megatron.models.gpt import build_gpt

    return build_gpt(model, settings)
