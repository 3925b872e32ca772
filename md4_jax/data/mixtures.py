"""Sequences of a mixture: parts are packed separately and sampled by their shares."""

import contextlib
import dataclasses
import functools
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from md4_jax.data.corpus import Corpus
from md4_jax.data.sequences import Rows, SplitSize, Windows
from md4_jax.data.sources.mixture import Mixture
from md4_jax.protocols import Batch, UserError

BLOCK = 1 << 16  # training sequences with exact shares of the parts


def corpus_of(source: Any, domain: Any, options: Any) -> Corpus:
    """Returns the corpus of a source or of a mixture."""
    return (MixedCorpus if isinstance(source, Mixture) else Corpus)(source, domain, options)


@dataclasses.dataclass(frozen=True)
class MixedCorpus(Corpus):
    """Corpus of a mixture.

    Training takes sequences of the parts by their shares; see `Mixed`. Other splits contain each
    sequence of all parts once, one part after another, whatever their shares.
    """

    def __post_init__(self):
        for name in self._parts:
            self._of(name)

    @property
    def _parts(self) -> Mapping[str, Any]:
        return self.source.parts

    @property
    def _corpora(self) -> dict[str, Corpus]:
        return {name: self._of(name) for name in self._parts}

    def _of(self, name: str) -> Corpus:
        """Returns the corpus of a part; UserError with its name."""
        with _named(name):
            return Corpus(self._parts[name].source, self.domain, self.options)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Returns the warnings of all parts, with their names."""
        corpora = self._corpora.items()
        return tuple(f"data.parts.{name}: {said}" for name, c in corpora for said in c.warnings)

    @property
    def counts_padding(self) -> bool:
        """Returns whether any part has padding that counts."""
        return any(corpus.counts_padding for corpus in self._corpora.values())

    def has_labels(self, split: str) -> bool:
        """Returns False: texts with classes cannot be part of a mixture."""
        return False

    def stream(self, split: str) -> "Joined":
        """Returns the tokens of a split, one part after another."""
        return Joined([corpus.stream(split) for corpus in self._corpora.values()])

    def shards(self) -> str:
        """Returns the directories of shards; '' if there are none."""
        return ", ".join(filter(None, (corpus.shards() for corpus in self._corpora.values())))

    def fingerprint(self) -> dict[str, int]:
        """Returns {tokens, crc32} of the training splits and the shares."""
        found = {name: corpus.fingerprint() for name, corpus in self._corpora.items()}
        facts = json.dumps([found, self.source.shares]).encode()
        tokens = sum(part["tokens"] for part in found.values())
        return {"tokens": tokens, "crc32": zlib.crc32(facts)}

    def sizes(self, splits: Iterable[str]) -> dict[str, SplitSize]:
        """Returns the sizes of the splits; UserError for a part without a training sequence."""
        found = {}
        for split in splits:
            sizes = [self._size(name, split) for name in self._parts]
            found[split] = SplitSize(*map(sum, zip(*sizes, strict=True)))
            if not found[split].tokens:
                raise UserError(
                    f"the {split} split of all parts is empty: raise data.parts.NAME.{split}"
                )
        return found

    def _size(self, name: str, split: str) -> SplitSize:
        corpus = self._of(name)
        with _named(name):
            if split == "train":
                return corpus.sizes([split])[split]
            return corpus._sequences(split).size

    def eval_batches(
        self, split: str, *, batch_size: int, rows: np.ndarray, stride: int = 0
    ) -> Iterator[Batch]:
        """Returns the batches of a whole split of each part; see `Corpus`.

        Batches of the parts are interleaved in proportion to their numbers, so that the first
        batches contain all parts.
        """
        facts = dict(batch_size=batch_size, rows=rows, stride=stride)
        corpora = [c for c in self._corpora.values() if c._sequences(split).size.tokens]
        if not corpora:
            raise UserError(f"the {split} split of all parts is empty, so it cannot be evaluated")
        counts = [
            -(-(corpus._sequences(split).size.sequences + 1) // batch_size) for corpus in corpora
        ]
        return woven([corpus.eval_batches(split, **facts) for corpus in corpora], counts)

    def check_stride(self, stride: int) -> None:
        """Raises UserError for a stride if examples of a part are whole sequences."""
        for name, corpus in self._corpora.items():
            with _named(name):
                corpus.check_stride(stride)

    def example(self, split: str, number: int) -> np.ndarray:
        """Raises UserError: a mixture has no images."""
        raise UserError(f"sample.image_from={split}:{number}: a mixture contains text, not images")

    @property
    def _training(self) -> "Mixed":
        shares = self.source.shares
        parts = {name: corpus._training for name, corpus in self._corpora.items()}
        return Mixed([*parts.values()], apportioned(shares, BLOCK))


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Adds the name of a part to errors."""
    try:
        yield
    except UserError as error:
        raise UserError(f"data.parts.{name}: {error}") from error


def woven(parts: Sequence[Iterator[Any]], counts: Sequence[int]) -> Iterator[Any]:
    """Yields all items of the parts, evenly interleaved, keeping the order within a part.

    counts: approximate number of items of each part
    """
    turns = [((k + 0.5) / count, part) for part, count in enumerate(counts) for k in range(count)]
    for _, part in sorted(turns):
        yield from itertools.islice(parts[part], 1)
    yield from itertools.chain(*parts)


class Mixed:
    """Training sequences of several parts, indexed one part after another.

    parts   sequences of each part, of the same length
    counts  number of sequences of each part among BLOCK successive training sequences
    """

    def __init__(self, parts: Sequence[Windows | Rows], counts: Sequence[int]):
        self._parts, self._counts = parts, counts
        self._starts = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def length(self) -> int:
        return self._parts[0].length

    @property
    def size(self) -> SplitSize:
        return SplitSize(*map(sum, zip(*(part.size for part in self._parts), strict=True)))

    def take(self, index: np.ndarray) -> Batch:
        """Returns the sequences with these numbers [B]."""
        index = np.asarray(index, np.int64)
        owner = np.searchsorted(self._starts, index, "right") - 1
        shape = (len(index), self.length)
        tokens, counts = np.zeros(shape, np.int32), np.zeros(shape, bool)
        segments = np.zeros(shape, np.int32)
        for number, part in enumerate(self._parts):
            own = np.flatnonzero(owner == number)
            if len(own):
                found = part.take(index[own] - self._starts[number])
                tokens[own], counts[own] = found.tokens, found.loss_mask
                segments[own] = found.context.get("segments", 0)
        return Batch(tokens, counts, {"segments": segments} if self._has_segments else {})

    @functools.cached_property
    def _has_segments(self) -> bool:
        """Returns whether any part has segments; then all batches have them."""
        first = [part.take(np.array([0])) for part in self._parts]
        return any("segments" in batch.context for batch in first)

    def rest(self) -> None:
        """Returns None: tokens after the last whole sequence of a part are not used in training."""

    def order(self, seed: int, rounds: int) -> Callable[[int], int]:
        """Returns a function (position in the endless order) -> index of the sequence.

        In each BLOCK of positions the parts have exactly their counts. Each part is spread over the
        block: the k-th of its n sequences has a random position in [k, k + 1) / n. So in any run of
        successive positions a part has its share to within two sequences of the parts. Each epoch
        of a part is another permutation of it. A position is computed without the ones before it,
        so a run can resume anywhere.

        seed    seed of the order
        rounds  rounds of the permutations
        """
        counts, lengths = np.array(self._counts), [len(part) for part in self._parts]
        seeds = [np.random.SeedSequence([seed, k]).generate_state(1)[0] for k in range(len(counts))]
        plain = np.repeat(np.arange(len(counts)), counts)
        within_part = np.concatenate([np.arange(count) for count in counts])

        @functools.lru_cache(maxsize=8)
        def block(number: int) -> tuple[np.ndarray, np.ndarray]:
            """Returns the part of each position of a block, and its rank within the part."""
            bits = np.random.Philox(key=seed, counter=number << 64).random_raw(len(plain))
            jitter = (bits >> np.uint64(11)) * 2.0**-53
            owner = plain[np.argsort((within_part + jitter) / counts[plain], kind="stable")]
            rank = np.zeros(len(owner), np.int64)
            for k, count in enumerate(counts):
                rank[owner == k] = np.arange(count)
            return owner, rank

        def number_at(place: int) -> int:
            number, within = divmod(int(place), len(plain))
            owner, rank = block(number)
            k = int(owner[within])
            epoch, index = divmod(number * int(counts[k]) + int(rank[within]), lengths[k])
            own = (int(seeds[k]) + epoch) % 2**32
            found = grain.experimental.index_shuffle(index, lengths[k] - 1, own, rounds)
            return int(self._starts[k]) + found

        return number_at


def apportioned(shares: Mapping[str, float], total: int) -> list[int]:
    """Returns whole numbers in the ratio of the shares that sum to `total`.

    After rounding down, the rest goes to the largest remainders. UserError for a share that would
    get 0.
    """
    exact = np.array([share * total for share in shares.values()])
    found = np.floor(exact).astype(int)
    largest = np.argsort(found - exact, kind="stable")
    found[largest[: total - found.sum()]] += 1
    for (name, share), count in zip(shares.items(), found, strict=True):
        if not count:
            raise UserError(
                f"data.parts.{name}.weight is {share:.1e} of all weights, which is less than one "
                f"sequence in {total:,}: raise the weight, or remove the part"
            )
    return found.tolist()


class Joined:
    """Concatenated token streams; a slice is an array."""

    def __init__(self, streams: Sequence[Any]):
        self._streams = streams
        self._starts = np.cumsum([0, *map(len, streams)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, wanted: slice) -> np.ndarray:
        first, last, _ = wanted.indices(len(self))
        found = [np.empty(0, np.uint8)]
        for start, stream in zip(self._starts, self._streams, strict=False):
            edges = [min(max(0, int(edge - start)), len(stream)) for edge in (first, last)]
            found.append(np.asarray(stream[edges[0] : edges[1]]))
        return np.concatenate(found)
