"""Perplexity and last-word accuracy of texts equal transformers, row by row, on any layout."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.errors import ConfigError
from tests.families.parity import pretrained_module, tiny_model
from tests.marks import exhaustive
from tests.parity.training import FOUR_RANKS, Case, Layout, refusal, trainer_of
from tests.ranks import run_ranks
from tests.recording import recorded_warnings
from tests.tokenizers import make_tokenizer

SEQ_LENGTH = 12
STRIDE = 5
Rows = list[tuple[list[int], int]]
"""Tokens, and how many of the last are scored."""
TEXTS = [
    "the answer is yes",
    "was it the question? is it? the answer was: yes",
    "is yes the answer? it is the answer",
    "it is",
    "the question was: yes, is it yes?",
    "yes, yes, yes, is it the answer? was it? the answer is: yes, it is, the answer to the question is yes",
    "yes yes",
]
"""Their number is no multiple of replicas or batch sizes; the longest is truncated at its start."""
LAYOUTS = (
    Layout(),
    FOUR_RANKS,
    Layout(dp=3, num_microbatches=2),
    exhaustive(Layout(cp=2, pp=2)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 biased towards `` yes``, its tokenizer, and the texts."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("texts")
    make_tokenizer(folder)
    sizes = {
        "vocab_size": 311,
        "n_layer": 4,
        "n_embd": 32,
        "n_head": 4,
        "n_positions": 24,
    }
    model = tiny_model(GPT2LMHeadModel, GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    with torch.no_grad():
        (yes,) = AutoTokenizer.from_pretrained(folder).encode(" yes")
        model.transformer.ln_f.bias += 8 * model.transformer.wte.weight[yes]
    model.save_pretrained(folder)
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return folder


def _last_words(tokenizer: Any) -> Rows:
    rows = []
    for text in TEXTS:
        context, word = text.rsplit(" ", 1)
        before = tokenizer.encode(context)
        target = tokenizer.encode(" " + word)
        tokens = [*before, *target]
        rows.append((tokens[-(SEQ_LENGTH + 1) :], len(target)))
    return rows


def _windows(tokenizer: Any) -> Rows:
    """Sliding windows as in Hugging Face's guide to perplexity, but scoring also the first token after a window."""
    rows = []
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        done = 1
        for begin in range(0, len(tokens), STRIDE):
            end = min(begin + SEQ_LENGTH + 1, len(tokens))
            rows.append((tokens[begin:end], end - done))
            done = end
            if end == len(tokens):
                break
    return rows


def _losses(model: Any, rows: Rows) -> tuple[float, float]:
    """Mean loss of the last ``count`` tokens of each row, and the share of rows that are predicted completely."""
    losses = []
    right = []
    for tokens, count in rows:
        row = torch.tensor(tokens)
        targets = row[-count:]
        with torch.no_grad():
            logits = model(row[None, :-1]).logits[0, -count:]
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        losses.append(loss.double())
        right.append(logits.argmax(-1).equal(targets))
    return torch.cat(losses).mean().item(), sum(right) / len(right)


def _test(folder: str, case: Case) -> dict[str, Any]:
    from lightning_megatron import TextEvaluationDataModule

    metrics: dict[str, Any] = {}
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
        (metrics[task],) = trainer_of(case).test(
            module,
            datamodule=data,
            verbose=False,
        )
    return metrics


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_perplexity_and_last_word_accuracy_equal_transformers(folder: Path, layout: Layout) -> None:
    from transformers import AutoTokenizer, GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    mean, right = _losses(model, _last_words(tokenizer))
    of_windows, _ = _losses(model, _windows(tokenizer))
    assert 0.2 < right < 0.8
    for metrics in run_ranks(
        _test,
        layout.world_size,
        str(folder),
        Case(layout=layout),
    ):
        # A count, so exact.
        assert metrics["last_word"]["test_last_word_accuracy"] == pytest.approx(right, rel=1e-14)
        for task, expected in (("last_word", mean), ("perplexity", of_windows)):
            # fp32 logits of four layers with a different summation order, and one fp32 mean per batch.
            assert metrics[task]["test_loss"] == pytest.approx(expected, rel=2e-6)
            assert metrics[task]["test_perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)


def _refusals(folder: str) -> list[str]:
    from lightning_megatron import MegatronModule, TextEvaluationDataModule

    messages = []
    sizes = {
        "model_type": "gpt2",
        "n_layer": 1,
        "n_embd": 8,
        "n_head": 1,
        "n_positions": 16,
    }
    for task, phase in (("last_word", "test"), ("perplexity", "fit")):
        module = MegatronModule(model={**sizes, "vocab_size": 311}, train_step="gpt")
        data = TextEvaluationDataModule(f"{folder}/texts.jsonl", folder, task=task, seq_length=12)  # type: ignore[arg-type]
        run = getattr(trainer_of(Case()), phase)
        messages.append(refusal(run, module, datamodule=data))
    return messages


def test_wrong_train_step_or_phase_is_refused(folder: Path) -> None:
    objective, split = run_ranks(_refusals, 1, str(folder))[0]
    assert "expected train_step='last_word', which counts last words, got" in objective
    assert "TextEvaluationDataModule has no train split" in split


def test_an_option_of_the_other_task_is_refused() -> None:
    from lightning_megatron import TextEvaluationDataModule

    with pytest.raises(ConfigError, match="strict=False: expected task='last_word', whose words"):
        TextEvaluationDataModule("texts.jsonl", "tokenizer", strict=False)


def _losses_of_encodings(folder: str) -> list[Any]:
    """Loss of texts in UTF-8, of the same in Latin-1, and with their letters replaced; the refusal of the default."""
    from lightning_megatron import TextEvaluationDataModule

    def test(name: str, **options: Any) -> float:
        path = f"{folder}/{name}"
        data = TextEvaluationDataModule(path, folder, seq_length=12, micro_batch_size=1, **options)
        module = pretrained_module(folder)
        (metrics,) = trainer_of(Case()).test(
            module,
            datamodule=data,
            verbose=False,
        )
        return float(metrics["test_loss"])

    utf8 = test("utf8.txt")
    latin = test("latin.txt", encoding="latin-1")
    with recorded_warnings() as warned:
        replaced = test("latin.txt", errors="replace")
    return [utf8, latin, replaced, refusal(test, "latin.txt"), warned]


def test_encoding_of_texts_is_given_replaced_or_refused(folder: Path) -> None:
    for name, encoding in (("utf8.txt", "utf-8"), ("latin.txt", "latin-1")):
        (folder / name).write_bytes("is it yés? the answer is: yés".encode(encoding))
    utf8, latin, replaced, refused, warned = run_ranks(_losses_of_encodings, 1, str(folder))[0]
    assert utf8 == latin != replaced
    assert "latin.txt is not utf-8: byte 0xe9 at offset 7 of it" in refused
    assert "offset 7 of it; give its encoding (encoding=latin-1" in refused
    replaced_count = re.compile("2 characters of .*latin.txt that are not utf-8 were replaced")
    assert any(map(replaced_count.search, warned))
