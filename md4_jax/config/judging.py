"""Models that judge what a run samples: the run itself, other runs, and models that are no runs."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from md4_jax.config import load as config
from md4_jax.config.inputs import checkpoint_of
from md4_jax.config.runs import averaged, check_checkpoint, other_run
from md4_jax.evals.likelihood import reported
from md4_jax.evals.suite import Judge
from md4_jax.experiment import Experiment
from md4_jax.protocols import Params
from md4_jax.runtime.paths import place


class Foreign(NamedTuple):
    """Reads models that are no runs; both functions return None for a source that names none.

    read       (key, source, section `mesh`) -> (experiment, params, whether this package trained
               it)
    is_causal  (key, source) -> whether the network is causal; it reads no parameters
    """

    read: Callable[[str, str, Mapping[str, Any]], tuple[Experiment, Params, bool] | None]
    is_causal: Callable[[str, str], bool | None]


def judge_of(experiment: Experiment) -> Judge | None:
    """Returns params -> (experiment, params) of the judge of samples; None without a judge.

    Another run keeps its network, process and bound; mesh, draws and batch size are this run's.
    UserError if there is no such run, or if it has another tokenizer.
    """
    asked = experiment.sample.judge
    if not asked:
        return None
    reported(experiment)
    if asked == "self":
        return lambda params: (experiment, params)
    hint = "; 'self' is the run that samples"
    judge, directory = other_run(experiment, "sample.judge", asked, hint)
    check_checkpoint(judge, directory)
    return lambda params: (judge, averaged(judge, directory)[1])


@dataclasses.dataclass(frozen=True)
class Others:
    """Reads other models, with any tokenizer. UserError, which names the key, if there is none.

    experiment  whose mesh, draws and batch size they get
    foreign     reads models that are no runs; None: only runs are known
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
        """Returns whether a directory's network is causal, without reading its parameters.

        True also for a network of the user's own whose section does not say so.
        """
        found = self.foreign.is_causal(key, asked) if self.foreign else None
        if found is not None:
            return found
        kept = config.stored(checkpoint_of(place(asked, key))[0])
        return kept is None or bool(kept["network"].get("causal", True))
