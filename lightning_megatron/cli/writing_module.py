"""What does ``generate`` run, and who shows the texts? A module with the weights of a checkpoint of any format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_megatron.cli.generated_text import Continued, TextPrinter, TextStream, cut
from lightning_megatron.convert.shards import Loading, Source
from lightning_megatron.errors import CheckpointError
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.texts import decoder_texts, new_texts
from lightning_megatron.module import MegatronModule


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be continued."""

    prompts: list[str]
    is_answer: bool
    """Whether texts answer the prompts, as an encoder-decoder's, instead of continuing them."""
    tokenizer: Any
    input_ids: torch.Tensor
    """[b, s]."""
    attention_mask: torch.Tensor
    """[b, s]."""

    @property
    def between(self) -> str:
        """What stands between a prompt and a text that is shown with it."""
        return "\n" if self.is_answer else ""

    def stream(self, stop: list[str]) -> TextStream:
        """For the text of the only prompt."""
        given = [] if self.is_answer else self.input_ids[0].tolist()
        return TextStream(self.tokenizer, self.prompts[0] + self.between, given, stop)

    def texts(self, written: torch.Tensor, rows: slice) -> list[str]:
        """What was written behind the prompts of ``rows``."""
        if self.is_answer:
            return decoder_texts(self.tokenizer, written)
        return new_texts(self.tokenizer, written, self.input_ids[rows], self.attention_mask[rows])

    def loader(self, batch_size: int) -> DataLoader[Any]:
        """The rows in batches."""
        rows = [
            {"input_ids": tokens, "attention_mask": mask}
            for tokens, mask in zip(self.input_ids, self.attention_mask, strict=True)
        ]
        return DataLoader(rows, batch_size=batch_size)  # type: ignore[arg-type]


class BatchTexts:
    """Shows the texts of each batch, in the order of the prompts."""

    def __init__(self, job: Job, printer: TextPrinter, stop: list[str], copies: int) -> None:
        self._job = job
        self._printer = printer
        self._stop = stop
        self._copies = copies
        self._next = 0

    def __call__(self, written: torch.Tensor) -> None:
        """Show the texts of the next ``len(written) / copies`` prompts."""
        rows = slice(self._next, self._next + len(written) // self._copies)
        self._next = rows.stop
        prompts = [prompt for prompt in self._job.prompts[rows] for _ in range(self._copies)]
        texts = [cut(text, self._stop) for text in self._job.texts(written, rows)]
        self._printer.show([Continued(prompt=p, text=t) for p, t in zip(prompts, texts, strict=True)])


_Show = TextStream | BatchTexts


class WritingModule(MegatronModule):
    """A module with the weights of a checkpoint of any format, whose texts rank 0 shows as they come."""

    def __init__(self, stored: Source, generation: GenerationOptions, show: _Show) -> None:
        super().__init__(model=stored.hf_config, generation=generation)
        self.model_config = stored.model  # its config describes no variant
        self._stored = stored
        self._show = show

    def _fill_weights(self, chunks: torch.nn.ModuleList) -> None:
        loading = Loading(chunks, self._stored)
        if loading.missing:
            names = ", ".join(map(str, sorted(loading.missing)))
            raise CheckpointError(f"{self._stored.path} has no {names}, and the model needs them; use a whole one")
        loading.fill()

    def predict_step(
        self, batch: dict[str, torch.Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> torch.Tensor | None:
        """As ever, and shown by rank 0."""
        is_first = self.trainer.is_global_zero
        if isinstance(self._show, TextStream):
            if is_first:
                self._show.begin()
            options, on_tokens = vars(self.generation), self._show.add if is_first else None
            return self.generate(batch["input_ids"], batch.get("attention_mask"), on_tokens=on_tokens, **options)
        written = super().predict_step(batch, batch_idx, dataloader_idx)
        if is_first and written is not None:
            self._show(written)
        return written
