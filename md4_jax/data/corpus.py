"""The data of an experiment: the splits of a source as symbols of a domain, and their batches."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from md4_jax.data import loader, packing, text_size
from md4_jax.data.domains import DOMAIN_FILE, Domain
from md4_jax.data.sequences import SplitSize, Windows
from md4_jax.options import DataOptions
from md4_jax.protocols import Batch, UserError
from md4_jax.runtime.paths import Place
from md4_jax.runtime.sharding import max_over_processes


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A source read as a domain.

    Batches hold the rows of a global batch that this process gets: `rows`, ascending.
    """

    source: Any
    domain: Domain
    options: DataOptions

    def stream(self, split: str) -> np.ndarray:
        """Returns the tokens of a split, memory-mapped."""
        return packing.token_stream(self.source, self.domain.tokenizer, split)

    def fingerprint(self) -> dict[str, int]:
        """Returns {tokens, crc32} of the training split; UserError if processes have different."""
        found = packing.fingerprint(self.source, self.domain.tokenizer, "train")
        number = found["crc32"] >> 1  # of 31 bits
        if max_over_processes(number) != -max_over_processes(-number):
            raise UserError("the processes have different training texts: make data.path the same")
        return found

    def sizes(self, splits: Iterable[str]) -> dict[str, SplitSize]:
        """Tokenises the splits and returns their sizes; UserError for one that is too short."""
        found = {split: self._sequences(split).size for split in splits}
        if "train" in found:
            found["train"] = self._training.size
        for split, size in found.items():
            if size.tokens == 0 or (split == "train" and size.sequences == 0):
                raise UserError(
                    f"the {split} split has {size.tokens} tokens, fewer than "
                    f"{'one sequence of' if split == 'train' else 'needed with'} "
                    f"data.length={self._length}: take a larger corpus or lower data.length"
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

    def eval_batches(
        self, split: str, *, batch_size: int, rows: np.ndarray, stride: int = 0
    ) -> Iterator[Batch]:
        """Returns the batches of a whole split, in order.

        stride  0: windows side by side. Else each window begins so many tokens after the one
                before it, and the tokens that both have are only conditioned on in the second
        """
        return loader.eval_batches(
            self._sequences(split, step=stride, conditional=bool(stride)),
            batch_size=batch_size,
            rows=rows,
            text_size=text_size.of_one_text(self.domain.tokenizer),
        )

    def batches_of(
        self, tokens: np.ndarray, *, batch_size: int, rows: np.ndarray
    ) -> Iterator[Batch]:
        """Returns the batches of sequences [N, L], in order, each a text of its own."""
        return loader.eval_batches(
            Windows(tokens.ravel(), tokens.shape[1], tokens.shape[1], eot_id=self._eot_id),
            batch_size=batch_size,
            rows=rows,
            text_size=text_size.of_many_texts(self.domain.tokenizer),
        )

    def _sequences(self, split: str, step: int = 0, conditional: bool = False) -> Windows:
        """Windows of a split, side by side where step is 0."""
        length = self._length
        return Windows(self.stream(split), length, step or length, conditional, self._eot_id)

    @property
    def _training(self) -> Windows:
        return self._sequences("train", step=1 if self._is_dense else self._length)

    @property
    def _is_dense(self) -> bool:
        """Whether training takes a window at every offset."""
        return self.options.windows == "every"

    @property
    def _length(self) -> int:
        return math.prod(self.domain.shape)

    @property
    def _eot_id(self) -> int | None:
        return self.domain.eot_id if self.options.separate_documents else None


def check_same_text(kept: Mapping[str, int] | None, now: Mapping[str, int], workdir: Place) -> None:
    """UserError if a run is resumed on other tokens than it was trained on.

    kept: the fingerprint in its checkpoint; None in those that have none.
    """
    if kept is not None and kept != now:
        before, after = (f"{x['tokens']:,} tokens, CRC-32 {x['crc32']:08x}" for x in (kept, now))
        raise UserError(
            f"{workdir} was trained on another text: the tokens of its training split were "
            f"{before}; now they are {after}. Put the text (data.path) and {DOMAIN_FILE} back "
            "as they were to resume. To train on the new text take another --workdir, with "
            f"--config.train.initial={workdir} to begin with the parameters of this run"
        )
