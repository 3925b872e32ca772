"""Learning the quality of tokens: from scratch, from a trained model, with adapters, resumed."""

import json
import shutil

import numpy as np
import pytest
import runs

import md4_jax

pytestmark = pytest.mark.slow

KEYS = {
    "network.quality": True, "objective.name": "prism", "objective.tokens": 3,
    "sample.name": "prism", "train.num_steps": 12, "optim.warmup_steps": 0, "log.every": 4,
    "evals.validation.every": 0,
}  # fmt: skip


def flags(keys) -> list[str]:
    return [f"--config.{key}={value}" for key, value in keys.items()]


def arrays(folder) -> dict[str, np.ndarray]:
    """Parameters of a run, by path."""
    return {k: v for k, v in runs.arrays(folder).items() if k.startswith("params/network/")}


@pytest.fixture(scope="module")
def head_alone(run, trained, tiny, scratch):
    """A run that trains the head of a trained model and nothing else."""
    workdir = scratch / "head_alone"
    keys = KEYS | {"train.initial": trained, "train.trainable": "quality/"}
    ended = run("--config", tiny, "--workdir", workdir, *flags(keys))
    assert ended.code == 0, ended
    return workdir


def test_a_trained_model_learns_which_of_its_tokens_are_right(head_alone, trained):
    """Its head alone: the tokens it predicts and its bound stay as they were."""
    model, before = md4_jax.load(head_alone), md4_jax.load(trained)
    z = np.array([[3, 1, model.experiment.process.mask_id, 7]])
    assert model.logits(z, 0.3).tobytes() == before.logits(z, 0.3).tobytes()
    rows = [json.loads(line) for line in (head_alone / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "judging" in row]
    assert rows[-1]["judging"] < rows[0]["judging"] and 0 < rows[-1]["right"] < 1
    found, expected = (runs.evaluated(run)["nats_per_token"] for run in (head_alone, trained))
    assert found == expected
    assert all(len(text) == 16 for text in model.sample(num=2).texts)


def test_a_head_that_would_stay_frozen_is_refused(refused, trained, tiny, scratch):
    """With a pattern that was meant for something else, such as adapters."""
    keys = KEYS | {"train.initial": trained, "train.trainable": "query/"}
    said = refused("--config", tiny, "--workdir", scratch / "frozen", *flags(keys))
    assert "train.trainable='query/' does not train the head of network.quality" in said
    assert "set it to 'query/|quality/'" in said


@pytest.mark.campaign
def test_a_resumed_run_ends_bit_for_bit_the_same(run, head_alone, scratch):
    again = scratch / "head_again"
    shutil.copytree(head_alone, again)
    shutil.rmtree(again / "checkpoints" / "12")
    assert run("--workdir", again).code == 0
    assert runs.different_arrays(again, head_alone) == []


@pytest.mark.campaign
def test_adapters_and_the_head_are_trained_together(run, trained, tiny, scratch):
    """And nothing else; the state holds no copy of the rest."""
    workdir = scratch / "head_and_adapters"
    keys = KEYS | {"train.initial": trained, "network.lora_rank": 2}
    ended = run("--config", tiny, "--workdir", workdir, *flags(keys))
    assert ended.code == 0, ended
    paths = {path for path in runs.arrays(workdir) if path.startswith("params/network/")}
    assert paths and all("lora_" in path or "/quality/" in path for path in paths)
    assert any("/quality/out" in path for path in paths)
    model = md4_jax.load(workdir)
    head = model.params["network"]["quality"]["out"]["kernel"]
    assert np.abs(np.asarray(head)).max() > 0


@pytest.mark.campaign
def test_from_scratch_on_two_devices_the_run_is_the_same(program, tiny, scratch):
    """Split over fsdp, up to rounding."""
    found = []
    for name, mesh in (("one", {"mesh.data": 1}), ("two", {"mesh.data": 1, "mesh.fsdp": 2})):
        workdir = scratch / f"quality_{name}"
        keys = KEYS | mesh | {"objective.texts": 2, "train.num_steps": 4, "log.every": 1}
        two = "--xla_force_host_platform_device_count=2"
        ended = program("--config", tiny, "--workdir", workdir, *flags(keys), XLA_FLAGS=two)
        assert ended.code == 0, ended
        rows = [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]
        found.append([row["train_loss_bits"] for row in rows if "train_loss_bits" in row])
    assert len(found[0]) == 4
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4)
