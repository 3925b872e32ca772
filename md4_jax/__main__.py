"""`python -m md4_jax`, and the command md4_jax."""

import os
import signal


def main() -> None:
    """Imports the package, which takes seconds and can be interrupted, and runs the command."""
    is_free = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_free:  # and not ignored, as under nohup
        signal.signal(signal.SIGINT, _leave)
    from md4_jax import main

    if is_free:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main.main()


def _leave(number: int, frame: object) -> None:
    """Ends the process without a traceback; libraries may swallow errors during import."""
    del number, frame
    os.write(2, b"interrupted while starting: nothing has changed\n")
    os._exit(130)


if __name__ == "__main__":
    main()
