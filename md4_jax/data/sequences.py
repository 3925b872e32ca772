"""Sequences of equal length, by index: windows of a token stream, or rows of a source."""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from md4_jax.data.packing import segments
from md4_jax.protocols import Batch, UserError, batch_of

ROWS_AT_ONCE = 4096


class SplitSize(NamedTuple):
    """Size of a split: number of whole sequences, and number of all tokens."""

    sequences: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of a token stream: sequence i is tokens[i * step : i * step + length].

    tokens       ids [N]: an array, a memory map, or shards
    length       L
    step         tokens from the start of one window to the next: L for adjacent windows, 1 for a
                 window at every offset; UserError above L, which would skip tokens
    conditional  whether only new tokens count, and those shared with the previous window are
                 context
    eot_id       end of text; if given, context['segments'] numbers the documents of each window
    """

    tokens: np.ndarray
    length: int
    step: int
    conditional: bool = False
    eot_id: int | None = None

    def __post_init__(self):
        if not 1 <= self.step <= self.length:
            raise UserError(
                f"stride={self.step} must lie between 1 and {self.length}, the number of tokens "
                "of a sequence: with a larger stride some text would be left out"
            )

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - self.length) // self.step + 1)

    @property
    def size(self) -> SplitSize:
        return SplitSize(len(self), len(self.tokens))

    def take(self, index: np.ndarray) -> Batch:
        """Returns the windows with these numbers [B]."""
        starts = index.astype(np.int64) * self.step
        if (np.diff(index) == 1).all():  # as in evaluation: one read, and one request of a store
            span = self.tokens[starts[0] : starts[-1] + self.length]
            rows = np.lib.stride_tricks.sliding_window_view(span, self.length)[:: self.step]
        else:
            rows = np.stack([self.tokens[start : start + self.length] for start in starts])
        return self._batch(rows, index)

    def rest(self) -> Batch | None:
        """Returns the tokens after the last whole window, as a shorter window; None if none."""
        covered = len(self) and (len(self) - 1) * self.step + self.length
        if covered == len(self.tokens):
            return None
        start = len(self) * self.step
        return self._batch(np.asarray(self.tokens[start:])[None], np.array([len(self)]))

    def _batch(self, rows: np.ndarray, index: np.ndarray) -> Batch:
        tokens = rows.astype(np.int32)
        context = {} if self.eot_id is None else {"segments": segments(tokens, self.eot_id)}
        loss_mask = None
        if self.conditional:
            is_new = np.arange(tokens.shape[1]) >= self.length - self.step
            loss_mask = is_new | (index == 0)[:, None]
        return batch_of(tokens, loss_mask=loss_mask, context=context)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Examples that are whole sequences, such as images, with their context.

    tokens   integers [N, L], an array or a memory map
    context  other inputs of the network, by name, each [N, ...], such as the class `label`
    lengths  integers [N], index of the first padding of each row. Padding does not count, and no
             token attends to it: it has its own segment, -1. None: no padding
    begins   integers [N], index of the first token that counts, after a prompt. None: 0
    counted  integers [N, ceil(L / 8)], the bits of the tokens that count (np.packbits), if they
             are not contiguous, as the answers of a conversation. None: see lengths and begins
    rejected integers [N, L], the same sequences with rejected answers, or None
    augment  random augmentation of training rows: (tokens [B, L], random bits uint64 [B]) ->
             tokens. None: no augmentation
    """

    tokens: np.ndarray
    context: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    lengths: np.ndarray | None = None
    augment: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    begins: np.ndarray | None = None
    counted: np.ndarray | None = None
    rejected: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    @property
    def size(self) -> SplitSize:
        if self.lengths is None:
            return SplitSize(len(self), self.tokens.size)
        if self.counted is not None:
            return SplitSize(len(self), self._tokens_that_count)
        before = 0 if self.begins is None else int(np.sum(self.begins, dtype=int))
        return SplitSize(len(self), int(np.sum(self.lengths, dtype=int)) - before)

    def take(self, index: np.ndarray) -> Batch:
        """Returns the rows with these numbers [B]."""
        context = {name: _narrow(values[index]) for name, values in self.context.items()}
        if self._has_padding:
            # The network does not attend to padding.
            is_text = np.arange(self.length) < np.asarray(self.lengths)[index][:, None]
            context["segments"] = np.where(is_text, 0, -1).astype(np.int32)
        tokens = np.asarray(self.tokens[index], np.int32)
        batch = batch_of(tokens, loss_mask=self._loss_mask(index), context=context)
        if self.rejected is None:
            return batch
        return batch._replace(rejected=np.asarray(self.rejected[index], np.int32))

    @functools.cached_property
    def _has_padding(self) -> bool:
        return self.lengths is not None and bool(
            np.min(self.lengths, initial=self.length) < self.length
        )

    @functools.cached_property
    def _tokens_that_count(self) -> int:
        starts = range(0, len(self), ROWS_AT_ONCE)
        masks = (self._bits(slice(first, first + ROWS_AT_ONCE)) for first in starts)
        return sum(int(mask.sum()) for mask in masks)

    def rest(self) -> None:
        """Returns None: all rows are complete sequences."""

    def stream(self) -> np.ndarray:
        """Returns the tokens that count, one row after another."""
        if self.lengths is None:
            return self.tokens.reshape(-1)
        return self.tokens[self._loss_mask(np.arange(len(self)))]

    def fingerprint(self) -> dict[str, int]:
        """Returns {tokens, crc32}; the checksum covers tokens, their positions and the context."""
        crc, arrays = 0, [self.tokens, *(self.context[name] for name in sorted(self.context))]
        places = (self.lengths, self.begins, self.counted, self.rejected)
        arrays += [array for array in places if array is not None]
        for array in arrays:
            for first in range(0, len(self), ROWS_AT_ONCE):
                crc = zlib.crc32(np.ascontiguousarray(array[first : first + ROWS_AT_ONCE]), crc)
        return {"tokens": self.size.tokens, "crc32": crc}

    def _loss_mask(self, index: np.ndarray) -> np.ndarray | None:
        """Marks the tokens of rows that are neither prompt nor padding; None: all."""
        if self.counted is not None:
            return self._bits(index)
        if self.lengths is None:
            return None
        place = np.arange(self.length)
        counted = place < np.asarray(self.lengths)[index][:, None]
        if self.begins is not None:
            counted &= place >= np.asarray(self.begins)[index][:, None]
        return counted

    def _bits(self, index: np.ndarray | slice) -> np.ndarray:
        packed = np.asarray(self.counted[index], np.uint8)
        return np.unpackbits(packed, axis=1, count=self.length).astype(bool)


def _narrow(values: np.ndarray) -> np.ndarray:
    """Returns integers as int32, the type of labels on a device."""
    values = np.asarray(values)
    return values.astype(np.int32) if np.issubdtype(values.dtype, np.integer) else values
