"""Pretrain a small BERT on plain text, with masked language modeling and sentence order prediction.

    lightning-megatron train-tokenizer --kind bert --input TEXT --vocab-size 4096 --output tokenizer
    lightning-megatron preprocess --input TEXT --tokenizer tokenizer --split-sentences --output-prefix corpus
    python examples/pretrain_bert.py --data-path corpus_text_sentence --tokenizer tokenizer --output runs/pretrain_bert

Saves model and tokenizer to OUTPUT/model, which examples/classify_bert.py can fine-tune. By configuration:
lightning-megatron fit --config configs/pretrain_bert.yaml
"""

import argparse
from pathlib import Path

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from transformers import AutoTokenizer

from lightning_megatron import IndexedDataModule, MegatronModule, MegatronStrategy


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
        "--output", default="runs/pretrain_bert", help="directory for the log and the model"
    )
    arguments = parser.parse_args()

    seed_everything(1234, workers=True)
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    model = MegatronModule(
        model={  # fields of a Hugging Face config
            "model_type": "megatron-bert",
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 256,
            "max_position_embeddings": 64,
            "pad_token_id": tokenizer.pad_token_id,
        },
        task="pretraining",  # without sentence order: "masked_lm"
        lr=3e-3,
    )
    data = IndexedDataModule(
        arguments.data_path,
        split="95,5,0",
        seq_length=64,
        micro_batch_size=4,
        tokenizer=arguments.tokenizer,
    )
    trainer = Trainer(
        devices=4,
        strategy=MegatronStrategy(tp=2, pp=2, num_microbatches=2),
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
