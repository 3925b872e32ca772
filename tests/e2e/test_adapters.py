"""Fine-tuning by adapters: from a published folder and from a run, resumed, used, on a mesh."""

import json
import shutil

import numpy as np
import pytest
import runs
from peer_folders import peer_folder
from safetensors.numpy import load_file, save_file

import md4_jax
from md4_jax import main
from md4_jax.protocols import UserError

pytestmark = pytest.mark.slow

KEYS = {
    "train.num_steps": 4, "train.batch_size": 2, "optim.warmup_steps": 0, "log.every": 1,
    "optim.learning_rate": 0.01, "evals.validation.every": 0, "evals.test.limit": 2,
    "evals.samples.final": False, "checkpoint.every": 2, "network.lora_rank": 2,
    "network.parameters": "bfloat16", "train.ema": 0.5, "network.lora_dropout": 0.2,
}  # fmt: skip
Z = np.array([[3, 1, 125, 7, 125, 0]])


def flags(keys) -> list[str]:
    return [f"--config.{key}={value}" for key, value in keys.items()]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return peer_folder(tmp_path_factory.mktemp("published"), "llada")


@pytest.fixture(scope="module")
def tuned(published, tmp_path_factory, once):
    """A run that was made of the published folder, and trained."""

    def make(directory):
        text = directory.with_name("text.txt")
        text.write_text("abcdefghijk" * 400)
        keys = flags({**KEYS, "data.path": text})
        source = ["--mode", "import", "--from", str(published)]
        assert main.run([*source, "--workdir", str(directory), *keys]) == 0
        assert main.run(["--workdir", str(directory)]) == 0

    return once("tuned", make)


def test_training_learns_and_leaves_the_base(tuned, published):
    rows = [json.loads(line) for line in (tuned / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    model, plain = md4_jax.load(tuned), md4_jax.load(published)
    assert model.step == 4
    assert np.abs(model.logits(Z, 0.3) - plain.logits(Z, 0.3)).max() > 0.05
    half = md4_jax.load(published, config={"network.parameters": "bfloat16"})
    found, expected = (m.params["network"]["blocks"]["attention"]["query"] for m in (model, half))
    assert np.asarray(found["kernel"]).tobytes() == np.asarray(expected["kernel"]).tobytes()


@pytest.mark.campaign
def test_a_resumed_run_ends_bit_for_bit_the_same(tuned, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(tuned, again)
    shutil.rmtree(again / "checkpoints" / "4")
    before = {p: p.stat().st_mtime_ns for p in (again / "base").rglob("*")}
    assert main.run(["--workdir", str(again)]) == 0
    assert runs.different_arrays(again, tuned) == []
    assert runs.rows(again) == runs.rows(tuned)
    assert before == {p: p.stat().st_mtime_ns for p in (again / "base").rglob("*")}
    expected = md4_jax.load(tuned).logits(Z, 0.3)
    assert md4_jax.load(again).logits(Z, 0.3).tobytes() == expected.tobytes()


@pytest.mark.campaign
def test_a_run_gives_its_adapters_back(tuned, published, tmp_path):
    """In PEFT's layout; beside the published model they are the run, and are trained on."""
    model = md4_jax.load(tuned)
    folder = model.export(tmp_path / "adapter", adapters=True)
    told = json.loads((folder / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == str(published) and told["lora_dropout"] == 0.2
    run = tmp_path / "run"
    words = ["--mode", "import", "--from", str(published), "--adapters", str(folder)]
    keys = {key: value for key, value in KEYS.items() if key != "network.lora_dropout"}
    keys |= {"data.path": tuned.with_name("text.txt"), "train.num_steps": 1}
    assert main.run([*words, "--workdir", str(run), *flags(keys)]) == 0
    begun = md4_jax.load(run)
    assert begun.logits(Z, 0.3).tobytes() == model.logits(Z, 0.3).tobytes()
    assert begun.config["network"] == model.config["network"]
    assert main.run(["--workdir", str(run)]) == 0
    assert np.abs(md4_jax.load(run).logits(Z, 0.3) - model.logits(Z, 0.3)).max() > 0.01


def test_a_run_without_its_base_is_refused(tuned, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(tuned, again)
    shutil.move(again / "base", tmp_path / "base")
    with pytest.raises(UserError, match="base with the frozen parameters .* missing or incomplete"):
        md4_jax.load(again)
    with pytest.raises(UserError, match="base with the frozen parameters .* missing or incomplete"):
        main.run(["--workdir", str(again)])


def test_the_base_of_another_run_is_refused(tuned, published, tmp_path):
    """Parameters of the same shapes, one of them with another value."""
    arrays = load_file(published / "model.safetensors")
    arrays["model.transformer.blocks.1.q_proj.weight"][0, 0] += 1.0
    shutil.copytree(published, tmp_path / "published")
    save_file(arrays, tmp_path / "published" / "model.safetensors")
    other, again = tmp_path / "other", tmp_path / "again"
    keys = flags({**KEYS, "data.path": tuned.with_name("text.txt")})
    source = ["--mode", "import", "--from", str(tmp_path / "published")]
    assert main.run([*source, "--workdir", str(other), *keys]) == 0
    shutil.copytree(tuned, again)
    shutil.rmtree(again / "base")
    shutil.copytree(other / "base", again / "base")
    for read in (lambda: md4_jax.load(again), lambda: main.run(["--workdir", str(again)])):
        with pytest.raises(UserError, match="base does not belong to the checkpoints beside it"):
            read()


@pytest.mark.campaign
def test_evaluation_and_samples_of_a_run(tuned, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(tuned, run)
    few = flags({"sample.steps": 2, "sample.num": 1})
    same = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    for dtype in ("bfloat16", "float32"):
        asked = flags({"network.parameters": dtype})
        assert main.run(["--workdir", str(run), "--mode", "eval", *asked]) == 0
        found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
        assert found["nats_per_token"] == pytest.approx(same[0]["nats_per_token"], rel=1e-6)
        assert main.run(["--workdir", str(run), "--mode", "sample", *asked, *few]) == 0
    with pytest.raises(UserError, match="network.parameters: 'bfloat16' in the workdir, 'float32'"):
        main.run(["--workdir", str(run), *flags({"network.parameters": "float32"})])


@pytest.mark.campaign
def test_a_run_begins_with_another_run_and_adapters(trained, tiny, tmp_path):
    """And without them a run of the same network is what it began with; it may begin a third."""
    keys = {
        "train.num_steps": 6, "optim.warmup_steps": 0, "evals.validation.every": 0,
        "network.lora_rank": 2, "train.initial": trained, "evals.samples.final": False,
    }  # fmt: skip
    run, third = tmp_path / "run", tmp_path / "third"
    tuning = ["--config", str(tiny), "--workdir"]
    assert main.run([*tuning, str(run), *flags(keys)]) == 0
    model, before = md4_jax.load(run), md4_jax.load(trained)
    found, expected = (m.params["network"] for m in (model, before))
    assert np.asarray(found["embedding"]).tobytes() == np.asarray(expected["embedding"]).tobytes()
    blocks = {key: layer["attention"]["query"] for key, layer in found.items() if "blocks" in key}
    assert blocks.keys() == {"blocks_0"}
    for name, query in blocks.items():
        same = expected[name]["attention"]["query"]["kernel"]
        assert np.asarray(query["kernel"]).tobytes() == np.asarray(same).tobytes()
        assert np.abs(query["lora_b"]["kernel"]).max() > 0
    keys |= {
        "train.initial": run,
        "train.trainable": "query/lora",
        "network.parameters": "bfloat16",
    }
    assert main.run([*tuning, str(third), *flags(keys)]) == 0
    last = md4_jax.load(third).params["network"]["blocks_0"]["attention"]
    assert last["query"]["lora_b"]["kernel"].dtype == np.float32
    assert last["key"]["lora_b"]["kernel"].dtype == "bfloat16"


EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
MESHES = {
    "one": {"mesh.data": 1},
    "mixed": {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "train.microbatches": 2},
}


@pytest.mark.campaign
def test_losses_on_a_mesh(start, tiny, tmp_path):
    """A run begins with another one and adapters, on one device and on eight."""
    keys = {
        "network.size": 64, "network.heads": 8, "network.hidden": 64, "network.depth": 2,
        "network.scan_blocks": True, "log.every": 1, "evals.validation.every": 0,
        "evals.samples.final": False, "evals.test.limit": 64, "optim.learning_rate": 0.01,
    }  # fmt: skip
    first = {**keys, "train.num_steps": 4, "mesh.data": 1}
    tuned = {**keys, "train.num_steps": 6, "network.lora_rank": 4, "train.initial": tmp_path / "a"}
    tuned["network.lora_dropout"] = 0.2
    words = [tiny.with_name("driver.py"), "runs"]
    words += ["--config", tiny, "--workdir", tmp_path / "a", *flags(first), "--"]
    for name, mesh in MESHES.items():
        own = flags({**tuned, **mesh})
        words += ["--config", tiny, "--workdir", tmp_path / name, *own, "--"]
    process = start(*words, **EIGHT)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    found, expected = (
        [(row["train_bits_per_token"], row["grad_norm"]) for row in runs.rows(tmp_path / name)]
        for name in ("mixed", "one")
    )
    assert len(expected) == 6 and min(norm for _, norm in expected) > 1e-3
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    results = [runs.evaluated(tmp_path / name)["nats_per_token"] for name in ("mixed", "one")]
    assert results[0] == pytest.approx(results[1], rel=2e-5)
    assert "no rule says how" not in err
