"""Small datasets on disk, made by the commands under test."""

from pathlib import Path
from typing import Any

from lightning_megatron.cli import main

VOCAB_SIZE = 300


def make_corpus(folder: Path) -> Path:
    """Train a tokenizer and preprocess; returns the dataset's prefix."""
    text = folder / "text"
    text.mkdir()
    for number in range(60):
        (text / f"{number:02}.txt").write_text(
            " ".join(f"w{(number * 7 + i * i) % 97}" for i in range(300))
        )
    assert (
        main(
            _words(
                "train-tokenizer",
                "--input",
                text,
                "--vocab-size",
                VOCAB_SIZE,
                "--output",
                folder / "tok",
            )
        )
        == 0
    )
    prefix = folder / "corpus"
    arguments = _words(
        "preprocess", "--input", text, "--output-prefix", prefix, "--tokenizer", folder / "tok"
    )
    assert main([*arguments, "--append-eod"]) == 0
    return folder / "corpus_text_document"


def make_sentences(
    folder: Path,
    kind: str,
    text: Path,
    vocab_size: int = 512,
) -> Path:
    """Like ``make_corpus``, in sentences, with the special tokens of ``kind``; the tokenizer is ``folder / "tok"``."""
    options = _words(
        "--input", text, "--vocab-size", vocab_size, "--output", folder / "tok", "--kind", kind
    )
    assert main(["train-tokenizer", *options]) == 0
    options = _words(
        "--input", text, "--output-prefix", folder / "corpus", "--tokenizer", folder / "tok"
    )
    assert main(["preprocess", *options, "--split-sentences"]) == 0
    return folder / "corpus_text_sentence"


def _words(*arguments: object) -> list[str]:
    return [str(each) for each in arguments]


def configuration(corpus: Path, folder: Path) -> dict[str, Any]:
    """A complete configuration of ``fit`` for one process."""
    shape = {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 32,
    }
    data = {
        "data_path": str(corpus),
        "split": "90,10,0",
        "seq_length": 32,
        "micro_batch_size": 2,
    }
    trainer = {
        "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": str(folder)}},
        "strategy": {"class_path": "MegatronStrategy", "init_args": {"num_microbatches": 2}},
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 2,
            "limit_val_batches": 1,
            "enable_progress_bar": False,
        },
    }
    return {
        "trainer": trainer,
        "model": {
            "class_path": "MegatronModule",
            "init_args": {"model": {"model_type": "gpt2", **shape}},
        },
        "data": {"class_path": "IndexedDataModule", "init_args": data},
    }
