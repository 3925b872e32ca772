"""Initial parameters from another run: `train.initial`, or a teacher."""

from collections.abc import Callable

import jax

from md4_jax.config import load as config
from md4_jax.config.inputs import PUBLISHED
from md4_jax.config.runs import averaged, check_checkpoint, other_run, read
from md4_jax.config.same_network import differing
from md4_jax.data.domains import other_class
from md4_jax.experiment import Experiment
from md4_jax.protocols import Params, UserError
from md4_jax.runtime.paths import Place
from md4_jax.runtime.sharding import path_name
from md4_jax.training import first_save
from md4_jax.training.checkpoint import Checkpoints
from md4_jax.training.loop import fresh_parts
from md4_jax.training.precision import abstract_params
from md4_jax.training.trainable import is_new, joined

# Keys of a network that may differ from those of the other run: training adapts to them.
RELEARNED = (
    "causal", "causal_context", "shifted", "rotary_base", "rotary_scaling", "rotary_ramp",
    "rotary_gain", "rotary_type", "query_scaling", "local_base", "window",
)  # fmt: skip


def beginning(
    experiment: Experiment, workdir: Place, say: Callable[[str], None]
) -> Callable[[Params], Params] | None:
    """Returns a function: fresh parameters -> those of train.initial; None if it is empty.

    Also None if the run in workdir has a checkpoint: it no longer needs the other run. Both
    networks must have parameters of the same shapes; only `new_parts` may be new. They must compute
    the same function of them, except for the RELEARNED keys. Parameters of the process are copied
    if they have the same shapes. Raises UserError immediately if the other run does not fit, and
    for adapters of a network that starts from random parameters.
    """
    asked, has_adapters = experiment.train.initial, bool(experiment.network.adapters)
    if not (asked or has_adapters or experiment.objective.needs.teacher):
        return None
    if steps := read(experiment, workdir, Checkpoints.steps):
        if not first_save.was_cut_short(workdir, steps[-1]):
            return None
        # Needed only if this first checkpoint turns out to be unreadable.
        return lambda fresh: _made(experiment, say)(fresh)
    return _made(experiment, say)


def _made(experiment: Experiment, say: Callable[[str], None]) -> Callable[[Params], Params]:
    """Returns the function of `beginning` for a run that has no checkpoint."""
    asked, taught = experiment.train.initial, experiment.objective.needs.teacher
    if taught and not asked:
        raise UserError(
            f"objective.name={experiment.config['objective']['name']!r} needs a teacher, which is "
            "a model that is already trained: give its run by --config.train.initial=RUN. To use "
            "a published model as the teacher, first make a run of it by --mode import --from "
            "FOLDER"
        )
    if not asked:
        raise UserError(
            "network.lora_rank trains adapters of a model that is already trained: give its run "
            "by --config.train.initial=RUN, or start this run from a published model by --mode "
            "import --from FOLDER"
        )
    other, directory = other_run(experiment, "train.initial", asked, PUBLISHED)
    if taught:
        _check_teacher(experiment, other)
    check_checkpoint(other, directory)
    own, its = (_shapes(abstract_params(e)["network"]) for e in (experiment, other))
    new = {path for path in own.keys() - its.keys() if is_new(experiment.network, path)}
    if {path: shape for path, shape in own.items() if path not in new} != its:
        raise UserError(
            f"train.initial={asked} has a network with other parameters than this run: "
            f"{_difference(experiment, other)}"
        )
    changed = _changed(experiment, other)
    _check_places(experiment, other)

    def begin(fresh: Params) -> Params:
        step, params = averaged(other, directory)
        say(f"begins with the averaged parameters of step {step} of {asked}{changed}")
        same = _shapes(params["process"]) == _shapes(fresh["process"])
        process = params["process"] if same else fresh["process"]
        # Keep this run's hyper-parameters of the process, with the learned values of the other.
        leaves, structure = jax.tree.leaves(process), jax.tree.structure(fresh["process"])
        network = params["network"]
        if new:
            network = joined(fresh_parts(experiment), network)
        return {"network": network, "process": jax.tree.unflatten(structure, leaves)}

    return begin


def _changed(experiment: Experiment, other: Experiment) -> str:
    """Describes which RELEARNED keys differ, '' if none; UserError if any other key differs.

    For a teacher no key may differ, because its parameters are used without further training.
    """
    found = differing(experiment, other)
    said = ", ".join(
        f"network.{key}={its!r} in that run and {own!r} in this one" for key, own, its in found
    )
    relearned = () if experiment.objective.needs.teacher else RELEARNED
    if {key for key, _, _ in found} - set(relearned):
        raise UserError(
            f"train.initial={experiment.train.initial} has a network with parameters of the same "
            f"shapes but another meaning: {said}. Set the keys to the values of that run"
        )
    return f", whose network had {said}" if found else ""


def _check_teacher(experiment: Experiment, teacher: Experiment) -> None:
    """Raises UserError if the teacher was trained with other noise or classes than the student."""
    said = (
        f"train.initial={experiment.train.initial} cannot be the teacher of "
        f"objective.name={experiment.config['objective']['name']!r}: it was trained "
    )
    if experiment.process != teacher.process:
        raise UserError(
            f"{said}with another process: {_keys('process', experiment, teacher)}. Set the keys to "
            "the values of the teacher"
        )
    if different := other_class(experiment.domain, teacher.domain):
        raise UserError(
            f"{said}on other classes: {different}. Use data with the classes of the teacher"
        )


def _check_places(experiment: Experiment, other: Experiment) -> None:
    """Raises UserError if a class of this run has another number in the other run.

    Vectors of classes are copied by number. Classes that the other run lacks may be anywhere.
    """
    if not experiment.config["network"].get("classes", 0):
        return
    own, its = (tuple(getattr(e.domain, "labels", ())) for e in (experiment, other))
    for number, name in enumerate(own):
        if name in its and its.index(name) != number:
            raise UserError(
                f"train.initial={experiment.train.initial} has other numbers for the classes: "
                f"{name!r} is class {number} of this run, but class {its.index(name)} of that run, "
                "whose vectors of classes are copied by number. Use data with the classes of that "
                "run"
            )


def _shapes(params: Params) -> dict[str, tuple[int, ...]]:
    return {path_name(p): x.shape for p, x in jax.tree_util.tree_leaves_with_path(params)}


def _difference(experiment: Experiment, other: Experiment) -> str:
    """Describes the difference of two networks: keys of the config, or else a parameter."""
    if said := _keys("network", experiment, other):
        return said
    shapes = [_shapes(abstract_params(e)["network"]) for e in (experiment, other)]
    name = min(set(shapes[0].items()) ^ set(shapes[1].items()))[0]
    return f"{name} is {shapes[1].get(name)} in that run and {shapes[0].get(name)} in this one"


def _keys(section: str, experiment: Experiment, other: Experiment) -> str:
    """Lists the keys of a config section that differ, with both values; '' if none."""
    own, its = (dict(config.flatten(e.config[section])) for e in (experiment, other))
    keys = [key for key in sorted({**own, **its}) if own.get(key) != its.get(key)]
    said = [
        f"{section}.{k}={its.get(k)!r} in that run and {own.get(k)!r} in this one" for k in keys
    ]
    return ", ".join(said)
