"""Pretrain a small T5 on plain text with span corruption: the decoder predicts spans replaced by sentinels.

    lightning-megatron train-tokenizer --kind t5 --input TEXT --vocab-size 4096 --output tokenizer
    lightning-megatron preprocess --input TEXT --tokenizer tokenizer --split-sentences --output-prefix corpus
    python examples/pretrain_t5.py --data-path corpus_text_sentence --tokenizer tokenizer --output runs/pretrain_t5

By configuration: lightning-megatron fit --config configs/pretrain_t5.yaml
"""

import argparse
from pathlib import Path

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from transformers import AutoTokenizer

from lightning_megatron import IndexedDataModule, MaskingOptions, MegatronModule, MegatronStrategy


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-path", required=True, help="indexed dataset from preprocess, without .bin"
    )
    parser.add_argument("--tokenizer", required=True, help="directory from train-tokenizer")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument(
        "--output", default="runs/pretrain_t5", help="directory for the log and the model"
    )
    arguments = parser.parse_args()

    seed_everything(1234, workers=True)
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
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
        arguments.data_path,
        split="95,5,0",
        seq_length=64,  # encoder
        seq_length_decoder=32,
        micro_batch_size=4,
        tokenizer=arguments.tokenizer,
        masking=MaskingOptions(probability=0.15),  # fraction of masked tokens
    )
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
        logger=CSVLogger(arguments.output),
        enable_checkpointing=False,
        default_root_dir=arguments.output,
    )
    trainer.fit(model, datamodule=data)
    folder = Path(arguments.output) / "model"
    model.save_pretrained(folder)  # call it on all ranks: each sends its shards
    if trainer.is_global_zero:
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":  # Lightning starts the other processes by running this file again
    main()
