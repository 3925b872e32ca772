"""Every objective with processes of the registry that it goes with, on 1 and on 8 devices."""

import json

import pytest

pytestmark = pytest.mark.slow
EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


@pytest.fixture(params=["first", pytest.param("all", marks=pytest.mark.campaign)])
def metrics(request, start, tiny):
    """{mesh: {pair: {name: value}}} after one step from the same parameters."""
    process = start(tiny.with_name("pairs.py"), request.param, **EIGHT, PYTHONPATH=".:tests")
    out, err = process.communicate(timeout=3000)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.mark.campaign
def test_one_step_is_the_same_on_eight_devices(metrics):
    """Losses, diagnostics and the gradient's norm to 2e-4, float32 sums being in another order."""
    one, eight = metrics["one"], metrics["eight"]
    assert one.keys() == eight.keys() and len(one) > 7
    for pair, numbers in one.items():
        assert numbers["skipped"] == 0 and numbers["grad_norm"] > 0
        assert numbers == pytest.approx(eight[pair], rel=2e-4, abs=1e-6), pair
