"""Every config builds; every section refuses what its constructor does not take."""

import copy
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from configs.families import FAMILIES
from md4_jax.config import build
from md4_jax.config import schema as sections
from md4_jax.config.load import flatten, load
from md4_jax.experiment import eval_batch_size
from md4_jax.protocols import UserError
from md4_jax.runtime.commit import PACKAGE_ROOT

CONFIGS = PACKAGE_ROOT / "configs"
FILES = sorted(p for p in CONFIGS.glob("*.py") if p.name not in ("__init__.py", "families.py"))
ALL = [*map(str, FILES), *(f"{CONFIGS / 'families.py'}:{name}" for name in FAMILIES)]
BASE = load(str(PACKAGE_ROOT / "configs" / "base.py"))
TOKENIZER = types.SimpleNamespace(vocab_size=27, eot_id=None, is_character=True)


def changed(**values):
    """The base config on one device with 'section__key' values; DROP removes the key."""
    config = copy.deepcopy(BASE)
    config["mesh"]["data"] = 1
    for path, value in values.items():
        *parents, key = path.split("__")
        section = config
        for parent in parents:
            section = section[parent]
        section[key] = value
        if value is DROP:
            del section[key]
    return config


DROP = object()


@pytest.mark.parametrize("path", ALL, ids=lambda path: Path(path).name)
def test_a_config_builds(path: str):
    """With a stand-in for the tokenizer, which may need data; nothing is allocated."""
    config = sections.load_config(path, {"mesh.data": "1", "mesh.fsdp": "1"})
    words = config["tokenizer"]["name"] == "bpe"
    tokenizer = types.SimpleNamespace(**vars(TOKENIZER) | {"eot_id": 0 if words else None})
    built = build.experiment(config, tokenizer)
    assert built.network.time_free == (not config["network"]["time_conditioning"])
    assert built.process.vocab_size == 27 and built.grid.shape == (built.sample.steps + 1,)
    assert built.eval_objective.is_bound(built.process)
    params = jax.eval_shape(built.network.init, jax.random.key(0))
    assert sum(np.prod(x.shape) for x in jax.tree.leaves(params)) > 1e5


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_a_config_is_short(path: Path):
    assert path.stem == "base" or len(path.read_text().splitlines()) <= 40


@pytest.mark.parametrize("path", ALL, ids=lambda path: Path(path).name)
def test_a_config_has_constructors_for_its_data(path: str):
    config = sections.load_config(path, {})
    assert set(config["data"]) <= {"name", *sections.arguments_of("data", config["data"]["name"])}
    assert set(config["tokenizer"]) <= {
        "name", *sections.arguments_of("tokenizer", config["tokenizer"]["name"])
    }  # fmt: skip


def test_the_base_config_spells_every_key_of_its_constructors():
    """Those that an objective, tokenizer or schedule takes are in comments beside its name."""
    optional = {"tokenizer", "objective", "process.schedule", "eval.objective"}
    paths = {path for path in [*sections.REGISTRIES, *sections.CLASSES] if "base" not in path}
    for path in sorted(paths - optional):
        section = BASE
        for part in path.split("."):
            section = section[part]
        known = set(sections.arguments_of(path, section.get("name")))
        nested = {
            p.removeprefix(path + ".") for p in sections.REGISTRIES if p.startswith(path + ".")
        }
        assert known - nested == set(section) - nested - {"name"}, path


def test_the_base_config_has_the_defaults_of_the_constructors():
    """Where they differ it is on purpose: sizes of a run and not of the code."""
    differing = {"train.num_steps", "checkpoint.every", "eval.every", "eval.limit"}
    for path, classes in sections.CLASSES.items():
        for cls in classes:
            for field in cls.__dataclass_fields__.values():
                if field.name in BASE[path] and f"{path}.{field.name}" not in differing:
                    assert BASE[path][field.name] == field.default, f"{path}.{field.name}"


@pytest.mark.parametrize("section", sorted({*sections.REGISTRIES, *sections.CLASSES}))
def test_an_unknown_key_is_refused_in_every_section(section):
    if section == "process.schedule.base":
        config = changed(process__schedule=dict(name="clipped", base=dict(name="linear", bad=1)))
    else:
        config = changed(**{section.replace(".", "__") + "__bad": 1})
    with pytest.raises(UserError, match=rf"unknown key in {section} 'bad'.* Known: "):
        sections.check_keys(config)


@pytest.mark.parametrize("section", sorted(sections.REGISTRIES))
def test_an_unknown_name_is_refused_in_every_section(section):
    if section == "process.schedule.base":
        config = changed(process__schedule=dict(name="clipped", base=dict(name="nothing")))
    else:
        config = changed(**{section.replace(".", "__") + "__name": "nothing"})
    known = ", ".join(sorted(sections.REGISTRIES[section]))
    with pytest.raises(UserError, match=f"unknown {section}.name 'nothing'.*Known: {known}"):
        sections.check_keys(config)


@pytest.mark.parametrize("key", [key for key, _ in flatten(BASE) if not key.endswith("name")])
def test_a_wrong_type_is_refused_for_every_key(key):
    with pytest.raises(UserError, match=f"{key} must be "):
        sections.check_keys(changed(**{key.replace(".", "__"): {"a": 1}}))


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("train__batch_size", 4.5, "train.batch_size must be a whole number, not 4.5"),
        ("train__batch_size", True, "must be a whole number, not True"),
        ("train__batch_size", "8", "must be a whole number, not '8'"),
        ("optim__learning_rate", "fast", "optim.learning_rate must be a number, not 'fast'"),
        ("network__qk_norm", 1, "network.qk_norm must be true or false, not 1"),
        ("sample__grid", 3, "sample.grid must be text, not 3"),
        ("train", 3, r"train must be a section \(a dict\), not 3"),
        ("train", DROP, "the config has no section 'train'; start from configs/base.py"),
        ("trian", {}, "unknown config section 'trian'; did you mean 'train'"),
        ("network__vocab_size", 5, "unknown key in network 'vocab_size'"),
    ],
)
def test_a_wrong_value(key, value, words):
    with pytest.raises(UserError, match=words):
        sections.check_keys(changed(**{key: value}))


def test_whole_numbers_are_numbers_and_none_is_allowed_where_it_is_the_default():
    sections.check_keys(changed(optim__clip=1, data__path="somewhere"))
    sections.check_keys(changed(data__path=None))


def test_a_missing_argument_is_named():
    with pytest.raises(UserError, match=r"data.path is needed by data.name='text'"):
        sections.make("data", {"name": "text", "length": 8})


def test_nested_sections_are_made_first():
    section = dict(name="masking", schedule=dict(name="clipped", base=dict(name="cosine"), eps=0.1))
    process = sections.make("process", section, vocab_size=4)
    assert type(process.schedule.base).__name__ == "Cosine" and process.schedule.eps == 0.1
    assert float(process.schedule.alpha(1.0)) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "values, words",
    [
        (dict(train__batch_size=10, train__microbatches=4),
         "train.batch_size=10 must be divisible by train.microbatches=4 times the 1 batch shards"
         " of the mesh 1x1x1 .* which is 4"),
        (dict(eval__objective=dict(name="any_order", weight_power=0.5)),
         "eval.objective.name='any_order' is not a bound"),
        (dict(eval__objective=dict(name="md4"), process__schedule=dict(name="geometric")),
         "eval.objective.name='md4' is not a bound of -log p with this process"),
        (dict(objective=dict(name="genmd4")),
         "objective.name='genmd4' needs process.name='state_dependent', not 'masking'"),
        (dict(objective=dict(name="genmd4"), process=dict(name="state_dependent"),
              network__time_conditioning=False),
         "needs network.time_conditioning=True: with a schedule that depends on the symbol"),
        (dict(objective=dict(name="cross_entropy"), process=dict(name="uniform")),
         "objective.name='cross_entropy' needs process.parametrisation='mixture', not 'joint'"),
        (dict(objective=dict(name="d3pm", cross_entropy=0.1), process=dict(name="uniform")),
         "mixture"),
        (dict(objective=dict(name="autoregressive")),
         "objective.name='autoregressive' needs network.causal=True: it predicts each token from "
         "those before it"),
        (dict(network__causal=True), "objective.name='md4' needs network.causal=False"),
        (dict(objective=dict(name="uniform_elbo"), process=dict(name="uniform"),
              eval__objective=dict(name="cross_entropy")), "needs process.parametrisation"),
        (dict(data__separate_documents=True), "needs a tokenizer with an end-of-text token"),
        (dict(sample__grid="cosin"), r"unknown sample.grid 'cosin'; did you mean 'cosine'\?"),
        (dict(sample__top_p=0.0), r"sample.top_p must lie in \(0, 1\]"),
        (dict(optim__warmup_steps=2_000_000), "optim.warmup_steps=2000000 .* 0 and"),
        (dict(eval__draws=0), "eval.draws must be at least 1, not 0"),
        (dict(eval__split="dev"), "eval.split must be train, validation or test, not 'dev'"),
        (dict(sample__steps=0), "sample.steps must be at least 1, not 0"),
        (dict(sample__label=1), "sample.label=1 asks for .* and network.classes=0"),
        (dict(sample__label=3, network__classes=3),
         "sample.label=3 must be below network.classes=3"),
        (dict(checkpoint__keep=0), "checkpoint.keep must be at least 1, not 0"),
        (dict(data__length=1), "data.length must be at least 2, not 1"),
    ],
)  # fmt: skip
def test_sections_that_do_not_go_together(values, words):
    config = changed(**values)
    sections.check_keys(config)
    with pytest.raises(UserError, match=words):
        build.experiment(config, TOKENIZER)


@pytest.mark.parametrize(
    "process, objective, bound",
    [
        (dict(name="masking"), dict(name="md4"), "AnyOrder()"),
        (dict(name="masking"), dict(name="any_order", weight_power=0.0), "AnyOrder()"),
        (dict(name="uniform"), dict(name="d3pm"), "UniformELBO()"),
        (dict(name="uniform", parametrisation="score", schedule=dict(name="log_linear")),
         dict(name="concrete_score"), "ScoreEntropy()"),
        (dict(name="state_dependent"), dict(name="genmd4", first_time=0.1),
         "GenMD4(first_time=0.1)"),
        (dict(name="rates"), dict(name="ctmc", passes="two"), "CTMC(passes='two')"),
        (dict(name="rates"), dict(name="ctmc", passes="one"), "CTMC()"),
    ],
)  # fmt: skip
def test_the_bound_that_auto_reports(process, objective, bound):
    built = build.experiment(changed(process=process, objective=objective), TOKENIZER)
    name, arguments = bound.removesuffix(")").split("(")
    expected = dict(part.split("=") for part in arguments.split(",") if part)
    assert type(built.eval_objective).__name__ == name
    for key, value in expected.items():
        assert repr(getattr(built.eval_objective, key)) == value
    if name == "AnyOrder":
        assert built.eval_objective.weight_power == 1.0
    if bound == "CTMC()":
        assert built.eval_objective.passes != "one"


def test_auto_reports_the_likelihood_of_a_causal_network():
    values = dict(objective=dict(name="autoregressive"), network__causal=True)
    built = build.experiment(changed(**values, sample__name="left_to_right"), TOKENIZER)
    assert type(built.eval_objective).__name__ == "Autoregressive"


def test_the_eval_batch_is_that_of_training_unless_it_is_given():
    built = build.experiment(changed(train__batch_size=6), TOKENIZER)
    assert eval_batch_size(built) == 6
    built = build.experiment(changed(train__batch_size=6, eval__batch_size=4), TOKENIZER)
    assert eval_batch_size(built) == 4
