"""Data loading benchmark: tokens per second of one data-parallel rank's DataLoader, without a model.

    python -m benchmarks.loader                     # GPT s4096, BERT s512, T5 512 + 114
    python -m benchmarks.loader --objective gpt --num-workers 0 2 --document-tokens 50 5000

Writes a corpus of random tokens first. The peer reads the same samples with Megatron-Core's dataset, one by one,
collated by PyTorch's DataLoader with the same number of workers.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.data import save_tokenizer, write_corpus
from lightning_megatron.data.batch_shape import BatchShape
from lightning_megatron.data.loader import PassOrder, TrainLoader
from lightning_megatron.datamodules.indexed import IndexedDataModule
from lightning_megatron.models.config import Architecture

VOCAB_SIZE = 32000
NUM_SAMPLES = 200_000


def tokens_per_second(
    batches: Iterable[dict[str, torch.Tensor]], key: str, seconds: float
) -> float:
    """Measure tokens of ``key`` per second; the first batches, during which workers start, do not count."""
    iterator = iter(batches)
    for _ in range(8):
        next(iterator)
    start, tokens = time.perf_counter(), 0
    for batch in iterator:
        tokens += batch[key].numel() - (batch[key].shape[0] if key == "text" else 0)
        if time.perf_counter() - start > seconds:
            break
    return tokens / (time.perf_counter() - start)


def peer_batches(prefix: str, seq_length: int, rows: int, num_workers: int) -> Any:
    """Create a PyTorch DataLoader over Megatron-Core's GPT dataset."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    class NoTokenizer:
        vocab_size, eod, unique_identifiers = None, -2, {"class": "none"}

    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=seq_length,
        blend=([prefix], None),
        split="1",
        path_to_cache="",
        tokenizer=NoTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    low_level = GPTDataset.build_low_level_dataset(prefix, config)
    documents = np.arange(len(low_level), dtype=np.int32)
    dataset = GPTDataset(low_level, prefix, documents, NUM_SAMPLES, Split.train, config)
    return torch.utils.data.DataLoader(dataset, batch_size=rows, num_workers=num_workers)


def measure(
    name: Architecture,
    seq_length: int,
    document_tokens: int,
    num_workers: list[int],
    options: Any,
) -> None:
    """Measure and print a line for each number of workers."""
    with tempfile.TemporaryDirectory() as folder:
        prefix, tokenizer = os.path.join(folder, "corpus"), os.path.join(folder, "tokenizer")
        write_corpus(
            prefix, VOCAB_SIZE, options.tokens, document_tokens, in_sentences=name != "gpt"
        )
        if name != "gpt":
            save_tokenizer(tokenizer, VOCAB_SIZE)
        data = IndexedDataModule(
            prefix,
            "1",
            seq_length,
            objective=name,
            tokenizer=tokenizer,
            seq_length_decoder=128,
            seed=1,
        )
        samples = data.open("train", NUM_SAMPLES)
        shape = BatchShape(
            micro_batch_size=options.rows,
            num_microbatches=1,
            data_parallel_size=1,
            data_parallel_rank=0,
        )
        for workers in num_workers:
            ours, peer = [], []
            for _ in range(3):
                order = PassOrder(len(samples), 1, "later passes")
                loader = TrainLoader(samples, order, shape, 10**9, workers)
                ours.append(
                    tokens_per_second(
                        loader, "text" if name == "gpt" else "input_ids", options.seconds
                    )
                )
                if name == "gpt":
                    batches = peer_batches(prefix, seq_length, options.rows, workers)
                    peer.append(tokens_per_second(batches, "tokens", options.seconds))
            peer_speed = f"{statistics.median(peer) / 1e6:8.2f}" if peer else "       -"
            print(
                f"{name:5} s{seq_length:<5} documents of {document_tokens:<5} workers {workers}"
                f"   {statistics.median(ours) / 1e6:8.2f} M tokens/s   Megatron-Core {peer_speed}",
                flush=True,
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--objective", nargs="+", choices=("gpt", "bert", "t5"), default=["gpt", "bert", "t5"]
    )
    parser.add_argument("--num-workers", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--document-tokens", nargs="+", type=int, default=[50, 500, 5000])
    parser.add_argument("--rows", type=int, default=16, help="rows per batch")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="duration of each of three measurements"
    )
    parser.add_argument("--tokens", type=int, default=20_000_000, help="tokens of the corpus")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("megatron").setLevel(
        logging.ERROR
    )  # the peer warns that it caches no index on disk
    for name in options.objective:
        for document_tokens in options.document_tokens if name == "gpt" else [2000]:
            measure(
                name, 4096 if name == "gpt" else 512, document_tokens, options.num_workers, options
            )


if __name__ == "__main__":
    main()
