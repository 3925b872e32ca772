"""Quality of sampled images: Frechet distance, precision and recall, nearest neighbours."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from md4_jax.data.corpus import Corpus
from md4_jax.data.sequences import SplitSize
from md4_jax.data.units import CODE
from md4_jax.evals import report, sets
from md4_jax.evals.context import Context, OnSplit, check_least, first_alone, warned
from md4_jax.evals.features import RandomFeatures
from md4_jax.evals.samples import check_guided, drawn_samples
from md4_jax.experiment import Experiment
from md4_jax.generate import writers
from md4_jax.generate.pictures import decoded, has_pictures
from md4_jax.protocols import Array, Params, Prompt, UserError
from md4_jax.protocols.phrases import amount

AT_ONCE = 1000  # images read at once
SHOWN, NEIGHBOURS = 16, 7  # samples in the picture, and training images per sample


@dataclasses.dataclass(frozen=True)
class FrechetDistance(OnSplit):
    """Draws samples of images and compares them with those of a split: docs/quality.md.

    every, final, split, data  as in `likelihood`
    features    kind of features: random, inception (FID), or package.module:attribute
    num         number of samples, and largest number of images of the split; 50,000 in published
                FIDs
    labels      whether each sample gets the label of one of these images; otherwise sample.label
    neighbours  k of precision and recall; 0: they are not computed
    nearest     number of samples for which the nearest training images are searched; 0: none
    """

    features: Any = RandomFeatures()
    split: str = "train"
    num: int = 50_000
    labels: bool = False
    neighbours: int = 3
    nearest: int = 64

    def __post_init__(self):
        super().__post_init__()
        check_least(self, neighbours=0, nearest=0)
        if self.num < 2 or self.num <= self.neighbours:
            raise UserError(
                f"num={self.num} must be at least 2 and more than neighbours={self.neighbours}"
            )

    def check(self, experiment: Experiment, key: str) -> None:
        """Raises UserError for data without images or labels, and for a guide to one label."""
        shape = experiment.domain.shape
        if not has_pictures(experiment.domain):
            raise UserError(
                f"{key} compares images, but these data have examples of the shape {shape}"
            )
        if self.labels and not experiment.domain.labels:
            raise UserError(f"{key}.labels=True needs data with labels, but these data have none")
        if self.labels and experiment.guide is not None:
            raise UserError(
                f"{key}.labels=True draws samples of many labels, but sample.classifier="
                f"{experiment.guide.options.classifier} guides each to sample.label="
                f"{experiment.guide.label}: set sample.classifier='' or {key}.labels=False"
            )

    def check_samples(self, experiment: Experiment, key: str) -> None:
        """Raises UserError, before a run begins, for guidance without a class."""
        if not self.labels:
            check_guided(experiment)

    def check_size(self, key: str, size: SplitSize) -> None:
        """Raises UserError, before a run begins, for a split with fewer than two images."""
        if size.sequences < 2:
            more = f", or raise data.{self.split}" if self.split in ("validation", "test") else ""
            raise UserError(
                f"{key}: the {self.split} split has {amount(size.sequences, 'image')}, but the "
                f"covariance of features needs at least 2: set {key}.split to another split{more}"
            )

    def check_corpus(self, key: str, corpus: Corpus) -> None:
        """Raises UserError if samples should get the labels of images that have none."""
        if self.labels and not corpus.has_labels(self.split):
            raise UserError(
                f"{key}.labels=True gives samples the labels of the images of the {self.split} "
                f"split of {key}.data, but these have none: set {key}.data.labels=True or "
                f"{key}.labels=False"
            )

    def run(self, experiment: Experiment, params: Params, context: Context) -> dict[str, Any]:
        """Returns distance, precision, recall, and distances to the nearest training images."""
        corpus = context.corpus(self.data)
        rows, labels = spread(corpus, self.split, self.num)
        asked = dataclasses.replace(experiment.sample, num=self.num, trace=False)
        length = rows.shape[1]
        blank = Prompt(np.zeros(length, np.int32), np.zeros(length, bool))
        inputs = {"label": np.resize(labels, self.num)} if self.labels else None
        drawn = drawn_samples(
            experiment._replace(sample=asked), params, context.programs, [blank], context=inputs
        )
        if jax.process_index() != 0:
            return {}
        with first_alone():
            real = functools.partial(pictures, experiment.domain, corpus, self.split, rows)
            return self._of(drawn.tokens, real, len(rows), experiment.domain, context)

    def _of(
        self,
        tokens: np.ndarray,
        images: Callable[[], np.ndarray],
        count: int,
        domain: Any,
        context: Context,
    ) -> dict[str, Any]:
        """Compares samples with `count` images; prints and returns the numbers."""
        samples = decoded(domain, tokens)
        result = {
            "split": self.split,
            "samples": len(samples),
            "images": count,
            **self._compared(samples, images, context),
        }
        if self.nearest:
            result |= self._nearest(tokens[: self.nearest], domain, context)
        context.say(f"{report.label(context.name, self.split)}: {report.quality(result)}")
        return result

    def _compared(
        self, samples: np.ndarray, images: Callable[[], np.ndarray], context: Context
    ) -> dict[str, float]:
        """Returns the comparisons in feature space; caches the features of the images."""
        key = ("features", context.name)
        if key not in context.programs:
            context.programs[key] = np.asarray(self.features(images()))
        found, theirs = np.asarray(self.features(samples)), context.programs[key]
        name = getattr(self.features, "distance", "frechet_distance")
        result = {name: sets.frechet_distance(found, theirs)}
        if self.neighbours and len(theirs) > self.neighbours:
            both = sets.precision_recall(found, theirs, self.neighbours)
            result |= dict(zip(("precision", "recall"), both, strict=True))
        return result

    def _nearest(self, samples: np.ndarray, domain: Any, context: Context) -> dict[str, Any]:
        """Writes a picture of samples beside the nearest training images; returns distances."""
        train, of_codes = context.corpus({}).stream("train"), domain.unit == CODE
        rows, away = beside_nearest(samples, train, NEIGHBOURS, of_codes=of_codes)
        found = {"nearest_distance": float(away.mean()), "copies": int(np.sum(away == 0))}
        with warned(context, "the picture of the nearest images"):
            file = writers.write_rows(
                context.workdir / "samples", context.step, domain, rows[:SHOWN], context.name
            )
            found["picture"] = str(file)
        return found


def spread(corpus: Corpus, split: str, count: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns at most `count` sequences of a split, evenly spaced in it, and their labels."""
    wanted = evenly(corpus, split, count)
    tokens, labels, first = [], [], 0
    for batch in corpus.eval_batches(split, batch_size=AT_ONCE, rows=np.arange(AT_ONCE)):
        own = wanted[(wanted >= first) & (wanted < first + AT_ONCE)] - first
        tokens.append(np.asarray(batch.tokens)[own])
        if "label" in batch.context:
            labels.append(np.asarray(batch.context["label"])[own])
        first += AT_ONCE
    return np.concatenate(tokens), np.concatenate(labels) if labels else None


def evenly(corpus: Corpus, split: str, count: int) -> np.ndarray:
    """Returns the numbers of at most `count` sequences of a split, evenly spaced in it."""
    total = corpus.sizes([split])[split].sequences
    return np.linspace(0, total, min(count, total), endpoint=False).astype(int)


def pictures(domain: Any, corpus: Corpus, split: str, rows: np.ndarray) -> np.ndarray:
    """Returns the images uint8 [N, H, W, C] of which rows are the symbols, as `spread` found them.

    Images of codes are read again, since an autoencoder changes them.
    """
    if not hasattr(corpus.source, "pictures"):
        return decoded(domain, rows)
    wanted, found, first = evenly(corpus, split, len(rows)), [], 0
    for piece in corpus.source.pictures(split):
        found.append(piece[wanted[(wanted >= first) & (wanted < first + len(piece))] - first])
        first += len(piece)
    return np.concatenate(found)


def beside_nearest(
    samples: np.ndarray, train: Array, count: int, *, of_codes: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Finds the training images nearest to samples [N, L] in the values of their symbols.

    Returns a sample and its `count` nearest images in each row, nearest first [N, 1 + count, L],
    and the distance to the nearest one [N]: the root mean square over dimensions, or, for symbols
    that are codes, the fraction of them that differ.
    """
    images = train.reshape(-1, samples.shape[1])
    index, away = sets.nearest(samples, images, count, sets.differing if of_codes else None)
    rows = np.concatenate([samples[:, None], images[index]], axis=1)
    mean = away[:, 0] / samples.shape[1]
    return rows, mean if of_codes else np.sqrt(mean)
