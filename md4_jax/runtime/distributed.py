"""Multi-process programs: on a Cloud TPU pod, GKE, Slurm, or started by hand."""

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from md4_jax.protocols import UserError
from md4_jax.runtime.sharding import max_over_processes

# A process that does not connect, or is silent, for this time ends all others.
CONNECT_SECONDS = 300
HEARTBEAT_SECONDS = 100
USAGE = "--distributed is 'auto' (Cloud TPU, GKE, Slurm, MPI) or HOST:PORT,PROCESSES,INDEX"


def start(how: str | None) -> None:
    """Joins this process to the others; call it before any device is used.

    how: None for a single process; 'auto' if the cluster provides the addresses; otherwise
    'HOST:PORT,PROCESSES,INDEX', where HOST:PORT is a free port of process 0. UserError for any
    other value, and if the others do not connect within CONNECT_SECONDS.
    """
    if not how:
        return
    arguments = {} if how == "auto" else _explicit(how)
    if arguments.get("process_id"):
        _wait_for_first(arguments["coordinator_address"], how)
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
        other = "" if arguments else ". Outside a cluster give HOST:PORT,PROCESSES,INDEX"
        raise UserError(
            f"--distributed={how}: the processes could not connect to each other: {first}{other}"
        ) from error


def check_alike(facts: Mapping[str, Any]) -> None:
    """Raises UserError on all processes unless all have equal facts {name: JSON value}."""
    if not jax.distributed.is_initialized():
        return
    own = json.loads(json.dumps(facts))
    first = json.loads(_of_first(json.dumps(facts)))
    names = [name for name in own | first if own.get(name) != first.get(name)]
    if not max_over_processes(len(names)):
        return
    here = ", ".join(
        f"{n}={own.get(n)!r} in this process and {first.get(n)!r} in process 0" for n in names
    )
    raise UserError(
        "the processes were started with different "
        f"settings{': ' + here if here else ', which another process names'}. Start the same "
        "command, with the same version of md4_jax, in all of them"
    )


def _of_first(text: str) -> str:
    """Returns the text of process 0."""
    from jax.experimental import multihost_utils

    own = text.encode()
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(own))))
    padded = np.frombuffer(own[:size].ljust(size), np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))).decode()


def agreed(error: Exception | None, what: str) -> Exception | None:
    """Returns this process's error, or one about `what` if another process has one; None if none.

    All processes call it, while none waits for another. If one of them has an error, all end with
    one, together: see `leave`.
    """
    if not max_over_processes(int(error is not None)):
        return None
    return of_all(error or UserError(f"{what} failed in another process, which says why"))


def of_all(error: Exception) -> Exception:
    """Marks an error that every process ends with."""
    error.of_all_processes = True
    return error


def _is_of_all(error: BaseException | None) -> bool:
    """Returns whether an error, or one that caused it, is marked by `of_all`."""
    return error is not None and (
        getattr(error, "of_all_processes", False) or _is_of_all(error.__cause__)
    )


def is_first() -> bool:
    """Returns whether this is the only process or the first of several."""
    return jax.process_index() == 0


def fault(error: Exception) -> int:
    """Prints why this process of several ends, and returns the exit code 1.

    Re-raises the error if the process is the only one. If another process ends, this one gets an
    error of the runtime.
    """
    if not jax.distributed.is_initialized():
        raise error
    # Reading a result raises gloo's error as a ValueError.
    if not (isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)):
        traceback.print_exception(error)
    first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    print(
        f"error: this process cannot continue, probably because another one ended: {first}\nTo "
        "continue from the last complete checkpoint, repeat the command in every process.",
        file=sys.stderr,
        flush=True,
    )
    return 1


def leave(code: int, error: BaseException | None = None) -> None:
    """Ends this process; after a failure immediately, without waiting for the others.

    After an error that all processes end with, they wait for each other, so that none is ended by
    the runtime before it has said why. An interrupted process does not wait for the program that
    its devices compute: if Python's ordinary exit comes first, that program crashes at its end.
    """
    is_alone = jax.distributed.is_initialized() and not _is_of_all(error)
    if isinstance(error, KeyboardInterrupt) or (code in (1, 2) and is_alone):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _wait_for_first(address: str, how: str) -> None:
    """Waits until process 0 listens; UserError if its host is unknown or it does not listen.

    JAX itself would end this process with a C++ stack trace instead of a message.
    """
    host, _, port = address.rpartition(":")
    until = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            return
        except socket.gaierror as error:
            raise UserError(
                f"--distributed={how}: the host {host!r} was not found: {error.strerror}"
            ) from error
        except OSError as error:
            if time.monotonic() > until:
                raise UserError(
                    f"--distributed={how}: process 0 did not listen on {address} within "
                    f"{CONNECT_SECONDS} s: {error}"
                ) from error
        time.sleep(0.2)


def _explicit(how: str) -> dict[str, str | int]:
    parts = how.split(",")
    address = parts[0].rpartition(":")
    numbers = [address[2], *parts[1:]]
    if len(parts) != 3 or not address[0] or not all(n.isdigit() for n in numbers):
        raise UserError(f"{USAGE}, not {how!r}")
    processes, index = int(parts[1]), int(parts[2])
    if not processes:
        raise UserError(f"--distributed={how}: PROCESSES must be at least 1, not 0")
    if not 0 <= index < processes:
        raise UserError(f"--distributed={how}: INDEX must lie in 0..{processes - 1}, not {index}")
    return {"coordinator_address": parts[0], "num_processes": processes, "process_id": index}
