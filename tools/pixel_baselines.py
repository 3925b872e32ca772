"""Fits per-pixel models to image data and prints their held-out bits per dimension.

    python tools/pixel_baselines.py --config configs/digits.py [--split test] [--components 5] \\
        [--smoothing 1.0] [--config.data.KEY=VALUE]

Every dimension (a channel of a pixel) has its own distribution, independent of all others. A
diffusion model that is not better has learned nothing about dependencies between pixels.

    uniform    log2(levels)
    histogram  counts of the training split plus `smoothing` in each level
    logistics  a mixture of `components` discretised logistics (PixelCNN++, arXiv:1701.05517): level
               k has the mass between k - 1/2 and k + 1/2; the first and last include the tails

Both are fitted to the training split and evaluated on the same images as the run's evaluator. The
standard error is that of the mean over images.
"""

import argparse
import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from md4_jax.config import inputs, schema
from md4_jax.config.command import parse
from md4_jax.protocols import Array, UserError

STEPS, RATE = 600, 0.05
AT_ONCE = 1024
SMALLEST = 1e-12  # smallest probability in a logarithm


def counts(tokens: np.ndarray, levels: int) -> np.ndarray:
    """Returns the counts of each level in each dimension, int [L, levels]."""
    found = np.zeros((tokens.shape[1], levels), np.int64)
    places = np.arange(tokens.shape[1])[None]
    for first in range(0, len(tokens), AT_ONCE):
        rows = np.asarray(tokens[first : first + AT_ONCE], np.int64)
        np.add.at(found, (np.broadcast_to(places, rows.shape), rows), 1)
    return found


def histogram(seen: np.ndarray, smoothing: float) -> np.ndarray:
    """Returns log-probabilities [L, levels]."""
    smooth = seen + smoothing
    return np.log(smooth / smooth.sum(axis=1, keepdims=True))


def mixture(params: dict[str, Array], levels: int) -> Array:
    """Returns log-probabilities [L, levels] of the mixture; params: arrays [L, components]."""
    edges = jnp.arange(levels - 1) + 0.5  # between neighbouring levels
    scaled = (edges - params["mean"][..., None]) * jnp.exp(-params["log_scale"])[..., None]
    below = jax.nn.sigmoid(scaled)
    below = jnp.pad(below, ((0, 0), (0, 0), (1, 0)))
    below = jnp.pad(below, ((0, 0), (0, 0), (0, 1)), constant_values=1.0)
    masses = jnp.diff(below, axis=-1)
    weights = jax.nn.softmax(params["weight"], axis=-1)
    return jnp.log(jnp.einsum("lk,lkv->lv", weights, masses) + SMALLEST)


def logistics(seen: np.ndarray, components: int) -> np.ndarray:
    """Fits the mixture to the counts with Adam and returns log-probabilities [L, levels]."""
    length, levels = seen.shape
    shares = jnp.asarray(seen / seen.sum(axis=1, keepdims=True), jnp.float32)
    spread = (jnp.arange(components) + 0.5) / components * levels
    params = {
        "mean": jnp.tile(spread, (length, 1)),
        "log_scale": jnp.full((length, components), math.log(levels / (4 * components))),
        "weight": jnp.zeros((length, components)),
    }
    # Means move over all levels, the other parameters over a few units.
    rates = {"mean": levels * RATE, "log_scale": RATE, "weight": RATE}
    steps = {
        name: optax.adam(optax.cosine_decay_schedule(rate, STEPS)) for name, rate in rates.items()
    }
    optimizer = optax.multi_transform(steps, {name: name for name in rates})

    def loss(params: dict[str, Array]) -> Array:
        return -jnp.sum(shares * mixture(params, levels)) / length

    @jax.jit
    def fitted(params: dict[str, Array]) -> dict[str, Array]:
        def body(state, _):
            params, moments = state
            updates, moments = optimizer.update(jax.grad(loss)(params), moments)
            return (optax.apply_updates(params, updates), moments), None

        return jax.lax.scan(body, (params, optimizer.init(params)), length=STEPS)[0][0]

    found = np.asarray(mixture(fitted(params), levels), np.float64)
    return found - np.log(np.exp(found).sum(axis=1, keepdims=True))


def bits(log_p: np.ndarray, tokens: np.ndarray) -> tuple[float, float]:
    """Returns bits per dimension of images [N, L], and the standard error."""
    places = np.arange(tokens.shape[1])
    each = np.concatenate([
        -log_p[places, np.asarray(tokens[first : first + AT_ONCE], np.int64)].mean(axis=1)
        for first in range(0, len(tokens), AT_ONCE)
    ]) / math.log(2)  # fmt: skip
    return float(each.mean()), float(each.std(ddof=1) / math.sqrt(len(each)))


def options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--components", type=int, default=5)
    parser.add_argument("--smoothing", type=float, default=1.0)
    return parser.parse_args(arguments)


def main() -> None:
    own = options([a for a in sys.argv[1:] if not a.startswith("--config.")])
    assignments = parse([a for a in sys.argv[1:] if a.startswith("--config.")])[1]
    config = schema.load_config(own.config, assignments)
    domain, source = inputs.domain_and_source(config, None)
    if domain.unit != "dimension":
        raise UserError(f"--config {own.config}: its data is text, not images")
    train, held_out = (source.rows(split).tokens for split in ("train", own.split))
    seen = counts(train, domain.vocab_size)
    print(f"{own.split}: {len(held_out):,} images, fitted to {len(train):,}; bits per dimension")
    print(f"  {math.log2(domain.vocab_size):.4f}             uniform")
    models = {
        f"histogram of each dimension, +{own.smoothing:g}": functools.partial(
            histogram, smoothing=own.smoothing
        ),
        f"{own.components} logistics of each dimension": functools.partial(
            logistics, components=own.components
        ),
    }
    for name, fit in models.items():
        mean, error = bits(fit(seen), held_out)
        print(f"  {mean:.4f} +- {error:.4f}  {name}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
