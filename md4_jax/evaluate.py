"""The likelihood bound of a whole split, with its standard error."""

import collections
import dataclasses
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from md4_jax.compiling import jit
from md4_jax.metrics import Likelihood
from md4_jax.protocols import Array, Batch, Params, UserError
from md4_jax.sharding import to_global, to_host


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """The `eval` section; its `objective` is the bound that is estimated.

    every        steps between evaluations on the validation split while training; 0 for none
    draws        noise draws per sequence
    split        what the final evaluation and `--mode eval` measure, always the whole of it
    batch_size   sequences per batch; 0: as in training
    stride       new tokens of each sequence, which has the text before them given; 0: all of it
    limit        sequences used by the evaluations while training; 0: all
    ngram_order  n-gram models up to this order are printed beside the result; 0 for none
    seed         of the noise draws
    """

    every: int = 0
    draws: int = 1
    split: str = "test"
    batch_size: int = 0
    stride: int = 0
    limit: int = 0
    ngram_order: int = 0
    seed: int = 0

    def __post_init__(self):
        if self.draws < 1:
            raise UserError(f"eval.draws must be at least 1, not {self.draws}")
        for name in ("every", "batch_size", "stride", "limit", "ngram_order"):
            if getattr(self, name) < 0:
                raise UserError(f"eval.{name} must not be negative, not {getattr(self, name)}")
        if self.split not in ("train", "validation", "test"):
            raise UserError(f"eval.split must be train, validation or test, not {self.split!r}")


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
            weight, lengths = to_host(rows.weight), batch.tokens.shape[1]
            text = None if rows.text is None else to_host(rows.text)
            if rows.given is not None:
                lengths = lengths - np.sum(to_host(rows.given), axis=1)
            for name, value in nats.items():
                totals[name].add(to_host(value), lengths, weight, text=text)
            seen += int(np.sum(weight))
            if limit and seen >= limit:
                break
        result = totals.pop("nats").result(characters=self._characters)
        parts = {name: part.result(characters=False) for name, part in totals.items()}
        bits = {name: part["bits_per_token"] for name, part in parts.items()}
        bits = {"diffusion": result["bits_per_token"] - sum(bits.values()), **bits}
        named = {f"{name}_bits_per_token": value for name, value in bits.items()}
        facts = {"sequences": result.pop("sequences"), "draws": self._draws, "exact": self._exact}
        return {**facts, **result, **named}
