"""Pretrain a small T5 on plain text with span corruption: the decoder predicts spans replaced by sentinels.

    python examples/pretrain_t5.py

With a text of your own:

    lightning-megatron train-tokenizer --kind t5 --input TEXT --vocab-size 4096 --output tokenizer
    lightning-megatron preprocess --input TEXT --tokenizer tokenizer --split-sentences --output-prefix corpus
    python examples/pretrain_t5.py --data-path corpus_text_sentence --tokenizer tokenizer

By configuration: lightning-megatron fit --config configs/pretrain_t5.yaml
"""

import argparse

if __name__ == "__main__":  # before the imports below, which take ten seconds
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-path", help="indexed dataset of sentences, without .bin (default: Shakespeare)"
    )
    parser.add_argument("--tokenizer", help="directory of its tokenizer")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument(
        "--output", default="runs/pretrain_t5", help="directory for the log and the model"
    )
    arguments = parser.parse_args()
    if (arguments.data_path is None) != (arguments.tokenizer is None):
        parser.error("--data-path and --tokenizer: expected both or neither, got one")

from pathlib import Path

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from transformers import AutoTokenizer

from lightning_megatron import IndexedDataModule, MaskingOptions, MegatronModule, MegatronStrategy


def main() -> None:
    path, data_path = arguments.tokenizer, arguments.data_path
    if data_path is None:
        import shipped

        path, data_path = shipped.shakespeare("t5")
    seed_everything(1234, workers=True)
    tokenizer = AutoTokenizer.from_pretrained(path)
    shape = {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_heads": 4,
        "num_layers": 2,
        "feed_forward_proj": "gated-gelu",
    }
    model = MegatronModule(
        model={"model_type": "t5", "vocab_size": len(tokenizer), **shape}, lr=3e-3
    )
    data = IndexedDataModule(
        data_path,
        split="95,5,0",
        seq_length=64,  # encoder
        seq_length_decoder=32,
        micro_batch_size=4,
        tokenizer=path,
        masking=MaskingOptions(probability=0.15),  # fraction of masked tokens
    )
    logger = CSVLogger(arguments.output)
    trainer = Trainer(
        devices=4,
        strategy=MegatronStrategy(
            tp=2, pp=2, num_microbatches=2
        ),  # encoder and decoder form one pipeline
        max_steps=arguments.max_steps,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        val_check_interval=arguments.max_steps,
        limit_val_batches=20,
        logger=logger,
        enable_checkpointing=False,
        default_root_dir=arguments.output,
    )
    trainer.fit(model, datamodule=data)
    folder = Path(arguments.output) / "model"
    model.save_pretrained(folder)  # call it on all ranks: each sends its shards
    if trainer.is_global_zero:
        tokenizer.save_pretrained(folder)
        losses = trainer.callback_metrics
        print(
            f"{trainer.global_step} steps: training loss {losses['train_loss']:.3f}, "
            f"validation loss {losses['val_loss']:.3f}"
        )
        print(f"losses of all steps: {logger.log_dir}/metrics.csv")
        print(f"model and tokenizer: {folder}")


if __name__ == "__main__":  # Lightning starts the other processes by running this file again
    main()
