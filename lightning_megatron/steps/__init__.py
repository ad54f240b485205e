"""Train steps: the training objectives of GPT, BERT and T5.

What is learned belongs here: from a batch to targets, losses and metrics. Imports models and the engine, and never
Lightning.
"""

from __future__ import annotations

from lightning_megatron.errors import require_choice
from lightning_megatron.models.config import CLASSIFICATION
from lightning_megatron.steps.base import TrainStep
from lightning_megatron.steps.bert import BertTrainStep
from lightning_megatron.steps.classification import ClassificationTrainStep
from lightning_megatron.steps.dpo import DPOTrainStep
from lightning_megatron.steps.gpt import GPTTrainStep, LastWordTrainStep
from lightning_megatron.steps.reward import RewardTrainStep
from lightning_megatron.steps.t5 import T5TrainStep

_STEPS: dict[str, type[TrainStep]] = {
    "bert": BertTrainStep,
    "dpo": DPOTrainStep,
    "gpt": GPTTrainStep,
    "last_word": LastWordTrainStep,
    "reward": RewardTrainStep,
    "t5": T5TrainStep,
}

_STEPS_OF_TASKS: dict[tuple[str, str], type[TrainStep]] = {
    ("gpt", task): ClassificationTrainStep for task in CLASSIFICATION
}
"""By name and task, where one name stands for several train steps."""


def train_step_named(name: str, task: str) -> TrainStep:
    """Create the train step called ``name`` for a model of ``task``.

    Raises:
        ConfigError: If the name is unknown.
    """
    require_choice("train_step", name, _STEPS)
    step_class = _STEPS_OF_TASKS.get((name, task), _STEPS[name])
    return step_class()
