"""Models that judge what a run samples: the run itself, other runs, and models that are no runs."""

from collections.abc import Callable, Mapping
from typing import Any

from md4_jax.config.runs import averaged, check_checkpoint, other_run
from md4_jax.evals.likelihood import reported
from md4_jax.evals.suite import Judge, RunOf
from md4_jax.experiment import Experiment
from md4_jax.protocols import Params

# (key, source, section `mesh`) -> (experiment, params, whether this package trained it) of a model
# that is no run; None if the source names none.
Foreign = Callable[[str, str, Mapping[str, Any]], tuple[Experiment, Params, bool] | None]


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


def run_of(experiment: Experiment, foreign: Foreign | None = None) -> RunOf:
    """Returns (key, source) -> (experiment, params, is_own) of another model, with any tokenizer.

    Mesh, draws and batch size are this run's. UserError, which names the key, if there is no model.

    foreign: reads models that are no runs; None: only runs are known
    """

    def read(key: str, asked: str) -> tuple[Experiment, Params, bool]:
        found = foreign(key, asked, experiment.config["mesh"]) if foreign else None
        if found is not None:
            return found
        other, directory = other_run(experiment, key, asked, same_tokenizer=False)
        return other, averaged(other, directory)[1], True

    return read
