"""Benchmark of ``preprocess``: its share of the tokenizer library's own speed, in one process and in several.

    python -m benchmarks.preprocess [--megabytes 20] [--workers 1 2] [--rounds 5] [--input PATH ...]

The peer is ``encode_batch_fast`` of the Rust library with one thread, on the same texts, in the same run; the target is
0.9 x N of it on N workers. Peer and ``preprocess`` take
turns, and the table compares medians. Cores that share caches, or that other jobs take, make N peers at once slower
than N times one: the table has both, and the CPU time. Memory is that of the largest process.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

DOCUMENT_CHARACTERS = 4000
VOCAB_SIZE = 32_000
TARGET = 0.9


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to run ``preprocess``."""

    name: str
    suffix: str
    arguments: tuple[str, ...] = ()


CASES = (
    Case(name=".jsonl", suffix=".jsonl"),
    Case(name=".jsonl.gz", suffix=".jsonl.gz"),
    Case(name=".jsonl.zst", suffix=".jsonl.zst"),
    Case(name=".parquet", suffix=".parquet"),
    Case(name=".jsonl, sentences", suffix=".jsonl", arguments=("--split-sentences",)),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preprocess", description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=20, help="of text (default: 20)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], metavar="N", help="(1 first; default: 1 2)")
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement (default: 5)")
    parser.add_argument("--input", nargs="+", help="text files or folders (default: the Python standard library)")
    parser.add_argument("--case", nargs="+", choices=[case.name for case in CASES], help="(default: all)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _measure(Path(folder), options)
    return 0


def _measure(folder: Path, options: argparse.Namespace) -> None:
    texts = list(_texts(options.input or [sysconfig.get_path("stdlib")], options.megabytes * 1e6))
    num_bytes = sum(len(text.encode()) for text in texts)
    _write_inputs(folder, texts)
    _train(folder)
    print(
        f"{len(texts):,} documents, {num_bytes / 1e6:.1f} MB of text, {os.cpu_count()} cores, {options.rounds} rounds"
    )
    cases = [case for case in CASES if not options.case or case.name in options.case]
    peers: dict[int, list[dict[str, float]]] = {}
    runs: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for case in cases:
            for workers in options.workers:
                peers.setdefault(workers, []).append(_peers_at_once(folder, workers))
                done = _child(folder, "preprocess", case.suffix, str(workers), *case.arguments)
                runs.setdefault((case.name, workers), []).append(done)
    _print_table(peers, runs, num_bytes / 1e6)


def _print_table(
    peers: dict[int, list[dict[str, float]]], all_runs: dict[tuple[str, int], list[dict[str, float]]], megabytes: float
) -> None:
    fewest = min(peers)
    peer = _median(peers[fewest], "seconds")
    print(f"peer, one thread: {megabytes / peer:.2f} MB/s, CPU time {_median(peers[fewest], 'cpu'):.2f} s\n")
    print("| input | workers | MB/s | of N x peer | of N peers at once | by CPU time | target 0.9 | memory |")
    print("|---|---|---|---|---|---|---|---|")
    for (name, workers), runs in sorted(all_runs.items(), key=lambda item: item[0][1]):
        seconds, cpu = _median(runs, "seconds"), _median(runs, "cpu")
        share = peer / seconds / workers
        print(
            f"| {name} | {workers} | {megabytes / seconds:.2f} | {share:.2f} |"
            f" {_median(peers[workers], 'seconds') / seconds / workers:.2f} |"
            f" {_median(peers[workers], 'cpu') / cpu:.2f} | {'met' if share >= TARGET else 'missed'} |"
            f" {max(run['mebibytes'] for run in runs):.0f} MiB |"
        )


def _median(runs: list[dict[str, float]], name: str) -> float:
    return statistics.median(run[name] for run in runs)


def _peers_at_once(folder: Path, number: int) -> dict[str, float]:
    """Each tokenizes all of the text, at the same time; the average of them."""
    with ThreadPoolExecutor(number) as threads:
        done = list(threads.map(lambda _: _child(folder, "peer"), range(number)))
    return {name: statistics.mean(each[name] for each in done) for name in done[0]}


def _texts(inputs: list[str], num_bytes: float) -> Iterator[str]:
    """Pieces of the inputs' files, over and over until there are enough."""
    from lightning_megatron.data.documents import find_files

    files = find_files(inputs)
    left = num_bytes
    while left > 0:
        for path in files:
            text = path.read_text(errors="replace").replace("\0", "")
            for begin in range(0, len(text), DOCUMENT_CHARACTERS):
                part = text[begin : begin + DOCUMENT_CHARACTERS]
                left -= len(part.encode())
                yield part
                if left <= 0:
                    return


def _write_inputs(folder: Path, texts: list[str]) -> None:
    import pyarrow
    import pyarrow.parquet
    import zstandard

    data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (folder / "x.jsonl").write_bytes(data)
    (folder / "x.jsonl.gz").write_bytes(gzip.compress(data, 6))
    (folder / "x.jsonl.zst").write_bytes(zstandard.compress(data))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "x.parquet")  # one row group


def _train(folder: Path) -> None:
    from lightning_megatron.data.tokenizer import TokenizerTrainingOptions, train_tokenizer

    train_tokenizer(
        TokenizerTrainingOptions(input=[folder / "x.jsonl"], vocab_size=VOCAB_SIZE, output=folder / "tokenizer")
    )


def _child(folder: Path, *arguments: str) -> dict[str, float]:
    """Measure in a process of its own: no warm caches, and memory that is its own."""
    command = [sys.executable, "-m", "benchmarks.preprocess_run", str(folder), *arguments]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, env=environment)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    sys.exit(main())
