"""Rows to pretrain a BERT on, from plain text: neighbouring stretches, in order or swapped, with tokens masked."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, random_split
from transformers import AutoTokenizer, PreTrainedTokenizerBase

SPECIAL_TOKENS = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}


class MaskedPairs(Dataset):
    """Rows ``[CLS] a [SEP] b [SEP]``; each has the same masks in every epoch and on every rank."""

    def __init__(self, pairs: list[tuple[list[int], list[int]]], tokenizer: PreTrainedTokenizerBase, seq_length: int):
        self.pairs, self.tokenizer, self.seq_length = pairs, tokenizer, seq_length

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        swapped = int(torch.randint(2, (), generator=generator))
        a, b = reversed(self.pairs[index]) if swapped else self.pairs[index]
        cls, sep, pad = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id, self.tokenizer.pad_token_id
        length = len(a) + len(b) + 3
        padding = self.seq_length - length
        tokens = torch.tensor([cls, *a, sep, *b, sep] + [pad] * padding)
        types = torch.tensor([0] * (len(a) + 2) + [1] * (len(b) + 1) + [0] * padding)
        chosen = torch.rand(self.seq_length, generator=generator) < 0.15
        chosen &= ~torch.isin(tokens, torch.tensor([cls, sep, pad]))
        # Of the chosen tokens 80 % are masked, 10 % replaced, 10 % left (Devlin et al. 2018, 3.1).
        dice = torch.rand(self.seq_length, generator=generator)
        others = torch.randint(len(self.tokenizer), (self.seq_length,), generator=generator)
        masked = tokens.masked_fill(chosen & (dice < 0.8), self.tokenizer.mask_token_id)
        return {
            "input_ids": torch.where(chosen & (dice >= 0.9), others, masked),
            "attention_mask": (torch.arange(self.seq_length) < length).long(),
            "token_type_ids": types,
            "labels": tokens.masked_fill(~chosen, -100),
            "next_sentence_label": torch.tensor(swapped),
        }


class SentencePairs(LightningDataModule):
    """Neighbouring stretches of the files of a folder."""

    def __init__(
        self, tokenizer: str, text: str | None = None, seq_length: int = 64, batch_size: int = 8, max_files: int = 100
    ) -> None:
        super().__init__()
        self.path, self.text, self.max_files = tokenizer, text or sysconfig.get_path("stdlib"), max_files
        self.seq_length, self.batch_size = seq_length, batch_size

    def stretches(self, file: Path) -> Iterator[list[int]]:
        """Whole lines together, as many as fit into half a row."""
        room, stretch = (self.seq_length - 3) // 2, []
        lines = [line for line in file.read_text(errors="replace").splitlines(keepends=True) if line.strip()]
        for line in self.tokenizer(lines)["input_ids"] if lines else []:
            if stretch and len(stretch) + len(line) > room:
                yield stretch
                stretch = []
            stretch = (stretch + line)[:room]

    def setup(self, stage: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(self.path)
        self.tokenizer.add_special_tokens(SPECIAL_TOKENS)  # four entries more, if it has none of them
        pairs = []
        for file in sorted(Path(self.text).glob("*.py"))[: self.max_files]:
            found = list(self.stretches(file))
            pairs += zip(found[::2], found[1::2], strict=False)
        rows = MaskedPairs(pairs, self.tokenizer, self.seq_length)
        generator = torch.Generator().manual_seed(0)
        self.train_rows, self.val_rows = random_split(rows, [0.95, 0.05], generator)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_rows, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val_rows, batch_size=self.batch_size)
