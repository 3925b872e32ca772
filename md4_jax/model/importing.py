"""Creation of a run directory from a model, to continue its training."""

import shlex
from collections.abc import Mapping

from md4_jax.config import chats, inputs
from md4_jax.config import load as config_lib
from md4_jax.data.chat import Chat
from md4_jax.data.domains import keep_domain
from md4_jax.model.load import load
from md4_jax.model.model import Model
from md4_jax.protocols import UserError
from md4_jax.runtime import errors
from md4_jax.runtime.distributed import is_first
from md4_jax.runtime.paths import Place, check_name, check_writable
from md4_jax.training import base
from md4_jax.training.checkpoint import Checkpoints
from md4_jax.training.loop import started
from md4_jax.training.precision import check_matrices, check_trainable

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

    changes: keys of its config, such as data.path. adapters: folder of a LoRA, as in `load`.
    UserError if workdir holds a run.
    """
    check_name(workdir)
    if config_lib.stored(workdir) is not None:
        raise UserError(f"{workdir} already holds a run: use another --workdir")
    model = load(source, changes, adapters=adapters)
    form = _form(model)
    check_trainable(model.experiment)
    check_matrices(model.experiment)
    if any(key.startswith("data.") for key in changes):
        inputs.check_files(model.config["data"], form)
    if is_first():
        check_writable(workdir)
        keep_domain(model.domain, workdir)
        if form is not None:
            form.keep(workdir)
        if model.layout is not None:
            model.layout.keep(workdir)
    state = started(model.experiment, lambda fresh: model.params)
    base.keep(workdir, state.frozen, model.experiment.checkpoint.retries)
    checkpoints = Checkpoints(workdir / "checkpoints", model.experiment.checkpoint)
    checkpoints.save(0, state._replace(frozen=()), FRESH | base.mark(workdir))
    checkpoints.wait()
    checkpoints.close()
    if is_first():
        config_lib.store(workdir, model.config)
    return model


def _form(model: Model) -> Chat | None:
    """Returns the chat template to keep: that of data.chat_template, else the model's own."""
    section = model.config["data"]
    if model.form is not None and not section.get("chat_template"):
        return model.form.dated()
    return chats.of_run(model.config, None)
