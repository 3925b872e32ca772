"""Sequences that are split over devices: the same numbers, and the work shared."""

import json
import subprocess
import sys
from pathlib import Path

import contexts
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from several_devices import with_devices

from md4_jax.protocols import UserError
from md4_jax.runtime.sharding import AXES, spec_for

HERE = Path(__file__).parents[1]
# What is not divided by four devices; scores that tiles would not compute; unequal shares of keys.
WORK = {"odd length": 0.25, "blocks": 0.2, "blocks, layers one by one": 0.2, "cache": 0.2}
WORK |= {"neighbours": 0.129}  # 0.1276; with tokens of batch and length in one axis 0.1314
# Sums in another order change which way an operand is rounded.
ROUNDED = {"bfloat16 products": 0.05}


def cases(*names):
    """Cases as parameters of a test."""
    marks = {True: pytest.mark.campaign, False: pytest.mark.slow}
    return [pytest.param(name, marks=marks[name in contexts.IN_CAMPAIGNS]) for name in names]


@pytest.fixture(scope="module")
def found(request):
    """What the cases of this run of the tests have."""
    here = [item for item in request.session.items if item.path == request.path]
    names = {item.callspec.params["case"] for item in here if "found" in item.fixturenames}
    done = subprocess.run(
        [sys.executable, HERE / "contexts.py", *names],
        env=with_devices(8),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", cases(*contexts.CASES, *contexts.KERNEL, *contexts.SAMPLES))
def test_outputs_and_gradients_are_those_of_one_device(case, found):
    assert found[case]["difference"] < ROUNDED.get(case, 1e-3)


@pytest.mark.parametrize("case", cases(*contexts.CASES))
def test_each_of_eight_devices_has_an_eighth_of_the_work(case, found):
    assert found[case]["work"] < WORK.get(case, 0.145)


@pytest.mark.parametrize(
    "name, shape, spec",
    [
        (
            "network/blocks/attention/query/kernel",
            (3, 8, 8),
            P(None, ("fsdp", "context"), "tensor"),
        ),
        ("network/blocks_1/attention/out/kernel", (8, 8), P("tensor", ("fsdp", "context"))),
        ("network/head/bias", (128,), P("tensor")),
    ],
)
def test_parameters_are_split_over_it_too(name, shape, spec):
    assert spec_for(name, shape, AbstractMesh((1, 2, 4, 2), AXES)) == spec


def test_an_uneven_split_names_both_axes():
    said = "of 12, which is not a multiple of mesh.fsdp=2 times mesh.context=4"
    with pytest.raises(UserError, match=said):
        spec_for("network/head/kernel", (12, 128), AbstractMesh((1, 2, 4, 2), AXES))
