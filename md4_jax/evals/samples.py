"""Samples of the model: drawn, written, printed and, if there is a judge, judged."""

import dataclasses
from typing import Any, ClassVar

import jax
import numpy as np

from md4_jax.data.corpus import Corpus
from md4_jax.evals.context import Context
from md4_jax.evals.likelihood import reported
from md4_jax.experiment import Experiment, rows_of, sample_length, sample_window
from md4_jax.generate import writers
from md4_jax.generate.prompts import templates
from md4_jax.protocols import Params, UserError
from md4_jax.samplers.batches import Samples, draw_samples, make_sampler


@dataclasses.dataclass(frozen=True)
class DrawnSamples:
    """Draws the samples that the `sample` section describes.

    every, final  as in `likelihood`
    """

    every: int = 0
    final: bool = True

    needs_data: ClassVar[bool] = False

    def __post_init__(self):
        if self.every < 0:
            raise UserError(f"every must not be negative, not {self.every}")

    def run(self, experiment: Experiment, params: Params, context: Context) -> dict[str, Any]:
        """Writes and prints the samples; returns their cost, diversity and bound."""
        drawn = drawn_samples(experiment, params, context.programs)
        judged = _judged(experiment, params, context, drawn.tokens)
        if jax.process_index() != 0:
            return {}
        rows = [row[:end] for row, end in zip(drawn.tokens, drawn.lengths, strict=True)]
        texts = [experiment.domain.decode(row) for row in rows]
        path = writers.write_samples(
            context.workdir / "samples",
            context.step,
            texts,
            drawn,
            {"seed": experiment.sample.seed},
        )
        context.say(f"{context.name}:\n{path.read_text(encoding='utf-8')}")
        if drawn.frames is not None:
            for picture in writers.trace(path, drawn, experiment, params):
                context.say(f"trace: {picture}")
        least, most = drawn.lengths.min(), drawn.lengths.max()
        size = f"{most}" if least == most else f"{least} to {most}"
        context.say(f"{len(texts)} samples of {size} tokens from step {context.step}: {path}")
        name = experiment.config["sample"]["name"]
        return {"sampler": name, **writers.of_samples(drawn), **judged}


def drawn_samples(experiment: Experiment, params: Params, programs: dict) -> Samples:
    """Draws the samples of the `sample` section; `programs` caches the compiled sampler."""
    sampler = programs.setdefault(
        ("samples", experiment.network, experiment.loop, experiment.sample.trace),
        make_sampler(
            experiment.network,
            experiment.loop,
            experiment.grid,
            experiment.mesh,
            trace=experiment.sample.trace,
        ),
    )
    return draw_samples(
        sampler,
        params,
        experiment.sampler_step,
        experiment.sample,
        templates(experiment.prompt, experiment.domain, sample_length(experiment)),
        window=sample_window(experiment),
    )


def _judged(
    experiment: Experiment, params: Params, context: Context, tokens: np.ndarray
) -> dict[str, Any]:
    """Returns the judge's bound on -log p of the samples, its keys prefixed with 'judge_'."""
    if context.judge is None:
        return {}
    judge, its_params = context.judge(params)
    bound = reported(judge)
    batches = Corpus(None, judge.domain, judge.data).batches_of(
        tokens, **rows_of(judge, bound.sequences(judge))
    )
    result = dataclasses.replace(bound, limit=0).of_batches(
        judge, its_params, batches, context.programs
    )
    return {"judge": experiment.sample.judge, **{f"judge_{k}": v for k, v in result.items()}}
