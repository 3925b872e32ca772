"""JAX on the CPU beside an accelerator, and devices that are asked for and not there."""

import types

import jax
import pytest

from md4_jax.protocols import UserError
from md4_jax.runtime import devices


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Sets the platform that JAX runs on, whether there is a driver, and JAX_PLATFORMS."""

    def machine(platform: str, driver: bool, asked: str = "") -> None:
        path = tmp_path / "driver"
        path.unlink(missing_ok=True)
        if driver:
            path.touch()
        monkeypatch.setattr(devices, "DRIVERS", {str(path): ("an X", "pip install Y")})
        monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(platform=platform)])
        monkeypatch.setenv("JAX_PLATFORMS", asked)

    return machine


def test_the_cpu_beside_an_idle_accelerator(machine):
    machine("cpu", driver=True)
    assert devices.warning() == (
        "this machine has an X, but JAX runs on the CPU: pip install Y, or set JAX_PLATFORMS=cpu "
        "to use the CPU"
    )


@pytest.mark.parametrize(
    "settings", [("gpu", True), ("cpu", False), ("cpu", True, "cpu"), ("cpu", True, "tpu,cpu")]
)
def test_nothing_to_say(settings, machine):
    machine(*settings)
    assert devices.warning() == ""


@pytest.mark.parametrize(
    "error, words",
    [
        (
            RuntimeError("Unable to initialize backend 'cuda'\n."),
            "(Unable to initialize backend",
        ),
        (AssertionError(), "(no plug-in of JAX provides it)"),
    ],
)
def test_devices_that_are_not_there(error, words, machine, monkeypatch):
    def missing():
        raise error

    machine("cpu", driver=True, asked="cuda")
    monkeypatch.setattr(jax, "devices", missing)
    with pytest.raises(UserError) as caught:
        devices.warning()
    assert str(caught.value).startswith("JAX_PLATFORMS=cuda asks for devices") and words in str(
        caught.value
    )


@pytest.mark.parametrize(
    "platform, dtype, words",
    [("gpu", "float32", "attention of a GPU"), ("tpu", "float32", "attention of a TPU"),
     ("gpu", "bfloat16", ""), ("cpu", "float32", ""), ("gpu", "", "")],
)  # fmt: skip
def test_an_accelerator_that_could_be_faster(platform, dtype, words, machine):
    machine(platform, driver=False)
    said = devices.slower(dtype)
    assert words in said and bool(said) == bool(words)
    assert not said or "--config.network.dtype=bfloat16" in said


def test_both_are_said_in_front_of_a_mode(machine):
    machine("gpu", driver=True)
    (said,) = devices.remarks({"dtype": "float32"})
    assert said.startswith("note: the network computes in float32. ")
    machine("cpu", driver=True)
    (said,) = devices.remarks({"dtype": "float32"})
    assert said.startswith("warning: this machine has an X, ")
    machine("gpu", driver=True)
    assert devices.remarks({"dtype": "bfloat16"}) == devices.remarks({}) == []
