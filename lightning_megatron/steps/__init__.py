"""Training objectives: what GPT, BERT and T5 learn from a batch."""

from __future__ import annotations

from lightning_megatron.engine.schedule import TrainStep
from lightning_megatron.errors import require_choice
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
    """The objective called ``name``.

    Raises:
        ConfigError: If there is none.
    """
    require_choice("train_step", name, _STEPS)
    return _STEPS[name]()
