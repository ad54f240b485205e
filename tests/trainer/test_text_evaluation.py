"""Perplexity and last-word accuracy of texts are those of transformers, row by row, on any layout."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families.parity import pretrained_module, tiny_model
from tests.parity.training import Case, Layout, module_of, trainer_of
from tests.ranks import run_ranks
from tests.unit.data.chat_tokenizer import make_tokenizer

SEQ_LENGTH = 12
STRIDE = 5
TEXTS = [
    "the answer is yes",
    "was it the question? is it? the answer was: yes",
    "is yes the answer? it is the answer",
    "it is",
    "the question was: yes, is it yes?",
    "yes, yes, yes, is it the answer? was it? the answer is: yes, it is, the answer to the question is yes",
    "yes yes",
]
"""No multiple of copies or batches; the longest loses its beginning."""
LAYOUTS = (
    Layout(),
    Layout(tp=2, pp=2, sequence_parallel=True, num_microbatches=2),
    Layout(dp=3, num_microbatches=2),
    pytest.param(Layout(cp=2, pp=2), marks=pytest.mark.exhaustive),
)


@functools.cache
def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 whose favourite word is `` yes``, its tokenizer, and the texts."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("texts")
    make_tokenizer(folder)
    sizes = {"vocab_size": 311, "n_layer": 4, "n_embd": 32, "n_head": 4, "n_positions": 24}
    model = tiny_model(GPT2LMHeadModel, GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    with torch.no_grad():
        (yes,) = _tokenizer(folder).encode(" yes")
        model.transformer.ln_f.bias += 8 * model.transformer.wte.weight[yes]
    model.save_pretrained(folder)
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return folder


def _losses(folder: Path, rows: list[tuple[list[int], int]]) -> tuple[list[torch.Tensor], list[bool]]:
    """Of each row, read by itself: the losses of its last tokens, so many, and whether all of them are predicted."""
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    losses, right = [], []
    for tokens, count in rows:
        row = torch.tensor(tokens)
        with torch.no_grad():
            logits = model(row[None, :-1]).logits[0, -count:]
        losses.append(torch.nn.functional.cross_entropy(logits, row[-count:], reduction="none").double())
        right.append(bool((logits.argmax(-1) == row[-count:]).all()))
    return losses, right


def _last_words(folder: Path) -> list[tuple[list[int], int]]:
    rows = []
    for text in TEXTS:
        context, word = text.rsplit(" ", 1)
        before, target = _tokenizer(folder).encode(context), _tokenizer(folder).encode(" " + word)
        rows.append(([*before, *target][-(SEQ_LENGTH + 1) :], len(target)))
    return rows


def _windows(folder: Path) -> list[tuple[list[int], int]]:
    """Windows as Hugging Face's guide to perplexity moves them, except that the first token behind one is kept."""
    rows = []
    for text in TEXTS:
        tokens, done = _tokenizer(folder).encode(text), 1
        for begin in range(0, len(tokens), STRIDE):
            end = min(begin + SEQ_LENGTH + 1, len(tokens))
            rows.append((tokens[begin:end], end - done))
            done = end
            if end == len(tokens):
                break
    return rows


def _tested(folder: str, case: Case) -> dict[str, Any]:
    from lightning_megatron import TextEvaluationDataModule

    found: dict[str, Any] = {}
    for task, step, stride in (("last_word", "last_word", None), ("perplexity", "gpt", STRIDE)):
        data = TextEvaluationDataModule(
            data_path=f"{folder}/texts.jsonl",
            tokenizer=folder,
            task=task,  # type: ignore[arg-type]
            seq_length=SEQ_LENGTH,
            stride=stride,
            micro_batch_size=1,
        )
        module = pretrained_module(folder, train_step=step)
        (found[task],) = trainer_of(case).test(module, datamodule=data, verbose=False)
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_texts_have_the_perplexity_and_the_last_words_of_transformers(folder: Path, layout: Layout) -> None:
    losses, right = _losses(folder, _last_words(folder))
    assert 2 <= sum(right) < len(right) - 1
    mean = torch.cat(losses).mean().item()
    windows, _ = _losses(folder, _windows(folder))
    windows_mean = torch.cat(windows).mean().item()
    assert len(windows) > len(TEXTS)
    for found in run_ranks(_tested, layout.world_size, str(folder), Case(layout=layout)):
        # Counted, not measured.
        assert found["last_word"]["test_last_word_accuracy"] == pytest.approx(sum(right) / len(right), rel=1e-14)
        # fp32 logits of four layers in another order of additions, and one mean of fp32 losses a batch.
        assert found["last_word"]["test_loss"] == pytest.approx(mean, rel=2e-6)
        assert found["last_word"]["test_perplexity"] == pytest.approx(math.exp(mean), rel=1e-5)
        assert found["perplexity"]["test_loss"] == pytest.approx(windows_mean, rel=2e-6)
        assert found["perplexity"]["test_perplexity"] == pytest.approx(math.exp(windows_mean), rel=1e-5)


def _refusals(folder: str) -> list[tuple[str, str]]:
    """What must be said, and is."""
    from lightning_megatron import ConfigError, MegatronModule, TextEvaluationDataModule

    told = []
    for changes, vocab_size, phase, expected in (
        ({}, 200, "test", "the model's vocab_size=200 ends before it"),
        ({"task": "last_word"}, 311, "test", "expected train_step='last_word', which counts last words, got"),
        ({}, 311, "fit", "TextEvaluationDataModule has no train split"),
    ):
        options: dict[str, Any] = {"data_path": f"{folder}/texts.jsonl", "tokenizer": folder, "seq_length": 12}
        data = TextEvaluationDataModule(**{**options, **changes})
        sizes = {"vocab_size": vocab_size, "n_layer": 1, "n_embd": 8, "n_head": 1, "n_positions": 16}
        module = MegatronModule(model={"model_type": "gpt2", **sizes}, train_step="gpt")
        with pytest.raises(ConfigError) as error:
            getattr(trainer_of(Case()), phase)(module, datamodule=data)
        told.append((expected, str(error.value)))
    return told


def test_what_does_not_fit_together_is_refused(folder: Path) -> None:
    for expected, told in run_ranks(_refusals, 1, str(folder))[0]:
        assert expected in told


def _weighted_losses(case: Case) -> tuple[float, float]:
    """Epoch means of rows whose targets count in part."""
    from torch.utils.data import DataLoader

    from tests.parity.training import Sentences

    rows = [
        {**row, "loss_mask": torch.full((len(row["input_ids"]),), weight)}
        for row, weight in zip(Sentences(3), (0.01, 0.3, 0.7), strict=True)  # type: ignore[arg-type]
    ]
    module = module_of(case)
    trainer = trainer_of(case)
    (alone,) = zip(*[_value(trainer, module, DataLoader([row], batch_size=1)) for row in rows], strict=True)  # type: ignore[arg-type]
    (together,) = _value(trainer, module, DataLoader(rows, batch_size=1))  # type: ignore[arg-type]
    return together, sum(loss * weight for loss, weight in zip(alone, (0.01, 0.3, 0.7), strict=True)) / 1.01


def _value(trainer: Any, module: Any, loader: Any) -> tuple[float]:
    (values,) = trainer.test(module, loader, verbose=False)
    return (values["test_loss"],)


def test_targets_that_count_in_part_do_so_in_the_mean_of_an_epoch() -> None:
    ((together, expected),) = run_ranks(_weighted_losses, 1, Case(layout=Layout()))
    assert together == pytest.approx(expected, rel=2e-6)
