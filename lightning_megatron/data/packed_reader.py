"""Readers of a stream: documents of one share of a corpus, shuffled in a buffer and packed into rows.

The buffer is filled with consecutive documents, shuffled and emptied. So a position needs neither its content nor the
tokens left over from the last row: it is where the buffer begins in the corpus, the number of the document in the
shuffled buffer, and that of the token in the document.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.corpus import Corpus, Position, RawDocument, Share
from lightning_megatron.errors import DataError

_UNSHUFFLED_DOCUMENTS = 64
"""Documents between two positions that are asked of the corpus, without a shuffle buffer."""
_JOB_BYTES = 1 << 16
"""Bytes of text that a worker tokenizes at a time."""


@dataclass(frozen=True, kw_only=True)
class ReaderState:
    """Position of a reader, which names no row twice and leaves none out."""

    source: int = 0
    """Index of the corpus."""
    share: Share = Share()
    """Documents of the reader after the current buffer."""
    num_rows: int = 0
    """Rows read, or those of the reader that this one is a part of: whose turn it is."""
    pass_index: int = 0
    """Pass over the corpus."""
    buffer_share: Share = Share()
    """Share that the current buffer is filled from."""
    buffer_start: Position | None = None
    """Where the current buffer begins; None for the beginning of the pass."""
    document: int = 0
    """Index of the next document in the shuffled buffer."""
    token: int = 0
    """Index of its next token."""
    is_buffer_of_other: bool = False
    """Whether the current buffer is read by another reader, into which this one's share was split."""
    has_ended: bool = False
    """Whether nothing is left of the pass."""

    def split(self, parts: int) -> list[ReaderState]:
        """Readers of parts of this one's share; the first one goes on in its buffer."""
        states = []
        for part, share in enumerate(self.share.split(parts)):
            is_other = self.is_buffer_of_other or part > 0
            states.append(replace(self, share=share, is_buffer_of_other=is_other))
        return states

    def next_pass(self) -> ReaderState:
        """The beginning of the pass after this one."""
        return ReaderState(
            source=self.source,
            share=self.share,
            num_rows=self.num_rows,
            pass_index=self.pass_index + 1,
            buffer_share=self.share,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for a checkpoint."""
        return asdict(self)

    @staticmethod
    def from_dict(saved: dict[str, Any]) -> ReaderState:
        """The state that was saved."""
        shares = {name: Share(**saved[name]) for name in ("share", "buffer_share")}
        return ReaderState(**{**saved, **shares})


@dataclass(frozen=True)
class _Buffer:
    """A filled buffer, as far as a position in it needs it."""

    pass_index: int
    share: Share
    start: Position | None


@dataclass(frozen=True)
class Row:
    """Tokens of a row; fewer than its length only at the end of a pass."""

    tokens: NDArray[np.int32]
    starts: list[int]
    """Indices of the tokens with which documents begin, and 0."""


class PackedReader:
    """Rows of a reader: its documents one after the other, cut every ``seq_length`` tokens.

    A row has one token more, with which the next one begins: it is predicted in the first, and read in the second.

    Args:
        corpus: The documents.
        state: Where to begin.
        seq_length: Predictions of a row.
        shuffle_buffer: Documents of the buffer; 0 keeps the order of the corpus.
        seed: Seed of the order within a buffer.
        repeats: Whether the next pass follows on the end of one, within the same row; an empty share ends.
    """

    def __init__(
        self,
        corpus: Corpus,
        state: ReaderState,
        *,
        seq_length: int,
        shuffle_buffer: int,
        seed: int,
        repeats: bool,
    ) -> None:
        self.state = state
        """Position after the last row."""
        self.num_waiting_bytes = 0
        """Bytes of text of the documents that were given to workers, and are not yet in rows."""
        self._corpus = corpus
        self._seq_length = seq_length
        self._shuffle_buffer = shuffle_buffer
        self._seed = seed
        self._repeats = repeats
        self._documents = self._read(state)
        self._all_read = state.has_ended
        self._issued: deque[tuple[_Buffer, int, int]] = deque()
        """Buffer, index and bytes of the documents that are being tokenized."""
        self._tokenized: deque[tuple[_Buffer, int, int, NDArray[np.int32]]] = deque()
        """Documents that are not completely in rows."""
        self._first_token = 0
        """Index of the first token, in the first of these, that is not in a row."""
        if not state.is_buffer_of_other:
            self._first_token = state.token
        self._num_tokens = -self._first_token
        """Tokens of the documents from ``_first_token`` on; below 0 until the first document is tokenized."""
        self._tokens_of_pass = (state.pass_index, 1)
        """Pass of the last document, and its tokens; a resumed pass may have none left."""

    # ---- documents to tokenize --------------------------------------------------------------------------------------

    @property
    def all_read(self) -> bool:
        """Whether the reader has given all its documents to workers."""
        return self._all_read

    def next_documents(self) -> list[RawDocument]:
        """Next documents to tokenize; none at the end of the pass."""
        documents: list[RawDocument] = []
        num_bytes = 0
        while num_bytes < _JOB_BYTES:
            found = next(self._documents, None)
            if found is None:
                self._all_read = True
                break
            buffer, index, document = found
            size = document.num_bytes
            self._issued.append((buffer, index, size))
            documents.append(document)
            num_bytes += size
        self.num_waiting_bytes += num_bytes
        return documents

    def _read(self, state: ReaderState) -> Iterator[tuple[_Buffer, int, RawDocument]]:
        """Documents from a position on, each with its buffer and its index in this."""
        pass_index = state.pass_index
        share = state.buffer_share
        start = state.buffer_start
        first = state.document
        is_other = state.is_buffer_of_other
        while not state.has_ended:
            cursor = self._corpus.open(share, pass_index, start)
            found = 0
            while documents := self._fill(cursor):
                found += len(documents)
                buffer = _Buffer(pass_index, share, start)
                if not is_other:
                    for index, document in self._shuffled(documents, pass_index):
                        if index >= first:
                            yield buffer, index, document
                first = 0
                is_other = False
                start = cursor.position()
                if share != state.share:
                    share = state.share
                    cursor = self._corpus.open(share, pass_index, start)
            is_empty = not found and start is None
            if is_empty or not self._repeats:
                return
            # What is left of a buffer of another share may be all that the pass had.
            share = state.share
            pass_index += 1
            start = None
            first = 0
            is_other = False

    def _fill(self, cursor: Any) -> list[RawDocument]:
        documents: list[RawDocument] = []
        for _ in range(self._shuffle_buffer or _UNSHUFFLED_DOCUMENTS):
            try:
                documents.append(cursor.__next__())
            except StopIteration:
                break
        return documents

    def _shuffled(
        self, documents: list[RawDocument], pass_index: int
    ) -> Iterator[tuple[int, RawDocument]]:
        if not self._shuffle_buffer:
            return enumerate(documents)
        # The order depends on what is in the buffer, not on how many there were before in this run.
        begin = documents[0].content
        if isinstance(begin, str):
            begin = begin.encode(errors="surrogatepass")
        digest = hashlib.blake2b(begin or b"", digest_size=8).digest()
        seed = (self._seed, pass_index, int.from_bytes(digest, "big"))
        order = np.random.default_rng(seed).permutation(len(documents))
        return enumerate(documents[index] for index in order)

    # ---- rows of tokens ---------------------------------------------------------------------------------------------

    def add(self, documents: list[NDArray[np.int32]]) -> None:
        """Take the tokens of the documents that were issued first.

        Raises:
            DataError: If a whole pass has no token.
        """
        for tokens in documents:
            buffer, index, size = self._issued.popleft()
            pass_index, found = self._tokens_of_pass
            if buffer.pass_index != pass_index:
                if found == 0:
                    raise DataError(
                        "the training documents have no token; give texts that are not empty"
                    )
                found = 0
            self._tokens_of_pass = (buffer.pass_index, found + len(tokens))
            self._num_tokens += len(tokens)
            self._tokenized.append((buffer, index, size, tokens))
        self._drop_empty()

    @property
    def has_row(self) -> bool:
        """Whether the tokens suffice for a row, or are the last ones of the pass."""
        return self._num_tokens > self._seq_length or self.is_at_last_row

    @property
    def is_at_last_row(self) -> bool:
        """Whether the pass has a last row, shorter than the others."""
        return self._all_read and not self._issued and self._num_tokens > 1

    @property
    def has_ended(self) -> bool:
        """Whether no row is left."""
        return self._all_read and not self._issued and self._num_tokens < 2

    def take_row(self) -> Row:
        """Next row, of which there must be one."""
        pieces: list[NDArray[np.int32]] = []
        starts = [0]
        missing = self._seq_length + 1
        first = self._first_token
        found = 0
        for *_, tokens in self._tokenized:
            piece = tokens[first : first + missing]
            if found and len(piece):
                starts.append(found)
            pieces.append(piece)
            found += len(piece)
            missing -= len(piece)
            first = 0
            if missing == 0:
                break
        self._advance(min(self._seq_length, found))
        state = replace(self.state, num_rows=self.state.num_rows + 1)
        if self.has_ended:
            self.state = replace(state, has_ended=True)
        else:
            self.state = self._at_first_token(state)
        return Row(np.concatenate(pieces), starts)

    def _at_first_token(self, state: ReaderState) -> ReaderState:
        buffer, index, *_ = self._tokenized[0]
        return replace(
            state,
            pass_index=buffer.pass_index,
            buffer_share=buffer.share,
            buffer_start=buffer.start,
            document=index,
            token=self._first_token,
            is_buffer_of_other=False,
        )

    def _advance(self, num_tokens: int) -> None:
        self._num_tokens -= num_tokens
        self._first_token += num_tokens
        self._drop_empty()

    def _drop_empty(self) -> None:
        """Drop the documents in front that are completely in rows."""
        while self._tokenized and self._first_token >= len(self._tokenized[0][3]):
            _, _, size, tokens = self._tokenized.popleft()
            self._first_token -= len(tokens)
            self.num_waiting_bytes -= size
