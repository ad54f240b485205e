"""Fine-tune a BERT to classify lines of Python files: code, or prose (comments and docstrings).

    python examples/classify_bert.py
    python examples/classify_bert.py --model path/to/bert --text path/to/python/files

``--model`` is a Hugging Face directory with a tokenizer. Without it, the model that examples/pretrain_bert.py leaves is
read, or else one with random weights is made. By configuration:
lightning-megatron fit --config configs/classify_bert.yaml --model.model DIR --data.tokenizer DIR
"""

import argparse

if __name__ == "__main__":  # before the imports below, which take ten seconds
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="Hugging Face directory of a Megatron-BERT with its tokenizer"
    )
    parser.add_argument(
        "--text", help="directory with .py files (default: Python's standard library)"
    )
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--output", default="runs/classify_bert", help="directory for the log")
    arguments = parser.parse_args()

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, random_split
from transformers import AutoTokenizer

from lightning_megatron import MegatronModule, MegatronStrategy

PRETRAINED = "runs/pretrain_bert/model"


def labelled_lines(source: str) -> Iterator[tuple[str, int]]:
    """Yield lines without comment and quotation marks, and their class: 1 for comments and docstrings, 0 for code."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for number, line in enumerate(source.splitlines(), start=1):
        text = line.strip(" \t#\"'")
        if len(text) > 8:
            yield text, int(number in prose or line.lstrip().startswith("#"))


class LabelledLines(LightningDataModule):
    """Lines of the .py files of a directory, as many of code as of prose."""

    def __init__(
        self,
        tokenizer: str,
        text: str | None = None,
        seq_length: int = 32,
        batch_size: int = 16,
        max_files: int = 40,
    ) -> None:
        super().__init__()
        self.path = tokenizer
        self.text = text or sysconfig.get_path("stdlib")
        self.max_files = max_files
        self.seq_length = seq_length
        self.batch_size = batch_size

    def encode(self, text: str, label: int) -> dict[str, torch.Tensor]:
        """Tokenize one row; integer labels select the loss of single-label classification."""
        tokenizer, max_tokens = self.tokenizer, self.seq_length - 2
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"][:max_tokens]
        tokens = [tokenizer.cls_token_id, *tokens, tokenizer.sep_token_id]
        padding = self.seq_length - len(tokens)
        padded = torch.tensor(tokens + [tokenizer.pad_token_id] * padding)
        mask = torch.tensor([1] * len(tokens) + [0] * padding)
        return {"input_ids": padded, "attention_mask": mask, "labels": torch.tensor(label)}

    def setup(self, stage: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(self.path)
        lines: tuple[list[str], list[str]] = ([], [])
        for file in sorted(Path(self.text).glob("*.py"))[: self.max_files]:
            for text, label in labelled_lines(file.read_text(encoding="utf-8")):
                lines[label].append(text)
        rows: Any = [
            self.encode(text, label)
            for pair in zip(*lines, strict=False)
            for label, text in enumerate(pair)
        ]
        generator = torch.Generator().manual_seed(0)
        self.train_rows, self.val_rows = random_split(rows, [0.95, 0.05], generator)

    def train_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        return DataLoader(self.train_rows, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        return DataLoader(self.val_rows, batch_size=self.batch_size)


def main() -> None:
    folder = arguments.model
    if folder is None:
        import shipped

        folder = PRETRAINED if Path(PRETRAINED).exists() else shipped.model("megatron-bert")
    seed_everything(1234, workers=True)
    # The classification head is new; all other weights are loaded. Validation logs val_accuracy and val_f1.
    model = MegatronModule(model=folder, pretrained=True, task="sequence_classification", lr=1e-3)
    logger = CSVLogger(arguments.output)
    trainer = Trainer(
        devices=2,
        strategy=MegatronStrategy(tp=2),
        max_steps=arguments.max_steps,
        val_check_interval=arguments.max_steps,
        check_val_every_n_epoch=None,
        gradient_clip_val=1.0,
        logger=logger,
        log_every_n_steps=10,
        enable_checkpointing=False,
    )
    trainer.fit(model, datamodule=LabelledLines(folder, arguments.text))
    if trainer.is_global_zero:
        metrics = trainer.callback_metrics
        print(
            f"{trainer.global_step} steps from {folder}: {metrics['val_accuracy']:.1%} of the "
            f"validation lines right, F1 {metrics['val_f1']:.3f}"
        )
        print(f"losses and metrics: {logger.log_dir}/metrics.csv")


if __name__ == "__main__":  # Lightning starts the other processes by running this file again
    main()
