"""Likelihood bound of a split, with its standard error."""

import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from md4_jax.evals import report
from md4_jax.evals.context import Context, OnBatches, check_least, data_length
from md4_jax.evals.metrics import Likelihood
from md4_jax.experiment import Experiment, rows_of
from md4_jax.objectives.draws import (
    antithetic_times,
    at_early_times,
    draws,
    evaluation_power,
)
from md4_jax.protocols import (
    PARTS,
    Array,
    Batch,
    Network,
    Objective,
    Params,
    Prompt,
    UserError,
)
from md4_jax.protocols.phrases import amount
from md4_jax.runtime.compiling import jit
from md4_jax.runtime.sharding import to_global, to_host
from md4_jax.runtime.stopping import stop_if_asked
from md4_jax.samplers.guidance import guided


@dataclasses.dataclass(frozen=True)
class LikelihoodBound(OnBatches):
    """Estimates a bound on -log p of a split, or -log p itself if the objective is exact.

    every       steps between evaluations during training; 0: none
    final       whether it runs when training ends, and in --mode eval without --evals
    split       train, validation, test, or all (the whole data)
    data        keys of the `data` section that differ from the run's own
    draws       number of noise draws per sequence; one if the objective is exact
    batch_size  sequences per batch; 0: as in training
    stride      number of new tokens in each sequence; the ones before them are context. 0: all
    limit       number of sequences from the start of the split, rounded up to whole batches; 0: all
    seed        seed of the noise draws
    objective   the bound; `auto`: the tightest that the process and the network support
    """

    objective: Any
    final: bool = dataclasses.field(default=True, kw_only=True)
    stride: int = 0

    main_figure: ClassVar[str] = "nats_per_token"

    def __post_init__(self):
        super().__post_init__()
        check_least(self, stride=0)

    def check_stride(self, length: int, key: str = "", length_key: str = "data.length") -> None:
        """Raises UserError if the stride does not fit sequences of this length.

        key: prefix of other keys in the error, such as "evals.test."
        """
        if self.stride > length:
            raise UserError(
                f"{key}stride={self.stride} must be at most {length_key}={length}, the number of "
                f"tokens in a window: set it to less, such as {max(1, length // 2)}, or to 0 for "
                "windows that do not overlap"
            )
        block = getattr(self.objective, "block", 0)
        if self.stride and block and (length - self.stride) % block:
            raise UserError(
                f"{key}stride={self.stride} leaves {length_key}={length} - {self.stride} = "
                f"{amount(length - self.stride, 'token')} of context, and objective.block={block} "
                "must divide that number"
            )

    def length_of(self, experiment: Experiment) -> tuple[str, int]:
        """Returns (key, tokens) of the sequences that the network reads."""
        return data_length(self, experiment)

    def sequences(self, experiment: Experiment) -> int:
        """Returns the global batch size."""
        return self.batch_size or experiment.train.batch_size

    def is_exact(self, network: Network) -> bool:
        """Returns whether the bound is -log p itself."""
        return getattr(self.objective, "is_exact", lambda network: False)(network)

    def count(self, network: Network) -> int:
        """Returns the number of noise draws per sequence."""
        return 1 if self.is_exact(network) else self.draws

    def run(self, experiment: Experiment, params: Params, context: Context) -> dict[str, Any]:
        """Returns the bound in all units, each with its standard error, and prints it.

        End-of-text tokens that pad a sequence count as tokens. The bound is then that of the texts
        and their lengths: per byte and word of the texts, and per token including the padding.
        """
        corpus = context.corpus(self.data)
        batches = corpus.eval_batches(
            self.split, stride=self.stride, **rows_of(experiment, self.sequences(experiment))
        )
        result = self.of_batches(experiment, params, batches, context.programs)
        if corpus.counts_padding:
            result["padding"] = "end_of_text"
        context.say(f"{report.label(context.name, self.split)}: {report.line(result)}")
        return {"split": self.split, **result}

    def of_batches(
        self, experiment: Experiment, params: Params, batches: Iterable[Batch], programs: dict
    ) -> dict[str, Any]:
        """Returns the bound for the given batches; programs: cache of compiled steps."""
        return self.estimator(experiment, programs)(params, batches, self.limit)

    def estimator(
        self, experiment: Experiment, programs: dict, guidance: float = 1.0
    ) -> "Estimator":
        """Returns the compiled step, cached in `programs` by bound, draws and seed.

        guidance: see `make_eval_step`
        """
        exact, count = self.is_exact(experiment.network), self.count(experiment.network)
        key = ("likelihood", experiment.network, self.objective, count, self.seed, guidance)
        if key not in programs:
            programs[key] = Estimator(
                make_eval_step(experiment.network, self.objective, count, self.seed, guidance),
                experiment.network,
                experiment.mesh,
                count,
                unit=experiment.domain.unit,
                exact=exact,
            )
        return programs[key]


def main_bound(experiment: Experiment) -> LikelihoodBound | None:
    """Returns the main likelihood of a run: the first final one, else the first; None if none."""
    bounds = [e for e in experiment.evals.values() if isinstance(e, LikelihoodBound)]
    return next((bound for bound in bounds if bound.final), bounds[0] if bounds else None)


def reported(experiment: Experiment) -> LikelihoodBound:
    """Returns the main likelihood of a run; UserError if there is none.

    Its bound, draws and batch size are used by the judge of samples, --mode bench and --mode plan.
    """
    found = main_bound(experiment)
    if found is None and experiment.network.classifies:
        raise UserError("a classifier has no likelihood, because it does not predict tokens")
    if found is None:
        raise UserError(
            "the config has no evaluator of kind likelihood: add one with "
            "--config.evals.test.name=likelihood"
        )
    return found


class Estimator:
    """Compiled eval step, run over the batches of a split."""

    def __init__(
        self,
        eval_step: Callable[[Params, Batch, Array], dict[str, Array]],
        network: Network,
        mesh: Mesh,
        draws: int,
        *,
        unit: str = "token",
        exact: bool = False,
    ):
        self._step = jit(eval_step, mesh, network)
        self._mesh = mesh
        self._draws = draws
        self._unit = unit
        self.exact = exact

    def nats(self, params: Params, rows: Batch, index: int) -> dict[str, Array]:
        """Applies the eval step to the global batch with this index."""
        with jax.set_mesh(self._mesh):
            return self._step(params, rows._replace(text=None), jnp.int32(index))

    def __call__(self, params: Params, batches: Iterable[Batch], limit: int = 0) -> dict:
        """Returns {'sequences', 'draws', 'exact', 'nats_per_token', 'nats_per_token_se', ...}.

        Values per byte and word are included if the batches have `text`. The total is the sum of
        'diffusion_bits_per_token' and those of the bound's other PARTS, if any. 'exact' is True for
        the likelihood itself and False for a bound.

        limit: stops after that many sequences, rounded up to whole batches; 0: all.
        """
        totals, seen = collections.defaultdict(Likelihood), 0
        for index, batch in enumerate(batches):
            stop_if_asked()
            rows = to_global(batch, self._mesh)
            nats = {name: to_host(x) for name, x in self.nats(params, rows, index).items()}
            tokens = np.sum(to_host(rows.loss_mask), axis=1)
            text = None if rows.text is None else to_host(rows.text)
            strata = nats.pop("strata", None)
            for name, value in nats.items():
                totals[name].add(value, tokens, text=text, strata=None if self.exact else strata)
            seen += int(np.sum(tokens > 0))
            if limit and seen >= limit:
                break
        result = totals.pop("nats").result(self._unit)
        parts = {name: part.result() for name, part in totals.items()}
        bits = {name: part["bits_per_token"] for name, part in parts.items()}
        bits = {"diffusion": result["bits_per_token"] - sum(bits.values()), **bits}
        named = {f"{name}_bits_per_token": value for name, value in bits.items()}
        facts = {"sequences": result.pop("sequences"), "draws": self._draws, "exact": self.exact}
        return {**facts, **result, **named}


def make_eval_step(
    network: Network,
    objective: Objective,
    draws_per_sequence: int,
    seed: int,
    guidance: float = 1.0,
) -> Callable[[Params, Batch, Array], dict[str, Array]]:
    """Makes (params, global batch, batch index) -> {'nats': [draws, B], PARTS, 'strata': [B]}.

    The times of a sequence's draws are `antithetic_times` with an offset per sequence. The offsets
    are stratified over the batch and returned as strata. `evaluation_power` gives the times and
    weights of an integral.

    guidance: weight of `guided` by the tokens that do not count, for masking noise. The nats are
    then those of the guided model.
    """

    def eval_step(params: Params, batch: Batch, index: Array) -> dict[str, Array]:
        given = Prompt(batch.tokens, jnp.logical_not(batch.loss_mask))
        denoiser, _ = guided(network, params, batch.context, guidance, given)
        size = batch.tokens.shape[0]
        u, _ = draws(seed, index, size)

        def one(draw: Array) -> dict[str, Array]:
            _, keys = draws(seed, index * draws_per_sequence + draw, size)
            own = jax.vmap(antithetic_times, (0, None))(u, draws_per_sequence)[:, draw]
            call = at_early_times(objective, evaluation_power(objective, params["process"]))
            nats, extra = call(denoiser, params["process"], batch, own, keys)
            return {"nats": nats, **{name: extra[name] for name in PARTS if name in extra}}

        return jax.lax.map(one, jnp.arange(draws_per_sequence)) | {"strata": u}

    return eval_step
