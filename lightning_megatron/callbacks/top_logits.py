"""``TopLogitsWriter``: a teacher's top-k logits, written to files by ``Trainer.predict``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.utilities import rank_zero_info
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from lightning_megatron.data.top_logits import MANIFEST, TopLogitsPart, write_manifest
from lightning_megatron.engine.collectives import raise_on_all_ranks
from lightning_megatron.errors import ConfigError, DataError, require_number
from lightning_megatron.foreign_names import checks_options


@checks_options
class TopLogitsWriter(Callback):
    """Writes the k most likely tokens at each position of predicted rows, and their logits, for distillation.

    One pass of a teacher over a dataset, at any layout, replaces it in all later runs of students::

        teacher = MegatronModule(model=DIR, pretrained=True, return_logits="last_stage")
        trainer = Trainer(strategy=..., callbacks=[TopLogitsWriter("teacher_logits", k=64)])
        trainer.predict(teacher, loader, return_predictions=False)

    ``TopLogitsDataset`` reads them. A position takes 8 k bytes. Each data-parallel replica writes its own rows, from a
    rank of the last stage, so the folder must be on a file system that all hosts share. The logits of one batch are
    gathered over the vocabulary: 4 x rows x tokens x vocabulary bytes.
    """

    def __init__(self, folder: str | Path, k: int = 64) -> None:
        """Set where to write, and how much.

        Args:
            folder: Folder to create; one with a finished pass is refused.
            k: Tokens per position.

        Raises:
            ConfigError: If k is not positive.
        """
        require_number("k", k, at_least=1)
        self.folder = Path(folder)
        self.k = k
        self._part: TopLogitsPart | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check function, module and folder. Collective over the world.

        Raises:
            ConfigError: If the Trainer does not predict logits of a vocabulary of k tokens at least, or the folder has
                a finished pass.
        """
        model = getattr(pl_module, "model_config", None)
        returns_logits = getattr(pl_module, "return_logits", False)
        function = TrainerFn(stage)
        is_predicting = function == TrainerFn.PREDICTING
        if not is_predicting or not returns_logits or model is None or model.architecture != "gpt":
            raise ConfigError(
                "TopLogitsWriter: expected Trainer.predict of a GPT's MegatronModule(return_logits='last_stage'), got "
                f"{function.value} with return_logits={returns_logits}; leave the callback out"
            )
        if self.k > model.vocab_size or not model.has_output_layer:
            raise ConfigError(
                f"k={self.k}: expected a language model of as many tokens at least, got vocab_size={model.vocab_size}, "
                f"task={model.task!r}; lower k"
            )
        with raise_on_all_ranks():
            if (self.folder / MANIFEST).exists():
                raise ConfigError(
                    f"folder={self.folder}: expected none, or one of a pass that did not end, got a finished one; "
                    "remove it, or give another"
                )

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Create the files of this replica. Collective over the world."""
        strategy: Any = trainer.strategy
        topology = strategy.topology
        is_writer = topology.is_last_stage and topology.tp_rank == topology.cp_rank == 0
        with raise_on_all_ranks():
            if is_writer:
                self._part = TopLogitsPart(self.folder / _part_name(topology.dp_rank))

    @override
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: dict[str, Tensor],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Write the rows of a batch.

        Raises:
            DataError: If a file cannot be written.
        """
        if self._part is None:
            return
        inputs = {
            name: batch[name]
            for name in ("input_ids", "attention_mask", "position_ids")
            if name in batch
        }
        if "input_ids" not in inputs:
            inputs["input_ids"] = batch["text"][:, :-1].clamp(min=0)
        if "sample_mask" in batch:
            is_row = batch["sample_mask"] != 0
            inputs = {name: tensor[is_row] for name, tensor in inputs.items()}
        values, ids = outputs.topk(self.k, dim=-1)
        on_host = {name: tensor.cpu() for name, tensor in inputs.items()}
        try:
            for row, (tokens, logits) in enumerate(zip(ids.cpu(), values.cpu(), strict=True)):
                of_row: dict[str, Any] = {name: tensor[row] for name, tensor in on_host.items()}
                self._part.append(of_row, tokens, logits)
        except OSError as error:
            raise DataError(
                f"{self.folder} cannot be written ({error}); give another folder"
            ) from error

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the files, and mark the folder as complete. Collective over the world."""
        strategy: Any = trainer.strategy
        with raise_on_all_ranks():
            if self._part is not None:
                self._part.close()
                self._part = None
        with raise_on_all_ranks():
            if strategy.global_rank == 0:
                parts = [_part_name(replica) for replica in range(strategy.data_parallel_size)]
                model: Any = pl_module
                facts = {
                    "vocab_size": model.model_config.vocab_size,
                    "model": str(model.pretrained_path),
                }
                num_rows = write_manifest(self.folder, parts, self.k, facts)
                rank_zero_info(f"{self.folder}: the top {self.k} logits of {num_rows:,} rows")


def _part_name(replica: int) -> str:
    return f"part-{replica:05d}"
