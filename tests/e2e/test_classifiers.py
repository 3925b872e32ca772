"""A classifier of digits and samples that it guides, as users run them."""

import json

import jax
import numpy as np
import pytest
import runs

import md4_jax

SMALL = (
    "network.size=16", "network.depth=1", "network.heads=2", "network.embedding=8",
    "train.num_steps=6", "optim.warmup_steps=2", "train.batch_size=8", "log.every=3",
    "checkpoint.every=3",
)  # fmt: skip
OF_MODEL = (
    "data.labels=False", "network.classes=0", "network.label_dropout=0", "network.head_size=8",
    "evals.validation.every=0", "evals.samples.every=0", "evals.test.limit=60",
    "evals.test.draws=1", "evals.unlabelled.final=False", "evals.samples.final=False",
    "sample.steps=3", "sample.num=2",
)  # fmt: skip
OF_CLASSIFIER = ("evals.validation.every=3", "evals.validation.limit=60", "evals.test.draws=2")


def flags(*words: str) -> list[str]:
    return [f"--config.{word}" for word in words]


@pytest.fixture(scope="module")
def both(run, tmp_path_factory):
    """(directory of a classifier, of a model without classes)."""
    folder = tmp_path_factory.mktemp("classifier")
    for name, config, own in (
        ("classifier", "configs/digits_classifier.py", OF_CLASSIFIER),
        ("model", "configs/digits.py", OF_MODEL),
    ):
        ended = run("--config", config, "--workdir", folder / name, *flags(*SMALL, *own))
        assert ended.code == 0, ended
        (folder / f"{name}.txt").write_text(ended.out)
    return folder / "classifier", folder / "model"


@pytest.mark.campaign
def test_a_classifier_is_trained_evaluated_and_resumed(both, run, refused, tmp_path):
    workdir, _ = both
    said = (workdir.parent / "classifier.txt").read_text()
    assert "cross-entropy of the class" in said and "accuracy" in said
    # What is no likelihood of the data is not shown as one.
    assert "bits/" not in said and "bound" not in said
    result = runs.evaluated(workdir)
    assert 0 <= result["accuracy"] <= 1 and 0 < result["cross_entropy_se"] < 1
    assert result["sequences"] == 180 and not any("bits" in key for key in result)
    again = run("--workdir", workdir, "--mode", "eval")
    assert again.code == 0, again
    last = json.loads(again.out.strip().splitlines()[-1])
    assert last["cross_entropy"] == result["cross_entropy"]
    # Stopped after three steps and resumed, it is the same bit for bit.
    keys = ["--config", "configs/digits_classifier.py", "--workdir", tmp_path / "half"]
    keys += flags(*SMALL, *OF_CLASSIFIER)
    assert run(*keys, "--config.train.seconds=0.001").code == 0
    assert run(*keys, "--config.train.seconds=0").code == 0
    assert runs.different_arrays(tmp_path / "half", workdir) == []
    error = refused("--workdir", workdir, "--mode", "sample")
    assert "is a classifier and cannot generate samples" in error


@pytest.mark.campaign
def test_it_guides_the_samples_of_a_model_without_classes(both, run, refused):
    classifier, model = both
    sample = ["--workdir", model, "--mode", "sample", f"--config.sample.classifier={classifier}"]
    ended = run(*sample, *flags("sample.label=3", "sample.classifier_strength=4"))
    assert ended.code == 0, ended
    assert json.loads(ended.out.strip().splitlines()[-1])["network_evaluations"] == 3
    drawn = np.load(sorted((model / "samples").glob("*.npy"))[-1]).reshape(2, 64)
    loaded = md4_jax.load(model)
    own = dict(num=2, classifier=str(classifier), label=3)
    found = loaded.sample(**own, classifier_strength=4.0)
    np.testing.assert_array_equal(found.tokens, drawn)
    assert (loaded.sample(**own, classifier_strength=-4.0).tokens != drawn).any()
    quick = dict(own, sampler="first_hitting", classifier_method="taylor", steps=2)
    assert loaded.sample(**quick).tokens.shape == (2, 64)
    told = {key: own[key] for key in ("classifier", "label")}
    *_, last = loaded.watch(**told, classifier_strength=4.0)
    assert last.of == 3 and (last.z == drawn[0]).all()
    *_, last = loaded.watch(**{**quick, "num": 1})
    assert (last.z == loaded.sample(**quick).tokens[0]).all()
    assert md4_jax.load(classifier).logits(drawn.astype(int)).shape == (2, 10)
    for words, error in (
        (["sample.label=10"], "sample.label=10 must be below 10"),
        (["sample.label=-1"], "set sample.label"),
        (["sample.label=1", "sample.name=remask"], "cannot guide sample.name='remask'"),
    ):
        assert error in refused(*sample, *flags(*words))
    wrong = [*sample[:-1], f"--config.sample.classifier={model}", *flags("sample.label=1")]
    assert "which predicts tokens" in refused(*wrong)
    # Samples with both networks are timed; the formula of FLOPs is of one.
    times = flags("bench.parts=sample", "bench.windows=1", "bench.seconds=0.01")
    ended = run(*sample[:2], "--mode", "bench", sample[-1], *times, *flags("sample.label=3"))
    assert ended.code == 0, ended
    told = json.loads(ended.out.strip().splitlines()[-1])["sample"]
    assert told["network_evaluations"] == 3 and told["model_gflop"] is None
    plan = ("--mode", "plan", "--topology=cpu:1", "--config.plan.parts=train,sample")
    ended = run(*sample[:2], *plan, sample[-1], *flags("sample.label=3"))
    assert ended.code == 0, ended
    plain = run(*sample[:2], *plan)
    guided, alone = (
        json.loads(each.out.strip().splitlines()[-1])["sample"] for each in (ended, plain)
    )
    # Its parameters are arguments too, and the formula of FLOPs is of one network.
    held = sum(x.nbytes for x in jax.tree.leaves(md4_jax.load(classifier).params["network"]))
    assert guided["arguments"] >= alone["arguments"] + held and guided["flops"] is None
    random = flags("sample.label=3", "plan.random_tokens=17")
    error = refused("--config", "configs/digits.py", *plan, *flags(*OF_MODEL), sample[-1], *random)
    assert "was trained on other data than random tokens" in error
