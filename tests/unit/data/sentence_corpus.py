"""Random sentence documents, a WordPiece vocabulary, and Megatron-Core's own BERT and T5 samples."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from lightning_megatron.data.masked import MaskingOptions
from lightning_megatron.data.samples import Part
from lightning_megatron.data.splits import canonical_split, split_ranges
from lightning_megatron.data.tokenizer_facts import TokenizerFacts
from tests.unit.data.corpus import Documents

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[BOS]", "[EOS]")
NUM_SENTINELS = 100
NUM_PIECES = 400
PIECES = (
    *SPECIAL,
    *(f"<extra_id_{number}>" for number in range(NUM_SENTINELS)),
    *(f"{'##' if number % 3 == 0 else ''}w{number}" for number in range(NUM_PIECES)),
)
SPLIT = "8,1,1"


class WordPieceTokenizer:
    """Attributes of transformers' and Megatron-Core's tokenizers; one piece in three continues a word.

    Padding has the id 0, as Megatron-Core requires.
    """

    pad, _, cls, sep, mask, bos, eos = range(len(SPECIAL))
    inv_vocab: ClassVar = dict(enumerate(PIECES))
    additional_special_tokens_ids: ClassVar = list(
        range(len(SPECIAL), len(SPECIAL) + NUM_SENTINELS)
    )
    unique_identifiers: ClassVar = {"class": "word pieces"}

    added_tokens_decoder: ClassVar[dict[int, str]] = {}
    all_special_ids = tuple(range(len(SPECIAL)))
    pad_token_id = pad
    cls_token_id = cls
    sep_token_id = sep
    mask_token_id = mask
    bos_token_id = bos
    eos_token_id = eos

    def __len__(self) -> int:
        return len(self.inv_vocab)

    def get_vocab(self) -> dict[str, int]:
        return {piece: token for token, piece in self.inv_vocab.items()}


def word_pieces() -> TokenizerFacts:
    return TokenizerFacts.of(WordPieceTokenizer(), "word-pieces")


def first_text_id() -> int:
    return len(SPECIAL) + NUM_SENTINELS


def random_documents(
    num_documents: int,
    seed: int = 0,
    sentences: int = 12,
) -> Documents:
    """Documents of sentences, each starting with a word-initial piece. Some documents and sentences are tiny."""
    random = np.random.default_rng(seed)
    low = first_text_id()

    def sentence() -> list[int]:
        length = int(random.integers(1, 40))
        # The piece after the first text id begins a word.
        return [low + 1, *random.integers(low, low + NUM_PIECES, size=length - 1).tolist()]

    return [
        [sentence() for _ in range(random.integers(1, sentences))] for _ in range(num_documents)
    ]


def part_of(
    prefix: Path,
    num_samples: int | None = None,
    seed: int = 1234,
) -> Part:
    return Part(
        prefix=str(prefix),
        split=SPLIT,
        name="train",
        seed=seed,
        num_samples=num_samples,
    )


def engine_samples(
    kind: str,
    part: Part,
    masking: MaskingOptions,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    **config: Any,
) -> Sequence[dict[str, Any]]:
    """Megatron-Core's dataset of one split, with the index that it builds itself.

    Args:
        kind: ``bert`` or ``t5``.
        part: Documents to read; Megatron-Core fails without ``num_samples``.
        masking: Masking options; ``max_ngram`` is required.
        monkeypatch: Replaces ``torch.distributed.get_rank``.
        folder: Directory of Megatron-Core's index.
        config: ``sequence_length`` and other fields of Megatron-Core's configuration.
    """
    from megatron.core.datasets.bert_dataset import (
        BERTMaskedWordPieceDataset,
        BERTMaskedWordPieceDatasetConfig,
    )
    from megatron.core.datasets.t5_dataset import (
        T5MaskedWordPieceDataset,
        T5MaskedWordPieceDatasetConfig,
    )
    from megatron.core.datasets.utils import Split

    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    dataset_class, config_class = {
        "bert": (BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig),
        "t5": (T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig),
    }[kind]
    engine_config = config_class(
        random_seed=part.seed,
        blend=([part.prefix], None),
        split=canonical_split(part.split),
        path_to_cache=str(folder),
        tokenizer=WordPieceTokenizer(),
        masking_probability=masking.probability,
        short_sequence_probability=masking.short_sequence_probability,
        masking_max_ngram=masking.max_ngram,
        masking_do_full_word=masking.whole_words,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=kind == "t5",
        **config,
    )
    low_level = dataset_class.build_low_level_dataset(part.prefix, engine_config)
    documents = split_ranges(part.split, dataset_class.numel_low_level_dataset(low_level))[
        part.name
    ]
    indices = np.arange(documents.start, documents.stop, dtype=np.int32)
    samples: Sequence[dict[str, Any]] = dataset_class(
        low_level, part.prefix, indices, part.num_samples, Split[part.name], engine_config
    )
    return samples
