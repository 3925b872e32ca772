"""Data of an experiment: splits of a source as symbols of a domain, in batches."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from md4_jax.data import conversations, labelled, loader, packing, pairs, prepare, text_size
from md4_jax.data.domains import DOMAIN_FILE, Domain, TextDomain, other_class
from md4_jax.data.sequences import Rows, SplitSize, Windows
from md4_jax.data.shards import TokenShards
from md4_jax.data.sources.splits import NoText
from md4_jax.options.data import DataOptions
from md4_jax.protocols import Batch, UserError
from md4_jax.protocols.phrases import amount
from md4_jax.runtime.paths import Place, cache_root
from md4_jax.runtime.sharding import same_everywhere


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A source as symbols of a domain.

    The documents of each split are concatenated into a token stream, which is cut into windows.
    With windows='documents', and for labels, prompts or conversations, each document is one
    sequence. A source with `rows` supplies sequences and context itself. Batches hold the rows of a
    global batch that belong to this process: `rows`, ascending.
    """

    source: Any
    domain: Domain
    options: DataOptions

    def __post_init__(self):
        if not hasattr(self.source, "domain") and not hasattr(self.domain, "tokenizer"):
            raise UserError(
                "these data are text, but the run was made for examples of shape "
                f"{self.domain.shape}"
            )
        if not self._has_rows:
            return
        self._check_symbols()
        length = math.prod(self.domain.shape)
        if self._are_documents and not hasattr(self.source, "documents"):
            raise UserError(
                "data.windows='documents' is only for text, and these data consist of single "
                "examples"
            )
        if not self._are_own and self.options.length != length:
            raise UserError(
                f"data.length={self.options.length} must be {length}: an example of this data "
                f"has the shape {self.domain.shape}"
            )
        if self._is_dense or self.options.separate_documents:
            raise UserError(
                "data.windows='every' and data.separate_documents=True are only for text that is "
                "cut into sequences, and these data consist of single examples"
            )

    def _check_symbols(self) -> None:
        """Raises UserError if examples do not have the shape and symbols of the run's domain."""
        own = self.source.domain() if hasattr(self.source, "domain") else self.domain
        facts = [(domain.shape, domain.vocab_size) for domain in (own, self.domain)]
        if facts[0] != facts[1]:
            said = [f"shape {shape} with {size} symbols" for shape, size in facts]
            raise UserError(
                f"these data have examples of {said[0]}, but the run was made for {said[1]}"
            )
        if different := other_class(own, self.domain):
            raise UserError(
                f"these data have other classes than the run: {different}. Classes are numbered in "
                "the order of their names in the training split: put images of only some classes "
                "into a folder test beside the run's folder train, or set data.labels=False"
            )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Returns the warnings of the source, and one for options that need shards without any."""
        found, store = [*self.source.warnings], self.options.store
        if store and not self._has_shards:
            found.append(
                f"data.store={store!r} has no effect: the tokens of this data are kept in files of "
                f"the cache directory, {cache_root()}, and not in shards"
            )
        if not getattr(self.source, "keep_files", True) and not self._has_shards:
            found.append(
                "data.keep_files=False has no effect: it deletes files once their tokens are in "
                "shards, but these data have no shards and are read several times"
            )
        return tuple(found)

    @property
    def counts_padding(self) -> bool:
        """Returns whether padding consists of end-of-text tokens that count."""
        return (self._are_own or self._are_documents) and self.options.padding == "end_of_text"

    def has_labels(self, split: str) -> bool:
        """Returns whether batches of a split have the class of each sequence."""
        return self._has_rows and "label" in self._rows(split).context

    def stream(self, split: str) -> np.ndarray | TokenShards:
        """Returns the tokens of a split, one sequence after another, memory-mapped if possible."""
        if self._has_rows:
            return self._rows(split).stream()
        if self._has_shards:
            return prepare.stream(self.source, self.domain.tokenizer, split, self.options.store)
        return packing.token_stream(self.source, self.domain.tokenizer, split)

    def shards(self) -> str:
        """Returns the directory of the token shards; '' if there are none."""
        if not self._has_shards:
            return ""
        store, tokenizer = self.options.store, self.domain.tokenizer
        return str(prepare.prepared(self.source, tokenizer, store).folder)

    def fingerprint(self) -> dict[str, int]:
        """Returns {tokens, crc32} of the training split; UserError if processes differ in it."""
        if self._has_rows:
            found = self._rows("train").fingerprint()
        elif self._has_shards:
            store = self.options.store
            found = prepare.fingerprint(self.source, self.domain.tokenizer, "train", store)
        else:
            found = packing.fingerprint(self.source, self.domain.tokenizer, "train")
        if not same_everywhere(found["crc32"]):
            raise UserError(
                "the processes have different training data: give all of them the same files in "
                "data.path"
            )
        return found

    def sizes(self, splits: Iterable[str]) -> dict[str, SplitSize]:
        """Tokenises the splits and returns their sizes; UserError if one is too short."""
        found = {split: self._sequences(split).size for split in splits}
        if "train" in found:
            found["train"] = self._training.size
        for split, size in found.items():
            if size.tokens == 0 or (split == "train" and size.sequences == 0):
                raise (UserError if size.tokens else NoText)(
                    f"the {split} split has {amount(size.tokens, 'token')}, fewer than "
                    f"{'one sequence of' if split == 'train' else 'needed with'} "
                    f"data.length={self.options.length}: take a larger corpus or lower data.length"
                )
        return found

    def train_batches(
        self, *, batch_size: int, rows: np.ndarray, seed: int
    ) -> loader.TrainIterator:
        """Returns the endless shuffled training batches."""
        return loader.train_iterator(
            self._training,
            batch_size=batch_size,
            rows=rows,
            seed=seed,
            rounds=loader.MANY_ROUNDS if self._is_dense else loader.FEW_ROUNDS,
        )

    def training_in_order(self, *, batch_size: int, rows: np.ndarray) -> Iterator[Batch]:
        """Returns the batches of all training sequences in order, then one with the rest."""
        return loader.eval_batches(self._training, batch_size=batch_size, rows=rows)

    def eval_batches(
        self, split: str, *, batch_size: int, rows: np.ndarray, stride: int = 0
    ) -> Iterator[Batch]:
        """Returns the batches of a whole split, in order.

        stride  tokens from the start of one window to the next; tokens shared by two windows are
                context in the second. 0: adjacent windows
        """
        self.check_stride(stride)
        return loader.eval_batches(
            self._sequences(split, step=stride, conditional=bool(stride)),
            batch_size=batch_size,
            rows=rows,
            text_size=self._text_size(are_texts=self._has_rows),
        )

    def check_stride(self, stride: int) -> None:
        """Raises UserError for a stride if examples are whole sequences."""
        if stride and self._has_rows:
            raise UserError(
                f"stride={stride} is only for text, and these data consist of single examples"
            )

    def example(self, split: str, number: int) -> np.ndarray:
        """Returns the symbols [L] of one example of a split; UserError if it does not exist."""
        rows = self._rows(split)
        if number >= len(rows):
            raise UserError(
                f"sample.image_from={split}:{number}: the {split} split has "
                f"{amount(len(rows), 'image', ',')}, numbered from 0"
            )
        return rows.take(np.array([number])).tokens[0]

    def batches_of(
        self, tokens: np.ndarray, *, batch_size: int, rows: np.ndarray
    ) -> Iterator[Batch]:
        """Returns the batches of sequences [N, L], in order; each sequence is a separate text."""
        return loader.eval_batches(
            Windows(tokens.ravel(), tokens.shape[1], tokens.shape[1], eot_id=self._eot_id),
            batch_size=batch_size,
            rows=rows,
            text_size=self._text_size(are_texts=True),
        )

    def _sequences(self, split: str, step: int = 0, conditional: bool = False) -> Windows | Rows:
        """Returns the rows of a split, or its windows; step 0: adjacent windows."""
        if self._has_rows:
            return self._rows(split)
        length = self.options.length
        return Windows(self.stream(split), length, step or length, conditional, self._eot_id)

    def _rows(self, split: str) -> Rows:
        if not self._are_own and not self._are_documents:
            return self.source.rows(split)
        padding = labelled.Padding.of(self.domain.tokenizer, self.options.padding)
        make = labelled.rows if getattr(self.source, "label_key", "") else labelled.of_documents
        if getattr(self.source, "prompt_key", ""):
            make = pairs.rows
        if getattr(self.source, "messages_key", ""):
            make = conversations.rows
        return make(self.source, self.domain, split, self.options.length, padding)

    def _text_size(self, *, are_texts: bool) -> Callable | None:
        """Makes a counter of bytes and words, for whole texts or for pieces of one text."""
        if not isinstance(self.domain, TextDomain):
            return None
        count = text_size.of_many_texts if are_texts else text_size.of_one_text
        return count(self.domain.tokenizer)

    @property
    def _training(self) -> Windows | Rows:
        return self._sequences("train", step=1 if self._is_dense else 0)

    @property
    def _is_dense(self) -> bool:
        """Returns whether training takes a window at every offset."""
        return self.options.windows == "every"

    @property
    def _has_rows(self) -> bool:
        return self._are_own or self._are_documents or hasattr(self.source, "rows")

    @property
    def _has_shards(self) -> bool:
        """Returns whether the tokens are stored in shards."""
        return not self._has_rows and prepare.is_sharded(self.source, self.options.store)

    @property
    def _are_documents(self) -> bool:
        """Returns whether each text document is one sequence."""
        return self.options.windows == "documents"

    @property
    def _are_own(self) -> bool:
        """Returns whether each document is one sequence because it has a label or answers."""
        return labelled.own_sequences(self.source)

    @property
    def _eot_id(self) -> int | None:
        return self.domain.eot_id if self.options.separate_documents else None


def check_same_text(kept: Mapping[str, int] | None, now: Mapping[str, int], workdir: Place) -> None:
    """Raises UserError if a resumed run would train on different tokens.

    kept: the fingerprint in its checkpoint; None in checkpoints of older versions.
    """
    if kept is not None and kept != now:
        before, after = (f"{x['tokens']:,} tokens, CRC-32 {x['crc32']:08x}" for x in (kept, now))
        raise UserError(
            f"{workdir} was trained on another text: the tokens of its training split were "
            f"{before}; now they are {after}. Put the text (data.path) and {DOMAIN_FILE} back "
            "as they were to resume. To train on the new text use another --workdir, with "
            f"--config.train.initial={workdir} to begin with the parameters of this run"
        )
