"""Runs the program many times in one process, which compiles its functions once.

A run of six steps takes a quarter of the time that way. Only what depends on nothing but the
config is kept: the built experiment, compiled functions, and the state before the first step.
Whatever reads or writes a file happens anew in each run.
"""

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any


def once(module: Any, name: str) -> None:
    """Lets a function of a module keep what it returned first."""
    real, kept = getattr(module, name), []

    def keeping(*arguments: Any, **more: Any) -> Any:
        if not kept:
            kept.append(real(*arguments, **more))
        return kept[0]

    setattr(module, name, keeping)


def compile_once() -> None:
    """Lets later runs of this process, all of one config, use what the first has compiled."""
    import jax
    import jax.numpy as jnp

    from md4_jax.config import build
    from md4_jax.evals import samples, suite
    from md4_jax.training import loop, precision

    for module, name in ((build, "experiment"), (loop, "step_program"), (loop, "fresh_state")):
        once(module, name)
    for module in (loop, precision):
        once(module, "abstract_state")
    first_state, begin, programs = loop.fresh_state, suite.Suite.__init__, {}
    # A training step overwrites the state that it is given.
    loop.fresh_state = lambda experiment: jax.tree.map(jnp.copy, first_state(experiment))

    def begin_with_programs(self: suite.Suite, *arguments: Any, **more: Any) -> None:
        begin(self, *arguments, **more)
        self._programs = programs

    suite.Suite.__init__ = begin_with_programs
    make = samples.make_sampler

    def made(*arguments: Any, **more: Any) -> Any:
        sampler = make(*arguments, **more)
        return sampler._replace(program=_CompiledOnce(sampler.program))

    samples.make_sampler = made


class _CompiledOnce:
    """A jitted function that is lowered and compiled for its first arguments only."""

    def __init__(self, program: Any):
        self._program, self._compiled = program, None

    def lower(self, *arguments: Any) -> "_CompiledOnce":
        if self._compiled is None:
            self._compiled = self._program.lower(*arguments).compile()
        return self

    def compile(self) -> Any:
        return self._compiled


def exit_code(run: Callable[[], Any], out: os.PathLike) -> int:
    """Runs a program whose output goes to a file; returns the exit code of its process."""
    sys.stdout.flush()
    before = [os.dup(1), os.dup(2)]
    file = os.open(out, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        run()
    except SystemExit as ended:
        return ended.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, kept in zip((1, 2), before, strict=True):
            os.dup2(kept, number)
            os.close(kept)
        os.close(file)
    return 0
