"""Quality of sampled images: Frechet distance, precision and recall, nearest neighbours."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from md4_jax.data.corpus import Corpus
from md4_jax.evals import report, sets
from md4_jax.evals.context import Context, check_data
from md4_jax.evals.features import RandomFeatures
from md4_jax.evals.samples import drawn_samples
from md4_jax.experiment import Experiment
from md4_jax.protocols import Array, Params, UserError

AT_ONCE = 1000  # images that are read


@dataclasses.dataclass(frozen=True)
class FrechetDistance:
    """Draws samples of images and compares them with those of a split: docs/quality.md.

    every, final, split, data  as in `likelihood`
    features    in which sets are compared: random, inception (FID), or package.module:attribute
    num         samples to draw, and most images of the split to use; published FIDs take 50,000
    labels      whether each sample gets the label of one of these images; otherwise sample.label
    neighbours  k of precision and recall; 0: leaves them out
    nearest     samples whose nearest training images are found; 0: none
    """

    features: Any = RandomFeatures()
    every: int = 0
    final: bool = False
    split: str = "train"
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    num: int = 50_000
    labels: bool = False
    neighbours: int = 3
    nearest: int = 64

    needs_data: ClassVar[bool] = True

    def __post_init__(self):
        check_data(self)
        for name in ("every", "neighbours", "nearest"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must not be negative, not {getattr(self, name)}")
        if self.num < 2 or self.num <= self.neighbours:
            raise UserError(
                f"num={self.num} must be at least 2 and more than neighbours={self.neighbours}"
            )

    def check(self, experiment: Experiment, key: str) -> None:
        """Raises UserError for data that are no images, or that have no labels."""
        shape = experiment.domain.shape
        if experiment.domain.unit != "dimension" or len(shape) != 3:
            raise UserError(f"{key} compares images; this data has examples of the shape {shape}")
        if self.labels and not experiment.domain.labels:
            raise UserError(f"{key}.labels=True needs data with labels; this data has none")

    def run(self, experiment: Experiment, params: Params, context: Context) -> dict[str, Any]:
        """Returns distance, precision and recall, and how near samples are to training images."""
        domain = experiment.domain
        rows, labels = spread(context.corpus(self.data), self.split, self.num)
        asked = dataclasses.replace(experiment.sample, num=self.num, trace=False)
        told = {"label": np.resize(labels, self.num)} if self.labels else None
        drawn = drawn_samples(
            experiment._replace(sample=asked), params, context.programs, context=told
        )
        if jax.process_index() != 0:
            return {}
        samples = pictures(domain, drawn.tokens)
        result = {
            "split": self.split,
            "samples": len(samples),
            "images": len(rows),
            **self._compared(samples, rows, domain, context),
        }
        if self.nearest:
            train = context.corpus({}).stream("train")
            result |= nearness(drawn.tokens[: self.nearest], train)
        context.say(f"{report.label(context.name, self.split)}: {report.quality(result)}")
        return result

    def _compared(
        self, samples: np.ndarray, rows: np.ndarray, domain: Any, context: Context
    ) -> dict[str, float]:
        """Returns the comparisons in the space of the features; those of images are kept."""
        key = ("features", context.name)
        if key not in context.programs:
            context.programs[key] = np.asarray(self.features(pictures(domain, rows)))
        found, theirs = np.asarray(self.features(samples)), context.programs[key]
        name = getattr(self.features, "distance", "frechet_distance")
        result = {name: sets.frechet_distance(found, theirs)}
        if self.neighbours and len(theirs) > self.neighbours:
            both = sets.precision_recall(found, theirs, self.neighbours)
            result |= dict(zip(("precision", "recall"), both, strict=True))
        return result


def spread(corpus: Corpus, split: str, count: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns at most `count` sequences of a split, evenly spaced in it, and their labels."""
    total = corpus.sizes([split])[split].sequences
    wanted = np.linspace(0, total, min(count, total), endpoint=False).astype(int)
    tokens, labels, first = [], [], 0
    for batch in corpus.eval_batches(split, batch_size=AT_ONCE, rows=np.arange(AT_ONCE)):
        own = wanted[(wanted >= first) & (wanted < first + AT_ONCE)] - first
        tokens.append(np.asarray(batch.tokens)[own])
        if "label" in batch.context:
            labels.append(np.asarray(batch.context["label"])[own])
        first += AT_ONCE
    return np.concatenate(tokens), np.concatenate(labels) if labels else None


def pictures(domain: Any, rows: Array) -> np.ndarray:
    """Returns the images of rows of symbols [N, L]: uint8 [N, H, W, C]."""
    return np.stack([domain.decode(row) for row in np.asarray(rows)])


def nearness(samples: np.ndarray, train: Array) -> dict[str, float]:
    """Returns the distance of samples [N, L] to the nearest training images, in levels.

    nearest_distance is the root of the mean square over dimensions, averaged over samples; copies
    is the number of samples that are training images.
    """
    _, away = sets.nearest(samples, train.reshape(-1, samples.shape[1]), 1)
    roots = np.sqrt(away[:, 0] / samples.shape[1])
    return {"nearest_distance": float(roots.mean()), "copies": int(np.sum(away[:, 0] == 0))}


def beside_nearest(domain: Any, samples: np.ndarray, train: Array, count: int) -> np.ndarray:
    """Returns rows of a sample and its nearest training images: uint8 [N, 1 + count, H, W, C]."""
    images = train.reshape(-1, math.prod(domain.shape))
    index, _ = sets.nearest(samples, images, count)
    rows = [
        pictures(domain, [row, *images[near]]) for row, near in zip(samples, index, strict=True)
    ]
    return np.stack(rows)
