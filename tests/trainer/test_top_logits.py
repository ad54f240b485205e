"""A teacher's top-k logits in files: written at any layout, found by what the model read, or else refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_megatron.data.top_logits import TopLogitsDataset
from lightning_megatron.errors import DataError
from tests.families.parity import Rows, padded_sentences, pretrained_module
from tests.marks import exhaustive
from tests.parity.test_dpo import tiny
from tests.parity.training import FOUR_RANKS, PP2_DP2, TP2_SP, Case, Layout, refusal, trainer_of
from tests.ranks import run_ranks

TOP = 6


def _rows() -> Rows:
    """Five rows of tokens, of which three have padding."""
    whole = padded_sentences(lengths=(16, 16, 16, 16))
    rows = padded_sentences()
    return [{**row, "input_ids": row["input_ids"].flip(0)} for row in rows[1:]] + whole[:2]


def _write(directory: str, folder: str, layout: Layout) -> None:
    from lightning_megatron import TopLogitsWriter

    module = pretrained_module(directory, return_logits="last_stage")
    loader: DataLoader[Any] = DataLoader(_rows(), batch_size=2)  # type: ignore[arg-type]
    trainer = trainer_of(Case(layout=layout), callbacks=[TopLogitsWriter(folder, TOP)])
    trainer.predict(module, loader, return_predictions=False)


def _train(
    directory: str,
    folder: str,
    layout: Layout,
) -> dict[str, float]:
    """Train a student on the files, with rows in another order and a worker process."""
    from lightning_megatron import DatasetDataModule, DistillationTrainStep

    module = pretrained_module(directory, train_step=DistillationTrainStep(alpha=1.0))
    data = DatasetDataModule(
        train=TopLogitsDataset(_rows()[:4][::-1], folder),
        micro_batch_size=4 // (layout.dp * layout.num_microbatches),
        num_workers=1,
    )
    trainer = trainer_of(Case(layout=layout, steps=1))
    trainer.fit(module, datamodule=data)
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, num_microbatches=2),
        *(exhaustive(each) for each in (Layout(), TP2_SP, PP2_DP2, FOUR_RANKS)),
    ],
    ids=str,
)
def test_files_have_the_logits_of_transformers(layout: Layout, tmp_path: Path) -> None:
    hf_model = tiny("llama")
    directory = str(tmp_path / "model")
    folder = str(tmp_path / "logits")
    hf_model.save_pretrained(directory)
    run_ranks(_write, layout.world_size, directory, folder, layout)
    rows = _rows()
    dataset = TopLogitsDataset(rows[::-1], folder)
    assert len(dataset) == len(rows)
    for number, row in enumerate(rows[::-1]):
        found = dataset[number]
        assert found["input_ids"].equal(row["input_ids"])
        with torch.no_grad():
            logits = hf_model(row["input_ids"][None], row["attention_mask"][None]).logits[0]
        real = row["attention_mask"].bool()
        expected = logits.topk(TOP)
        torch.testing.assert_close(
            found["teacher_logits"][real], expected.values[real], rtol=0.0, atol=2e-5
        )
        assert found["teacher_ids"][real].equal(expected.indices[real])
    manifest = json.loads((tmp_path / "logits/top_logits.json").read_text())
    assert manifest["num_rows"] == len(rows)
    assert manifest["model"] == directory
    # The student is the teacher: they differ by the share of the tokens that the files leave out.
    shares = []
    for row in rows[:4]:
        with torch.no_grad():
            logits = hf_model(row["input_ids"][None], row["attention_mask"][None]).logits[0]
        kept = (logits / 2.0).softmax(dim=-1).topk(TOP).values.sum(dim=-1)
        shares.append(kept[:-1][row["labels"][1:] != -100])
    expected_loss = -torch.cat(shares).log().mean().item()
    for metrics in run_ranks(_train, layout.world_size, directory, folder, layout):
        assert metrics["train_kl_loss"] == pytest.approx(expected_loss, rel=1e-5)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder of logits, beside the model."""
    tiny("llama").save_pretrained(tmp_path / "model")
    run_ranks(
        _write,
        1,
        str(tmp_path / "model"),
        str(tmp_path / "logits"),
        Layout(),
    )
    return tmp_path / "logits"


def _refusals(directory: str, folder: str) -> list[str]:
    from lightning_megatron import TopLogitsWriter

    def run(function: str, folder: str, k: int, **options: Any) -> None:
        module = pretrained_module(directory, **options)
        trainer = trainer_of(Case(steps=1), callbacks=[TopLogitsWriter(folder, k)])
        loader: DataLoader[Any] = DataLoader(_rows(), batch_size=2)  # type: ignore[arg-type]
        getattr(trainer, function)(module, loader)

    other = f"{folder}_other"
    return [
        refusal(run, "predict", folder, TOP, return_logits=True),
        refusal(run, "predict", other, TOP),
        refusal(run, "fit", other, TOP, return_logits=True),
        refusal(run, "predict", other, 1000, return_logits=True),
        refusal(run, "predict", f"{directory}/config.json/none", TOP, return_logits=True),
        refusal(TopLogitsWriter, other, 0),
    ]


def test_what_cannot_be_written_is_refused(written: Path) -> None:
    (messages,) = run_ranks(
        _refusals,
        1,
        str(written.parent / "model"),
        str(written),
    )
    expected = [
        "got a finished one; remove it, or give another",
        "got predict with return_logits=False; leave the callback out",
        "got fit with return_logits=True; leave the callback out",
        "k=1000: expected a language model of as many tokens at least, got vocab_size=83",
        "Not a directory",
        "k=0 must be at least 1",
    ]
    for message, part in zip(messages, expected, strict=True):
        assert part in message


def test_what_is_not_there_is_refused(written: Path) -> None:
    rows = _rows()
    other = {**rows[1], "input_ids": rows[1]["input_ids"] + 1}
    with pytest.raises(
        DataError, match="row 2: expected logits of the teacher for its tokens, mask"
    ):
        TopLogitsDataset([*rows[:2], other], written)
    with pytest.raises(DataError, match="row 0: expected logits of the teacher"):
        TopLogitsDataset([{"input_ids": rows[0]["input_ids"]}], written)
    hidden_nothing = {name: rows[3][name] for name in ("input_ids", "labels")}
    assert len(TopLogitsDataset([hidden_nothing], written)[0]["teacher_ids"]) == 16
    file = written / "part-00000/logits.bin"
    content = bytearray(file.read_bytes())
    content[7] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        DataError, match=r"is damaged \(.*logits.bin differs from its checksum.*\); write"
    ):
        TopLogitsDataset(rows, written)
    (written / "top_logits.json").unlink()
    with pytest.raises(
        DataError, match="expected a folder of TopLogitsWriter with top_logits.json"
    ):
        TopLogitsDataset(rows, written)
