"""Pretrain a small GPT-2 with tensor and pipeline parallelism, in plain Python.

    lightning-megatron preprocess --input TEXT --output-prefix corpus --tokenizer DIR --append-eod
    python examples/pretrain_gpt.py --data-path corpus_text_document --vocab-size 4096

Lightning starts the four processes. On a cluster, torchrun or SLURM start them, without changes to this file.
"""

import argparse

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron import (
    IndexedDataModule,
    LRSchedule,
    MegatronModule,
    MegatronStrategy,
    ThroughputMonitor,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-path", required=True, help="indexed dataset, without .bin")
    parser.add_argument(
        "--vocab-size", type=int, required=True, help="vocabulary size of the tokenizer"
    )
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--accelerator", default="cpu", choices=("cpu", "gpu"))
    parser.add_argument(
        "--output", default="runs/pretrain_gpt", help="directory for logs and checkpoints"
    )
    arguments = parser.parse_args()

    seed_everything(1234, workers=True)
    model = MegatronModule(
        model={  # fields of a Hugging Face config; a config object or a path works too
            "model_type": "gpt2",
            "vocab_size": arguments.vocab_size,
            "n_positions": 64,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 2,
        },
        lr=3e-3,
        lr_schedule=LRSchedule(style="cosine", warmup_fraction=0.1, min_lr=3e-4),
    )
    data = IndexedDataModule(
        data_path=arguments.data_path, split="90,10,0", seq_length=64, micro_batch_size=4
    )
    trainer = Trainer(
        accelerator=arguments.accelerator,
        devices=4,
        strategy=MegatronStrategy(tp=2, pp=2, num_microbatches=2),
        precision="32-true" if arguments.accelerator == "cpu" else "bf16-mixed",
        max_steps=arguments.max_steps,
        val_check_interval=arguments.max_steps,
        check_val_every_n_epoch=None,
        limit_val_batches=4,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        default_root_dir=arguments.output,
        logger=CSVLogger(arguments.output),
        callbacks=[ThroughputMonitor(), ModelCheckpoint(monitor="val_loss", save_last=True)],
    )
    trainer.fit(model, datamodule=data)


if __name__ == "__main__":  # Lightning starts the other processes by running this file again
    main()
