"""Pretrain a small BERT on plain text: masked tokens, and whether two stretches of text are in order.

    lightning-megatron train-tokenizer --input TEXT --vocab-size 4096 --output tokenizer
    python examples/pretrain_bert.py --tokenizer tokenizer --text TEXT --output runs/pretrain_bert

``TEXT`` is a folder of .py files; without it, Python's own library is read. The model and its tokenizer end up in
OUTPUT/model, from which examples/classify_bert.py goes on. By configuration, after ``python3 -m nox -s quickstart`` has
made a tokenizer: lightning-megatron fit --config configs/pretrain_bert.yaml
"""

import argparse
from pathlib import Path

from bert_pairs import SPECIAL_TOKENS, SentencePairs
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from transformers import AutoTokenizer

from lightning_megatron import MegatronModule, MegatronStrategy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="folder that train-tokenizer wrote")
    parser.add_argument("--text", help="folder with .py files; Python's library if left out")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--output", default="runs/pretrain_bert", help="folder for the log and the model")
    arguments = parser.parse_args()

    seed_everything(1234, workers=True)
    data = SentencePairs(arguments.tokenizer, arguments.text)
    num_entries = len(AutoTokenizer.from_pretrained(arguments.tokenizer))  # [PAD] comes next
    model = MegatronModule(
        model={  # fields of a Hugging Face config
            "model_type": "megatron-bert",
            "vocab_size": num_entries + len(SPECIAL_TOKENS),
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 256,
            "max_position_embeddings": 64,
            "pad_token_id": num_entries,
        },
        task="pretraining",  # for masked tokens alone: "masked_lm"
        lr=3e-3,
    )
    trainer = Trainer(
        devices=4,
        strategy=MegatronStrategy(tp=2, pp=2, num_microbatches=2),
        max_steps=arguments.max_steps,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        val_check_interval=arguments.max_steps,
        check_val_every_n_epoch=None,
        logger=CSVLogger(arguments.output),
        enable_checkpointing=False,
        default_root_dir=arguments.output,
    )
    trainer.fit(model, datamodule=data)
    folder = Path(arguments.output) / "model"
    model.save_pretrained(folder)  # on all ranks: each sends its part
    if trainer.is_global_zero:
        data.tokenizer.save_pretrained(folder)


if __name__ == "__main__":  # Lightning starts the other processes by running this file again
    main()
