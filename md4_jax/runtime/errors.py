"""One-sentence messages for system errors: of a disk, a directory or the memory."""

import contextlib
import errno
from collections.abc import Callable, Iterator, Sequence

import jax

from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, exists

SMALLER = (
    "reduce train.batch_size, evals.NAME.batch_size or sample.batch_size, or the size of the "
    "network"
)
_WRITABLE = "give this user permission for that, or copy the run to a writable directory,"
REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EACCES: _WRITABLE,
    errno.EPERM: _WRITABLE,
    errno.EROFS: _WRITABLE,
}


@contextlib.contextmanager
def said(workdir: Place, *, resumes: bool = True) -> Iterator[None]:
    """Converts system errors to UserError.

    resumes: whether the same command resumes where it stopped
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not _is_memory(error):
            raise
        raise _memory(error) from error
    except OSError as error:
        if error.errno is None:
            raise
        if _is_below(workdir, error.filename) and not exists(workdir):
            raise UserError(
                f"{workdir} is gone: it was moved or deleted during the run. If it was moved, "
                "continue it with its new place as --workdir, without --config"
            ) from error
        after = ", which resumes from the last complete checkpoint" if resumes else ""
        raise UserError(
            f"{_of_system(error)}, while working on {workdir}: {_remedy(error)} and start the same "
            f"command again{after}"
        ) from error
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # of Rust, which is no Exception
            raise UserError(f"the tokenizers library failed: {error}") from error
        raise


def _is_below(workdir: Place, file: object) -> bool:
    return isinstance(file, str) and file.startswith(f"{workdir}/")


def cause(error: Exception) -> str | None:
    """Returns what to tell of an error that is no fault of the program; None for any other.

    Such are mistakes of the user (UserError), failures of disks and networks (OSError), and too
    little memory.
    """
    if isinstance(error, UserError):
        return str(error)
    if _is_memory(error):
        return str(_memory(error))
    if not isinstance(error, OSError):
        return None
    if error.errno is None:
        return f"{type(error).__name__}: {error}"
    return f"{_of_system(error)}: {_remedy(error)}"


def name_sizes(error: Exception, sizes: Callable[[], Sequence[str]]) -> None:
    """Adds what may be reduced, such as "evals.test.batch_size=64", to an error of the memory."""
    if _is_memory(error):
        error.sizes = sizes()


def _is_memory(error: Exception) -> bool:
    is_exhausted = "RESOURCE_EXHAUSTED" in str(error)
    of_devices = isinstance(error, jax.errors.JaxRuntimeError) and is_exhausted
    return isinstance(error, MemoryError) or of_devices


def _of_system(error: OSError) -> str:
    return f"{error.filename or 'a file'}: {error.strerror} (errno {error.errno})"


def _remedy(error: OSError) -> str:
    return REMEDIES.get(error.errno, "correct that")


def _memory(error: Exception) -> UserError:
    first = (str(error).strip().splitlines() or ["no details"])[0][:200]
    sizes = " or ".join(getattr(error, "sizes", ()))
    smaller = f"reduce {sizes}, or the size of the network" if sizes else SMALLER
    return UserError(f"there is not enough memory ({first}): {smaller}")
