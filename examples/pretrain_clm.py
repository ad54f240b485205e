"""Pretrain a GPT-2 on plain text or a Hugging Face dataset, tokenized and split into blocks, for several epochs.

    python examples/pretrain_clm.py
    python examples/pretrain_clm.py --dataset corpus.txt --tokenizer path/to/tokenizer --epochs 3 --with-tracking
    python examples/pretrain_clm.py --dataset corpus.txt --tokenizer path/to/tokenizer --epochs 5 --resume

``--dataset`` is a text file, JSON lines with ``text``, or the name of a dataset on the hub. The learning rate warms up
and then decays linearly to 0 over all epochs. Saves checkpoints and a Hugging Face model to --output. Or by
configuration: lightning-megatron fit --config configs/pretrain_clm.yaml --data.dataset corpus.txt
"""

import argparse

if __name__ == "__main__":  # before the imports below, which take ten seconds
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dataset",
        help="text file, .jsonl, or the name of a dataset on the hub (default: Shakespeare)",
    )
    parser.add_argument("--tokenizer", help="directory or name (default: one of Shakespeare)")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accelerator", default="cpu", choices=("cpu", "gpu"))
    parser.add_argument("--with-tracking", action="store_true", help="log to --report-to")
    parser.add_argument(
        "--report-to", default="tensorboard", choices=("csv", "tensorboard", "wandb")
    )
    parser.add_argument(
        "--resume", action="store_true", help="resume from the last checkpoint in --output"
    )
    parser.add_argument(
        "--output",
        default="runs/pretrain_clm",
        help="directory for data, logs, checkpoints and model",
    )
    arguments = parser.parse_args()
    if arguments.dataset is not None and arguments.tokenizer is None:
        parser.error("--dataset: expected --tokenizer beside it, got none")

from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from datasets import DatasetDict, load_dataset
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from transformers import AutoTokenizer

from lightning_megatron import (
    ConfigError,
    DatasetDataModule,
    LRSchedule,
    MegatronModule,
    MegatronStrategy,
    PerplexityReport,
)

LOGGERS = {"csv": CSVLogger, "tensorboard": TensorBoardLogger, "wandb": WandbLogger}


class TextBlocks(DatasetDataModule):
    """Tokenized texts, concatenated and split into blocks of equal length; prepared once, in a directory."""

    def __init__(
        self,
        dataset: str,
        tokenizer: str,
        folder: str = "runs/pretrain_clm/blocks",
        seq_length: int = 128,
        validation_share: float = 0.05,
        micro_batch_size: int = 4,
    ) -> None:
        super().__init__(
            train=f"{folder}/train", valid=f"{folder}/test", micro_batch_size=micro_batch_size
        )
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.folder = Path(folder)
        self.seq_length = seq_length
        self.validation_share = validation_share

    def prepare_data(self) -> None:
        """Tokenize the dataset; Lightning calls this hook on one process per node, before any process reads."""
        if (self.folder / "dataset_dict.json").exists():
            return
        if (
            Path(self.dataset).suffix in (".txt", ".json", ".jsonl")
            and not Path(self.dataset).exists()
        ):
            raise ConfigError(
                f"dataset={self.dataset} does not exist; give a text or JSON file, or a dataset of the hub"
            )
        if Path(self.dataset).exists():
            texts = load_dataset(
                "json" if ".json" in self.dataset else "text",
                data_files=self.dataset,
                split="train",
            )
        else:
            texts = load_dataset(self.dataset, split="train")
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        size = self.seq_length

        def tokenize(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
            return {"input_ids": tokenizer([f"{text}\n" for text in rows["text"]])["input_ids"]}

        def split(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
            tokens = list(chain.from_iterable(rows["input_ids"]))
            blocks = [
                tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size)
            ]
            return {"input_ids": blocks, "labels": blocks}

        columns = texts.column_names
        blocks = texts.map(tokenize, batched=True, remove_columns=columns).map(split, batched=True)
        splits: DatasetDict = blocks.train_test_split(self.validation_share, seed=1234)
        splits.with_format("torch").save_to_disk(self.folder)


class RunningTraining(pl.Callback):
    """Prints the size of the training run, as transformers' example scripts do."""

    def on_train_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        data, strategy = trainer.datamodule, trainer.strategy
        size = data.micro_batch_size * strategy.num_microbatches
        if trainer.is_global_zero:
            print(
                "***** Running training *****\n"
                f"  Examples = {len(data.open('train', None))}\n"
                f"  Epochs = {trainer.max_epochs}\n"
                f"  Batch size per replica = {size} ({strategy.num_microbatches} microbatches)\n"
                f"  Total batch size = {size * strategy.data_parallel_size}\n"
                f"  Optimization steps = {trainer.estimated_stepping_batches}"
            )


def main() -> None:
    dataset, path = arguments.dataset, arguments.tokenizer
    if path is None:
        import shipped

        path, _ = shipped.shakespeare()
        dataset = str(shipped.TEXT)
    pl.seed_everything(1234, workers=True)
    tokenizer = AutoTokenizer.from_pretrained(path)
    sizes = {"n_positions": arguments.block_size, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = MegatronModule(
        model={"model_type": "gpt2", "vocab_size": len(tokenizer), **sizes},
        lr=3e-3,
        lr_schedule=LRSchedule(style="linear", warmup_fraction=0.1),  # over all epochs
    )
    folder = f"{arguments.output}/blocks-{arguments.block_size}"
    data = TextBlocks(dataset, path, folder, arguments.block_size)
    logger: Logger | bool = False
    if arguments.with_tracking:
        try:
            logger = LOGGERS[arguments.report_to](save_dir=arguments.output, name="log")
        except ModuleNotFoundError:
            package = arguments.report_to
            parser.error(
                f"--report-to {package}: expected its package, got none; pip install {package}"
            )
    checkpoints = ModelCheckpoint(arguments.output, save_last=True)
    trainer = pl.Trainer(
        accelerator=arguments.accelerator,
        devices=4,
        strategy=MegatronStrategy(tp=2, pp=2, num_microbatches=2),
        precision="32-true" if arguments.accelerator == "cpu" else "bf16-mixed",
        max_epochs=arguments.epochs,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        default_root_dir=arguments.output,
        logger=logger,
        callbacks=[
            PerplexityReport(),
            RunningTraining(),
            checkpoints,
        ],
    )
    trainer.fit(model, datamodule=data, ckpt_path="last" if arguments.resume else None)
    trained = f"{arguments.output}/model"  # AutoModelForCausalLM.from_pretrained loads it
    model.save_pretrained(trained)  # call it on all ranks: each sends its shards
    if trainer.is_global_zero:
        tokenizer.save_pretrained(trained)
        losses = trainer.callback_metrics
        print(
            f"{trainer.global_step} steps: training loss {losses['train_loss']:.3f}, "
            f"validation loss {losses['val_loss']:.3f}"
        )
        print(f"checkpoint: {checkpoints.last_model_path}")
        print(f"model and tokenizer: {trained}")


if __name__ == "__main__":  # Lightning starts the other processes by running this file again
    main()
