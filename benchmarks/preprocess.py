"""Preprocessing benchmark: speed of ``preprocess`` relative to the tokenizer library's, in one process and several.

    python -m benchmarks.preprocess [--megabytes 20] [--workers 1 2] [--rounds 5] [--input PATH ...]

The peer is ``encode_batch_fast`` of the Rust library with one thread, on the same texts, in the same run; the target is
0.9 x N of its speed with N workers. Peer and ``preprocess`` alternate, and the table compares medians. Due to shared
caches and other jobs, N concurrent peers can be slower than N times one: the table has both, and the CPU time. Memory
is that of the largest process.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import statistics
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

DOCUMENT_CHARACTERS = 4000
VOCAB_SIZE = 32_000
TARGET = 0.9
PEER_BYTES = 1 << 20
"""Text per call of the peer; it is slower with only a few documents, and with the entire corpus at once."""
CASES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".jsonl, sentences")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.preprocess", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--megabytes", type=float, default=20, help="size of the text (default: 20)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        default=[1, 2],
        metavar="N",
        help="(1 first; default: 1 2)",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="repetitions of each measurement (default: 5)"
    )
    parser.add_argument(
        "--input",
        nargs="+",
        help="text files or directories (default: the Python standard library)",
    )
    parser.add_argument("--case", nargs="+", choices=CASES, default=CASES, help="(default: all)")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as folder:
        _measure(Path(folder), options)


def _measure(folder: Path, options: argparse.Namespace) -> None:
    texts = list(_texts(options.input or [sysconfig.get_path("stdlib")], options.megabytes * 1e6))
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    _write_inputs(folder, texts)
    print(
        f"{len(texts):,} documents, {megabytes:.1f} MB of text, {os.cpu_count()} cores, {options.rounds} rounds"
    )
    peers, runs = (
        defaultdict[int, list[Measured]](list),
        defaultdict[tuple[int, str], list[Measured]](list),
    )
    for _ in range(options.rounds):
        for case in options.case:
            for workers in options.workers:
                peers[workers].append(_run_in_processes(workers, _peer, folder))
                runs[workers, case].append(_run_in_processes(1, _preprocess, folder, case, workers))
    peer, peer_cpu, _ = _medians(peers[min(peers)])
    print(f"peer, one thread: {megabytes / peer:.2f} MB/s, CPU time {peer_cpu:.2f} s\n")
    print(
        "| input | workers | MB/s | of N x peer | of N peers at once | by CPU time | target 0.9 | memory |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for (workers, case), measured in sorted(runs.items(), key=lambda item: item[0][0]):
        (seconds, cpu, _), (peers_at_once, cpu_at_once, _) = (
            _medians(measured),
            _medians(peers[workers]),
        )
        share, largest = peer / seconds / workers, max(mebibytes for _, _, mebibytes in measured)
        print(
            f"| {case} | {workers} | {megabytes / seconds:.2f} | {share:.2f} | {peers_at_once / seconds / workers:.2f}"
            f" | {cpu_at_once / cpu:.2f} | {'met' if share >= TARGET else 'missed'} | {largest:.0f} MiB |"
        )


def _texts(inputs: list[str], num_bytes: float) -> Iterator[str]:
    """Yield pieces of the input files, repeated until there are ``num_bytes``."""
    from lightning_megatron.data.input_files import find_files

    files = find_files(inputs)
    left = num_bytes
    while left > 0:
        for path in files:
            text = path.read_text(errors="replace").replace("\0", "")
            for start in range(0, len(text), DOCUMENT_CHARACTERS):
                document = text[start : start + DOCUMENT_CHARACTERS]
                left -= len(document.encode())
                yield document
                if left <= 0:
                    return


def _write_inputs(folder: Path, texts: list[str]) -> None:
    """Write the texts in every format, and a tokenizer trained on them."""
    import pyarrow
    import pyarrow.parquet
    import zstandard

    from lightning_megatron.data.tokenizer_training import TokenizerTrainingOptions, train_tokenizer

    data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (folder / "x.jsonl").write_bytes(data)
    (folder / "x.jsonl.gz").write_bytes(gzip.compress(data, 6))
    (folder / "x.jsonl.zst").write_bytes(zstandard.compress(data))
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts}), folder / "x.parquet"
    )  # one row group
    train_tokenizer(
        TokenizerTrainingOptions(
            input=[folder / "x.jsonl"], vocab_size=VOCAB_SIZE, output=folder / "tokenizer"
        )
    )


# ---- one measurement ------------------------------------------------------------------------------------------------

Measured = tuple[float, float, float]
"""Wall-clock seconds, CPU seconds, and MiB of the largest process."""


def _medians(measured: list[Measured]) -> Measured:
    seconds, cpu, mebibytes = map(statistics.median, zip(*measured, strict=True))
    return seconds, cpu, mebibytes


def _run_in_processes(
    number: int, measure: Callable[..., tuple[float, float]], *arguments: object
) -> Measured:
    """Average of ``number`` concurrent measurements in new processes, without warm caches and with separate memory."""
    with ProcessPoolExecutor(number, get_context("spawn")) as pool:
        futures = [pool.submit(_measure_memory, measure, *arguments) for _ in range(number)]
        seconds, cpu, mebibytes = map(
            statistics.mean, zip(*(future.result() for future in futures), strict=True)
        )
    return seconds, cpu, mebibytes


def _measure_memory(measure: Callable[..., tuple[float, float]], *arguments: object) -> Measured:
    return *measure(*arguments), max(usage.ru_maxrss for usage in _usage()) / 1024


def _usage() -> list[resource.struct_rusage]:
    return [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]


def _cpu() -> float:
    return sum(usage.ru_utime + usage.ru_stime for usage in _usage())


def _peer(folder: Path) -> tuple[float, float]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    batches: list[list[str]] = []
    size = PEER_BYTES
    for line in (folder / "x.jsonl").read_bytes().splitlines():
        if size >= PEER_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(json.loads(line)["text"])
        size += len(line)
    cpu, start = _cpu(), time.perf_counter()
    for batch in batches:
        tokenizer.encode_batch_fast(batch, add_special_tokens=False)
    return time.perf_counter() - start, _cpu() - cpu


def _preprocess(folder: Path, case: str, workers: int) -> tuple[float, float]:
    from lightning_megatron.data.preprocess import PreprocessOptions, preprocess

    suffix, _, sentences = case.partition(", ")

    def run(name: str) -> tuple[float, float]:
        cpu = _cpu()
        options = PreprocessOptions(
            input=[folder / name],
            output_prefix=Path(tempfile.mkdtemp(dir=folder), "out"),
            tokenizer=folder / "tokenizer",
            workers=workers,
            append_eod=True,
            split_sentences=bool(sentences),
        )
        return preprocess(options).seconds, _cpu() - cpu

    (folder / "one.txt").write_text("one")
    run("one.txt")  # excludes the time of imports
    _, startup_cpu = run("one.txt")
    seconds, cpu = run(f"x{suffix}")
    return seconds, cpu - startup_cpu


if __name__ == "__main__":
    main()
