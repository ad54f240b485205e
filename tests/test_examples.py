"""Does each program in examples/ run as a user would run it?"""

from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.corpus import VOCAB_SIZE, make_corpus
from tests.ranks import ROOT


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def _run(example: str, *arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / example, *(str(each) for each in arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]


def _train_losses(folder: Path) -> list[float]:
    (metrics,) = folder.rglob("metrics.csv")
    with metrics.open() as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]


@pytest.mark.slow
def test_pretrain_gpt_trains_in_four_processes_and_leaves_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    common = ("--data-path", corpus, "--vocab-size", VOCAB_SIZE, "--output", tmp_path)
    _run("pretrain_gpt.py", *common, "--max-steps", 20)
    assert list(tmp_path.rglob("last.ckpt"))
    losses = _train_losses(tmp_path)
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_custom_train_step_trains_with_its_own_loss(corpus: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    of_every_word = AutoTokenizer.from_pretrained(corpus.parent / "tok")(" w")["input_ids"]
    common = ("--data-path", corpus, "--vocab-size", VOCAB_SIZE, "--output", tmp_path)
    _run("custom_train_step.py", *common, "--max-steps", 20, "--key-tokens", *of_every_word)
    losses = _train_losses(tmp_path)
    assert losses[-1] < losses[0]
    # Each row has some: the weighted loss of a model that knows little is above the logarithm of its vocabulary.
    assert losses[0] > 1.1 * math.log(VOCAB_SIZE)


@pytest.mark.slow
def test_finetune_llama_learns_the_answers_and_leaves_a_hugging_face_model(corpus: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(corpus.parent / "tok")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    source = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads))
    source.save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    _run("finetune_llama.py", "--model", tmp_path / "llama", "--output", tmp_path / "run", "--max-steps", 12)
    losses = _train_losses(tmp_path / "run")
    assert losses[-1] < losses[0]
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert tuned.num_parameters() == source.num_parameters()
    moved = [not torch.equal(a, b) for a, b in zip(tuned.parameters(), source.parameters(), strict=True)]
    assert all(moved)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "run" / "model")) == len(tokenizer)


def test_prompts_and_padding_are_no_targets_but_the_end_token_is(corpus: Path) -> None:
    from examples.finetune_llama import Instructions

    data = Instructions(str(corpus.parent / "tok"), seq_length=24)
    row = data.encode("What?", "That.")
    asked = len(data.tokenizer("What?\n")["input_ids"])
    answered = data.tokenizer("That.")["input_ids"] + [data.tokenizer.eos_token_id]
    assert row["labels"].tolist() == [-100] * asked + answered + [-100] * (24 - asked - len(answered))
    assert row["input_ids"][asked : asked + len(answered)].tolist() == answered
    assert row["attention_mask"].sum() == asked + len(answered)


def test_examples_are_short_enough_to_be_read_at_once() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 100, path.name
