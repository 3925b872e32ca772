"""Batches of sequences, prompts, and the error for mistakes of users."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray
Params = Any


class UserError(Exception):
    """Error that the user can correct; `main` prints it without a traceback."""


class Batch(NamedTuple):
    """Batch of sequences, the input of every objective.

    tokens     int32 [B, L], values 0..V-1
    loss_mask  bool [B, L], True for tokens that count in the likelihood. The others (a prompt, the
               text before a window, padding) are context: never noised, never counted
    context    other inputs of the network by name, each [B, ...]: `segments` of documents, `label`
    text       int32 [B, 2] or None, numbers of bytes and words of the counted tokens' text
    rejected   int32 [B, L] or None, the same sequences with rejected answers as counted tokens
    number     int32 [B] or None, the index of each sequence in the training data
    reward     float32 [B] or None, rewards of sequences that the model has drawn
    advantage  float32 [B] or None, their rewards relative to others for the same prompt
    """

    tokens: Array
    loss_mask: Array
    context: Mapping[str, Array]
    text: Array | None = None
    number: Array | None = None
    rejected: Array | None = None
    reward: Array | None = None
    advantage: Array | None = None


def batch_of(
    tokens: Array, *, loss_mask: Array | None = None, context: Mapping[str, Array] | None = None
) -> Batch:
    """Makes a batch; all tokens count by default."""
    if loss_mask is None:
        library = jnp if isinstance(tokens, jax.Array) else np
        loss_mask = library.ones(tokens.shape, bool)
    return Batch(tokens, loss_mask, context or {})


class Prompt(NamedTuple):
    """Tokens that the user fixes, at any positions of one sequence or of a batch.

    tokens  int32 [L] or [B, L], ignored where mask is False
    mask    bool, like tokens: the positions that the user fixed
    """

    tokens: Array
    mask: Array
