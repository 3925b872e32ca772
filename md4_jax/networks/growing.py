"""Networks for variable-length texts, which also predict the missing tokens of each gap.

Names of arrays end in their shapes: B, L, D, and M = L + 1.
"""

from typing import Any

import jax.numpy as jnp

from md4_jax.protocols import Array, UserError


def symbols_read(options: Any) -> int:
    """Returns the number of symbols of z: V + 1 with the mask, V + 2 with gaps (no token)."""
    return options.vocab_size + 1 + options.gaps


def check_growing(options: Any) -> None:
    """Raises UserError for options that `network.gaps` does not support."""
    if options.edits and not options.gaps:
        raise UserError(
            "network.edits=True, which also predicts deletions of masks, needs network.gaps=True"
        )
    for key, fits in (("causal", False), ("tables", 0), ("output", "categorical")):
        if options.gaps and getattr(options, key) != fits:
            raise UserError(
                f"network.gaps=True, for texts that grow, needs network.{key}={fits!r}, not "
                f"{getattr(options, key)!r}"
            )


def with_gaps(
    module: Any, z_BxL: Array, t_B: Array, label: Array | None = None, keys: Array | None = None
) -> tuple[Array, Array]:
    """Returns (h [B, M, D], outputs [B, M] on the missing tokens of each gap), M = L + 1.

    z is padded at the end with the symbol V + 1, "no token". The network sees only the first of
    these symbols, as the end of the text, so one position is added to z. The output for a gap is
    computed from the features of the symbol after it, and for the last gap from those of the end.

    module  `TransformerModule` with bound parameters
    """
    h_BxMxD = _features(module, z_BxL, t_B, label, keys)
    return h_BxMxD, module.missing(h_BxMxD)[..., 0]


def with_edits(
    module: Any, z_BxL: Array, t_B: Array, label: Array | None = None, keys: Array | None = None
) -> tuple[Array, Array, Array]:
    """Returns (h, h of the replacement of each mask, outputs); h as in `with_gaps`, [B, M, D].

    outputs are [B, M, 2]: those of `with_gaps`, and the logit of the deletion of the mask.
    """
    h_BxMxD = _features(module, z_BxL, t_B, label, keys)
    return h_BxMxD, h_BxMxD + module.replaced(h_BxMxD), module.missing(h_BxMxD)


def growing_features(module: Any, z_BxL: Array, t_B: Array) -> Array:
    """Returns h [B, L, D] of the symbols of z; calls all parts, to initialise parameters."""
    read = with_edits if module.options.edits else with_gaps
    return read(module, z_BxL, t_B)[0][:, :-1]


def _features(
    module: Any, z_BxL: Array, t_B: Array, label: Array | None, keys: Array | None
) -> Array:
    """Returns the features of the symbols of z and of the end of the text, [B, M, D]."""
    absent = module.options.vocab_size + 1
    z_BxM = jnp.pad(z_BxL, ((0, 0), (0, 1)), constant_values=absent)
    count_Bx1 = jnp.sum(z_BxL != absent, axis=1, keepdims=True)
    segments_BxM = jnp.where(jnp.arange(z_BxM.shape[1]) <= count_Bx1, 0, -1)
    return module.features(z_BxM, t_B, segments_BxM, label, keys)
