"""Train steps: the training objectives of GPT, BERT and T5.

What is learned belongs here: from a batch to targets, losses and metrics. Imports models and the engine, and never
Lightning.
"""

from __future__ import annotations

from lightning_megatron.errors import require_choice
from lightning_megatron.steps.base import TrainStep
from lightning_megatron.steps.bert import BertTrainStep
from lightning_megatron.steps.gpt import GPTTrainStep, LastWordTrainStep
from lightning_megatron.steps.t5 import T5TrainStep

_STEPS: dict[str, type[TrainStep]] = {
    "bert": BertTrainStep,
    "gpt": GPTTrainStep,
    "last_word": LastWordTrainStep,
    "t5": T5TrainStep,
}


def train_step_named(name: str) -> TrainStep:
    """Create the train step called ``name``.

    Raises:
        ConfigError: If the name is unknown.
    """
    require_choice("train_step", name, _STEPS)
    return _STEPS[name]()
