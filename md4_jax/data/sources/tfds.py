"""Text from TensorFlow Datasets; TensorFlow is needed only for preparing a data set."""

import dataclasses
import functools
import importlib.util
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from md4_jax.data.lock import alone
from md4_jax.data.sources.corpora import CORPORA
from md4_jax.data.sources.splits import ALL, SPLITS, bounds, check_split, digest
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import cache_root

RECORDS_AT_ONCE = 512


@dataclasses.dataclass(frozen=True)
class TfdsText:
    """Texts of a data set prepared by TensorFlow Datasets.

    dataset           its name, such as 'lm1b' or 'wikipedia/20230601.en:1.0.0'
    text_key          name of the text feature
    data_dir          directory where it was prepared; None: TFDS's default
    validation_split  a split of the data set to validate on; None: its own 'validation', or the
                      end of its train split if it has none
    test_split        likewise
    validation, test  size of a split to cut from the train split: a fraction of the examples if
                      below 1, otherwise their number

    The format of the files must be array_record, which needs no TensorFlow to read. A data set
    that is not prepared is downloaded and prepared, if TensorFlow is installed.

    Raises UserError if it is unknown, cannot be prepared, or has no such split or text feature.
    """

    dataset: str
    text_key: str = "text"
    data_dir: str | None = None
    validation_split: str | None = None
    test_split: str | None = None
    validation: float = 0.05
    test: float = 0.05

    @property
    def warnings(self) -> tuple[str, ...]:
        return ()

    def fingerprint(self) -> str:
        """Returns a hash of the version, place and split sizes, and of the arguments."""
        info = self._builder.info
        sizes = [
            (name, split.num_bytes, split.shard_lengths) for name, split in info.splits.items()
        ]
        facts = (info.full_name, str(info.data_dir), sorted(sizes))
        return digest("tfds", facts, dataclasses.astuple(self))

    def documents(self, split: str) -> Iterator[str]:
        """Yields the texts of the split, one at a time."""
        return (self._text(record, where) for record, where in self.records(split))

    def records(self, split: str) -> Iterator[tuple[dict[str, Any], str]]:
        """Yields the examples of the split, each with its place for messages."""
        check_split(split)
        if split == ALL:
            own = ("train", *(self._own(held_out) for held_out in SPLITS[1:]))
            names = dict.fromkeys(name for name in own if name in self._builder.info.splits)
            return itertools.chain.from_iterable(map(self._records, names))
        if split == "train" or self._own(split) is None:
            return self._cut_from_train(split)
        return self._records(self._own(split))

    def _own(self, split: str) -> str | None:
        """Returns the held-out split of the data set; None if it is cut from train."""
        named = {"validation": self.validation_split, "test": self.test_split}[split]
        known = self._builder.info.splits
        if named is not None and named not in known:
            raise UserError(
                f"data.{split}_split: {self.dataset} has no split {named!r}; "
                f"it has {', '.join(known)}"
            )
        return named or (split if split in known else None)

    def _cut_from_train(self, split: str) -> Iterator[tuple[dict[str, Any], str]]:
        splits = self._builder.info.splits
        if "train" not in splits:
            raise UserError(f"{self.dataset} has no split 'train'; it has {', '.join(splits)}")
        amounts = {
            name: getattr(self, name) if self._own(name) is None else 0 for name in SPLITS[1:]
        }
        count = splits["train"].num_examples
        start, stop = bounds(count, split, unit="examples", **amounts)
        return self._records("train", start, stop)

    def _records(
        self, name: str, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[dict[str, Any], str]]:
        source = self._source(name)
        stop = len(source) if stop is None else stop
        for first in range(start, stop, RECORDS_AT_ONCE):
            indices = range(first, min(first + RECORDS_AT_ONCE, stop))
            for index, record in zip(indices, source.__getitems__(indices), strict=True):
                yield record, f"{self.dataset}, {name}, example {index}"

    def _text(self, record: dict[str, Any], where: str) -> str:
        value = record[self.text_key]
        if not isinstance(value, bytes | str):
            raise UserError(f"{where}: {self.text_key!r} (data.text_key) is not text")
        try:
            return value.decode("utf-8") if isinstance(value, bytes) else value
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8 text at byte {error.start}") from error

    @property
    def features(self) -> Mapping[str, Any]:
        """Returns the features of an example by name."""
        return self._builder.info.features

    def _source(self, name: str):
        features = self.features
        if self.text_key not in features:
            raise UserError(
                f"{self.dataset} has no feature {self.text_key!r} (data.text_key); "
                f"it has {', '.join(sorted(features))}"
            )
        try:
            return self._builder.as_data_source(split=name)
        except NotImplementedError as error:
            raise UserError(self._unprepared("is prepared in another format")) from error
        except ImportError as error:
            raise UserError(_missing(error)) from error

    @functools.cached_property
    def _builder(self):
        try:
            import tensorflow_datasets as tfds

            builder = tfds.builder(self.dataset, data_dir=self.data_dir)
            if not builder.info.splits and importlib.util.find_spec("tensorflow"):
                _prepare(builder)
            if builder.info.splits:
                return builder
        except ImportError as error:
            raise UserError(_missing(error)) from error
        except ValueError as error:  # DatasetNotFoundError; its first line has the name
            reason = str(error).splitlines()[0]
            raise UserError(
                f"{self._unprepared('was not found')} ({reason}) Known names are in the TFDS "
                "catalog; a data set of your own must lie in data.data_dir."
            ) from error
        raise UserError(self._unprepared("is not prepared"))

    def _unprepared(self, state: str) -> str:
        place = self.data_dir or "TFDS's default directory"
        flag = f" --data_dir={self.data_dir}" if self.data_dir else ""
        return (
            f"data set {self.dataset!r} {state} in {place}. Where TensorFlow is installed run: "
            f"tfds build {self.dataset} --file_format=array_record{flag}, or call "
            f"download_and_prepare(file_format='array_record') of its builder.{self._instead}"
        )

    @property
    def _instead(self) -> str:
        name = self.dataset.partition("/")[0]
        words = f" Without TensorFlow set data.name=public and data.dataset={name}."
        return words if name in CORPORA else ""


def _prepare(builder) -> None:
    """Downloads and prepares a data set with TensorFlow; other processes wait."""
    with alone(cache_root() / f"tfds-{builder.name}.lock", f"preparing {builder.name}"):
        try:
            builder.download_and_prepare(file_format="array_record")
        except Exception as error:  # TFDS and TensorFlow have many
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            where = f"{builder.name} could not be prepared in {builder.data_dir}"
            raise UserError(f"{where}: {reason}") from error


def _missing(error: ImportError) -> str:
    package = (error.name or "tensorflow_datasets").partition(".")[0].replace("_", "-")
    return f"TensorFlow Datasets cannot be imported ({error}): pip install {package}"
