"""One-sentence messages for system errors: of a disk, a directory or the memory."""

import contextlib
import errno
from collections.abc import Iterator

import jax

from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place

SMALLER = (
    "lower train.batch_size, evals.NAME.batch_size or sample.batch_size, or the network's sizes"
)
_WRITABLE = "let this user write there, or copy the run to where you may write,"
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
    except MemoryError as error:
        raise _memory(error) from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise _memory(error) from error
    except OSError as error:
        if error.errno is None:
            raise
        remedy = REMEDIES.get(error.errno, "mend that")
        after = ", which resumes from the last complete checkpoint" if resumes else ""
        raise UserError(
            f"{error.filename or 'a file'}: {error.strerror} (errno {error.errno}), while working "
            f"on {workdir}: {remedy} and start the same command again{after}"
        ) from error
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # of Rust, which is no Exception
            raise UserError(f"the tokenizers library gives up: {error}") from error
        raise


def _memory(error: Exception) -> UserError:
    first = (str(error).strip().splitlines() or ["no more is given"])[0][:200]
    return UserError(f"there is not enough memory ({first}): {SMALLER}")
