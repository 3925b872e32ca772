"""Cost of each token of a text; the bound is the sum of the costs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.evals.metrics import bits
from md4_jax.evals.texts import bucket, check_label, encoded, takes_segments
from md4_jax.experiment import Experiment
from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.draws import draws
from md4_jax.objectives.md4 import MD4
from md4_jax.objectives.radd import TDCE, LambdaDCE
from md4_jax.objectives.score_entropy import ScoreEntropy
from md4_jax.options import check_whole
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import Array, Batch, Objective, Params, UserError, batch_of
from md4_jax.protocols.phrases import amount
from md4_jax.runtime.compiling import jit
from md4_jax.runtime.sharding import batch_shards, to_global, to_host

# Bounds of masking in continuous time; they all have the same value as `any_order`.
SAME = (MD4, LambdaDCE, TDCE)
ROWS = 16  # draws of one estimate; the error comes from several


class TokenCosts(NamedTuple):
    """Costs of the N tokens of a text.

    tokens    int32 [N], their ids
    bits      float64 [N]; their sum is a bound on -log2 p of the text, or -log2 p itself if exact
    bits_se   float64 [N], standard errors of the Monte Carlo estimates; 0 if exact, NaN for a
              single estimate
    total_se  standard error of the sum, likewise
    exact     whether the sum is the likelihood itself
    """

    tokens: np.ndarray
    bits: np.ndarray
    bits_se: np.ndarray
    total_se: float
    exact: bool


def token_costs(
    experiment: Experiment,
    params: Params,
    text: str,
    objective: Objective,
    programs: dict,
    *,
    estimates: int = 4,
    label: int = -1,
) -> TokenCosts:
    """Estimates the contribution of each token of a text to the bound, with 16 draws per estimate.

    For masks it is the mean over random orders of -log p(token | the tokens drawn before it). The
    objective is the bound of whole texts. UserError for a text longer than the model's sequences,
    for a bound that is not a sum over tokens, and for a label that is not a class of the network.
    """
    check_label(experiment, label)
    check_whole("estimates", estimates)
    if estimates < 1:
        raise UserError(f"estimates must be a whole number of at least 1, not {estimates!r}")
    splits = splitting(experiment, objective)
    tokens = np.asarray(encoded(experiment, 0, text), np.int32)
    if len(tokens) > experiment.data.length:
        raise UserError(
            f"the text has {amount(len(tokens), experiment.domain.unit)}, but the model reads at "
            f"most {experiment.data.length}: shorten the text"
        )
    exact = getattr(splits, "is_exact", lambda network: False)(experiment.network)
    batch = _batch(experiment, params, tokens, 1 if exact else ROWS, label)
    key = ("token costs", experiment.network, splits)
    compiled = jit(_program(experiment, splits), experiment.mesh, experiment.network)
    program = programs.setdefault(key, compiled)
    found = []
    with jax.set_mesh(experiment.mesh):
        for number in range(1 if exact else estimates):
            nats = to_host(program(params, batch, jnp.int32(number)))
            found.append(nats[:, : len(tokens)].mean(axis=0, dtype=np.float64))
    each = bits(np.stack(found))
    error, total = _error(each, exact), _error(each.sum(axis=1), exact)
    return TokenCosts(tokens, each.mean(axis=0), error, float(total), exact)


def splitting(experiment: Experiment, objective: Objective) -> Any:
    """Returns an equal bound that is a sum over tokens; UserError if there is none."""
    process = experiment.process
    masks = isinstance(process, RevealsMasks) and process.is_complete
    if hasattr(objective, "of_tokens") and (masks or not isinstance(objective, ScoreEntropy)):
        return objective
    if masks and isinstance(objective, SAME):
        return AnyOrder()
    raise UserError(
        f"the bound {type(objective).__name__} of this model is not a sum over tokens: only "
        "masked and autoregressive models have costs of single tokens"
    )


def _error(estimates: np.ndarray, exact: bool) -> Any:
    """Returns the standard error of the mean over the first axis; NaN for a single estimate."""
    if len(estimates) == 1:
        return np.full(estimates.shape[1:], 0.0 if exact else np.nan)
    return estimates.std(axis=0, ddof=1) / np.sqrt(len(estimates))


def _batch(
    experiment: Experiment, params: Params, tokens: np.ndarray, rows: int, label: int
) -> Batch:
    """Repeats the text in rows, padded to one of a few lengths if the padding can be hidden."""
    shards, length = batch_shards(experiment.mesh), len(tokens)
    rows = -(-rows // shards) * shards
    pads = takes_segments(experiment, params)
    more = (0, bucket(length, experiment.data.length) - length if pads else 0)
    segments = np.pad(np.zeros(length, np.int32), more, constant_values=-1)
    context = {"segments": np.tile(segments, (rows, 1))} if pads else {}
    if label >= 0:
        context["label"] = np.full(rows, label, np.int32)
    counted = np.pad(np.ones(length, bool), more)
    batch = batch_of(
        np.tile(np.pad(tokens, more), (rows, 1)),
        loss_mask=np.tile(counted, (rows, 1)),
        context=context,
    )
    return to_global(batch._replace(text=None), experiment.mesh)


def _program(experiment: Experiment, objective: Any) -> Callable:
    """Makes (params, batch, index of the estimate) -> nats of each row's tokens, [B, L]."""

    def run(params: Params, batch: Batch, number: Array) -> Array:
        denoiser = experiment.network.denoiser(params, batch.context)
        u, keys = draws(0, number, len(batch.tokens))
        return objective.of_tokens(denoiser, params["process"], batch, u, keys)

    return run
