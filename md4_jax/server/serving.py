"""Serving of the playground at an address of this machine."""

import contextlib
import ipaddress
import logging
import socket
import sys
from collections.abc import Callable
from typing import Any

from md4_jax.protocols import UserError

INSTALL = "the playground needs two packages: pip install -e '.[serve]'"


def run(load: Callable[[], Any], name: str, host: str, port: int) -> int:
    """Serves the playground of the model that `load` returns until Ctrl-C; returns the exit code.

    UserError if the address is taken, or if the packages of the server are not installed.
    """
    check_installed()
    import uvicorn

    from md4_jax.server.actions import Playground
    from md4_jax.server.app import application

    with bound(host, port) as listening:
        number = listening.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        app = application(Playground(load(), name), [host, socket.gethostname()])
        print(f"playground of {name}: http://{shown}:{number}   (Ctrl-C ends it)", flush=True)
        if not is_local(host):
            print(
                f"warning: --host {host} lets every machine that can connect to this one use the "
                "model without a password",
                file=sys.stderr,
            )
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        config = uvicorn.Config(
            app, ws="none", log_config=None, access_log=False, server_header=False, lifespan="off",
            limit_concurrency=128, timeout_keep_alive=5, timeout_graceful_shutdown=2,
        )  # fmt: skip
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])
    return 0


def check_installed() -> None:
    """Raises UserError, with the install command, if the packages of the server are missing."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(INSTALL) from error


def bound(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 selects a free one. UserError if that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        # Listens before the address is printed, and before another server can take it.
        listening.listen()
    except (OSError, OverflowError) as error:
        listening.close()
        why = str(error).rstrip(".")
        raise UserError(
            f"--host {host} --port {port} cannot be used: {why}. --port 0 uses any free port"
        ) from error
    return listening


def is_local(host: str) -> bool:
    """Returns whether the address is reachable only from this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
