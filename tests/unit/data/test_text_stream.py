"""Streams of packed rows: positions, shares of documents, weights and boundaries of documents."""

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.data.corpus import Corpus, FileCorpus, HuggingFaceCorpus
from lightning_megatron.data.document_tokenizer import DocumentTokenizer
from lightning_megatron.data.gpt_samples import PADDING
from lightning_megatron.data.stateful import why_not_exact
from lightning_megatron.data.text_stream import PackedTexts, StreamOptions, TextBatches
from lightning_megatron.errors import ConfigError, DataError
from tests.marks import exhaustive
from tests.tokenizers import number_tokenizer

SEQ_LENGTH = 32
NUM_TEXTS = 240
LENGTHS = Counter({number: 1 + 3 * (number * number % 9) for number in range(NUM_TEXTS)})
TEXTS = [" ".join([str(number)] * length) for number, length in LENGTHS.items()]
"""Each is a token of its own, repeated."""
Batches = list[list[Any]]
"""By step and replica."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return number_tokenizer(NUM_TEXTS)


def _write(path: Path, texts: Sequence[str]) -> None:
    if path.suffix == ".txt":
        path.write_text(texts[0])
        return
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(
            pyarrow.table({"text": list(texts)}),
            path,
            row_group_size=16,
        )
        return
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if path.suffix == ".gz":
        lines = gzip.compress(lines)
    path.write_bytes(lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Numbered texts in files of every kind."""
    folder = tmp_path_factory.mktemp("texts")
    _write(folder / "a.jsonl", TEXTS[:100])
    _write(folder / "b.jsonl.gz", TEXTS[100:180])
    _write(folder / "c.parquet", TEXTS[180:238])
    _write(folder / "d.txt", TEXTS[238:239])
    _write(folder / "e.txt", TEXTS[239:])
    return folder


def _options(corpora: Sequence[Corpus], tokenizer: Any, **changes: Any) -> StreamOptions:
    settings: dict[str, Any] = {
        "corpora": corpora,
        "weights": [1.0],
        "tokenize": DocumentTokenizer(tokenizer, "text", append_eod=True),
        "seq_length": SEQ_LENGTH,
        "shuffle_buffer": 20,
        "separate_documents": False,
        "seed": 1,
        "num_workers": 0,
    }
    return StreamOptions(**{**settings, **changes})


def _files(folder: Path, seed: int | None = 1) -> FileCorpus:
    return FileCorpus([str(folder)], "text", seed)


def _read(
    options: StreamOptions,
    dp: int,
    states: Any = None,
    num_steps: int | None = None,
    repeats: bool = False,
) -> tuple[Batches, Any]:
    """Batches of all replicas, to the end of the pass or for some steps; and the state after them."""
    streams = [
        TextBatches(options, dp=dp, rank=rank, num_rows=3, repeats=repeats).open(0, states)
        for rank in range(dp)
    ]
    steps: Batches = []
    while num_steps is None or len(steps) < num_steps:
        batches = [stream.next() for stream in streams]
        if not any(batches):
            break
        steps.append([batch or streams[0].padding() for batch in batches])
    states = json.loads(json.dumps([stream.state() for stream in streams]))
    for stream in streams:
        stream.close()
    return steps, states


def _targets(*runs: Batches) -> Counter[int]:
    """How often each token is a target."""
    counts: Counter[int] = Counter()
    for run in runs:
        for step in run:
            for batch in step:
                counts.update(batch["text"][:, 1:].flatten().tolist())
    return counts


def _assert_each_text_once(num_readers: int, *runs: Batches) -> None:
    """Check that all tokens were targets once; only the first token of a reader is none, and shares may be empty."""
    found = _targets(*runs)
    del found[PADDING]
    expected = LENGTHS + Counter({NUM_TEXTS: NUM_TEXTS})
    assert found - expected == Counter()
    assert 1 <= (expected - found).total() <= num_readers


def _assert_same(found: Batches, expected: Batches) -> None:
    assert len(found) == len(expected)
    for step, reference in zip(found, expected, strict=True):
        for batch, other in zip(step, reference, strict=True):
            assert batch.keys() == other.keys()
            assert all(torch.equal(batch[name], other[name]) for name in batch)


@pytest.mark.parametrize("shuffle_buffer", [0, 20])
def test_resume_is_exact_at_every_step(folder: Path, tokenizer: Any, shuffle_buffer: int) -> None:
    options = _options([_files(folder)], tokenizer, shuffle_buffer=shuffle_buffer)
    whole, _ = _read(options, 2)
    _assert_each_text_once(2, whole)
    for step in range(1, len(whole), 5):
        first, states = _read(options, 2, num_steps=step)
        rest, _ = _read(options, 2, states)
        _assert_same(first + rest, whole)
        assert len(json.dumps(states)) < 1000


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.gz", "c.parquet", "d.txt"])
def test_a_file_that_changes_in_a_run_is_refused(name: str, tmp_path: Path, tokenizer: Any) -> None:
    _write(tmp_path / name, [" ".join(TEXTS[:9]), *TEXTS])
    corpus = _files(tmp_path)
    _write(tmp_path / name, TEXTS[:9])
    with pytest.raises(DataError, match="it was changed while it was in use"):
        _read(_options([corpus], tokenizer), 1)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match="got 0: it was changed"):
        _read(_options([corpus], tokenizer), 1)


def test_workers_give_the_same_rows(folder: Path, tokenizer: Any) -> None:
    options = _options([_files(folder)], tokenizer)
    expected, _ = _read(options, 2, num_steps=6)
    with_workers = _options([_files(folder)], tokenizer, num_workers=2)
    first, states = _read(with_workers, 2, num_steps=3)
    rest, _ = _read(with_workers, 2, states, num_steps=3)
    _assert_same(first + rest, expected)


@pytest.mark.parametrize(
    ("dps", "num_readers"),
    [
        ((2, 1), 2),
        ((2, 3, 2), 6),
        exhaustive((1, 4, 3, 1), 12),
        exhaustive((4, 2, 8), 8),
    ],
)
def test_each_text_comes_once_at_other_numbers_of_replicas(
    folder: Path, tokenizer: Any, dps: tuple[int, ...], num_readers: int
) -> None:
    options = _options([_files(folder)], tokenizer)
    runs = []
    states = None
    for dp in dps[:-1]:
        steps, states = _read(options, dp, states, num_steps=3)
        runs.append(steps)
    last, _ = _read(options, dps[-1], states)
    _assert_each_text_once(num_readers, *runs, last)


def test_passes_follow_one_another_in_other_orders(folder: Path, tokenizer: Any) -> None:
    options = _options([_files(folder)], tokenizer)
    one_pass, _ = _read(options, 1)
    steps, _ = _read(
        options,
        1,
        num_steps=2 * len(one_pass) + 2,
        repeats=True,
    )
    counts = _targets(steps)
    for number, length in LENGTHS.items():
        assert 2 * length - 1 <= counts[number] <= 3 * length
    again = steps[len(one_pass) : 2 * len(one_pass)]
    assert _targets(again[:3]) != _targets(one_pass[:3])
    # Resumed in the second pass.
    at = len(one_pass) + 3
    first, states = _read(options, 1, num_steps=at, repeats=True)
    rest, _ = _read(
        options,
        1,
        states,
        num_steps=len(steps) - at,
        repeats=True,
    )
    _assert_same(first + rest, steps)


def test_without_shuffling_rows_are_the_texts_in_order(folder: Path, tokenizer: Any) -> None:
    options = _options(
        [_files(folder, seed=None)],
        tokenizer,
        shuffle_buffer=0,
    )
    steps, _ = _read(options, 1)
    expected: list[int] = []
    for text in TEXTS:
        expected += [*tokenizer.encode(text), tokenizer.eos_token_id]
    rows = [row for step in steps for row in step[0]["text"].tolist() if row[1] >= 0]
    found = rows[0][:1] + [token for row in rows for token in row[1:] if token >= 0]
    assert found == expected
    assert all(row[0] == previous[-1] for previous, row in zip(rows[:-1], rows[1:], strict=True))


def test_weights_are_shares_of_the_rows(tmp_path: Path, tokenizer: Any) -> None:
    for name, text in (("long", "1 " * 90), ("short", "2 " * 9)):
        _write(tmp_path / f"{name}.jsonl", [text] * 300)
    corpora = [
        FileCorpus([str(tmp_path / f"{name}.jsonl")], "text", 1) for name in ("long", "short")
    ]
    options = _options(corpora, tokenizer, weights=[0.25, 0.75])
    whole, _ = _read(options, 2, num_steps=8, repeats=True)
    is_short = [(batch["text"] == 2).any(1) for step in whole for batch in step]
    assert torch.cat(is_short).sum() == 36
    first, states = _read(options, 2, num_steps=3, repeats=True)
    rest, _ = _read(options, 2, states, num_steps=5, repeats=True)
    _assert_same(first + rest, whole)


def test_documents_can_be_separated(folder: Path, tokenizer: Any) -> None:
    options = _options([_files(folder)], tokenizer, separate_documents=True)
    steps, _ = _read(options, 1)
    end = tokenizer.eos_token_id
    for (batch,) in steps[:-1]:
        for row, tokens in enumerate(batch["text"][:, :-1].tolist()):
            segments = [1]
            positions = [0]
            for previous in tokens[:-1]:
                segments.append(segments[-1] + (previous == end))
                positions.append(0 if previous == end else positions[-1] + 1)
            assert batch["attention_mask"][row].tolist() == segments
            assert batch["position_ids"][row].tolist() == positions
            # The end of a document does not predict the first token of the next one.
            assert batch["loss_mask"][row].tolist() == [float(token != end) for token in tokens]


def test_texts_for_evaluation_are_all_rows_of_a_pass(folder: Path, tokenizer: Any) -> None:
    options = _options([_files(folder)], tokenizer)
    steps, _ = _read(options, 1)
    samples = PackedTexts(options, "valid")
    rows = [row for step in steps for row in step[0]["text"] if row[1] >= 0]
    assert len(samples) == len(rows)
    assert torch.equal(samples.rows([3, 1])["text"], torch.stack([rows[3], rows[1]]))


def test_bad_texts_are_refused_with_their_place(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "1"}\n{"content": "2"}\n')
    options = _options([_files(tmp_path)], tokenizer)
    with pytest.raises(DataError, match=r"a.jsonl, byte 14 has no key 'text'"):
        _read(options, 1)
    file.write_text('{"text": ""}\n' * 9)
    with pytest.raises(DataError, match="have no token"):
        _read(
            _options([_files(tmp_path)], tokenizer),
            1,
            repeats=True,
            num_steps=1,
        )
    file.write_text('{"text": "1 2 3"}\n')
    with pytest.raises(DataError, match="a data-parallel replica has no training text"):
        _read(
            _options([_files(tmp_path)], tokenizer),
            2,
            repeats=True,
            num_steps=1,
        )


# ---- Hugging Face ---------------------------------------------------------------------------------------------------


def _stream(num_shards: int) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset(num_shards=num_shards)


@pytest.mark.parametrize("num_shards", [1, 4])
def test_hugging_face_stream_resumes_exactly(tokenizer: Any, num_shards: int) -> None:
    corpus = HuggingFaceCorpus(_stream(num_shards), "text")
    options = _options([corpus], tokenizer)
    whole, _ = _read(options, 2)
    _assert_each_text_once(2, whole)
    first, states = _read(options, 2, num_steps=7)
    rest, _ = _read(options, 2, states)
    _assert_same(first + rest, whole)
    on_one, _ = _read(options, 1, states)
    _assert_each_text_once(2, first, on_one)
    with pytest.raises(ConfigError, match="dp=3: expected at most the 2 data-parallel replicas"):
        _read(options, 3, states)


def test_a_position_belongs_to_a_number_of_shards() -> None:
    fingerprints = [HuggingFaceCorpus(_stream(shards), "text").fingerprint for shards in (4, 4, 2)]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_shuffle_buffer_of_hugging_face_is_reported() -> None:
    stream = _stream(2)
    assert why_not_exact(stream) is None
    assert why_not_exact(stream.map(lambda row: row)) is None
    shuffled = stream.shuffle(seed=1, buffer_size=10).map(lambda row: row)
    assert "shuffle buffer" in (why_not_exact(shuffled) or "")
    assert "no state_dict" in (why_not_exact(iter(TEXTS)) or "")


def test_only_streaming_datasets_are_taken() -> None:
    datasets = pytest.importorskip("datasets")
    with pytest.raises(ConfigError, match="expected a datasets.IterableDataset, got a Dataset"):
        HuggingFaceCorpus(datasets.Dataset.from_dict({"text": TEXTS}), "text")
    with pytest.raises(ConfigError, match="got a list"):
        HuggingFaceCorpus(TEXTS, "text")
