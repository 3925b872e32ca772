"""Samples of the model: drawing, writing, printing and, with a judge, scoring them."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from md4_jax.data.corpus import Corpus
from md4_jax.evals.context import Context, check_least, first_alone
from md4_jax.evals.likelihood import reported
from md4_jax.experiment import (
    Experiment,
    clean_prompts,
    drawn_classes,
    rows_of,
    sample_block,
    sample_length,
    sample_window,
)
from md4_jax.generate import writers
from md4_jax.generate.inpainting import Example
from md4_jax.generate.pictures import CHOSEN_FROM, has_pictures
from md4_jax.generate.prompts import Resized, check_beginnings, remarks, templates
from md4_jax.protocols import Batch, Params, Prompt, UserError
from md4_jax.protocols.phrases import amount
from md4_jax.runtime.paths import Place
from md4_jax.samplers.batches import Samples, context_of, cut, draw_samples, make_sampler
from md4_jax.samplers.live import Live, Request, SampleState
from md4_jax.samplers.live_parts import LiveBlocks, watch_windows
from md4_jax.samplers.steering import Programs, draw_steered


@dataclasses.dataclass(frozen=True)
class DrawnSamples:
    """Draws the samples that the `sample` section describes.

    every, final  as in `likelihood`
    """

    every: int = 0
    final: bool = True

    needs_data: ClassVar[bool] = False

    def __post_init__(self):
        check_least(self, every=0)

    def check_samples(self, experiment: Experiment, key: str) -> None:
        """Raises UserError, before a run begins, for guidance without a class or a prompt."""
        del key
        check_guided(experiment)

    def run(self, experiment: Experiment, params: Params, context: Context) -> dict[str, Any]:
        """Writes and prints the samples; returns their cost, diversity and the judge's bound."""
        prompts = _prompts(experiment, context)
        is_exact = experiment.process.shows_clean or clean_prompts(experiment.config["data"])
        for remark in remarks(experiment.prompt, prompts, is_exact):
            context.say(f"warning: {remark}")
        drawn = drawn_samples(experiment, params, context.programs, prompts)
        judged = _judged(experiment, params, context, drawn.tokens)
        if jax.process_index() != 0:
            return {}
        with first_alone():
            path, facts = _written(experiment, context, drawn, prompts)
            if drawn.paths is not None:
                for picture in writers.trace(path, drawn, experiment, params):
                    context.say(f"trace: {picture}")
        if drawn.steered is not None:
            context.say(drawn.steered.line(experiment.steering.options))
        least, most = drawn.lengths.min(), drawn.lengths.max()
        size = amount(most, experiment.domain.unit)
        size = size if least == most else f"{least} to {size}"
        of = f"{amount(len(drawn.tokens), 'sample')} of {size}"
        context.say(f"{of} from step {context.step}: {path}")
        name = experiment.config["sample"]["name"]
        return {"sampler": name, **writers.of_samples(drawn), **judged, **facts}


def _prompts(experiment: Experiment, context: Context) -> list[Prompt]:
    """Returns the prompts of the `sample` section, reading the data for sample.image_from."""
    return prompts_of(experiment, lambda split, number: context.corpus({}).example(split, number))


def prompts_of(experiment: Experiment, example: Example | None = None) -> list[Prompt]:
    """Returns the prompts of the `sample` section; example: as for `templates`."""
    step, process, resized = experiment.sampler_step, experiment.process, None
    if step.needs.hides:
        resized = Resized(process.absent_id, step.masks)
    length = sample_length(experiment)
    return templates(experiment.prompt, experiment.domain, length, example, resized)


def _written(
    experiment: Experiment, context: Context, drawn: Samples, prompts: list[Prompt]
) -> tuple[Place, dict[str, str]]:
    """Writes the samples as text, also printed, or as pictures; returns (file, results)."""
    directory, domain = context.workdir / "samples", experiment.domain
    if has_pictures(domain):
        path = writers.write_pictures(directory, context.step, domain, drawn, prompts)
        return path, {"picture": str(path)}
    texts, facts = decoded(experiment, drawn), writers.record(experiment)
    # Printed first: they may have taken hours, and the disk may be full.
    context.say(f"{context.name}:\n{writers.listed(texts)}")
    inputs = context_of(experiment.sample, len(texts), drawn_classes(experiment))
    own = writers.of_rows(experiment, inputs.get("label"))
    path = writers.write_samples(directory, context.step, texts, drawn, facts, own)
    return path, {"texts": str(path)}


def check_draws(experiment: Experiment) -> None:
    """Raises UserError for a classifier, which cannot generate samples."""
    if experiment.network.classifies:
        raise UserError(
            f"network.name={experiment.config['network']['name']!r} is a classifier and cannot "
            "generate samples: to guide the samples of another run with it, set "
            "sample.classifier of that run to the folder of this one"
        )


def has_prompt(experiment: Experiment) -> bool:
    """Returns whether tokens of the samples are fixed."""
    return experiment.prompt.is_given or experiment.prompted


def check_guided(experiment: Experiment) -> None:
    """Raises UserError for guidance of samples that have neither sample.label nor a prompt."""
    options = experiment.sample
    if options.guidance != 1.0 and options.label < 0 and not has_prompt(experiment):
        raise UserError(
            f"sample.guidance={options.guidance} steers samples towards a class or a prompt: set "
            "sample.label to one of the classes of a network with network.classes, or "
            "sample.prompt, suffix or template, or set sample.guidance=1.0"
        )


def drawn_samples(
    experiment: Experiment,
    params: Params,
    programs: dict,
    prompts: list[Prompt] | None = None,
    context: Mapping[str, np.ndarray] | None = None,
) -> Samples:
    """Draws samples with the settings of the `sample` section; `programs` caches the sampler.

    prompts  None: those of the section, which must not refer to examples of the data
    context  as for `draw_samples`; None: `context_of` of the section
    """
    check_draws(experiment)
    options = experiment.sample
    if prompts is None:
        prompts = prompts_of(experiment)
    if context is None:
        check_guided(experiment)
        context = context_of(options, options.num * len(prompts), drawn_classes(experiment))
    if experiment.network.gaps:
        check_beginnings(prompts)
    if experiment.steering is not None:
        return _steered(experiment, params, programs, prompts, context)
    traced = min(CHOSEN_FROM, options.num * len(prompts)) if options.trace else 0
    network, loop, grid = experiment.network, experiment.loop, experiment.grid
    guide = experiment.guide
    guidance = guide.key if guide else options.guidance
    sampler = programs.setdefault(
        ("samples", network, loop, grid.tobytes(), traced, guidance),
        make_sampler(
            network,
            loop,
            grid,
            experiment.mesh,
            trace=traced,
            guidance=guide or options.guidance,
            clean_prompts=clean_prompts(experiment.config["data"]),
        ),
    )
    drawn = draw_samples(
        sampler,
        guide.beside(params) if guide else params,
        experiment.sampler_step,
        options,
        prompts,
        window=sample_window(experiment),
        context=context,
    )
    if experiment.sampler_step.needs.hides:
        # Only the tokens before the first gap keep their positions.
        return drawn._replace(prompt_mask=np.logical_and.accumulate(drawn.prompt_mask, axis=1))
    return cut(drawn, experiment.ends)


def _steered(
    experiment: Experiment,
    params: Params,
    programs: dict,
    prompts: list[Prompt],
    context: Mapping[str, np.ndarray],
) -> Samples:
    """Draws samples steered by the reward of the `sample` section."""
    network, grid, options = experiment.network, experiment.grid, experiment.sample
    found = programs.setdefault(
        ("steered", network, grid.tobytes(), options.guidance),
        Programs(
            network,
            grid,
            experiment.mesh,
            options.guidance,
            clean_prompts(experiment.config["data"]),
        ),
    )
    step, steering = experiment.sampler_step, experiment.steering
    return draw_steered(found, params, step, options, prompts, steering, context=context)


def watched(
    experiment: Experiment, params: Params, prompt: Prompt, programs: dict
) -> Iterator[SampleState]:
    """Yields the states of the first sample during sampling."""
    options, length = experiment.sample, sample_length(experiment)
    if len(prompt.tokens) != length:
        has = amount(len(prompt.tokens), "position")
        raise UserError(f"the prompt has {has}, but samples have {length}")
    check_guided(experiment)
    if experiment.network.gaps:
        check_beginnings([prompt])
    inputs = context_of(options, 1, drawn_classes(experiment))
    context = {name: values[0] for name, values in inputs.items()}
    step, grid, guide = experiment.sampler_step, experiment.grid, experiment.guide
    request = Request(step, grid, options.seed, prompt, context, options.guidance)
    network, blocks, window = experiment.network, experiment.loop, sample_window(experiment)
    own = (network, experiment.mesh, clean_prompts(experiment.config["data"]))
    if sample_block(experiment):
        by_block = programs.setdefault(("live", network, blocks), LiveBlocks(*own, blocks))
        return by_block.watch(params, request)
    if guide is not None:
        guided = programs.setdefault(("live", network, guide.key), Live(*own, guide=guide))
        return guided.watch(guide.beside(params), request)
    live = programs.setdefault(("live", network), Live(*own))
    if window < length:
        return watch_windows(live, params, request, window, options.stride)
    return live.watch(params, request)


def decoded(experiment: Experiment, drawn: Samples) -> list:
    """Returns the text of each sample, up to its end."""
    ends = zip(drawn.tokens, drawn.lengths, strict=True)
    return [experiment.domain.decode(row[:end]) for row, end in ends]


def _judged(
    experiment: Experiment, params: Params, context: Context, tokens: np.ndarray
) -> dict[str, Any]:
    """Returns the judge's bound on -log p of the samples, its keys prefixed with 'judge_'.

    If the judge has classes, -log p is conditional on the class of the samples.
    """
    if context.judge is None:
        return {}
    judge, its_params = context.judge(params)
    bound = reported(judge)
    rows = rows_of(judge, bound.sequences(judge))
    # The samples are whole sequences, also for a judge of which each document is one.
    data = dataclasses.replace(judge.data, windows="grid")
    batches = Corpus(None, judge.domain, data).batches_of(tokens, **rows)
    if judge.config["network"].get("classes", 0):
        inputs = context_of(experiment.sample, len(tokens), drawn_classes(experiment))
        batches = with_context(batches, inputs, **rows)
    result = dataclasses.replace(bound, limit=0).of_batches(
        judge, its_params, batches, context.programs
    )
    return {"judge": experiment.sample.judge, **{f"judge_{k}": v for k, v in result.items()}}


def with_context(
    batches: Iterator[Batch],
    inputs: Mapping[str, np.ndarray],
    batch_size: int,
    rows: np.ndarray,
) -> Iterator[Batch]:
    """Adds the context {name: [N, ...]} of N sequences, in order, to their batches."""
    for number, batch in enumerate(batches):
        here = number * batch_size + rows
        own = {name: x[np.minimum(here, len(x) - 1)] for name, x in inputs.items()}
        yield batch._replace(context={**batch.context, **own})
