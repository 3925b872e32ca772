"""Information profile of a masked model, and the unmasking schedule with the least loss.

The profile Z(k), k = 0..L-1, is the mean cross-entropy in nats of a token given k visible ones,
over random orders. Revealing m tokens at once after k costs m Z(k) - sum_{j<m} Z(k + j) nats of
divergence between data and samples, whatever the order (arXiv:2510.25544, arXiv:2511.04647).
"""

import json
from typing import Any

import numpy as np

from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, exists, replace

FILE = "information_profile.json"
# Smallest number of measured points from which a curve can be separated from noise.
FEWEST = 16


def loss(profile: np.ndarray, counts: np.ndarray) -> float:
    """Predicts the divergence in nats if steps reveal `counts` tokens, which sum to L."""
    counts = np.asarray(counts)[np.asarray(counts) > 0]
    visible = np.cumsum(counts) - counts
    return float(counts @ profile[visible] - profile.sum())


def best_counts(profile: np.ndarray, steps: int) -> np.ndarray:
    """Finds the numbers of tokens per step with the least loss, by dynamic programming: int [T].

    T is `steps`, or L if there are fewer tokens. It takes T L^2 operations.
    """
    length = len(profile)
    steps = min(steps, length)
    begin, end = np.arange(length)[:, None], np.arange(1, length + 1)
    cost = np.where(end > begin, (end - begin) * profile[:, None], np.inf)
    least, origin = cost[0], np.zeros((steps, length), int)
    for step in range(1, steps):
        # least[j] belongs to j + 1 visible tokens, from which the next step begins.
        through = least[:-1, None] + cost[1:]
        origin[step] = np.argmin(through, axis=0) + 1
        least = np.min(through, axis=0)
    visible = [length]
    for step in range(steps - 1, -1, -1):
        visible.append(origin[step][visible[-1] - 1])
    return np.diff(visible[::-1])


def grid_of(counts: np.ndarray, schedule: Any) -> np.ndarray:
    """Returns times t(0) < ... < t(T) for these numbers of tokens per step: float32 [T + 1].

    Samplers with fixed numbers of tokens reveal exactly these, the others on average.
    UserError if the schedule does not reach all of these numbers.
    """
    length = int(np.sum(counts))
    left = length - np.cumsum(counts)[::-1]
    # A little above the number, which is rounded down.
    inner = np.asarray(schedule.inverse((left[1:] + 1e-3) / length), np.float32)
    grid = np.concatenate([[0.0], inner, [1.0]]).astype(np.float32)
    if not (np.diff(grid) > 0).all():
        raise UserError(
            "sample.grid='optimal' needs a schedule from no masks at t=0 to only masks at t=1, "
            f"and process.schedule={schedule} does not reach one of them: set sample.grid to a "
            "list of times"
        )
    return grid


def fitted(visible: np.ndarray, nats: np.ndarray, weight: np.ndarray, length: int) -> np.ndarray:
    """Fits a smooth and falling profile to measured cross-entropies: [L].

    Fits a cubic smoothing spline, with the smoothness chosen by cross-validation, then the nearest
    decreasing function (weighted least squares). Without the spline, noise would create flat parts
    of the profile, in which many tokens seem to be revealed at no cost. Fewer than FEWEST points
    are interpolated linearly instead.
    """
    # SciPy's interpolation takes half a second to import.
    from scipy.interpolate import make_smoothing_spline
    from scipy.optimize import isotonic_regression

    at = np.unique(visible)
    total = np.array([weight[visible == k].sum() for k in at])
    mean = np.array([weight[visible == k] @ nats[visible == k] for k in at]) / total
    if len(at) >= FEWEST:
        mean = make_smoothing_spline(at, mean, total / total.mean())(at)
    falling = isotonic_regression(mean, weights=total, increasing=False).x
    return np.interp(np.arange(length), at, falling)


def keep(workdir: Place, content: dict[str, Any]) -> Place:
    """Writes the profile of a run and returns its path."""
    path = workdir / FILE
    replace(path, json.dumps(content) + "\n")
    return path


def stored(workdir: Place | None, length: int) -> np.ndarray:
    """Returns the profile of a run, [L]; UserError if there is none, or one of another length."""
    if workdir is None or not exists(workdir / FILE):
        raise UserError(
            f"sample.grid='optimal' reads {workdir or 'DIR'}/{FILE}, which does not exist. Make "
            f"it from a trained run by: python -m md4_jax --workdir {workdir or 'DIR'} --mode "
            "eval --evals information_profile"
        )
    profile = np.array(json.loads((workdir / FILE).read_text())["nats"])
    if len(profile) != length:
        raise UserError(
            f"sample.grid='optimal' needs a profile for the {length} tokens of a sample, but "
            f"{workdir / FILE} has {len(profile)}: set sample.length={len(profile)}, or measure "
            "the profile again"
        )
    return profile
