"""A run is made of a published checkpoint, and training goes on from it."""

import json
import re

import pytest
from peer_folders import peer_folder

import md4_jax
from md4_jax import main
from md4_jax.protocols import UserError

pytestmark = pytest.mark.slow

# Read by code that the others use, or that test_decoders.py runs.
CAMPAIGN = ("llada", "bd3lm", "duo", "sedd_absorb", "sedd_uniform", "radd", "gidd", "md4_text")
KEYS = {
    "train.num_steps": 2, "train.batch_size": 2, "optim.warmup_steps": 0, "log.every": 1,
    "evals.validation.every": 0, "evals.test.limit": 2, "evals.samples.final": False,
    "network.scan_blocks": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "mdlm",
        *(pytest.param(name, marks=pytest.mark.campaign) for name in CAMPAIGN),
    ],
)
def test_training_goes_on_from_a_published_model(name, tmp_path):
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("abcdefghijk" * 400)
    keys = {**KEYS, "data.path": text}
    assignments = [f"--config.{key}={value}" for key, value in keys.items()]
    source = str(peer_folder(tmp_path, name))
    flags = ["--mode", "import", "--from", source, "--workdir", str(run)]
    assert main.run([*flags, *assignments]) == 0
    assert main.run(["--workdir", str(run)]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {1, 2}
    model = md4_jax.load(run)
    assert model.step == 2
    card = (model.save(tmp_path / "saved") / "README.md").read_text()
    assert re.search(r"- test: <= [\d.]+ \+- [\d.]+ bits/token", card)


def test_a_run_saved_as_safetensors_draws_the_samples_of_the_run(trained, tmp_path):
    """Those that the command line has written, bit for bit."""
    file = trained / "samples" / "step_00000030.jsonl"  # other tests add files to the run
    written = [json.loads(line) for line in file.read_text().splitlines()]
    run = md4_jax.load(trained)
    saved = md4_jax.load(run.save(tmp_path / "saved"))
    assert [row["text"] for row in written] == saved.sample(num=2, steps=4, seed=0).texts
    tokens = saved.sample(num=1).tokens
    assert saved.logits(tokens, 0.5).tobytes() == run.logits(tokens, 0.5).tobytes()


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--mode", "import", "--workdir", "x"], "--mode import and --from FOLDER .* need each"),
        (["--from", "x", "--config", "quickstart"], "need each other"),
        (["--mode", "import", "--from", "x", "--config", "a"], "makes the config itself"),
        (["--mode", "import", "--from", "x"], "writes a run: .* give --workdir"),
    ],
)
def test_flags_that_do_not_go_together(flags, said):
    with pytest.raises(UserError, match=said):
        main.run(flags)
