"""Averaged parameters of a run, for evaluation, for starting another run and for judging."""

from collections.abc import Callable, Mapping
from typing import Any

from md4_jax.config import build, foreign, imports
from md4_jax.config import load as config
from md4_jax.config.inputs import checkpoint_of
from md4_jax.config.mistakes import ELSEWHERE
from md4_jax.config.schema import class_of
from md4_jax.data.corpus import Corpus, check_same_text
from md4_jax.data.domains import same_symbols, stored_domain
from md4_jax.evals import rollouts
from md4_jax.evals.likelihood import main_bound
from md4_jax.experiment import Experiment
from md4_jax.protocols import Params, UserError, updates_of
from md4_jax.protocols.phrases import plus_minus
from md4_jax.runtime.distributed import is_first
from md4_jax.runtime.paths import Place, check_links, exists, place
from md4_jax.runtime.sharding import max_over_processes
from md4_jax.runtime.tensors import is_folder
from md4_jax.training import back, base, first_save, items, report
from md4_jax.training.checkpoint import Checkpoints
from md4_jax.training.keeping import Best, best_of, figure_of, without_best
from md4_jax.training.loop import abstract_state
from md4_jax.training.trainable import joined, stored
from md4_jax.training.writers import read_rows

# Values of `sample` that read no file, for a run that only judges or initialises another one.
NO_FILES = {"templates": "", "inpaint": "", "image_from": "", "mask": "", "box": ""}
NO_FILES |= {"judge": "", "classifier": ""}


def config_of_run(workdir: Place, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of a run that is not trained further.

    UserError if there is none in workdir, or if `asked` is the config of another run.
    """
    kept = config.stored(workdir)
    if kept is None:
        raise UserError(f"{workdir} holds no run: train one first with --workdir DIR")
    check_links(workdir)
    config.check_same(kept, asked, workdir, config.OF_USE)
    return kept


def averaged(experiment: Experiment, workdir: Place) -> tuple[int, Params]:
    """Returns (step, averaged parameters) of the checkpoint in eval.checkpoint.

    UserError if there is none.
    """
    return averaged_and_host(experiment, workdir)[:2]


def averaged_and_host(experiment: Experiment, workdir: Place) -> tuple[int, Params, dict]:
    """Returns what `averaged` returns, and the host state of that checkpoint."""
    state = abstract_state(experiment)

    def ask(kept: Checkpoints) -> tuple[int, Params, dict] | None:
        step = _asked_step(experiment, workdir, kept.steps())
        return kept.restore_ema(state.ema, step=step)

    found = read(experiment, workdir, ask)
    if found is None:
        raise _no_checkpoint(workdir)
    step, ema, host = found
    if state.frozen:
        return step, joined(ema, base.read(workdir, state.frozen, host)), host
    return step, {**ema, "network": stored(ema["network"], experiment.network.parameters)}, host


def check_checkpoint(experiment: Experiment, workdir: Place) -> None:
    """Raises UserError if a run does not have the checkpoint in eval.checkpoint."""
    steps = read(experiment, workdir, Checkpoints.steps)
    if not steps:
        raise _no_checkpoint(workdir)
    _asked_step(experiment, workdir, steps)


def _no_checkpoint(workdir: Place) -> UserError:
    if is_folder(workdir):
        return UserError(
            f"{workdir} is a published model, not a run: make a run of it by --mode import --from "
            f"{workdir} --workdir NEW"
        )
    return UserError(f"{workdir} holds no checkpoint yet: train it first")


def _asked_step(
    experiment: Experiment, workdir: Place, steps: list[int], asked: str | int = ""
) -> int | None:
    """Returns the step of the checkpoint `asked`, None for the newest; UserError if it is missing.

    asked: "" for eval.checkpoint
    """
    key, asked = "--back" if asked else "eval.checkpoint", asked or experiment.eval.checkpoint
    if asked == "newest" or not steps:
        return None
    if asked != "best":
        if int(asked) in steps:
            return int(asked)
        raise UserError(
            f"{workdir} has no checkpoint of step {asked} ({key}): it has checkpoints of the "
            f"steps {steps}"
        )
    if not experiment.checkpoint.best:
        raise without_best(key, steps)
    found = best(experiment, workdir, steps)
    # On a shared disk, only the process that wrote the last rows may see them yet.
    step = max_over_processes(found.step if found and is_first() else 0)
    if not step:
        raise UserError(
            f"{key}='best': none of the checkpoints of {workdir} was evaluated by "
            f"evals.{experiment.checkpoint.best} (checkpoint.best). It has checkpoints of the "
            f"steps {steps}"
        )
    return step


def decide_back(experiment: Experiment, workdir: Place, asked: str) -> None:
    """Records the return to the checkpoint of --back; UserError if it does not exist."""
    if back.is_done(workdir, asked, experiment.config["optim"]):
        return

    def look(kept: Checkpoints) -> tuple[int, tuple[int, dict] | None]:
        return _asked_step(experiment, workdir, kept.steps(), asked), kept.newest_host()

    found = read(experiment, workdir, look)
    if found is None or found[1] is None:
        raise UserError(f"--back={asked}: {workdir} holds no checkpoint yet")
    if is_first():
        each, times = rollouts.prompts_of(experiment), updates_of(experiment.objective)
        back.begin(workdir, asked, *found, experiment.config, each, times)


def check_steps(experiment: Experiment, workdir: Place, asked: str = "") -> None:
    """Raises UserError if a run is already beyond train.num_steps.

    asked: checkpoint of --back, to which the run returns first
    """
    steps = read(experiment, workdir, Checkpoints.steps) or []
    returns = asked and not back.is_done(workdir, asked, experiment.config["optim"])
    made = _asked_step(experiment, workdir, steps, asked) if returns else max(steps, default=0)
    if made and made > experiment.train.num_steps:
        raise UserError(
            f"train.num_steps={experiment.train.num_steps} is less than the {made} steps that "
            f"{workdir} has made: set train.num_steps to {made} or more. To return to an earlier "
            f"checkpoint add --back STEP, with one of the steps {steps}. To evaluate or sample "
            "from one use eval.checkpoint=STEP"
        )


def check_not_lost(workdir: Place, kept: Mapping[str, Any] | None) -> None:
    """Raises UserError for a run that had a checkpoint and has none.

    Training would begin again, and the log of the run would be deleted.

    kept: the config that the run has so far; None for a new run
    """
    folder = workdir / "checkpoints"
    names = [path.name for path in folder.iterdir()] if exists(folder) else []
    is_first = (workdir / first_save.FILE).exists()  # which a loss of power may have damaged
    if kept is None or is_first or any(name.isdecimal() for name in names):
        return
    had = ""
    if step := _saved_step(workdir, kept["checkpoint"]):
        had = f"it has been trained to step {step}"
    elif source := imports.source_of(workdir):
        had = f"it was made of {source} by an import"
    if had:
        raise UserError(
            f"{workdir} holds no checkpoint, but {had}: its checkpoints were deleted, or not "
            f"copied with the rest. Copy them to {folder}. To train from the beginning use another "
            "--workdir"
        )


def _saved_step(workdir: Place, options: Mapping[str, Any]) -> int:
    """Returns a step for which a run surely had a checkpoint, or a later one; 0 without any.

    Results are of checkpoints. The log goes on after a first checkpoint is complete.
    """
    log, due = workdir / report.METRICS, [options.get(key, 0) for key in ("every", "keep_every")]
    rows = read_rows(log) if log.exists() else []
    logged = max((row["step"] for row in rows), default=0)
    results = [row["step"] for row in report.kept(workdir) if type(row.get("step")) is int]
    is_saved = logged > min(filter(None, due), default=logged)
    return max([*results, logged * is_saved], default=0)


def best(experiment: Experiment, workdir: Place, steps: list[int]) -> Best | None:
    """Returns the best checkpoint of these steps; None without checkpoint.best or without steps.

    Compares the evaluations during training, which are in metrics.jsonl.
    """
    if not experiment.checkpoint.best:
        return None
    log = workdir / report.METRICS
    rows = read_rows(log) if log.exists() else []
    return best_of(rows, figure_of(experiment), steps)


def best_line(experiment: Experiment, workdir: Place) -> str:
    """Returns the line of the summary about the best checkpoint, '' if there is none."""
    found = best(experiment, workdir, read(experiment, workdir, Checkpoints.steps) or [])
    if found is None:
        return ""
    value = f"{found.value:.4f}{plus_minus(found.error, '.4f')}"
    return f"\n  best          step {found.step}: {figure_of(experiment)} {value}"


def check_text(experiment: Experiment, corpus: Corpus, workdir: Place) -> None:
    """Raises UserError if the run in workdir was trained on other text than the corpus."""
    newest = read(experiment, workdir, Checkpoints.newest_host)
    if newest is None:
        return
    _, host = newest
    if "text" not in host:
        raise UserError(
            f"the checkpoints of {workdir} do not record which text they were trained on, so it "
            "cannot be checked that the text at the new data.path is the same: use the old "
            "data.path"
        )
    found = corpus.fingerprint()
    try:
        check_same_text(host["text"], found, workdir)
    except UserError as error:
        raise UserError(f"{error}. {ELSEWHERE}") from error


def read(experiment: Experiment, workdir: Place, ask: Callable[[Checkpoints], Any]) -> Any:
    """Returns ask(checkpoints of the run); None if the run has no checkpoints."""
    directory = workdir / "checkpoints"
    if not directory.exists():
        return None
    items.check_allowed(directory, below=False)  # it would be listed as empty
    checkpoints = Checkpoints(directory, experiment.checkpoint, read_only=True)
    answer = ask(checkpoints)
    checkpoints.close()
    return answer


def named_checkpoint(folder: Place) -> tuple[Place, dict[str, str]]:
    """Splits RUN/checkpoints/STEP into RUN and the key that chooses STEP.

    Returns other folders unchanged, without a key: another project may use these names too.
    """
    run, step = checkpoint_of(folder)
    if run == folder or not (run / config.FILE).exists() or is_folder(folder):
        return folder, {}
    return run, {"eval.checkpoint": step}


def other_run(
    experiment: Experiment, key: str, asked: str, hint: str = "", *, same_tokenizer: bool = True
) -> tuple[Experiment, Place]:
    """Returns (experiment, directory) of another run, with the mesh and batch size of this one."""
    directory, checkpoint = checkpoint_of(place(asked, key))
    kept = config.stored(directory) if directory.is_dir() else None
    if kept is None:
        raise UserError(f"{key}={asked} holds no run{hint}")
    domain = stored_domain(directory, kept["data"]["length"], foreign.load)
    if same_tokenizer and not same_symbols(domain, experiment.domain):
        raise UserError(f"{key}={asked} was trained with another tokenizer than this run")
    train = experiment.train
    size = {"batch_size": train.batch_size, "microbatches": train.microbatches}
    changed = {
        "mesh": experiment.config["mesh"],
        "train": {**kept["train"], **size},
        "evals": {} if _classifies(kept) else {"test": _bound(experiment, kept)},
        "sample": {**kept["sample"], **NO_FILES, "reward": {"name": "none"}},
        "checkpoint": {},
        "eval": {"checkpoint": checkpoint},
    }
    return build.experiment({**kept, **changed}, domain, workdir=directory), directory


def _classifies(kept: Mapping[str, Any]) -> bool:
    """Returns whether a config describes a classifier, which has no bound."""
    return getattr(class_of("network", kept["network"]["name"]), "classifies", False)


def _bound(experiment: Experiment, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the main bound of another run, with the draws and batch size of this one."""
    sections = [s for s in kept["evals"].values() if s["name"] == "likelihood"]
    its = next((s for s in sections if s.get("final", True)), sections[0] if sections else {})
    section = {"name": "likelihood", **{key: its[key] for key in ("objective",) if key in its}}
    mine = main_bound(experiment)
    if mine is None:
        return section | {"batch_size": experiment.train.batch_size}
    return section | {
        "draws": mine.draws, "seed": mine.seed, "batch_size": mine.sequences(experiment)
    }  # fmt: skip
