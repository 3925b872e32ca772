"""The same run on any mesh and with any number of microbatches: draws equal, losses to rounding."""

import json

import numpy as np
import pytest

pytestmark = pytest.mark.slow

EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
# 8 heads of 8, so that every mesh divides all that it splits.
WIDE = (
    "network.depth=1",
    "network.size=64",
    "network.heads=8",
    "network.hidden=64",
    "network.dropout=0.1",
    "network.attention_dropout=0.1",
    "network.embedding_dropout=0.1",
    "network.tables=640",
    "network.tables_tokens=8192",
    "train.num_steps=6",
    "evals.test.limit=128",
)
OFTEN = (
    "log.every=1",
    "evals.validation.every=3",
    "checkpoint.every=3",
    "optim.learning_rate=0.001",
)
RUNS = {
    "one": ("mesh.data=1",),
    "mixed": ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "train.microbatches=2"),
}
# What those do together.
PARTS = {
    "tensor": ("mesh.data=1", "mesh.tensor=8", "train.microbatches=4"),
    "fsdp": ("mesh.data=1", "mesh.fsdp=8"),
    "data": ("mesh.data=8",),
    "microbatches": ("mesh.data=1", "train.microbatches=4"),
    "two": ("mesh.data=2", "mesh.fsdp=1", "mesh.tensor=2", "train.microbatches=4"),
}
ROUNDING = 2e-5  # relative; float32 sums in another order, six updates on


def flags(*assignments: str) -> list[str]:
    return [f"--config.{assignment}" for assignment in assignments]


@pytest.fixture(scope="module")
def meshes(start, tiny, once, request):
    """{name: workdir} of the same run on eight forced CPU devices and on several meshes."""
    made = RUNS | PARTS if request.config.getoption("--campaign") else RUNS

    def make(directory):
        words = [tiny.with_name("driver.py"), "runs"]
        for name, mesh in made.items():
            own = flags(*WIDE, *OFTEN, *mesh)
            words += ["--config", tiny, "--workdir", directory / name, *own, "--"]
        process = start(*words, **EIGHT)
        _, err = process.communicate(timeout=1200)
        assert process.returncode == 0, err

    directory = once("meshes", make)
    return {name: directory / name for name in made}


def numbers(found: list[dict], name: str) -> np.ndarray:
    return np.array([row[name] for row in found if name in row])


OTHERS = [name for name in RUNS if name != "one"]
OTHERS += [pytest.param(name, marks=pytest.mark.campaign) for name in PARTS]


@pytest.mark.parametrize("name", OTHERS)
def test_losses(name, meshes, rows):
    found, expected = rows(meshes[name]), rows(meshes["one"])
    assert [r.keys() for r in found] == [r.keys() for r in expected]
    for key in ("train_bits_per_token", "grad_norm", "validation/nats_per_token"):
        got, wanted = numbers(found, key), numbers(expected, key)
        assert len(wanted) == (2 if key.startswith("validation") else 6)
        np.testing.assert_allclose(got, wanted, rtol=ROUNDING, err_msg=key)


@pytest.mark.parametrize("name", OTHERS)
def test_draws(name, meshes, rows):
    """Shares of masked tokens are sums of sixteenths: exact in float32, in any order."""
    found, expected = rows(meshes[name]), rows(meshes["one"])
    assert numbers(found, "masked").tolist() == numbers(expected, "masked").tolist()


@pytest.mark.parametrize("name", OTHERS)
def test_samples(name, meshes):
    file = "samples/step_00000006.jsonl"
    assert (meshes[name] / file).read_text() == (meshes["one"] / file).read_text()


@pytest.mark.parametrize("name", OTHERS)
def test_parameters_are_close(name, meshes, arrays):
    """Adam divides by the root of a second moment: updates may differ by more than it."""
    found, expected = arrays(meshes[name]), arrays(meshes["one"])
    assert found.keys() == expected.keys()
    for key in found:
        if key.startswith(("params", "ema")):
            np.testing.assert_allclose(found[key], expected[key], rtol=1e-3, atol=1e-4, err_msg=key)


def matrices(workdir) -> dict[str, dict]:
    shards = json.loads((workdir / "shards.json").read_text())
    return {key: shard for key, shard in shards.items() if len(shard["shape"]) >= 2}


@pytest.mark.parametrize(
    "name, parts", [pytest.param("fsdp", 8, marks=pytest.mark.campaign), ("mixed", 4)]
)
def test_every_matrix_is_split(name, parts, meshes):
    """Of parameters, moving average and both moments; a matrix without a tensor axis by fsdp."""
    found = matrices(meshes[name])
    assert len({key.split("/")[0] for key in found}) == 3  # params, ema, opt_state
    for key, shard in found.items():
        whole, part = np.prod(shard["shape"]), np.prod(shard["shard"])
        if "companion" in key:  # whole on each device
            assert whole == part
            continue
        by_fsdp_alone = any(
            word in key for word in ("modulation", "time_in", "time_out", "mixture")
        )
        assert whole / part == (2 if name == "mixed" and by_fsdp_alone else parts), key
        assert shard["devices"] == 8


@pytest.mark.campaign
def test_tensor_splits_heads_and_vocabulary(meshes):
    found = matrices(meshes["tensor"])
    names = ("query/kernel", "key/kernel", "value/kernel", "attention/out/kernel", "down/kernel")
    split = [key for key in found if key.endswith((*names, "embedding", "head/kernel"))]
    assert len(split) >= 4 * (5 + 2)  # params, ema, two moments
    for key in split:
        assert np.prod(found[key]["shape"]) == 8 * np.prod(found[key]["shard"]), key


@pytest.mark.campaign
def test_data_alone_splits_no_parameter(meshes):
    for key, shard in matrices(meshes["data"]).items():
        assert shard["shape"] == shard["shard"], key


@pytest.mark.parametrize(
    "first, second", [("mixed", "one"), pytest.param("fsdp", "tensor", marks=pytest.mark.campaign)]
)
@pytest.mark.campaign
def test_the_mesh_may_change_when_a_run_is_continued(
    first, second, meshes, start, tiny, tmp_path, rows, program
):
    """Stopped after 3 of 6 steps on one mesh, continued on another: the same rows, to rounding."""
    workdir, common = tmp_path / "run", ["--config", tiny, *flags(*WIDE, *OFTEN)]
    driver = tiny.with_name("driver.py")
    at = [*common, "--workdir", workdir]
    # The first part is the program that `meshes` has compiled.
    split = [
        flags(*(RUNS | PARTS)[first]),
        flags(*(word for word in (RUNS | PARTS)[second] if word.startswith("mesh"))),
    ]
    process = start(driver, "kill-in-save", 6, *at, *split[0], **EIGHT)
    _, err = process.communicate(timeout=1200)
    assert process.returncode == -9, err
    # One device is here a process that has no other.
    devices = {} if second == "one" else EIGHT
    ended = program(*at, *split[1], **devices)
    assert ended.code == 0, ended
    assert "resuming from step 3\n" in ended.out
    found, expected = rows(workdir), rows(meshes["one"])
    assert [r.keys() for r in found] == [r.keys() for r in expected]
    for key in ("train_bits_per_token", "validation/nats_per_token"):
        got, wanted = numbers(found, key), numbers(expected, key)
        np.testing.assert_allclose(got, wanted, rtol=ROUNDING, err_msg=key)
    assert numbers(found, "masked").tolist() == numbers(expected, "masked").tolist()
