"""Texts, logits and Hugging Face's form of a module, in the middle of training too."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch

from lightning_megatron.convert.registry import config_object
from lightning_megatron.engine.collectives import on_all_ranks_alike
from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.options import GenerationOptions, options_from
from lightning_megatron.hub import upload

if TYPE_CHECKING:
    from lightning_megatron.checkpoint.load import LoadFrom
    from lightning_megatron.generate.generator import Generated, LiveModel
    from lightning_megatron.models.config import ModelConfig
    from lightning_megatron.strategy import MegatronStrategy


class Inference(pl.LightningModule):
    """The side of ``MegatronModule`` that answers; the module sets the attributes below."""

    model_config: ModelConfig
    model_chunks: torch.nn.ModuleList | None
    generation: GenerationOptions
    """How ``predict_step`` continues prompts."""
    return_logits: bool | Literal["last_stage"]
    """Whether ``predict_step`` gives logits instead."""
    model_provider: Callable[..., torch.nn.ModuleList] | None
    is_variant: bool
    """Whether no Hugging Face config describes the model."""
    pretrained_path: Path | None
    """The model directory that training began with."""
    load_from: LoadFrom | None
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
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        on_tokens: Callable[[torch.Tensor], None] | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Continue prompts, as Hugging Face's ``generate`` does, on any layout; every rank must call alike.

        A T5's encoder reads the prompts, and its decoder writes from ``decoder_start_token_id`` on, or continues rows
        of its own.

        Works in training too (from a callback, say), which goes on as if nothing had happened. The copies of the model
        share the prompts' rows.

        Args:
            input_ids: [b, s], the prompts, the same on every rank.
            attention_mask: [b, s], 1 for tokens and 0 for padding, on whichever side. None: padding is what equals the
                padding token, unless that ends texts.
            decoder_input_ids: [b, s_dec], what a T5's decoder continues; the start token is put before them if no row
                begins with it. None for that token alone.
            decoder_attention_mask: [b, s_dec], 1 for tokens and 0 for padding, which is taken out; None for no padding.
            on_tokens: Called with each new token of this rank's rows as soon as it is chosen, [b] with -1 for rows that
                have ended, where it is given; reading them on the host makes generation wait.
            options: Fields of ``GenerationOptions``: ``max_new_tokens``, ``temperature``, ``stop_strings`` with
                ``tokenizer``, ``seed``, ...

        Returns:
            [b, s + new] on every rank: ``input_ids`` and what follows; padding behind rows that ended before others. Of
            a T5, what the decoder reads and writes: [b, s_dec + new].

        Raises:
            ConfigError: On all ranks alike, before anything runs: if there is no model yet, a prompt cannot be
                continued, or an option is unknown, out of range or contradicts another.
        """
        return self.generate_with_scores(
            input_ids,
            attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            on_tokens=on_tokens,
            **options,
        ).sequences

    def generate_with_scores(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        on_tokens: Callable[[torch.Tensor], None] | None = None,
        **options: Any,
    ) -> Generated:
        """As ``generate``, with the log-probability of each new token and the score of each text."""
        from lightning_megatron.generate.inputs import Inputs
        from lightning_megatron.generate.texts import end_tokens

        model = self._writing_model()
        chosen = on_all_ranks_alike(partial(_watchable, options, on_tokens))
        given = Inputs(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
        )
        with self.megatron.engine():
            return model.generate(given, chosen, end_tokens(self._model), on_tokens)

    def predict_step(
        self, batch: dict[str, torch.Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> torch.Tensor | None:
        """Continue the prompts of one batch as ``generation`` says; each copy of the model has batches of its own.

        With ``return_logits`` give the logits of the batch instead, of whatever the model reads of it: a batch of
        ``test`` will do, too. ``gather_predictions`` puts what all copies have predicted into the dataset's order.

        Rows of two batches, or of two copies, may be of different length. To put all of them together::

            rows = [row for texts in trainer.predict(module, loader) for row in texts]
            texts = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_token_id)

        Args:
            batch: What ``generate`` takes, by the same names: ``input_ids`` [b, s] and, if rows are padded,
                ``attention_mask``. Of a T5 also Megatron's ``text_enc`` and ``enc_mask``; what its decoder shall
                continue counts only in a batch without ``labels``.
            batch_idx: Makes each batch draw other numbers.
            dataloader_idx: Not used.

        Returns:
            [b, s + new] or, of a T5, [b, s_dec + new], on all ranks of the copy; rows that fill up the last batch are
            left out. Logits: as ``logits``; None before the last stage if ``return_logits`` says so.

        Raises:
            ConfigError: If the batch has no prompts, or one that cannot be continued (or read).
        """
        from lightning_megatron.generate.inputs import inputs_of_batch
        from lightning_megatron.generate.texts import end_tokens

        rows = inputs_of_batch(batch, self.model_config, to_continue=not self.return_logits)
        with self.megatron.engine():
            if self.return_logits:
                last_stage_only = self.return_logits == "last_stage"
                return self._live_model().logits_of_own_rows(rows, last_stage_only=last_stage_only)
            if len(rows) == 0:
                return rows.input_ids.long()
            # What torch makes of a negative seed, too.
            options = replace(self.generation, seed=(self.generation.seed + batch_idx) % 2**64)
            ends = end_tokens(self._model)
            return self._writing_model().generate(rows, options, ends, is_shared=False).sequences

    def forward(self, batch: dict[str, torch.Tensor] | torch.Tensor) -> torch.Tensor | None:
        """What ``logits`` gives, of a batch (but for its targets) or of ``input_ids``; every rank must call alike."""
        from lightning_megatron.generate.inputs import inputs_of_batch

        if isinstance(batch, torch.Tensor):
            return self.logits(batch)
        model = self._live_model()
        with self.megatron.engine():
            return model.logits_of_shared_rows(inputs_of_batch(batch, self.model_config, to_continue=False))

    def logits(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        *,
        token_type_ids: torch.Tensor | None = None,
        last_stage_only: bool = False,
    ) -> torch.Tensor | None:
        """What the model predicts at every token, as its Hugging Face model does; every rank must call alike.

        The copies of the model share the rows. Works in training too, without dropout. The result is whole: gathered
        over tp and dp, padding of the vocabulary removed. It takes b * s * vocab_size * 4 bytes on every rank that
        keeps it: 1 GiB for 8 rows of 1,024 tokens and a vocabulary of 32,768.

        Args:
            input_ids: [b, s], the same on every rank.
            attention_mask: [b, s], 1 for tokens and 0 for padding; None for no padding.
            decoder_input_ids: [b, s_dec], what the decoder of a T5 reads; None for other models.
            token_type_ids: [b, s], of a BERT; None for 0 everywhere.
            last_stage_only: Keep the result on the ranks of the last pipeline stage, where it is computed; the others
                get None.

        Returns:
            [b, s, vocab_size] fp32, in the order of the rows; of a T5 [b, s_dec, vocab_size]; of a BERT as its task
            says: [b, s, vocab_size], [b, num_labels] for ``sequence_classification``, else [b, s, num_labels] (the
            order of sentences, which ``pretraining`` also learns, is left out).

        Raises:
            ConfigError: On all ranks alike, before anything runs: if there is no model yet, or it cannot read a row.
        """
        from lightning_megatron.generate.inputs import Inputs

        rows = Inputs(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            decoder_input_ids=decoder_input_ids,
        )
        model = self._live_model()
        with self.megatron.engine():
            return model.logits_of_shared_rows(rows, last_stage_only=last_stage_only)

    def _writing_model(self) -> LiveModel:
        """The model, which must be a GPT or T5.

        Raises:
            ConfigError: If there is none yet, or it is neither.
        """
        model = self.model_config
        if model.architecture not in ("gpt", "t5"):
            raise ConfigError(f"generate is for GPTs and T5s, and {model.family} is a {model.architecture.upper()}")
        return self._live_model()

    def _live_model(self) -> LiveModel:
        from lightning_megatron.generate.generator import LiveModel

        return LiveModel(
            chunks=self._chunks_to_ask(),
            config=self.model_config,
            topology=self.megatron.topology,
            device=self.megatron.root_device,
            is_own=self.model_provider is None,
        )

    def _chunks_to_ask(self) -> list[torch.nn.Module]:
        """This rank's chunks, built first on one process if there are weights for them and no Trainer yet.

        Raises:
            ConfigError: If there are none yet, and no weights.
        """
        if self.model_chunks is None and self._trainer is None and (self.load_from or self.pretrained_path):
            from lightning_megatron.strategy import MegatronStrategy

            pl.Trainer(
                accelerator="gpu" if torch.cuda.is_available() else "cpu",
                devices=1,
                strategy=MegatronStrategy(),
                limit_predict_batches=0,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            ).predict(self, [])
        if self.model_chunks is None:
            raise ConfigError("there is no model to ask before Trainer.fit (or validate) has built it; call this then")
        return list(self.model_chunks)

    # ---- the weights -----------------------------------------------------------------------------------------------

    def save_pretrained(self, save_directory: str | Path, max_shard_size: str | int = "5GB") -> None:
        """Write the model as a Hugging Face directory, which ``AutoModelFor*.from_pretrained`` loads.

        Every rank must call, within or after ``fit``. The weights are those that the model computes with (bf16 under
        ``bf16-mixed``); no rank holds more than one file's part of them at a time.

        Args:
            save_directory: Where to; made if it does not exist. Only rank 0 writes.
            max_shard_size: Largest weight file, e.g. ``200MB``, or bytes.

        Raises:
            ConfigError: If there is no model yet, or no Hugging Face class computes it.
            CheckpointError: If the directory cannot be written, on all ranks alike.
        """
        from lightning_megatron.convert.hugging_face import save_hugging_face
        from lightning_megatron.convert.hugging_face_files import generation_config
        from lightning_megatron.engine.wrap import finish_parameter_gathers

        if self.model_chunks is None:
            raise ConfigError("there is no model to save before Trainer.fit (or validate) has built it; call it then")
        if self.is_variant or self.model_provider is not None:
            raise ConfigError(
                f"no Hugging Face {self.model_config.family} model computes this one (position_embedding_type, "
                "attention_head_type or model_provider are given); save a checkpoint with trainer.save_checkpoint"
            )
        chunks = list(self.model_chunks)
        directory = Path(self.megatron.broadcast(str(save_directory)))
        with self.megatron.engine():
            finish_parameter_gathers(chunks)
            save_hugging_face(
                chunks,
                self.model_config,
                config_object(self._model),
                directory,
                max_shard_size,
                companions=generation_config(self.pretrained_path),
            )

    def push_to_hub(
        self,
        repo_id: str,
        commit_message: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: str | int = "5GB",
    ) -> str:
        """Upload the model to the Hugging Face hub, as ``PreTrainedModel.push_to_hub`` does. Every rank must call.

        Args:
            repo_id: ``org/name``, created if it does not exist.
            commit_message: Of the commit; None for "Upload model".
            private: Whether a repository that is created is private; None for its owner's default.
            token: Of the hub; None for that of ``hf auth login`` or ``HF_TOKEN``.
            revision: Branch to commit to, created if it does not exist; None for the main one.
            create_pr: Open a pull request instead of committing.
            max_shard_size: As for ``save_pretrained``.

        Returns:
            The address of the commit, or of the pull request, on every rank.

        Raises:
            ConfigError: On all ranks alike: if there is no model yet, no Hugging Face class computes it, or the hub
                cannot be reached or refuses it.
            CheckpointError: If the temporary folder of rank 0 cannot be written.
        """
        options = (repo_id, commit_message, private, token, revision, create_pr)
        with tempfile.TemporaryDirectory(prefix="lightning_megatron_") as folder, ThreadPoolExecutor(1) as pool:
            self.save_pretrained(folder, max_shard_size)
            running = pool.submit(upload, folder, *options) if self.megatron.global_rank == 0 else None
            # The others meet rank 0 every minute: an upload may take longer than a collective waits.
            while not self.megatron.broadcast(running is not None and bool(wait([running], timeout=60).done)):
                pass
            return self.megatron.broadcast(on_all_ranks_alike(lambda: running.result() if running else ""))


def _watchable(arguments: dict[str, Any], on_tokens: Callable[[torch.Tensor], None] | None) -> GenerationOptions:
    options = options_from(arguments)
    if on_tokens is not None and not callable(on_tokens):
        raise ConfigError(f"on_tokens={on_tokens!r} is no function, which each new token is given to; give one")
    if on_tokens is not None and options.num_beams > 1:
        raise ConfigError(
            f"on_tokens shows texts while they grow, and a search with num_beams={options.num_beams} knows none before "
            "its end; leave one of them out"
        )
    return options
