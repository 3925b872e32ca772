"""Checks of a training run before anything is written."""

from collections.abc import Mapping, Sequence
from typing import Any

from md4_jax.config import beginnings, build, inputs, runs
from md4_jax.config import load as config
from md4_jax.config.checks import check_training
from md4_jax.config.judging import Foreign, with_guide
from md4_jax.data.mixtures import Corpus, corpus_of
from md4_jax.experiment import Experiment
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, check_name
from md4_jax.training import back, trackers


def experiment_of(asked: Mapping[str, Any], workdir: Place | None) -> tuple[Experiment, Corpus]:
    """Returns the experiment of a config and the corpus of its data, without reading the data."""
    domain, source = inputs.domain_and_source(asked, workdir)
    experiment = build.experiment(asked, domain, workdir=workdir)
    return experiment, corpus_of(source, domain, experiment.data)


def planned(
    asked: Mapping[str, Any], run: Place | None, devices: Sequence[Any], others: Foreign | None
) -> Experiment:
    """Returns the experiment of a config on devices that need not exist, for --mode plan.

    run: directory of the run with this stored config, if there is one. The classifier that guides
    samples is read, except with plan.random_tokens
    """
    if domain := inputs.random_tokens(asked, "plan"):
        return build.experiment(asked, domain, devices)
    domain, _ = inputs.domain_and_source(asked, run)
    return with_guide(build.experiment(asked, domain, devices), others)


def checked(
    asked: Mapping[str, Any], workdir: Place, returns: str = ""
) -> tuple[Experiment, Corpus, dict[str, Any] | None]:
    """Returns (experiment, corpus, config with which the run began or None).

    returns: checkpoint of --back, '' for none; with one, the keys of back.FREE may differ from
    those of the run. UserError for settings that cannot be trained in workdir. Tokenises no text.
    """
    check_name(workdir)
    kept = config.stored(workdir, may_be_empty=True)
    if kept is not None:
        config.check_same(kept, asked, workdir, back.FREE if returns else ())
    experiment, corpus = experiment_of(asked, workdir)
    if kept is not None:
        runs.check_steps(experiment, workdir, returns)
    check_training(experiment, kept)
    trackers.check_installed(experiment.log.trackers)
    if kept is not None and config.moved(kept, asked):
        runs.check_text(experiment, corpus, workdir)
    return experiment, corpus, kept


def check_run(name: str, asked: Mapping[str, Any], workdir: Place) -> None:
    """Raises the UserError of `checked` with the name of a run of a sweep.

    Also raises UserError if the run cannot take its initial parameters from train.initial.
    """
    try:
        experiment, _, _ = checked(asked, workdir)
        beginnings.beginning(experiment, workdir, print)
    except UserError as error:
        raise UserError(f"run {name}: {error}") from error
