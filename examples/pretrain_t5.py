"""Pretrain a small T5 on plain text: spans of tokens are replaced by sentinels, and the decoder writes them.

    lightning-megatron train-tokenizer --input TEXT --vocab-size 4096 --output tokenizer
    python examples/pretrain_t5.py --tokenizer tokenizer --text TEXT --output runs/pretrain_t5

``TEXT`` is a folder of .py files; without it, Python's own library is read. By configuration, after ``python3 -m nox -s
quickstart`` has made a tokenizer: lightning-megatron fit --config configs/pretrain_t5.yaml
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset, random_split
from transformers import AutoTokenizer

from lightning_megatron import MegatronModule, MegatronStrategy

NUM_SENTINELS = 32  # entries of the vocabulary after the tokenizer's own


class Spans(Dataset):
    """Stretches of text of which 15 % are cut out in spans of about 3 tokens (Raffel et al. 2020, 3.1.4)."""

    def __init__(self, stretches: torch.Tensor, first_sentinel: int, eos: int) -> None:
        self.stretches, self.first_sentinel, self.eos = stretches, first_sentinel, torch.tensor([eos])
        self.num_cut = round(0.15 * stretches.shape[1])
        self.num_spans = round(self.num_cut / 3)

    def __len__(self) -> int:
        return len(self.stretches)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)  # the same spans in every epoch and on every rank
        stretch = self.stretches[index]

        def lengths(total: int) -> list[int]:
            borders = 1 + torch.randperm(total - 1, generator=generator)[: self.num_spans - 1].sort().values
            return torch.tensor([0, *borders, total]).diff().tolist()

        kept, cut = lengths(len(stretch) - self.num_cut), lengths(self.num_cut)
        pieces = stretch.split([length for pair in zip(kept, cut, strict=True) for length in pair])
        sentinels = (self.first_sentinel + torch.arange(self.num_spans)).split(1)
        source = [piece for pair in zip(pieces[::2], sentinels, strict=True) for piece in pair]
        target = [piece for pair in zip(sentinels, pieces[1::2], strict=True) for piece in pair]
        return {"input_ids": torch.cat([*source, self.eos]), "labels": torch.cat([*target, self.eos])}


class SpanCorruption(LightningDataModule):
    """The files of a folder in stretches of ``seq_length`` tokens; 640 at most, or sentinels run out."""

    def __init__(
        self, tokenizer: str, text: str | None = None, seq_length: int = 64, batch_size: int = 8, max_files: int = 100
    ) -> None:
        super().__init__()
        self.path, self.text, self.max_files = tokenizer, text or sysconfig.get_path("stdlib"), max_files
        self.seq_length, self.batch_size = seq_length, batch_size

    def setup(self, stage: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(self.path)
        texts = [file.read_text(errors="replace") for file in sorted(Path(self.text).glob("*.py"))[: self.max_files]]
        tokens = torch.tensor([token for file in tokenizer(texts)["input_ids"] for token in file])
        stretches = tokens[: len(tokens) // self.seq_length * self.seq_length].view(-1, self.seq_length)
        rows = Spans(stretches, first_sentinel=len(tokenizer), eos=tokenizer.eos_token_id)
        self.train_rows, self.val_rows = random_split(rows, [0.95, 0.05], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_rows, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val_rows, batch_size=self.batch_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="folder that train-tokenizer wrote")
    parser.add_argument("--text", help="folder with .py files; Python's library if left out")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--output", default="runs/pretrain_t5", help="folder for the log and the model")
    arguments = parser.parse_args()

    seed_everything(1234, workers=True)
    vocab_size = len(AutoTokenizer.from_pretrained(arguments.tokenizer)) + NUM_SENTINELS
    shape = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "num_layers": 2, "feed_forward_proj": "gated-gelu"}
    model = MegatronModule(model={"model_type": "t5", "vocab_size": vocab_size, **shape}, lr=3e-3)
    strategy = MegatronStrategy(tp=2, pp=2, num_microbatches=2)  # encoder and decoder are one pipeline
    options = {"devices": 4, "max_steps": arguments.max_steps, "log_every_n_steps": 5, "gradient_clip_val": 1.0}
    trainer = Trainer(strategy=strategy, logger=CSVLogger(arguments.output), enable_checkpointing=False, **options)
    trainer.fit(model, datamodule=SpanCorruption(arguments.tokenizer, arguments.text))
    model.save_pretrained(Path(arguments.output) / "model")  # on all ranks: each sends its part


if __name__ == "__main__":  # Lightning starts the other processes by running this file again
    main()
