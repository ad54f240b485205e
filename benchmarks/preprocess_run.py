"""One measurement of ``benchmarks.preprocess``, in a process of its own."""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

PEER_BYTES = 1 << 20
"""Text that the peer gets in a call; it is slower with a few documents, and with the whole corpus at once."""


def main() -> None:
    folder, what, *rest = Path(sys.argv[1]), *sys.argv[2:]
    seconds = _peer(folder) if what == "peer" else _preprocess(folder, *rest)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(json.dumps({"seconds": seconds[0], "cpu": seconds[1], "mebibytes": max(u.ru_maxrss for u in used) / 1024}))


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


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
    cpu, began = _cpu(), time.perf_counter()
    for batch in batches:
        tokenizer.encode_batch_fast(batch, add_special_tokens=False)
    return time.perf_counter() - began, _cpu() - cpu


def _preprocess(folder: Path, suffix: str, workers: str, *arguments: str) -> tuple[float, float]:
    from lightning_megatron.data.preprocess import PreprocessOptions, preprocess

    def run(name: str) -> tuple[float, float]:
        cpu = _cpu()
        options = PreprocessOptions(
            input=[folder / name],
            output_prefix=Path(tempfile.mkdtemp(dir=folder), "out"),
            tokenizer=folder / "tokenizer",
            workers=int(workers),
            append_eod=True,
            split_sentences="--split-sentences" in arguments,
        )
        return preprocess(options).seconds, _cpu() - cpu

    (folder / "one.txt").write_text("one")
    run("one.txt")  # what importing costs is no matter of the corpus
    _, start = run("one.txt")
    seconds, cpu = run(f"x{suffix}")
    return seconds, cpu - start


if __name__ == "__main__":
    main()
