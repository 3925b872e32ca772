"""The program starts without the libraries that only some runs need."""

import os
import subprocess
import sys

import pytest

# Plots, curves, a tracker, data of other formats, the hub.
LATER = (
    "matplotlib",
    "scipy.interpolate",
    "tensorboardX",
    "tensorflow",
    "huggingface_hub",
    "pyarrow",
)


@pytest.mark.slow
def test_what_takes_long_to_import_waits_for_its_use():
    code = f"import sys, md4_jax.modes; print([name for name in {LATER} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("ignored", [False, True])
def test_an_interruption_while_libraries_are_imported_has_one_line(ignored, tmp_path):
    """Though they may swallow the exception; what a shell made deaf to Ctrl-C stays so."""
    (tmp_path / "jax.py").write_text(
        "import os, signal, time\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(1)\n"
        "except BaseException:\n    pass\n"
        "raise SystemExit(3)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    handler = "SIG_IGN" if ignored else "default_int_handler"
    code = f"import signal; signal.signal(signal.SIGINT, signal.{handler})"
    code += "; from md4_jax.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (
        (3, "") if ignored else (130, "interrupted while starting: nothing has changed\n")
    )


def test_a_wrong_name_does_not_wait_for_what_models_need(tmp_path):
    """Their imports take seconds, and so do the devices of some machines."""
    code = """
import socket, sys
def none(*_, **__):
    raise socket.gaierror(-2, "Name or service not known")
socket.getaddrinfo = none
import md4_jax
try:
    md4_jax.load("no/such")
except md4_jax.UserError as error:
    print(error)
from jax._src import xla_bridge
print([name for name in sys.modules if name.startswith("md4_jax.networks")], xla_bridge._backends)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HOME": str(tmp_path / "hub")},
        timeout=60,
    )
    assert done.stdout == (
        f"there is no folder {tmp_path}/no/such, and hf:no/such is not in the hub's cache and "
        "cannot be fetched: the address of huggingface.co was not found. Is there a network?\n"
        "[] {}\n"
    ), done


@pytest.mark.slow
def test_an_interruption_does_not_wait_for_the_program_on_the_devices():
    """Python's ordinary exit does, until the last sample is drawn; then it may crash."""
    code = """
import jax, jax.numpy as jnp
from md4_jax import main

noise = jnp.ones((64, 64)).block_until_ready()

def interrupted(arguments):
    without_end = lambda x: jax.lax.while_loop(lambda x: x[0, 0] >= 0, lambda x: abs(x @ x), x)
    drawn = jax.jit(without_end)(noise)
    print("dispatched")
    raise KeyboardInterrupt

main.run = interrupted
main.main()
"""
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (130, "dispatched\n")
    assert done.stderr == "interrupted: repeat the command to continue\n"
