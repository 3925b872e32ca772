"""Several processes as one program: on a Cloud TPU pod, GKE, Slurm, or started by hand."""

import os
import sys
import traceback

import jax

from md4_jax.protocols import UserError

# A process that does not connect within this time, or is silent for so long, ends all others.
CONNECT_SECONDS = 300
HEARTBEAT_SECONDS = 100
USAGE = "--distributed is 'auto' (Cloud TPU, GKE, Slurm, MPI) or HOST:PORT,PROCESSES,INDEX"


def start(how: str) -> None:
    """Joins this process to the others; must come before any device is used.

    how: '' for a single process; 'auto' where the cluster knows the others;
    'HOST:PORT,PROCESSES,INDEX' otherwise, where HOST:PORT is a free port of process 0. UserError
    for anything else, and if the others do not connect within CONNECT_SECONDS.
    """
    if not how:
        return
    arguments = {} if how == "auto" else _explicit(how)
    # CPU devices of several processes communicate through gloo; other platforms ignore this.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=CONNECT_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"--distributed={how}: the processes did not meet: {first}") from error


def is_first() -> bool:
    """Returns whether this is the only process or the first of several."""
    return jax.process_index() == 0


def fault(error: Exception) -> int:
    """Prints why this process, one of several, ends, and returns the exit code 1.

    Raises the error again where the process is the only one. When another process ends, this one
    sees an error of the runtime.
    """
    if not jax.distributed.is_initialized():
        raise error
    if not isinstance(error, jax.errors.JaxRuntimeError):
        traceback.print_exception(error)
    first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    print(
        f"error: this process cannot go on, probably because another one ended: {first}\n"
        "The same command, started again in every process, goes on from the last whole checkpoint.",
        file=sys.stderr,
        flush=True,
    )
    return 1


def leave(code: int) -> None:
    """Ends this process; after a failure immediately, without waiting for the others."""
    if code in (1, 2) and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _explicit(how: str) -> dict[str, str | int]:
    parts = how.split(",")
    if len(parts) != 3 or ":" not in parts[0] or not (parts[1] + parts[2]).isdigit():
        raise UserError(f"{USAGE}, not {how!r}")
    processes, index = int(parts[1]), int(parts[2])
    if not 0 <= index < processes:
        raise UserError(f"--distributed={how}: INDEX must lie in 0..{processes - 1}, not {index}")
    return {"coordinator_address": parts[0], "num_processes": processes, "process_id": index}
