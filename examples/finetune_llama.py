"""Fine-tune a Llama on instructions, learning the answers only, and write it back as a Hugging Face model.

    python examples/finetune_llama.py --model path/to/llama --output runs/finetune_llama

``--model`` is a Hugging Face directory: config, tokenizer and weights (safetensors or .bin). Or by configuration:
lightning-megatron fit --config configs/finetune_llama.yaml --model.model path/to/llama --data.tokenizer path/to/llama
"""

import argparse
import json
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_megatron import MegatronModule, MegatronStrategy
from lightning_megatron.data.corpus.tokenizer import load_tokenizer


class Instructions(LightningDataModule):
    """Lines of ``{"prompt": ..., "completion": ...}``; prompts and padding are no targets."""

    def __init__(
        self,
        tokenizer: str,
        path: str = str(Path(__file__).with_name("instructions.jsonl")),
        seq_length: int = 128,
        batch_size: int = 8,
    ) -> None:
        super().__init__()
        self.path, self.seq_length, self.batch_size = path, seq_length, batch_size
        self.tokenizer = load_tokenizer(tokenizer)

    def encode(self, prompt: str, completion: str) -> dict[str, torch.Tensor]:
        """One row: [s] each. The end token is a target, also where it is the padding token: positions decide."""
        asked = self.tokenizer(f"{prompt}\n", add_special_tokens=True)["input_ids"]
        answered = self.tokenizer(completion, add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id]
        padding = max(0, self.seq_length - len(asked) - len(answered))
        row = {
            "input_ids": asked + answered + [self.tokenizer.eos_token_id] * padding,
            "labels": [-100] * len(asked) + answered + [-100] * padding,
            "attention_mask": [1] * (len(asked) + len(answered)) + [0] * padding,
        }
        return {name: torch.tensor(values[: self.seq_length]) for name, values in row.items()}

    def setup(self, stage: str) -> None:
        rows = [self.encode(**json.loads(line)) for line in Path(self.path).read_text().splitlines()]
        self.val_rows, self.train_rows = rows[: self.batch_size], rows[self.batch_size :]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_rows, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val_rows, batch_size=self.batch_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face directory of a Llama with its tokenizer")
    parser.add_argument("--max-steps", type=int, default=30)
    parser.add_argument("--output", default="runs/finetune_llama", help="folder for the log and the model")
    arguments = parser.parse_args()

    seed_everything(1234, workers=True)
    model = MegatronModule(model=arguments.model, pretrained=True, lr=1e-3)
    trainer = Trainer(
        devices=4,
        strategy=MegatronStrategy(tp=2, pp=2, num_microbatches=2),
        max_steps=arguments.max_steps,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        logger=CSVLogger(arguments.output),
        enable_checkpointing=False,
        default_root_dir=arguments.output,
    )
    data = Instructions(arguments.model)
    trainer.fit(model, datamodule=data)
    folder = Path(arguments.output) / "model"  # AutoModelForCausalLM.from_pretrained loads it
    model.save_pretrained(folder)  # on all ranks: each sends its part
    if trainer.is_global_zero:
        data.tokenizer.save_pretrained(folder)


if __name__ == "__main__":  # Lightning starts the other processes by running this file again
    main()
