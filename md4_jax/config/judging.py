"""Models that judge the samples of a run: the run itself, other runs, and foreign models."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from md4_jax.config import load as config
from md4_jax.config.inputs import checkpoint_of
from md4_jax.config.runs import averaged, check_checkpoint, other_run
from md4_jax.data.domains import other_class
from md4_jax.evals import guides
from md4_jax.evals.likelihood import reported
from md4_jax.evals.suite import Judge
from md4_jax.experiment import Experiment, drawn_classes
from md4_jax.networks import NETWORKS
from md4_jax.protocols import Params, UserError
from md4_jax.runtime.paths import place


class Foreign(NamedTuple):
    """Reads models that are not runs; both functions return None if the source is not such a model.

    read       (key, source, section `mesh`) -> (experiment, params, whether this package trained
               it)
    is_causal  (key, source) -> whether the network is causal, without reading its parameters
    """

    read: Callable[[str, str, Mapping[str, Any]], tuple[Experiment, Params, bool] | None]
    is_causal: Callable[[str, str], bool | None]


def judge_of(experiment: Experiment) -> Judge | None:
    """Returns params -> (experiment, params) of the judge of samples; None without a judge.

    Another run keeps its network, process and bound; mesh, draws and batch size are those of this
    run. UserError if there is no such run, or if its tokenizer or classes differ.
    """
    asked = experiment.sample.judge
    if not asked:
        return None
    reported(experiment)
    if asked == "self":
        return lambda params: (experiment, params)
    hint = "; 'self' stands for the run that is sampled"
    judge, directory = other_run(experiment, "sample.judge", asked, hint)
    _check_classes(experiment, judge)
    check_checkpoint(judge, directory)
    return lambda params: (judge, averaged(judge, directory)[1])


def _check_classes(experiment: Experiment, judge: Experiment) -> None:
    """Raises UserError if the judge has classes and they differ from those of the samples."""
    label, judge_name = experiment.sample.label, experiment.sample.judge
    own, its = (e.config["network"].get("classes", 0) for e in (experiment, judge))
    if (label >= 0 or drawn_classes(experiment)) and its not in (0, own):
        raise UserError(
            f"sample.judge={judge_name} was trained with network.classes={its}, but this run has "
            f"network.classes={own}, so that a class has another meaning for the judge: use a "
            "judge with the same classes or with none"
        )
    if own and its and (different := other_class(experiment.domain, judge.domain)):
        raise UserError(
            f"sample.judge={judge_name} was trained on other classes than this run: {different}. "
            "Use a judge with the same classes or with none"
        )
    if label < 0 and drawn_classes(judge) and not drawn_classes(experiment):
        raise UserError(
            f"sample.judge={judge_name} was trained with network.label_dropout=0 and cannot judge "
            "texts without a class: use another judge" + (", or set sample.label" if own else "")
        )


@dataclasses.dataclass(frozen=True)
class Others:
    """Reads other models, with any tokenizer. If a model is missing, a UserError names the key.

    experiment  experiment with the mesh, draws and batch size to use
    foreign     reads models that are not runs; None: only runs are read
    """

    experiment: Experiment
    foreign: Foreign | None = None

    def __call__(self, key: str, asked: str) -> tuple[Experiment, Params, bool]:
        """Returns (experiment, params, whether this package trained it)."""
        mesh = self.experiment.config["mesh"]
        found = self.foreign.read(key, asked, mesh) if self.foreign else None
        if found is not None:
            return found
        other, directory = other_run(self.experiment, key, asked, same_tokenizer=False)
        return other, averaged(other, directory)[1], True

    def is_causal(self, key: str, asked: str) -> bool:
        """Returns whether the network in a directory is causal, without reading its parameters."""
        found = self.foreign.is_causal(key, asked) if self.foreign else None
        if found is not None:
            return found
        kept = config.stored(checkpoint_of(place(asked, key))[0])
        return kept is None or says_causal(key, asked, kept["network"])


def with_guide(experiment: Experiment, foreign: Foreign | None) -> Experiment:
    """Returns the experiment after loading the classifier that guides its samples, if any."""
    return guides.opened(experiment, Others(experiment, foreign), {})


def says_causal(key: str, asked: str, section: Mapping[str, Any]) -> bool:
    """Returns whether a judge's section `network` describes a causal network.

    Also True for a network of another package if its section does not say. UserError for a network
    that always needs a class, because the judged texts have none.
    """
    if section.get("classes", 0) and not section.get("label_dropout", 0.0):
        raise UserError(
            f"{key}={asked} was trained with network.classes={section['classes']} and "
            "network.label_dropout=0, and cannot judge texts without a class: use another judge"
        )
    return bool(section.get("causal", section.get("name") not in NETWORKS))
