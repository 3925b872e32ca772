"""Creation of a run directory from a model, to continue its training."""

import contextlib
import shlex
from collections.abc import Mapping

from md4_jax.config import chats, imports, inputs
from md4_jax.config import load as config_lib
from md4_jax.data.chat import Chat
from md4_jax.data.domains import KEPT, keep_domain
from md4_jax.model.layout import FILE as LAYOUT
from md4_jax.model.load import load
from md4_jax.model.model import Model
from md4_jax.protocols import UserError
from md4_jax.runtime import errors
from md4_jax.runtime.distributed import is_first
from md4_jax.runtime.locks import exclusive
from md4_jax.runtime.paths import Place, check_name, check_writable, exists
from md4_jax.runtime.sharding import max_over_processes
from md4_jax.training import base, first_save
from md4_jax.training.checkpoint import Checkpoints
from md4_jax.training.loop import started
from md4_jax.training.precision import check_matrices, check_trainable

# What an import writes into a run directory before config.json.
OWN = (*KEPT, LAYOUT, base.FOLDER, "checkpoints", first_save.FILE)
# Positions of the data and of the log before the first step.
FRESH = {"data": {"sequences": 0}, "log": {"sums": {}, "squares": 0.0, "count": 0}}


def run(source: str, changes: Mapping[str, str], workdir: Place, adapters: str = "") -> int:
    """Writes a run directory with the parameters of a model, prints it, returns the exit code."""
    with errors.said(workdir, resumes=False):
        model = imported(source, changes, workdir, adapters)
    if is_first():
        print(f"{model} is step 0 of {workdir}. To continue training:", flush=True)
        print(f"  python -m md4_jax --workdir {shlex.quote(str(workdir))}", flush=True)
    return 0


def imported(source: str, changes: Mapping[str, str], workdir: Place, adapters: str = "") -> Model:
    """Writes a run with the parameters of `source` as its checkpoint of step 0.

    What an import into workdir that was interrupted has left is deleted first.

    changes: keys of its config, such as data.path. adapters: folder of a LoRA, as in `load`.
    UserError if workdir holds a run, or files of another run or model.
    """
    check_name(workdir)
    if not imports.has_begun(workdir) and config_lib.stored(workdir) is not None:
        raise _holds_run(workdir)
    model = load(source, changes, adapters=adapters)
    form = _form(model)
    check_trainable(model.experiment)
    check_matrices(model.experiment)
    if any(key.startswith("data.") for key in changes):
        inputs.check_files(model.config["data"], form)
    with contextlib.ExitStack() as held:
        if is_first():
            check_writable(workdir)
            held.enter_context(exclusive(workdir))
            _clear(workdir)
            imports.begin(workdir, source)
            keep_domain(model.domain, workdir)
            if form is not None:
                form.keep(workdir)
            if model.layout is not None:
                model.layout.keep(workdir)
        max_over_processes(0)  # the others wait until the directory is cleared
        _save(model, workdir)
        if is_first():
            config_lib.store(workdir, model.config)
            imports.end(workdir, source)
    return model


def _save(model: Model, workdir: Place) -> None:
    """Saves the parameters as the checkpoint of step 0, the frozen ones as the base."""
    state = started(model.experiment, lambda fresh: model.params)
    base.keep(workdir, state.frozen, model.experiment.checkpoint.retries)
    checkpoints = Checkpoints(workdir / "checkpoints", model.experiment.checkpoint)
    checkpoints.save(0, state._replace(frozen=()), FRESH | base.mark(workdir))
    checkpoints.wait()
    checkpoints.close()


def _clear(workdir: Place) -> None:
    """Deletes what an interrupted import left in a directory.

    UserError if it holds a run, or files of a run or model that no import left: the vocabulary of
    another model would be taken for that of this one.
    """
    if exists(workdir / config_lib.FILE):
        raise _holds_run(workdir)
    found = [workdir / name for name in OWN if (workdir / name).exists()]
    if found and not imports.has_begun(workdir):
        names = ", ".join(path.name for path in found)
        raise UserError(
            f"{workdir} holds files of another run or model: {names}. Use another --workdir, or "
            "delete them if an import left them"
        )
    for path in found:
        path.rmtree() if path.is_dir() else path.unlink()


def _holds_run(workdir: Place) -> UserError:
    return UserError(f"{workdir} already holds a run: use another --workdir")


def _form(model: Model) -> Chat | None:
    """Returns the chat template to keep: that of data.chat_template, else the model's own."""
    section = model.config["data"]
    if model.form is not None and not section.get("chat_template"):
        return model.form.dated()
    return chats.of_run(model.config, None)
