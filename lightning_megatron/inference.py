"""What can be asked of a module besides to be trained? Texts and logits, in the middle of training too."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch

from lightning_megatron.engine.agreement import on_all_ranks_alike
from lightning_megatron.errors import ConfigError

if TYPE_CHECKING:
    from lightning_megatron.models.config import ModelConfig
    from lightning_megatron.strategy import MegatronStrategy


class Inference(pl.LightningModule):
    """The side of ``MegatronModule`` that answers; the module sets the attributes below."""

    model_config: ModelConfig
    model_chunks: torch.nn.ModuleList | None
    _model: Any

    @property
    def megatron(self) -> MegatronStrategy:
        """The strategy that runs this module.

        Raises:
            ConfigError: If it is another one.
        """
        from lightning_megatron.strategy import MegatronStrategy

        strategy = self.trainer.strategy
        if not isinstance(strategy, MegatronStrategy):
            raise ConfigError(
                f"{type(self).__name__} runs on {type(strategy).__name__}; use Trainer(strategy=MegatronStrategy(...))"
            )
        return strategy

    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """Continue prompts, as Hugging Face's ``generate`` does, on any layout; every rank must call alike.

        Works in training too (from a callback, say), which goes on as if nothing had happened. The copies of the model
        share the prompts' rows.

        Args:
            input_ids: [b, s], the prompts, the same on every rank.
            attention_mask: [b, s], 1 for tokens and 0 for padding, on whichever side; None for no padding.
            options: Fields of ``GenerationOptions``: ``max_new_tokens``, ``temperature``, ``top_k``, ``seed``, ...

        Returns:
            [b, s + new] on every rank: ``input_ids`` and what follows; padding behind rows that ended before others.

        Raises:
            ConfigError: On all ranks alike, before anything runs: if there is no model yet, a prompt cannot be
                continued, or an option is unknown, out of range or contradicts another.
        """
        from lightning_megatron.generate.end_tokens import end_tokens
        from lightning_megatron.generate.generation import Generator
        from lightning_megatron.generate.options import options_from

        chunks, strategy = self._built_chunks(), self.megatron
        chosen = on_all_ranks_alike(partial(options_from, options))
        generator = Generator(
            chunks,
            self.model_config,
            strategy.topology,
            strategy.root_device,
            end_tokens(self._model),
        )
        with strategy.engine():
            return generator.generate(input_ids, attention_mask, chosen)

    def logits(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """What a GPT predicts after every token, as its Hugging Face model would; every rank must call alike.

        The copies of the model share the rows. Works in training too, without dropout.

        Args:
            input_ids: [b, s], the same on every rank.
            attention_mask: [b, s], 1 for tokens and 0 for padding; None for no padding.

        Returns:
            [b, s, vocab_size] fp32 on every rank, in the order of the rows.

        Raises:
            ConfigError: On all ranks alike, before anything runs: if there is no model yet, or it cannot read a row.
        """
        from lightning_megatron.generate.logits import whole_logits

        chunks, strategy = self._built_chunks(), self.megatron
        with strategy.engine():
            return whole_logits(chunks, self.model_config, strategy.topology, input_ids, attention_mask)

    def _built_chunks(self) -> list[torch.nn.Module]:
        """This rank's chunks of a GPT.

        Raises:
            ConfigError: If there are none yet, or the model is none.
        """
        if self.model_config.architecture != "gpt":
            raise ConfigError(
                f"generate and logits are for GPTs, and {self.model_config.family} is a "
                f"{self.model_config.architecture.upper()}"
            )
        if self.model_chunks is None:
            raise ConfigError("there is no model to ask before Trainer.fit (or validate) has built it; call this then")
        return list(self.model_chunks)
