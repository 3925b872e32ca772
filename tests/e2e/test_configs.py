"""Every config trains for 20 steps, is evaluated and sampled: small, on data of its own source."""

import functools
import json
import math
import os

import pytest
import runs
import stand_ins
from every_config import spelled

from md4_jax.config import schema
from md4_jax.config.load import flatten
from md4_jax.data import SOURCES
from md4_jax.data.images import ImageSource

SMALL = {
    "data.length": 32,
    "data.validation": 20,
    "data.test": 20,
    "tokenizer.size": 0,
    "network.size": 32,
    "network.depth": 1,
    "network.heads": 2,
    "network.hidden": 64,
    "network.kv_heads": 0,
    "network.channels": 32,
    "network.blocks": 1,
    "network.multipliers": (1, 1),
    "network.scan_blocks": False,
    "objective.block": 8,
    "objective.timesteps": 4,
    "process.masks": 8,
    "process.timesteps": 4,
    "optim.warmup_steps": 4,
    "train.num_steps": 20,
    "train.batch_size": 4,
    "train.microbatches": 1,
    "evals.*.every": 0,
    "evals.*.batch_size": 4,
    "evals.*.draws": 1,
    "evals.*.limit": 8,
    "evals.*.objective.block": 8,
    "evals.*.objective.timesteps": 4,
    "evals.ngrams.final": False,
    "sample.num": 1,
    "sample.batch_size": 1,
    "sample.steps": 4,
    "sample.length": 0,
    "sample.memory": 0,
    "log.every": 10,
    "mesh.data": 1,
    "mesh.fsdp": 1,
    "mesh.tensor": 1,
}
# What sources need besides to read the stand-ins in a folder.
OWN = {
    "images": {
        "data.path": "{folder}/images", "data.size": "16", "data.length": "64",
        "network.classes": "2",
    },
    "cifar10": {"data.path": "{folder}/cifar10.bin", "data.test": "20"},
    "tfds_images": {
        "data.data_dir": "{folder}", "data.image_shape": "(16, 16, 3)", "data.length": "768"
    },
}  # fmt: skip
# Config that distils a trained model -> the one that trains it.
TEACHERS = {
    "configs/sdtt_owt.py": "configs/mdlm_owt.py",
    "configs/dcd_owt.py": "configs/udlm_owt.py",
}
# test_families.py runs these, with other objectives and samplers beside them.
ELSEWHERE = "configs/families.py"
ALL = [name for name in spelled() if not name.startswith(ELSEWHERE)]
QUICK = ("configs/text8.py",)
# Minutes each: 784 or 3,072 symbols of 256 levels, a matrix for each step.
LONG = ("configs/d3pm_cifar10.py", "configs/tauldr_cifar10.py")
LONG += ("configs/image_families.py:d3pm", "configs/image_families.py:tauldr")
# Made small they differ from another one by a width, a rate or a source of text. That they can be
# built, and their parameters split, is among the quick tests (test_build.py).
ALIKE = (
    "configs/block_owt.py", "configs/d3pm_lm1b.py", "configs/flow_text8.py:mixture",
    "configs/genmd4_owt.py", "configs/genmd4_small.py", "configs/imagenet64.py",
    "configs/cifar10.py", "configs/d3pm_text8.py:absorbing", "configs/dcd_owt.py",
    "configs/edit_owt.py:empty", "configs/flow_text8.py:metric", "configs/llada_8b.py",
    "configs/mdlm_owt.py", "configs/mnist.py", "configs/owt_1b.py",
    "configs/owt_8b.py", "configs/owt_medium.py", "configs/radd_owt.py:lambda_dce",
    "configs/sedd_owt.py:absorb", "configs/text8_fast.py", "configs/text8_gpu.py",
    "configs/text8_tables.py",  # quickstart.py has tables too
    "configs/image_families.py:md4",
    "configs/digits.py",  # test_images.py trains it
    "configs/prime_text8.py",
    "configs/fineweb_edu.py", "configs/sedd_owt.py:uniform",
    "configs/sdtt_owt.py",  # test_distil.py trains a student by this objective
)  # fmt: skip


def marks(name: str) -> list:
    if name in QUICK:
        return []
    return [pytest.mark.campaign if name.startswith((*LONG, *ALIKE)) else pytest.mark.slow]


MARKED = [pytest.param(name, marks=marks(name), id=name) for name in ALL]


@pytest.fixture(scope="module", autouse=True)
def cache(here, tmp_path_factory):
    """A cache directory in which all public data lies."""
    folder = tmp_path_factory.mktemp("published")
    for make in stand_ins.ALL:
        make(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MD4_JAX_CACHE", str(folder))
        yield


def small(config: dict) -> dict[str, str]:
    """The keys of a config that are made small; an image keeps its size."""
    found = {key: SMALL.get(key, SMALL.get(schema.kind(key))) for key, _ in flatten(config)}
    if issubclass(SOURCES[config["data"]["name"]], ImageSource):
        del found["data.length"]
        found["train.batch_size"] = 2
    if config["network"].get("tables"):
        found |= {"network.tables": 640, "network.tables_tokens": 8192}
    if config["network"]["name"] == "partition":
        found |= {"network.depth": 2, "network.decoder_depth": 0}
    proteins = {"data.path": "{folder}/uniref50.fasta.gz"}
    is_proteins = config["tokenizer"]["name"] == "proteins"
    own = (proteins if is_proteins else OWN.get(config["data"]["name"], {})).items()
    own = {key: value.format(folder=os.environ["MD4_JAX_CACHE"]) for key, value in own}
    return {key: str(value) for key, value in found.items() if value is not None} | own


@pytest.fixture(scope="module")
def ended(run, tmp_path_factory):
    """Runs a config once, small; configs that differ in what is made small alone are one run."""

    @functools.cache
    def of(reduced: str):
        name, keys = first[reduced]
        workdir = tmp_path_factory.mktemp("run") / "small"
        if name in TEACHERS:
            keys = keys | {"train.initial": str(ended(TEACHERS[name])[1])}
        words = [f"--config.{key}={value}" for key, value in keys.items()]
        return run("--config", name, "--workdir", workdir, *words), workdir

    first = {}

    def ended(name: str):
        keys = small(schema.load_config(name, {}))
        reduced = json.dumps(schema.load_config(name, keys), sort_keys=True)
        first.setdefault(reduced, (name, keys))
        return of(reduced)

    return ended


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.cases(2)
def test_a_config_trains_evaluates_and_samples(name, ended):
    found, workdir = ended(name)
    assert found.code == 0, found
    rows = runs.rows(workdir)
    assert [row["step"] for row in rows] == [10, 20]
    loss = next(key for key in ("train_bits_per_token", "train_loss_bits") if key in rows[0])
    assert all(math.isfinite(row[loss]) for row in rows) and rows[0][loss] != rows[1][loss]
    result = runs.evaluated(workdir)
    classifies = "classifier" in name  # it has no bound and no samples
    measured = "cross_entropy" if classifies else "bits_per_token"
    assert result["step"] == 20 and 0 < result[measured] < math.inf
    assert classifies or runs.evaluated(workdir, "samples")["step"] == 20
