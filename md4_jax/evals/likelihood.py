"""The likelihood bound of a whole split, with its standard error."""

import collections
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from md4_jax.evals.metrics import Likelihood
from md4_jax.objectives.draws import antithetic_times, draws
from md4_jax.protocols import PARTS, Array, Batch, Network, Objective, Params
from md4_jax.runtime.compiling import jit
from md4_jax.runtime.sharding import to_global, to_host


class Evaluator:
    """A compiled eval step and what it needs to run over a split."""

    def __init__(
        self,
        eval_step: Callable[[Params, Batch, Array], dict[str, Array]],
        mesh: Mesh,
        draws: int,
        *,
        characters: bool,
        exact: bool = False,
    ):
        self._step = jit(eval_step, mesh)
        self._mesh = mesh
        self._draws = draws
        self._characters = characters
        self._exact = exact

    def __call__(self, params: Params, batches: Iterable[Batch], limit: int = 0) -> dict:
        """{'sequences', 'draws', 'nats_per_token', ... each with '_se'} over the batches.

        Per byte and word too, where the batches say what text they are.

        'diffusion_bits_per_token' and, where the bound has them, those of its other
        PARTS say what the total consists of; 'exact' whether it is the likelihood itself and
        no bound of it.
        limit > 0 stops after that many sequences, rounded up to whole batches.
        """
        totals, seen = collections.defaultdict(Likelihood), 0
        for index, batch in enumerate(batches):
            rows = to_global(batch, self._mesh)
            with jax.set_mesh(self._mesh):
                nats = self._step(params, rows._replace(text=None), jnp.int32(index))
            tokens = np.sum(to_host(rows.loss_mask), axis=1)
            text = None if rows.text is None else to_host(rows.text)
            for name, value in nats.items():
                totals[name].add(to_host(value), tokens, text=text)
            seen += int(np.sum(tokens > 0))
            if limit and seen >= limit:
                break
        result = totals.pop("nats").result(characters=self._characters)
        parts = {name: part.result(characters=False) for name, part in totals.items()}
        bits = {name: part["bits_per_token"] for name, part in parts.items()}
        bits = {"diffusion": result["bits_per_token"] - sum(bits.values()), **bits}
        named = {f"{name}_bits_per_token": value for name, value in bits.items()}
        facts = {"sequences": result.pop("sequences"), "draws": self._draws, "exact": self._exact}
        return {**facts, **result, **named}


def make_eval_step(
    network: Network, objective: Objective, draws_per_sequence: int, seed: int
) -> Callable[[Params, Batch, Array], dict[str, Array]]:
    """(params, global batch, batch index) -> {'nats': [draws, B], and each of PARTS}, unreduced.

    The draws of a sequence are `antithetic_times` with an offset of its own, and these offsets
    are strata over the batch.
    """

    def eval_step(params: Params, batch: Batch, index: Array) -> dict[str, Array]:
        denoiser = network.denoiser(params, batch.context)
        size = batch.tokens.shape[0]
        u, _ = draws(seed, index, size)

        def one(draw: Array) -> dict[str, Array]:
            _, keys = draws(seed, index * draws_per_sequence + draw, size)
            own = jax.vmap(antithetic_times, (0, None))(u, draws_per_sequence)[:, draw]
            nats, extra = objective(denoiser, params["process"], batch, own, keys)
            return {"nats": nats} | {name: extra[name] for name in PARTS if name in extra}

        return jax.lax.map(one, jnp.arange(draws_per_sequence))

    return eval_step
