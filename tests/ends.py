"""Every process with every schedule, and the steps at both ends of time."""

import dataclasses

import exact
import pytest

from md4_jax.processes.schedules import SCHEDULES, Geometric, Linear, Polynomial
from md4_jax.processes.transition import Transition
from md4_jax.protocols import UserError
from md4_jax.samplers import SAMPLERS

# Those of the registry, one whose noise and one whose alpha are too small for a float32.
ALL = {name: make() for name, make in SCHEDULES.items()} | {
    "polynomial, steep": Polynomial(20.0),
    "geometric, long": Geometric(1e-3, 200.0),
}
# Every sampler beside the name of a process that it goes with.
PAIRS = {
    f"{name}; {of}": (make, of)
    for of, process in exact.PROCESS_CASES.items()
    for name, make in SAMPLERS.items()
    if exact.fits(make(), process(3))
}


def with_schedule(make, schedule):
    """A process of three symbols with a schedule, None where they do not go together."""
    process = make(3).init()
    try:
        return dataclasses.replace(process, schedule=schedule)
    except UserError:
        return None
    except TypeError:  # its schedule is its own
        return process if isinstance(schedule, Linear) else None


def cases() -> list:
    pairs = {
        f"{name}; {of}": with_schedule(make, schedule)
        for name, make in exact.PROCESS_CASES.items()
        for of, schedule in ALL.items()
    }
    return [pytest.param(process, id=name) for name, process in pairs.items() if process]


def has_mask(process) -> bool:
    """Whether the process has a symbol besides the three clean ones."""
    return getattr(process, "mask_id", None) is not None


def states(process) -> int:
    return 3 + has_mask(process)


def times_of(process) -> list[tuple[float, float]]:
    """(s, t) of steps at both ends."""
    if isinstance(process, Transition):
        return [(1.0 - 1.0 / process.timesteps, 1.0), (0.0, 1.0 / process.timesteps)]
    return [(0.75, 1.0), (0.0, 1.0), (0.0, 1e-3), (0.0, 2.0**-24)]
