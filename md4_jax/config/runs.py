"""What one run takes from another: its averaged parameters, to begin with or to judge by."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from md4_jax.config import build, foreign
from md4_jax.config import load as config
from md4_jax.data.corpus import Corpus, check_same_text
from md4_jax.data.domains import same_symbols, stored_domain
from md4_jax.evals.likelihood import main_bound, reported
from md4_jax.evals.suite import Judge
from md4_jax.experiment import Experiment
from md4_jax.protocols import Params, UserError
from md4_jax.runtime.paths import Place, place
from md4_jax.runtime.sharding import path_name
from md4_jax.training.checkpoint import Checkpoints
from md4_jax.training.loop import abstract_state


def averaged(experiment: Experiment, workdir: Place) -> tuple[int, Params]:
    """(step, moving average) of the newest checkpoint; UserError if there is none."""
    found = _read(
        experiment, workdir, lambda kept: kept.restore_ema(abstract_state(experiment).ema)
    )
    if found is None:
        raise UserError(f"{workdir} holds no checkpoint yet: train it first")
    return found


def check_text(experiment: Experiment, corpus: Corpus, workdir: Place) -> None:
    """UserError if the corpus is not the text that the run in workdir was trained on, if it was."""
    host = _read(experiment, workdir, Checkpoints.host)
    if host is None:
        return
    if "text" not in host:
        raise UserError(
            f"the checkpoints of {workdir} do not say what text they were trained on, so that "
            "another place of it (data.path) cannot be checked: give the old one back"
        )
    try:
        check_same_text(host["text"], corpus.fingerprint(), workdir)
    except UserError as error:
        raise UserError(
            f"{error}. To evaluate this run on another text name it as an evaluator's data: "
            "--evals other --config.evals.other.name=likelihood --config.evals.other.data.path=FILE"
        ) from error


def judge_of(experiment: Experiment) -> Judge | None:
    """Returns params -> the (experiment, params) whose bound of samples is reported; or None.

    Another run keeps its network, process and bound; mesh, draws and batch are those asked for.
    UserError if there is none, or if it has another tokenizer.
    """
    asked = experiment.sample.judge
    if not asked:
        return None
    reported(experiment)
    if asked == "self":
        return lambda params: (experiment, params)
    judge = _other(experiment, "sample.judge", asked, hint="; 'self' is the run that samples")
    return lambda params: (judge, averaged(judge, place(asked))[1])


def beginning(
    experiment: Experiment, workdir: Place, say: Callable[[str], None]
) -> Callable[[Params], Params] | None:
    """What puts the parameters of train.initial in place of fresh ones; None where it is empty.

    None too where the run in workdir has a checkpoint: it needs the other run no more. The
    network must have the same parameters; those of a process are taken where it has them too.
    UserError now for another run that does not fit.
    """
    asked = experiment.train.initial
    if not asked or _read(experiment, workdir, Checkpoints.steps):
        return None
    other = _other(experiment, "train.initial", asked)
    own, its = (_shapes(abstract_state(e).ema["network"]) for e in (experiment, other))
    if own != its:
        raise UserError(
            f"train.initial={asked} has another network: {_difference(experiment, other)}"
        )

    def begin(fresh: Params) -> Params:
        step, params = averaged(other, place(asked))
        say(f"begins with the averaged parameters of step {step} of {asked}")
        same = _shapes(params["process"]) == _shapes(fresh["process"])
        process = params["process"] if same else fresh["process"]
        # Its values in this run's process, whose hyper-parameters may be others.
        leaves, structure = jax.tree.leaves(process), jax.tree.structure(fresh["process"])
        return params | {"process": jax.tree.unflatten(structure, leaves)}

    return begin


def _read(experiment: Experiment, workdir: Place, ask: Callable[[Checkpoints], Any]) -> Any:
    """What the checkpoints of a run answer; None where there are none."""
    directory = workdir / "checkpoints"
    if not directory.exists():
        return None
    checkpoints = Checkpoints(directory, experiment.checkpoint, read_only=True)
    answer = ask(checkpoints)
    checkpoints.close()
    return answer


def _other(experiment: Experiment, key: str, asked: str, hint: str = "") -> Experiment:
    """The experiment of another run with the same tokenizer, on this one's mesh and batch."""
    directory = place(asked, key)
    kept = config.stored(directory) if directory.is_dir() else None
    if kept is None:
        raise UserError(f"{key}={asked} holds no run{hint}")
    domain = stored_domain(directory, kept["data"]["length"], foreign.load)
    if not same_symbols(domain, experiment.domain):
        raise UserError(f"{key}={asked} was trained with another tokenizer than this run")
    size = {
        "batch_size": experiment.train.batch_size,
        "microbatches": experiment.train.microbatches,
    }
    changed = {
        "mesh": experiment.config["mesh"],
        "train": {**kept["train"], **size},
        "evals": {"test": _bound(experiment, kept)},
        "sample": {**kept["sample"], "judge": "", "templates": ""},
    }
    return build.experiment({**kept, **changed}, domain)


def _bound(experiment: Experiment, kept: Mapping[str, Any]) -> dict[str, Any]:
    """The evaluator that another run reports, with the draws and the batch of this one's."""
    sections = [s for s in kept["evals"].values() if s["name"] == "likelihood"]
    its = next((s for s in sections if s.get("final", True)), sections[0] if sections else {})
    section = {"name": "likelihood", **{key: its[key] for key in ("objective",) if key in its}}
    mine = main_bound(experiment)
    if mine is None:
        return section | {"batch_size": experiment.train.batch_size}
    return section | {
        "draws": mine.draws, "seed": mine.seed, "batch_size": mine.sequences(experiment)
    }  # fmt: skip


def _shapes(params: Params) -> dict[str, tuple[int, ...]]:
    return {path_name(p): x.shape for p, x in jax.tree_util.tree_leaves_with_path(params)}


def _difference(experiment: Experiment, other: Experiment) -> str:
    """In which keys of the network's section two runs differ, or in which parameter."""
    own, its = (dict(config.flatten(e.config["network"])) for e in (experiment, other))
    keys = [key for key in sorted({**own, **its}) if own.get(key) != its.get(key)]
    if not keys:
        shapes = [_shapes(abstract_state(e).ema["network"]) for e in (experiment, other)]
        name = min(set(shapes[0].items()) ^ set(shapes[1].items()))[0]
        return f"{name} is {shapes[1].get(name)} there and {shapes[0].get(name)} here"
    said: list[Any] = [f"network.{k}={its.get(k)!r} there and {own.get(k)!r} here" for k in keys]
    return ", ".join(said)
