"""The program starts without the libraries that only some runs need."""

import subprocess
import sys

# Plots, curves, a tracker, data of other formats, the hub.
LATER = (
    "matplotlib",
    "scipy.interpolate",
    "tensorboardX",
    "tensorflow",
    "huggingface_hub",
    "pyarrow",
)


def test_what_takes_long_to_import_waits_for_its_use():
    code = f"import sys, md4_jax.modes; print([name for name in {LATER} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
