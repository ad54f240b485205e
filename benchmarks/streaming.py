"""Cost of streaming text: CPU time of the process that reads and packs, and of a worker that tokenizes.

    python -m benchmarks.streaming                  # the sources of Python's own library, with a BPE of 32,000 tokens
    python -m benchmarks.streaming --input DIR --tokenizer DIR

CPU time per token does not depend on what else the machine does, so figures are of one core alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_megatron.data.corpus import FileCorpus
from lightning_megatron.data.document_tokenizer import (
    DocumentTokenizer,
    TokenizedJob,
    TokenizeJob,
)
from lightning_megatron.data.documents import read_texts
from lightning_megatron.data.text_stream import StreamOptions, TextBatches
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.data.tokenizer_training import TokenizerTrainingOptions, train_tokenizer

LLAMA_1B_TOKENS_PER_S = 64_000
"""Tokens that a model of Llama-3.2-1B's shape trains on per second and GPU (results.md)."""


class TimedTokenizer(DocumentTokenizer):
    """Adds up the CPU time of tokenization."""

    seconds = 0.0

    def __call__(self, job: TokenizeJob) -> TokenizedJob:
        begin = time.process_time()
        tokenized = super().__call__(job)
        self.seconds += time.process_time() - begin
        return tokenized


def measure(options: StreamOptions, num_tokens: int) -> tuple[float, float]:
    """Tokens per second of CPU time: of the process that reads and packs, and of a worker."""
    tokenize = options.tokenize
    assert isinstance(tokenize, TimedTokenizer)
    stream = TextBatches(options, dp=1, rank=0, num_rows=16, repeats=True).open(0, None)
    stream.next()
    tokenize.seconds = 0.0
    begin = time.process_time()
    found = 0
    while found < num_tokens:
        batch = stream.next()
        assert batch is not None
        found += batch["text"][:, 1:].numel()
    total = time.process_time() - begin
    stream.close()
    return found / (total - tokenize.seconds), found / tokenize.seconds


def resume_seconds(options: StreamOptions, num_steps: int) -> tuple[float, int]:
    """CPU time to the first batch after a resume, and bytes of the state as JSON."""
    batches = TextBatches(options, dp=1, rank=0, num_rows=16, repeats=True)
    stream = batches.open(0, None)
    for _ in range(num_steps):
        stream.next()
    state = stream.state()
    stream.close()
    begin = time.process_time()
    resumed = batches.open(0, [state])
    resumed.next()
    seconds = time.process_time() - begin
    resumed.close()
    return seconds, len(json.dumps(state))


def _python_sources(folder: Path) -> str:
    """JSON lines of the sources of Python's library, one file each."""
    path = folder / "sources.jsonl"
    library = sysconfig.get_paths()["stdlib"]
    with path.open("w") as stream:
        for source in sorted(Path(library).glob("**/*.py")):
            if "site-packages" not in source.parts and "test" not in source.parts:
                text = source.read_text(encoding="utf-8", errors="replace")
                stream.write(json.dumps({"text": text}) + "\n")
    return str(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", help="files, a directory or a pattern")
    parser.add_argument("--tokenizer", help="directory of a tokenizer")
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--shuffle-buffer", nargs="+", type=int, default=[0, 10_000])
    parser.add_argument("--tokens", type=int, default=2_000_000, help="tokens of a measurement")
    settings = parser.parse_args(arguments)
    # A worker has one thread.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = settings.input or _python_sources(folder)
        tokenizer = settings.tokenizer
        if tokenizer is None:
            tokenizer = str(folder / "tokenizer")
            train_tokenizer(
                TokenizerTrainingOptions(
                    input=[path], vocab_size=settings.vocab_size, output=tokenizer
                )
            )
        run(path, tokenizer, settings)


def run(path: str, tokenizer: str, settings: Any) -> None:
    """Measure and print a line for each size of the shuffle buffer."""
    num_bytes = sum(len(text) for _, text in read_texts(path))
    base = StreamOptions(
        corpora=[FileCorpus([path], "text", seed=1)],
        weights=[1.0],
        tokenize=TimedTokenizer(load_tokenizer(tokenizer), "text", append_eod=True),
        seq_length=settings.seq_length,
        shuffle_buffer=0,
        separate_documents=False,
        seed=1,
        num_workers=0,
    )
    print(f"{path}: {num_bytes / 1e6:.1f} M characters, s{settings.seq_length}")
    for shuffle_buffer in settings.shuffle_buffer:
        options = replace(base, shuffle_buffer=shuffle_buffer)
        figures = [measure(options, settings.tokens) for _ in range(3)]
        reader = statistics.median(reader for reader, _ in figures)
        worker = statistics.median(worker for _, worker in figures)
        seconds, state_bytes = resume_seconds(options, 10)
        print(
            f"shuffle buffer {shuffle_buffer:6}   worker {worker / 1e3:8,.0f} k tokens/s"
            f"   reader {reader / 1e3:8,.0f} k tokens/s   GPUs per worker {worker / LLAMA_1B_TOKENS_PER_S:5.1f}"
            f"   resume {seconds:.2f} s   state {state_bytes} bytes",
            flush=True,
        )


if __name__ == "__main__":
    main()
