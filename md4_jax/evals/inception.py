"""Inception network of FID, with weights supplied by the user: docs/quality.md.

This is the network of "Rethinking the Inception Architecture" (arXiv:1512.00567) as released by
TensorFlow in 2015, which FID is defined with (arXiv:1706.08500). Its average pooling excludes the
padding, and its last block uses max pooling. Weights have the names of pytorch-fid:
`Mixed_5b.branch1x1.conv.weight` [out, in, h, w], `Mixed_5b.branch1x1.bn.running_mean`.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.data import hub
from md4_jax.protocols import Array, UserError
from md4_jax.runtime.paths import place
from md4_jax.runtime.tensors import Tensors

SIDE = 299
EPSILON = 1e-3  # of the batch norms
# Names of layers -> (stride, padding), if not stride 1 and "same" padding.
VALID = {
    "Conv2d_1a_3x3": 2, "Conv2d_2a_3x3": 1, "Conv2d_4a_3x3": 1, "Mixed_6a.branch3x3": 2,
    "Mixed_6a.branch3x3dbl_3": 2, "Mixed_7a.branch3x3_2": 2, "Mixed_7a.branch7x7x3_4": 2,
}  # fmt: skip


@functools.lru_cache(maxsize=1)
def loaded(name: str) -> dict[str, np.ndarray]:
    """Returns the weights in a local safetensors file, or in OWNER/NAME/FILE of the hub."""
    path = Path(name)
    if not path.is_file():
        parts = name.split("/", 2)
        if len(parts) < 3:
            raise UserError(
                f"features.weights={name}: there is no such file, and it is not an "
                "OWNER/NAME/FILE of the hub"
            )
        path = hub.model_file(f"{parts[0]}/{parts[1]}", parts[2])
    found = dict(Tensors(place(path.parent, "features.weights"), only=path.name))
    if "Mixed_7c.branch_pool.conv.weight" not in found:
        raise UserError(
            f"features.weights={name} has no Mixed_7c.branch_pool.conv.weight: it must hold the "
            "Inception network with the names of pytorch-fid (docs/quality.md)"
        )
    return found


@jax.jit
def features(weights: Mapping[str, Array], images: Array) -> Array:
    """Computes the features [N, 2048] of images, uint8 [N, H, W, 1 or 3], at 299 x 299 pixels."""
    x = jnp.broadcast_to(images, (*images.shape[:3], 3)).astype(jnp.float32)
    x = jax.image.resize(x, (len(x), SIDE, SIDE, 3), "linear", antialias=False)
    conv = functools.partial(_conv, weights)
    x = 2.0 * (x / 255.0) - 1.0
    x = conv("Conv2d_2b_3x3", conv("Conv2d_2a_3x3", conv("Conv2d_1a_3x3", x)))
    x = conv("Conv2d_4a_3x3", conv("Conv2d_3b_1x1", _largest(x)))
    x = _largest(x)
    for name in ("Mixed_5b", "Mixed_5c", "Mixed_5d"):
        x = _branches(conv, name, x, FIRST, _mean)
    x = _branches(conv, "Mixed_6a", x, FIRST_TO_SECOND, None)
    for name in ("Mixed_6b", "Mixed_6c", "Mixed_6d", "Mixed_6e"):
        x = _branches(conv, name, x, SECOND, _mean)
    x = _branches(conv, "Mixed_7a", x, SECOND_TO_THIRD, None)
    x = _branches(conv, "Mixed_7b", x, THIRD, _mean)
    x = _branches(conv, "Mixed_7c", x, THIRD, functools.partial(_largest, stride=1, pad="SAME"))
    return jnp.mean(x, axis=(1, 2))


def _chain(stem: str, *numbers: str) -> list[str]:
    return [f"{stem}{number}" for number in numbers]


# Branches of a block, in the order of concatenation. A branch is a list of layers; a tuple at its
# end is two parallel layers.
FIRST = [["branch1x1"], _chain("branch5x5", "_1", "_2"), _chain("branch3x3dbl", "_1", "_2", "_3")]
FIRST_TO_SECOND = [["branch3x3"], _chain("branch3x3dbl", "_1", "_2", "_3")]
SECOND = [
    ["branch1x1"],
    _chain("branch7x7", "_1", "_2", "_3"),
    _chain("branch7x7dbl", "_1", "_2", "_3", "_4", "_5"),
]
SECOND_TO_THIRD = [
    _chain("branch3x3", "_1", "_2"),
    _chain("branch7x7x3", "_1", "_2", "_3", "_4"),
]
THIRD = [
    ["branch1x1"],
    ["branch3x3_1", ("branch3x3_2a", "branch3x3_2b")],
    ["branch3x3dbl_1", "branch3x3dbl_2", ("branch3x3dbl_3a", "branch3x3dbl_3b")],
]


def _branches(
    conv: Callable, name: str, x: Array, branches: list, pool: Callable[[Array], Array] | None
) -> Array:
    """Concatenates the branches; the last one pools, followed by a layer unless it downsamples."""
    found = []
    for branch in branches:
        h = x
        for layer in branch:
            layers = layer if isinstance(layer, tuple) else (layer,)
            h = jnp.concatenate([conv(f"{name}.{one}", h) for one in layers], axis=-1)
        found.append(h)
    last = _largest(x) if pool is None else conv(f"{name}.branch_pool", pool(x))
    return jnp.concatenate([*found, last], axis=-1)


def _conv(weights: Mapping[str, Array], name: str, x: Array) -> Array:
    """Computes a convolution, its batch norm with stored moments, and ReLU."""
    kernel = jnp.asarray(weights[f"{name}.conv.weight"]).transpose(2, 3, 1, 0)
    stride, padding = (VALID[name], "VALID") if name in VALID else (1, "SAME")
    x = jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=jax.lax.Precision.HIGHEST,
    )  # fmt: skip
    mean, variance, gain, bias = (
        jnp.asarray(weights[f"{name}.bn.{part}"])
        for part in ("running_mean", "running_var", "weight", "bias")
    )
    return jax.nn.relu((x - mean) * (gain * jax.lax.rsqrt(variance + EPSILON)) + bias)


def _largest(x: Array, stride: int = 2, pad: str = "VALID") -> Array:
    """Takes the maximum over windows of 3 x 3."""
    sizes, strides = (1, 3, 3, 1), (1, stride, stride, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, sizes, strides, pad)


def _mean(x: Array) -> Array:
    """Takes the mean over windows of 3 x 3, without the padding."""
    total = functools.partial(
        jax.lax.reduce_window, init_value=0.0, computation=jax.lax.add,
        window_dimensions=(1, 3, 3, 1), window_strides=(1, 1, 1, 1), padding="SAME",
    )  # fmt: skip
    return total(x) / total(jnp.ones((1, *x.shape[1:3], 1)))
