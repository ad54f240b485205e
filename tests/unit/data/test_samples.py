"""GPT samples, splits and blends equal Megatron's, except where it miscounts; each index is built once."""

import dataclasses
import multiprocessing
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data.blends import build_blend_index, parse_blend
from lightning_megatron.data.build_once import build_once
from lightning_megatron.data.gpt_samples import GPTIndex, GPTObjective, build_gpt_index
from lightning_megatron.data.index_cache import open_samples
from lightning_megatron.data.samples import Part, Samples
from lightning_megatron.data.splits import SPLIT_NAMES, canonical_split, parse_split, split_ranges
from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.storage.checksums import FileChecksums, write_checksums
from tests.unit.data.corpus import build, engine_rows, opened, write_corpus

GPT = GPTObjective(seq_length=16)


def _parts(
    folder: Path,
    names: str = "a",
    weights: Any = None,
    **changes: Any,
) -> list[Part]:
    fields = {
        "split": "8,1,1",
        "name": "train",
        "seed": 1234,
        "num_samples": None,
        **changes,
    }
    weights = weights or [None] * len(names)
    return [
        Part(prefix=str(folder / name), weight=w, **fields)
        for name, w in zip(names, weights, strict=True)
    ]


def _rows(samples: Samples) -> np.ndarray:
    return samples.rows(range(len(samples)))["text"].numpy()


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


# ---- GPT samples ----------------------------------------------------------------------------------------------------


def _write(prefix: Path, lengths: list[int]) -> None:
    build(
        prefix,
        [
            [list(range(end - length, end))]
            for length, end in zip(lengths, accumulate(lengths), strict=True)
        ],
    )


@settings(max_examples=60, deadline=None)
@given(
    # Empty documents, documents of one token, and documents of several samples.
    lengths=st.lists(
        st.sampled_from([0, 1, 2, 3, 7, 8, 9, 30]),
        min_size=1,
        max_size=30,
    ),
    seq_length=st.integers(1, 9),
    num_samples=st.one_of(st.none(), st.integers(1, 60)),
    drop=st.booleans(),
)
def test_rows_equal_megatrons(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    seq_length: int,
    num_samples: int | None,
    drop: bool,
) -> None:
    # Megatron fails if it keeps a partial sample and the last document of its order is empty.
    if not drop:
        lengths = [max(1, length) for length in lengths]
    lengths = [*lengths, seq_length + 1]
    prefix = tmp_path_factory.mktemp("rows") / "a"
    _write(prefix, lengths)
    options: dict[str, Any] = {"drop_last_partial_validation_sequence": drop}
    split: dict[str, Any] = {"split": "0,1,0", "name": "valid"}
    (part,) = _parts(prefix.parent, num_samples=num_samples, **split)
    samples = opened(GPTObjective(seq_length=seq_length, **options), part)

    expected = engine_rows(
        ([str(prefix)], None),
        num_samples,
        seq_length=seq_length,
        **split,
        **options,
    )
    assert np.array_equal(_rows(samples), expected)


@pytest.mark.parametrize(
    ("seq_length", "tokens"),
    [
        (1024, (1 << 25) + 3),  # Megatron counts one sample too few, in single precision
        (3360, 230079 * 3360 + 1),  # one too many
        (3077, 952502 * 3077 + 1),  # likewise, and more tokens than fit in 31 bits
    ],
)
def test_partial_sequences_of_large_corpora_are_counted_exactly(
    seq_length: int, tokens: int
) -> None:
    lengths = np.array(
        [tokens // 3, tokens // 3, tokens - 2 * (tokens // 3)],
        dtype=np.int32,
    )

    index = build_gpt_index(
        lengths,
        np.arange(3, dtype=np.int32),
        seq_length,
        None,
        1,
        True,
    )

    full, rest = divmod(tokens - 1, seq_length)
    assert len(index.shuffle_index) == full + (rest > 0)
    starts = np.concatenate(
        (
            [0],
            np.cumsum(
                lengths[index.document_index],
                dtype=np.int64,
            ),
        )
    )
    positions = starts[index.sample_index[:, 0]] + index.sample_index[:, 1]
    assert np.array_equal(positions[:-1], np.arange(len(positions) - 1) * seq_length)
    assert positions[-1] == tokens - 1


@pytest.mark.parametrize("truncate_during_read", [False, True])
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_truncation_during_training_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, truncate_during_read: bool
) -> None:
    file = tmp_path / f"a{suffix}"
    for replace in (True, False):
        _write(tmp_path / "a", [20, 30])
        samples = opened(
            GPTObjective(seq_length=4),
            _parts(tmp_path, split="1")[0],
        )
        before = _rows(samples)
        size = file.stat().st_size
        if replace:  # renaming another file over it leaves the open file unchanged
            (tmp_path / "copy").write_bytes(file.read_bytes()[:50])
            (tmp_path / "copy").rename(file)
            assert (_rows(samples) == before).all()
    if truncate_during_read:
        read = GPTObjective.read

        def truncate_and_read(*args: Any) -> Any:
            os.truncate(file, 50)
            return read(*args)

        monkeypatch.setattr(GPTObjective, "read", truncate_and_read)
    else:
        os.truncate(file, 50)
    with pytest.raises(
        DataError, match=rf"a\{suffix}: expected {size} bytes, got 50: .*resume from the last"
    ):
        samples.rows([3])


# ---- blends and splits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data_path", "blend"),
    [
        ("books", [("books", None)]),
        (["books", "web"], [("books", None), ("web", None)]),
        ([0.7, "books", 0.3, "web"], [("books", 0.7), ("web", 0.3)]),
        (["70", "books", 0, "web", "3e1", "code"], [("books", 70), ("code", 30)]),
        ("30", r"data_path=\['30'\] must be prefixes \(./30 for 30\)"),
        (["books", 0.5, "web", 0.5], "must be prefixes"),
        ([float("inf"), "books", 2, "web"], "finite weights"),
        ([0, "books", "0.0", "web"], "gives 0 datasets a weight"),
        (Path("books"), r"data_path=\[PosixPath\('books'\)\] must be prefixes"),
    ],
)
def test_blend_is_parsed_and_ambiguous_blends_are_refused(data_path: Any, blend: Any) -> None:
    if isinstance(blend, list):
        assert parse_blend(data_path) == blend
    else:
        with pytest.raises(ConfigError, match=blend):
            parse_blend(data_path)


@pytest.mark.parametrize(
    ("weights", "num_samples"),
    [
        ((0.3, 0.3, 0.4), 1000),
        ((5, 1, 0.001), 77),
        (None, 20),
        (None, None),
    ],
    ids=str,
)
def test_blend_equals_megatrons(
    tmp_path: Path, weights: tuple[float, ...] | None, num_samples: int | None
) -> None:
    parts = _parts(tmp_path, "abc", weights, num_samples=num_samples)
    first, second, third = (Path(part.prefix) for part in parts)
    write_corpus(first, 50, seed=0)
    write_corpus(second, 25, seed=1)
    write_corpus(third, 120, seed=2)
    samples = open_samples(GPT, parts, str(tmp_path / "cache"))
    assert len(samples) >= (num_samples or 1)
    blend = [part.prefix for part in parts], weights and list(weights)
    assert np.array_equal(_rows(samples), engine_rows(blend, num_samples))


@settings(max_examples=100, deadline=None)
@given(
    datasets=st.lists(
        st.tuples(st.integers(1, 300), st.floats(1e-3, 1e3)),
        min_size=2,
        max_size=8,
    ),
    num_samples=st.one_of(st.none(), st.integers(1, 500)),
)
def test_blend_takes_no_more_samples_than_exist(
    datasets: list[tuple[int, float]], num_samples: int | None
) -> None:
    counts, weights = zip(*datasets, strict=True)
    blend = build_blend_index(weights, counts, num_samples)

    size = len(blend.dataset_index)
    if num_samples is None:
        assert not blend.part_samples.any()
        # One more sample of the blend would exhaust some dataset.
        shares = np.array(weights) / sum(weights)
        assert (shares * (size + 1) > np.array(counts) - 1e-6).any()
    else:
        assert size >= num_samples
    taken = np.bincount(blend.dataset_index, minlength=len(datasets))
    available = np.where(blend.part_samples > 0, blend.part_samples, counts)
    assert (taken <= available).all()
    for number, count in enumerate(taken):
        assert np.array_equal(blend.sample_index[blend.dataset_index == number], np.arange(count))


@pytest.mark.parametrize("text", ["-1,1", "1e-3,1", "", "1,1,1,1"])
def test_invalid_split_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be one to three weights like 949,50,1"):
        parse_split(text)


def test_dataset_too_short_for_a_sample_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path / "b", 1, longest=2)
    with pytest.raises(
        DataError, match=r"gives train 1 of 1 documents of .*b with 1 tokens, .* needs 17; lower"
    ):
        GPT.count(*_parts(tmp_path, "b", split="1"))


@settings(max_examples=300, deadline=None)
@given(
    weights=st.lists(
        st.one_of(st.just(0.0), st.floats(1e-6, 1000)),
        min_size=1,
        max_size=3,
    ).filter(any),
    num_sequences=st.integers(1, 10**9),
)
def test_split_bounds_equal_megatrons(weights: list[float], num_sequences: int) -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    text = ",".join(np.format_float_positional(weight) for weight in weights)
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(canonical_split(text)))
    for name, bounds in zip(SPLIT_NAMES, matrix, strict=True):
        begin, end = bounds or (0.0, 0.0)
        expected = range(
            int(round(begin * float(num_sequences))),
            int(round(end * float(num_sequences))),
        )
        assert split_ranges(text, num_sequences)[name] == expected


# ---- building and caching the index ---------------------------------------------------------------------------------


def test_concurrent_processes_build_an_index_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.datasets import helpers  # noqa: F401 (once, not in each process)

    for seed, name in enumerate("ab"):
        write_corpus(tmp_path / name, 50, seed=seed)
    trace = tmp_path / "trace"
    build_index = GPTObjective.build_index

    def slow(objective: GPTObjective, part: Part) -> GPTIndex:
        with trace.open("a") as stream:
            stream.write(f"{part.prefix}\n")
        time.sleep(0.05)
        return build_index(objective, part)

    monkeypatch.setattr(GPTObjective, "build_index", slow)
    monkeypatch.setattr(
        "lightning_megatron.data.build_once._QUIET_WAIT_S", 0.01
    )  # seconds until the message about waiting
    parts = _parts(tmp_path, "ab", [0.5, 0.5], num_samples=200)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    barrier = context.Barrier(4)

    def job() -> None:
        torch.set_num_threads(
            1
        )  # as in a DataLoader worker: a forked process has no OpenMP threads
        barrier.wait()
        samples = open_samples(GPT, parts, str(tmp_path / "cache"))
        results.put((samples.fingerprint, _rows(samples).tobytes()))

    processes = [context.Process(target=job, daemon=True) for _ in range(4)]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=200) for _ in processes]
    for process in processes:
        process.join()

    assert sorted(trace.read_text().split()) == [part.prefix for part in parts]
    assert len(set(outcomes)) == 1
    assert len(os.listdir(tmp_path / "cache")) == 3


def test_killed_builder_neither_blocks_nor_leaves_files(tmp_path: Path) -> None:
    folder = tmp_path / "index"

    def write(staging: str) -> str:
        Path(staging, "file").write_text("complete")
        return "fingerprint"

    def write_half_and_die(staging: str) -> str:
        Path(staging, "file").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    arguments = (str(folder), write_half_and_die, "corpus")
    process = multiprocessing.get_context("fork").Process(target=build_once, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == [".index.lock", ".index.partial"]

    assert build_once(str(folder), write, "corpus") == "fingerprint"
    assert os.listdir(tmp_path) == ["index"]
    assert sorted(os.listdir(folder)) == ["checksums.json", "file", "index.json"]
    assert (folder / "file").read_text() == "complete"


def _flip(path: Path, offset: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def _replace_by_pickle(path: Path) -> None:
    with path.open("wb") as file:  # by name, numpy would add a suffix
        np.save(file, np.array([{}]), allow_pickle=True)


def _replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _claim_a_huge_shape(path: Path) -> None:
    """An array's header of terabytes; other files get it in front of theirs."""
    content = path.read_bytes()
    shape = b"'shape': ("
    path.write_bytes(
        content.replace(shape, shape + b"999999999999, ") if shape in content else shape + content
    )


REPLACEMENTS: tuple[Callable[[Path], Any], ...] = (
    _replace_by_pickle,
    _replace_by_link,
    _replace_by_directory,
    _claim_a_huge_shape,
    _truncate,
    Path.unlink,
    lambda path: path.write_bytes(b""),
)
FLIPS_PER_FILE = 15


def test_no_damage_of_a_cached_index_changes_a_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for seed, name in enumerate("ab"):
        write_corpus(tmp_path / name, 30, seed=seed)
    cache = tmp_path / "cache"
    parts = _parts(tmp_path, "ab")
    expected = _rows(open_samples(GPT, parts, str(cache)))
    assert caplog.text == ""
    names = sorted(str(path.relative_to(cache)) for path in cache.glob("*/*"))
    assert len({Path(name).name for name in names}) >= 5
    random = np.random.default_rng(3)
    for name in names:
        size = (cache / name).stat().st_size
        offsets = random.integers(0, size, FLIPS_PER_FILE).tolist()
        flips: list[Callable[[Path], Any]] = [
            partial(_flip, offset=offset, bit=offset % 8) for offset in offsets
        ]
        for damage in (*flips, *REPLACEMENTS):
            caplog.clear()
            damage(cache / name)
            assert np.array_equal(_rows(open_samples(GPT, parts, str(cache))), expected), (
                name,
                damage,
            )
            assert caplog.text.count("is damaged and is not used") == 1, (name, damage)
    caplog.clear()
    open_samples(GPT, parts, str(cache))
    assert caplog.text == ""
    assert [name for name in os.listdir(cache) if name.startswith(".")] == []


def test_directory_replaced_as_a_whole_is_built_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_corpus(tmp_path / "a", 30, seed=1)
    cache = tmp_path / "cache"
    (part,) = _parts(tmp_path)
    expected = _rows(open_samples(GPT, [part], str(cache)))
    (folder,) = cache.iterdir()
    for replace in (_replace_by_link_to_a_damaged_directory, _replace_by_file):
        caplog.clear()
        replace(folder)
        assert np.array_equal(_rows(open_samples(GPT, [part], str(cache))), expected)
        assert caplog.text.count("is damaged and is not used") == 1
        assert folder.is_dir()
        assert not folder.is_symlink()


def _replace_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"")


def _replace_by_link_to_a_damaged_directory(folder: Path) -> None:
    elsewhere = folder.parent.with_name("elsewhere")
    folder.rename(elsewhere)
    _flip(elsewhere / "shuffle_index.npy", -1, 0)
    folder.symlink_to(elsewhere)


def test_header_damaged_while_a_run_goes_on_is_an_error(tmp_path: Path) -> None:
    """A worker that starts later loads arrays that its run has verified."""
    write_corpus(tmp_path / "a", 30, seed=1)
    cache = tmp_path / "cache"
    samples = pickle.dumps(open_samples(GPT, _parts(tmp_path), str(cache)))
    (file,) = cache.glob("*/shuffle_index.npy")
    content = file.read_bytes()
    for header in (b"{" * 118, b"\xff" * 118, content[10:128].replace(b"(", b" "), b"[" * 118):
        file.write_bytes(content[:10] + header + content[128:])
        with pytest.raises(
            DataError, match=r"shuffle_index.npy cannot be read \(.*start the run again"
        ):
            pickle.loads(samples)


def test_rewritten_dataset_gets_a_new_index(tmp_path: Path) -> None:
    for seed in range(2):
        write_corpus(tmp_path / "a", 50, seed=seed)
        rows = _rows(open_samples(GPT, _parts(tmp_path), None))
    assert np.array_equal(rows, engine_rows(([str(tmp_path / "a")], None), None))


def test_removed_index_serves_open_samples_but_no_new_process(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a", 50)
    samples = open_samples(GPT, _parts(tmp_path), str(tmp_path / "cache"))
    copy = pickle.loads(pickle.dumps(samples))
    assert np.array_equal(_rows(copy), _rows(samples))
    shutil.rmtree(tmp_path / "cache")

    samples.rows([0])
    with pytest.raises(
        DataError, match=r"cache/gpt-train-.*\.npy cannot be read .*; start the run again"
    ):
        pickle.loads(pickle.dumps(samples))


@pytest.mark.parametrize(
    ("sample", "token"),
    [
        (0, 5000),
        (1, -3),
        (1, 2**31 - 1),
        (2, 700),
    ],
)
def test_forged_bounds_of_samples_are_refused(tmp_path: Path, sample: int, token: int) -> None:
    write_corpus(tmp_path / "a", 40)
    samples: Any = open_samples(GPT, _parts(tmp_path), str(tmp_path / "cache"))
    forged = np.array(samples.index.sample_index)
    forged[sample, 1] = token
    index = dataclasses.replace(samples.index, sample_index=forged)
    changed = dataclasses.replace(samples, index=index)
    with pytest.raises(DataError, match="names samples that it does not have"):
        _rows(changed)


def test_nested_manifest_of_an_index_means_building_again(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a", 40)
    parts = _parts(tmp_path)
    cache = tmp_path / "cache"
    rows = _rows(open_samples(GPT, parts, str(cache)))
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    (folder / "index.json").write_text("[" * 200_000)
    files = [file for file in folder.iterdir() if file.name != "checksums.json"]
    write_checksums(
        folder, {file.name: FileChecksums().update(file.read_bytes()) for file in files}
    )
    assert np.array_equal(_rows(open_samples(GPT, parts, str(cache))), rows)
