"""Pretrain a small GPT-2 with tensor and pipeline parallelism, in plain Python.

    python examples/pretrain_gpt.py

With a text of your own:

    lightning-megatron train-tokenizer --input TEXT --vocab-size 4096 --output tokenizer
    lightning-megatron preprocess --input TEXT --output-prefix corpus --tokenizer tokenizer --append-eod
    python examples/pretrain_gpt.py --data-path corpus_text_document --vocab-size 4096

Lightning starts the four processes. On a cluster, torchrun or SLURM start them, without changes to this file.
"""

import argparse

if __name__ == "__main__":  # before the imports below, which take ten seconds
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-path", help="indexed dataset, without .bin (default: Shakespeare)")
    parser.add_argument("--vocab-size", type=int, help="vocabulary size of its tokenizer")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--accelerator", default="cpu", choices=("cpu", "gpu"))
    parser.add_argument(
        "--output", default="runs/pretrain_gpt", help="directory for logs and checkpoints"
    )
    arguments = parser.parse_args()
    if (arguments.data_path is None) != (arguments.vocab_size is None):
        parser.error("--data-path and --vocab-size: expected both or neither, got one")

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
    data_path, vocab_size = arguments.data_path, arguments.vocab_size
    if data_path is None:
        import shipped

        _, data_path = shipped.shakespeare()
        vocab_size = shipped.VOCAB_SIZE
    seed_everything(1234, workers=True)
    model = MegatronModule(
        model={  # fields of a Hugging Face config; a config object or a path works too
            "model_type": "gpt2",
            "vocab_size": vocab_size,
            "n_positions": 64,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 2,
        },
        lr=3e-3,
        lr_schedule=LRSchedule(style="cosine", warmup_fraction=0.1, min_lr=3e-4),
    )
    data = IndexedDataModule(
        data_path=data_path, split="90,10,0", seq_length=64, micro_batch_size=4
    )
    checkpoints = ModelCheckpoint(monitor="val_loss", save_last=True)
    logger = CSVLogger(arguments.output)
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
        logger=logger,
        callbacks=[ThroughputMonitor(), checkpoints],
    )
    trainer.fit(model, datamodule=data)
    if trainer.is_global_zero:
        losses = trainer.callback_metrics
        print(
            f"{trainer.global_step} steps: training loss {losses['train_loss']:.3f}, "
            f"validation loss {losses['val_loss']:.3f}"
        )
        print(f"losses of all steps: {logger.log_dir}/metrics.csv")
        print(f"checkpoint: {checkpoints.last_model_path}")


if __name__ == "__main__":  # Lightning starts the other processes by running this file again
    main()
