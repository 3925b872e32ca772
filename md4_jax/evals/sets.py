"""Comparisons of two sets of points: Frechet distance, precision and recall, nearest points."""

from collections.abc import Callable

import numpy as np

AT_ONCE = 1000  # rows


def frechet_distance(one: np.ndarray, other: np.ndarray) -> float:
    """Computes the squared Frechet distance of Gaussians with the moments of two sets [N, D].

    |m_1 - m_2|^2 + tr(C_1 + C_2 - 2 (C_1 C_2)^(1/2)), in float64, with covariances normalised by
    N - 1 (arXiv:1706.08500). C_1 C_2 has the eigenvalues of C_1^(1/2) C_2 C_1^(1/2).
    """
    (mean, covariance), (its_mean, its_covariance) = moments(one), moments(other)
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.maximum(values, 0.0)) @ vectors.T
    product = np.linalg.eigvalsh(root @ its_covariance @ root)
    both = np.sum(np.sqrt(np.maximum(product, 0.0)))
    apart = np.sum((mean - its_mean) ** 2)
    return float(apart + np.trace(covariance) + np.trace(its_covariance) - 2.0 * both)


def moments(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes the mean [D] and the covariance [D, D] of points [N, D], in float64."""
    mean = points.mean(axis=0, dtype=np.float64)
    total = np.zeros((len(mean), len(mean)))
    for first in range(0, len(points), AT_ONCE):
        away = points[first : first + AT_ONCE] - mean
        total += away.T @ away
    return mean, total / (len(points) - 1)


def precision_recall(
    samples: np.ndarray, images: np.ndarray, neighbours: int = 3
) -> tuple[float, float]:
    """Computes improved precision and recall of samples [N, D] (arXiv:1904.06991).

    The region of a set is the union of balls around its points. The radius of a ball is the
    distance to the `neighbours`-th nearest other point of the set. Precision is the fraction of
    samples in the region of the images, recall the fraction of images in the region of the samples.
    """
    return (
        float(np.mean(_within(samples, images, neighbours))),
        float(np.mean(_within(images, samples, neighbours))),
    )


def _within(points: np.ndarray, others: np.ndarray, neighbours: int) -> np.ndarray:
    """Returns whether each point lies in a ball around one of the others: bool [N]."""
    found, others = np.zeros(len(points), bool), np.asarray(others, np.float64)
    for first in range(0, len(others), AT_ONCE):
        part = others[first : first + AT_ONCE]
        # The nearest point is the point itself.
        reach = np.partition(squares(part, others), neighbours, axis=1)[:, neighbours]
        found |= (squares(part, points) <= reach[:, None]).any(axis=0)
    return found


def nearest(
    points: np.ndarray,
    others: np.ndarray,
    count: int,
    distances: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Finds the `count` others nearest to each point, in order: (indices, distances).

    distances  of all pairs; None: squared ones
    """
    distances = distances or squares
    index = np.zeros((len(points), 0), int)
    best = np.zeros((len(points), 0))
    for first in range(0, len(others), AT_ONCE):
        away = distances(points, others[first : first + AT_ONCE])
        numbers = np.broadcast_to(np.arange(first, first + away.shape[1]), away.shape)
        index, best = np.hstack([index, numbers]), np.hstack([best, away])
        order = np.argsort(best, axis=1, kind="stable")[:, :count]
        index, best = (np.take_along_axis(a, order, axis=1) for a in (index, best))
    return index, best


def differing(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Counts the columns in which the rows of all pairs differ [N, M]."""
    return np.stack([np.sum(row != other, axis=1) for row in one])


def squares(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Computes the squared distances of all pairs [N, M] in float64, exact for whole numbers."""
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    away = np.sum(one**2, axis=1)[:, None] + np.sum(other**2, axis=1) - 2.0 * one @ other.T
    return np.maximum(away, 0.0)
