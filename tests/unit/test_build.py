"""Every config builds; every section refuses what its constructor does not take."""

import copy
import functools
import operator
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from every_config import CONFIGS, spelled

from configs.families import FAMILIES
from md4_jax.config import build, inputs, schema
from md4_jax.config.checks import check_training
from md4_jax.config.evaluators import named
from md4_jax.config.files import load
from md4_jax.config.load import flatten, merged
from md4_jax.data import SOURCES
from md4_jax.data.codes import CodeDomain
from md4_jax.data.domains import TextDomain
from md4_jax.data.images import ImageSource
from md4_jax.data.proteins import Proteins
from md4_jax.data.random_tokens import RandomTokens
from md4_jax.data.tokenizers import Bytes, Characters
from md4_jax.evals import EVALUATORS, likelihood
from md4_jax.evals.likelihood import LikelihoodBound, reported
from md4_jax.experiment import sample_block
from md4_jax.model.bounds import chosen
from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.d3pm import D3PM
from md4_jax.objectives.md4 import MD4
from md4_jax.objectives.partition import Partition
from md4_jax.objectives.uniform_elbo import UniformELBO
from md4_jax.protocols import UserError, batch_of
from md4_jax.runtime import sharding
from md4_jax.runtime.commit import PACKAGE_ROOT
from md4_jax.samplers.transforms import Transform
from md4_jax.training.loop import abstract_state

ALL = [str(PACKAGE_ROOT / name) for name in spelled()]
BASE = load(str(PACKAGE_ROOT / "configs" / "base.py"))
TOKENIZER = types.SimpleNamespace(vocab_size=27, eot_id=None, unit="character", shape=(256,))


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


@pytest.mark.parametrize(
    "labels, classes, words",
    [
        (("neg", "pos"), 0, "network.classes=0 must be 2, .* 'neg', 'pos'"),
        (("neg", "pos"), 3, "network.classes=3 must be 2"),
        ((), 2, "network.classes=2 needs data with labels"),
        (("neg", "pos"), 2, None),
        ((), 0, None),
        (None, 2, None),  # random tokens of a benchmark
    ],
)
def test_a_network_has_the_classes_of_the_data(labels, classes, words):
    domain = types.SimpleNamespace(**vars(TOKENIZER))
    if labels is not None:
        domain.labels = labels
    if words is None:
        build.experiment(changed(network__classes=classes), domain)
        return
    with pytest.raises(UserError, match=words):
        build.experiment(changed(network__classes=classes), domain)


def built_of(path: str):
    """The config, its domain and its experiment on one device; nothing is allocated.

    A stand-in takes the place of a tokenizer that needs data.
    """
    config = schema.load_config(path, {"mesh.data": "1", "mesh.fsdp": "1"})
    words = config["tokenizer"]["name"] == "bpe"
    domain = types.SimpleNamespace(**vars(TOKENIZER) | {"eot_id": 0 if words else None})
    if config["data"].get("autoencoder"):
        domain = CodeDomain((16, 16, 1), 8192, "", tuple(range(config["network"]["classes"])))
    elif issubclass(SOURCES[config["data"]["name"]], ImageSource):
        domain = inputs.domain_and_source(config, None)[0]
    if config["tokenizer"]["name"] == "proteins":
        domain = TextDomain(Proteins(), config["data"]["length"])
    return config, domain, build.experiment(config, domain)


@pytest.mark.parametrize("path", ALL, ids=lambda path: Path(path).name)
def test_a_config_builds(path: str, capsys):
    config, domain, built = built_of(path)
    is_told = config["network"]["time_conditioning"]
    is_told &= config["process"].get("conditioning") != "zero"
    assert built.network.time_free == (not is_told)
    assert built.process.vocab_size == domain.vocab_size
    assert built.grid.shape == (built.sample.steps + 1,)
    if built.network.classifies:
        with pytest.raises(UserError, match="a classifier has no likelihood"):
            reported(built)
    else:
        assert reported(built).objective.is_bound(built.process)
    sharding._warn_replicated.cache_clear()
    state = abstract_state(built)
    assert sum(np.prod(x.shape) for x in jax.tree.leaves(state.params)) > 1e5
    # All that is trained has a rule that splits it.
    assert "no rule" not in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_a_config_is_short(path: Path):
    assert path.stem == "base" or len(path.read_text().splitlines()) <= 40


@pytest.mark.parametrize("path", ALL, ids=lambda path: Path(path).name)
def test_a_config_has_constructors_for_its_data(path: str):
    config = schema.load_config(path, {})
    assert set(config["data"]) <= {"name", *schema.arguments_of("data", config["data"]["name"])}
    assert set(config["tokenizer"]) <= {
        "name", *schema.arguments_of("tokenizer", config["tokenizer"]["name"])
    }  # fmt: skip


def test_a_key_of_text_that_the_config_lacks_stays_text():
    """Such as a pattern that is a number; keys of other types are read as before."""
    words = {"data.name": "text", "data.path": "x", "data.text_key": "1", "data.validation": "2"}
    words |= {"sample.reward.name": "pattern", "sample.reward.pattern": "007"}
    config = schema.load_config(str(CONFIGS / "base.py"), words)
    assert config["sample"]["reward"]["pattern"] == "007" and config["data"]["text_key"] == "1"
    assert config["data"]["validation"] == 2 and config["data"]["path"] == "x"


def test_the_base_config_spells_every_key_of_its_constructors():
    """Those that an objective, tokenizer or schedule takes are in comments beside its name."""
    optional = {
        "tokenizer", "objective", "process.schedule", "process.insertion", "evals.*.objective",
        "evals.*.features",
    }  # fmt: skip
    paths = {path for path in [*schema.REGISTRIES, *schema.CLASSES] if "base" not in path}
    paths = paths - optional - {"evals.*"} | {f"evals.{name}" for name in BASE["evals"]}
    for path in sorted(paths):
        section = BASE
        for part in path.split("."):
            section = section[part]
        known = set(schema.arguments_of(path, section.get("name")))
        inner = schema.kind(path) + "."
        nested = {p.removeprefix(inner) for p in schema.REGISTRIES if p.startswith(inner)}
        assert known - nested == set(section) - nested - {"name"}, path


def test_the_base_config_has_the_defaults_of_the_constructors():
    """Where they differ it is on purpose: sizes of a run and not of the code."""
    differing = {"train.num_steps", "checkpoint.every"}
    for path, classes in schema.CLASSES.items():
        section = functools.reduce(operator.getitem, path.split("."), BASE)
        for cls in classes:
            for field in cls.__dataclass_fields__.values():
                if field.name in section and f"{path}.{field.name}" not in differing:
                    assert section[field.name] == field.default, f"{path}.{field.name}"
    for name in ("test", "ngrams", "samples"):
        section = BASE["evals"][name]
        for field in EVALUATORS[section["name"]].__dataclass_fields__.values():
            if field.name in section and field.name not in ("data", "objective"):
                assert section[field.name] == field.default, f"evals.{name}.{field.name}"


@pytest.mark.parametrize("section", sorted({*schema.REGISTRIES, *schema.CLASSES}))
def test_an_unknown_key_is_refused_in_every_section(section):
    if section == "process.schedule.base":
        config = changed(process__schedule=dict(name="clipped", base=dict(name="linear", bad=1)))
    elif section.startswith("process.insertion"):
        own = dict(name="linear", bad=1)
        nested = own if section == "process.insertion" else dict(name="clipped", base=own)
        config = changed(process=dict(name="insertion", insertion=nested))
    elif section == "evals.*.features":
        section = "evals.quality.features"
        features = dict(name="random", bad=1)
        config = changed(evals__quality=dict(name="frechet", features=features))
    else:
        section = section.replace("*", "test")
        config = changed(**{section.replace(".", "__") + "__bad": 1})
    with pytest.raises(UserError, match=rf"unknown key in {section} 'bad'.* Known: "):
        schema.check_keys(config)


@pytest.mark.parametrize("section", sorted(schema.REGISTRIES))
def test_an_unknown_name_is_refused_in_every_section(section):
    if section == "process.schedule.base":
        config = changed(process__schedule=dict(name="clipped", base=dict(name="nothing")))
    elif section.startswith("process.insertion"):
        own = dict(name="nothing")
        nested = own if section == "process.insertion" else dict(name="clipped", base=own)
        config = changed(process=dict(name="insertion", insertion=nested))
    elif section == "evals.*.features":
        config = changed(evals__test=dict(name="frechet", features=dict(name="nothing")))
    else:
        path = section.replace("*", "test")
        config = changed(**{path.replace(".", "__") + "__name": "nothing"})
    known, path = ", ".join(sorted(schema.REGISTRIES[section])), section.replace("*", "test")
    with pytest.raises(UserError, match=f"unknown {path}.name 'nothing'.*Known: {known}"):
        schema.check_keys(config)


@pytest.mark.parametrize("key", [key for key, _ in flatten(BASE) if not key.endswith("name")])
def test_a_wrong_type_is_refused_for_every_key(key):
    is_section = key.startswith("evals.") and key.endswith(".data")
    value = 5 if is_section else {"a": 1}
    with pytest.raises(UserError, match=f"{key} must be "):
        schema.check_keys(changed(**{key.replace(".", "__"): value}))


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
        ("network__vocab_size", 5, "unknown key in network 'vocab_size'; did you mean"),
        ("sample__kappa", 0.5, "'kappa', which belongs to sample.name='psi'. Known: "),
        ("network__channels", 8, "which belongs to network.name='unet', 'uvit'. Known: "),
    ],
)
def test_a_wrong_value(key, value, words):
    with pytest.raises(UserError, match=words):
        schema.check_keys(changed(**{key: value}))


def test_whole_numbers_are_numbers_and_none_is_allowed_where_it_is_the_default():
    schema.check_keys(changed(optim__clip=1, data__path="somewhere"))
    schema.check_keys(changed(data__path=None))


def test_the_data_of_an_evaluator_is_checked_as_the_data_it_would_be():
    data = dict(name="text", path="FILE", length=64)
    schema.check_keys(changed(evals__test__data=data))
    for values, words in (
        (dict(pth="FILE"), "evals.test: unknown key in data 'pth'; did you mean 'path'"),
        (dict(test=0.5), "evals.test: unknown key .* evals.test.data.name='text', .* and oth"),
        (dict(name="txt"), "evals.test: unknown data.name 'txt'; did you mean 'text"),
        (dict(length="long"), "evals.test: data.length must be a whole number, not 'long'"),
    ):
        with pytest.raises(UserError, match=words):
            schema.check_keys(changed(evals__test__data=values))


def test_another_source_leaves_nothing_of_the_old_one():
    old = dict(name="text8", path="text8.zip", length=8, separate_documents=True)
    assert merged(old, {"path": "b"}) == old | {"path": "b"}
    assert merged(old, {"name": "text8", "length": 4}) == old | {"length": 4}
    assert merged(old, {"name": "text", "path": "b"}) == {
        "name": "text", "path": "b", "length": 8, "separate_documents": True
    }  # fmt: skip


@pytest.mark.parametrize("name", ["a b", "a.b", "a,b", "1", ""])
def test_a_name_of_an_evaluator_can_be_asked_for(name):
    config = changed()
    config["evals"][name] = dict(name="samples")
    with pytest.raises(UserError, match="the name must be of letters, digits and _"):
        schema.check_keys(config)


def test_evaluators_run_in_the_order_of_their_kinds():
    """A dict from a config file comes sorted; n-gram models look for a bound before them."""
    config = changed()
    config["evals"] = {name: config["evals"][name] for name in sorted(config["evals"])}
    assert next(iter(config["evals"])) == "ngrams"
    built = build.experiment(config, TOKENIZER)
    assert list(built.evals) == ["test", "validation", "ngrams", "samples"]


def test_the_bound_that_stands_for_a_run_is_the_first_final_one():
    config = changed()
    assert reported(build.experiment(config, TOKENIZER)) == LikelihoodBound(AnyOrder())
    config["evals"]["test"]["final"] = False
    assert reported(build.experiment(config, TOKENIZER)).split == "test"
    config["evals"]["validation"]["final"] = True
    assert reported(build.experiment(config, TOKENIZER)).split == "validation"
    del config["evals"]["validation"], config["evals"]["test"]
    with pytest.raises(UserError, match="the config has no evaluator of kind likelihood"):
        reported(build.experiment(config, TOKENIZER))


def test_a_trace_may_end_with_the_last_step():
    built = build.experiment(changed(log__profile=[9, 1_000_000]), TOKENIZER)
    assert built.log.profile == [9, 1_000_000]


def test_an_evaluator_has_not_the_name_of_the_loss():
    """Trackers would show both under one name; older runs that have it may go on."""
    config = changed(evals__train=dict(name="likelihood", split="train"))
    experiment = build.experiment(config, TOKENIZER)
    for kept in (None, changed()):
        with pytest.raises(
            UserError, match=r"evals.train .* choose another name, such as evals.train_"
        ):
            check_training(experiment, kept)
    check_training(experiment, config)


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            dict(network=dict(name="unet", channels=32, blocks=1)),
            "optim.name='muon' with network.name='unet' .* optim.learning_rate=0.02 would",
        ),
        (dict(train__trainable="^head"), "optim.name='muon' with train.trainable='\\^head' trains"),
        (dict(train__trainable="query"), None),
        (dict(network__name="partition", network__depth=2, objective__name="partition"), None),
    ],
)
def test_muon_is_for_matrices_of_blocks(changes, words):
    """Without one, Adam would train everything. Runs that began before may go on."""
    domain = types.SimpleNamespace(**vars(TOKENIZER) | {"shape": (8, 8, 4)})
    config = changed(optim=dict(name="muon"), network__time_conditioning=False, **changes)
    experiment = build.experiment(config, domain)
    if words is None:
        return check_training(experiment)
    with pytest.raises(UserError, match=words):
        check_training(experiment)
    check_training(experiment, config)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(objective__name="block"), "objective.name='block': .* texts block by block, and"),
        (
            dict(objective__name="eso", sample__name="eso"),
            "attention_dropout=0.1 must be 0 with objective.name='eso': .* reads texts in an order",
        ),
        (dict(objective__name="any_order"), None),
    ],
)
def test_attention_in_blocks_or_in_an_order_has_no_dropout(changes, words):
    """The network would say so too, but only after the run has begun."""
    own = dict(network__attention_dropout=0.1, network__time_conditioning=False)
    experiment = build.experiment(changed(**own, **changes), TOKENIZER)
    if words is None:
        return check_training(experiment)
    with pytest.raises(UserError, match=words):
        check_training(experiment)


def test_a_missing_argument_is_named():
    with pytest.raises(UserError, match=r"data.path is needed by data.name='text'"):
        schema.build_section("data", {"name": "text", "length": 8})


def test_nested_sections_are_made_first():
    section = dict(name="masking", schedule=dict(name="clipped", base=dict(name="cosine"), eps=0.1))
    process = schema.build_section("process", section, vocab_size=4)
    assert type(process.schedule.base).__name__ == "Cosine" and process.schedule.eps == 0.1
    assert float(process.schedule.alpha(1.0)) == pytest.approx(0.1)


MIXTURE = dict(name="uniform", parametrisation="mixture")
IN_BLOCKS = dict(process=dict(name="uniform"), objective=dict(name="uniform_elbo", block=4))
BY_TWICE = dict(evals__test__objective=dict(name="uniform_elbo", block=8))


@pytest.mark.parametrize(
    "values, words",
    [
        (dict(train__batch_size=10, train__microbatches=4),
         "train.batch_size=10 must be divisible by train.microbatches=4 times the 1 batch shard"
         " of the mesh 1x1x1x1 .* which is 4"),
        (dict(evals__test__objective=dict(name="any_order", weight_power=0.5)),
         "evals.test.objective.name='any_order' is not a bound"),
        (dict(evals__test__objective=dict(name="md4"), process__schedule=dict(name="geometric")),
         "evals.test.objective.name='md4' is not a bound of -log p with this process"),
        (dict(evals__others=dict(name="zero_shot",
              objective=dict(name="any_order", weight_power=0.0))),
         "evals.others.objective.name='any_order' is not a bound"),
        (dict(evals__others=dict(name="zero_shot", objective=dict(
              name="block", block=16, draws="times", low=0.3, high=0.8)),
              network__local_width=0),
         "evals.others.objective.name='block' is not a bound"),
        (dict(network__condition=2),
         "the time embedding has 2 features, but needs at least 4: raise network.condition"),
        (dict(evals__path=dict(name="path"), sample__name="any_order", sample__temperature=0.0),
         "evals.path: at sample.temperature=0 all texts but one have the probability 0"),
        (dict(evals__of=dict(name="information_profile"), network__local_width=0,
              objective=dict(name="block", block=16)),
         "evals.of measures predictions of masks in whole texts, but a model trained with "
         "objective.block=16 has only seen"),
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
              evals__test__objective=dict(name="cross_entropy")), "needs process.parametrisation"),
        (dict(network__tables=640, process=dict(name="uniform"),
              objective=dict(name="uniform_elbo")),
         "network.tables=640 needs masks, not process.name='uniform'"),
        (dict(network__tables=640, objective=dict(name="block", block=16)),
         "^objective.name=.block. needs network.tables=0, not 640: tables would cross .*s$"),
        (dict(network__tables=640, network__causal=True, objective=dict(name="autoregressive"),
              sample=dict(name="left_to_right"), evals=dict()),
         "network.tables=640 needs network.causal=False"),
        (dict(network__tables=640, sample__block=16),
         "sample.block=16 needs network.tables=0, not 640: tables would cross"),
        (dict(**IN_BLOCKS, network__local_width=3),
         "^objective.name='uniform_elbo' needs network.local_width=0, not 3: a convolution"),
        (dict(**IN_BLOCKS, data__length=18),
         "objective.block=4 must divide the length of a sequence, data.length=18"),
        (dict(**IN_BLOCKS, evals__test__data=dict(length=18)),
         "^objective.block=4 must divide the length of a sequence, evals.test.data.length=18"),
        (dict(**IN_BLOCKS, evals__others=dict(name="zero_shot", length=18)),
         "objective.block=4 must divide the length of a sequence, evals.others.length=18"),
        *[(dict(network__positions=256, evals__of=dict(name=kind, **keys),
                sample=dict(name="any_order")), f"evals.of.{key}=260 must be at most 256")
          for kind, key, keys in (
              ("path", "data.length", dict(data=dict(length=260))),
              ("information_profile", "data.length", dict(data=dict(length=260))),
              ("zero_shot", "length", dict(length=260)))],
        (dict(evals__test=dict(name="likelihood", data=dict(length=20), stride=21)),
         "evals.test.stride=21 must be at most evals.test.data.length=20, the number of "),
        (dict(evals__test__stride=1000), "evals.test.stride=1000 must be at most data.length="),
        (dict(**IN_BLOCKS, evals__test__stride=2),
         "evals.test.stride=2 leaves .* objective.block=4 must divide"),
        (dict(**IN_BLOCKS, evals__test__stride=2, **BY_TWICE),
         "evals.test.stride=2 leaves .* evals.test.objective.block=8 must divide"),
        (dict(**IN_BLOCKS, data__length=20, **BY_TWICE),
         "^evals.test.objective.block=8 must divide the length of a sequence, data.length=20"),
        (dict(**IN_BLOCKS, evals__test__data=dict(length=18),
              evals__test__objective=dict(name="uniform_elbo")),
         "^objective.block=4 must divide the length of a sequence, evals.test.data.length=18"),
        (dict(**IN_BLOCKS, evals__test__objective=dict(name="uniform_elbo", block=-4)),
         "^evals.test.objective.block must be at least 1, or 0 for the whole text, not -4"),
        (dict(process=dict(name="transition", timesteps=4), objective=dict(name="d3pm"),
              sample=dict(name="ancestral", steps=4, grid="uniform"),
              evals__test__objective=dict(name="d3pm", timesteps=3)),
         "^evals.test.objective.timesteps=3 must be process.timesteps=4"),
        (dict(objective=dict(name="cross_entropy", block=-4), process=MIXTURE),
         "objective.block must be at least 1, or 0 for the whole text, not -4"),
        (dict(**IN_BLOCKS, sample__min_entropy=2.0),
         "sample.min_entropy=2.0 needs process.name='masking', not 'uniform': masks fill"),
        (dict(**IN_BLOCKS, sample__dual_cache=True),
         "sample.dual_cache=True .* not 'uniform': a block attends to masks"),
        (dict(**IN_BLOCKS, sample__next_token=True, network__shifted=True),
         "sample.next_token=True needs process.name='masking', not 'uniform': the first token"),
        (dict(process=dict(name="hybrid"), objective=dict(name="gidd"), sample__block=4),
         "sample.block=4 needs process.name='masking' or 'uniform', not 'hybrid'"),
        (dict(data__separate_documents=True), "needs a tokenizer with an end-of-text token"),
        (dict(sample__grid="cosin"), r"unknown sample.grid 'cosin'; did you mean 'cosine'\?"),
        (dict(sample__top_p=0.0), r"sample.top_p must lie in \(0, 1\]"),
        (dict(optim__warmup_steps=2_000_000), "optim.warmup_steps=2000000 .* 0 and"),
        (dict(evals__test__draws=0), "evals.test.draws must be at least 1, not 0"),
        (dict(evals__test__split="dev"),
         "evals.test.split must be train, validation, test or all, not 'dev'"),
        (dict(sample__steps=0), "sample.steps must be at least 1, not 0"),
        (dict(sample__label=1), "sample.label=1 asks for .*network.classes=0"),
        (dict(sample__label=3, network__classes=3),
         "sample.label=3 must be less than network.classes=3"),
        (dict(sample__guidance=2.0, network__classes=3, network__label_dropout=0.1),
         "sample.guidance=2.0 steers samples towards a class or a prompt: set sample.label"),
        (dict(sample__guidance=2.0, sample__prompt="a", process__name="uniform",
              objective__name="uniform_elbo"),
         "replaced by masks: it needs process.name='masking', not 'uniform'"),
        (dict(objective=dict(name="block", block=4), network__local_width=0,
              sample__guidance=2.0, sample__prompt="a"),
         r"this model was trained on blocks \(objective.block=4\): set sample.guidance=1.0"),
        (dict(sample__guidance=2.0, sample__prompt="a", sample__stride=4),
         "set sample.stride=0, not 4, or sample.guidance=1.0"),
        (dict(sample__guidance=2.0, sample__prompt="a", network__classes=3),
         "needs the prediction without a label, .* network.label_dropout above 0, .* with 0.0"),
        (dict(sample__guidance=0.5, sample__label=1, network__classes=3),
         "needs the prediction without a label, .* network.label_dropout above 0, .* with 0.0"),
        (dict(sample__guidance=2.0, sample__label=1, sample__top_p=0.9, network__classes=3,
              network__label_dropout=0.1, process=dict(name="uniform"),
              objective=dict(name="uniform_elbo")),
         "sample.top_k=0 and sample.top_p=1.0, not 0 and 0.9"),
        (dict(checkpoint__keep=0), "checkpoint.keep must be at least 1, not 0"),
        (dict(data__length=1), "data.length must be at least 2, not 1"),
        (dict(log__trackers="tensorboard, wandbb"),
         "unknown tracker in log.trackers 'wandbb'; did you mean 'wandb'"),
        *[(dict(log__profile=steps), "must be the first and the last step .* at most .*=1000000")
          for steps in ([9, 1_000_001], [3], [0, 2], [5, 4], [1, 2, 3])],
    ],
)  # fmt: skip
def test_sections_that_do_not_go_together(values, words):
    config = changed(**values)
    schema.check_keys(config)
    with pytest.raises(UserError, match=words):
        build.experiment(config, TOKENIZER)


def test_blocks_of_the_sampler_alone_may_begin_anywhere():
    """Those of a network that was trained in blocks begin at multiples of their size."""
    values = dict(data__length=16, network__local_width=0, sample__block=4)
    for more, found in (({}, True), (dict(objective=dict(name="block", block=4)), False)):
        config = changed(**values, **more)
        assert build.experiment(config, TOKENIZER).loop.anywhere == found


@pytest.mark.parametrize(
    "asked, passes",
    [
        (dict(name="ctmc"), "score_entropy"),
        (dict(name="ctmc", first_time=0.1), "score_entropy"),
        (dict(name="ctmc", passes="one_weighted"), "one_weighted"),
    ],
)
def test_a_bound_that_is_named_has_the_least_noise_unless_it_says_otherwise(asked, passes):
    config = changed(process=dict(name="rates"), objective=dict(name="ctmc", passes="two"))
    config["evals"]["test"]["objective"] = asked
    found = reported(build.experiment(config, TOKENIZER)).objective
    assert (found.passes, found.first_time) == (passes, asked.get("first_time", 1e-5))


def test_a_named_bound_of_infinite_variance_is_that_of_exact_numbers_of_masks():
    """`partition` has the value of `any_order`, and its draws no standard error."""
    for trained in (Partition(), MD4()):
        assert named("evals.test.objective", dict(name="partition"), trained) == AnyOrder()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_reports_the_form_of_its_bound_with_the_least_noise(family):
    config = schema.load_config(f"configs/families.py:{family}", {})
    bound = reported(build.experiment(config, TOKENIZER)).objective
    assert bound == (bound.for_evaluation() if hasattr(bound, "for_evaluation") else bound)


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
        (dict(name="rates"), dict(name="ctmc", passes="two"), "CTMC(passes='score_entropy')"),
        (dict(name="rates"), dict(name="ctmc", passes="one"), "CTMC(passes='score_entropy')"),
        (dict(name="rates"), dict(name="ctmc", first_time=0.1), "CTMC(first_time=0.1)"),
        (dict(name="rates", parametrisation="mixture"),
         dict(name="ctmc", passes="one", first_time=0.1, cross_entropy=0.001),
         "CTMC(first_time=0.1,cross_entropy=0.0)"),
        (dict(name="masking"), dict(name="block", block=4, draws="times"),
         "BlockDiffusion(block=4,draws='exact')"),
        (dict(name="masking"), dict(name="every_order", block=2, orders=8),
         "EveryOrder(block=2,orders=8)"),
        (MIXTURE, dict(name="cross_entropy", block=4), "UniformELBO(block=4)"),
        (MIXTURE, dict(name="uniform_elbo", block=4), "UniformELBO(block=4)"),
        (MIXTURE, dict(name="cross_entropy"), "UniformELBO(block=0)"),
    ],
)  # fmt: skip
def test_the_bound_that_auto_reports(process, objective, bound):
    built = build.experiment(changed(process=process, objective=objective), TOKENIZER)
    name, arguments = bound.removesuffix(")").split("(")
    expected = dict(part.split("=") for part in arguments.split(",") if part)
    assert type(reported(built).objective).__name__ == name
    for key, value in expected.items():
        assert repr(getattr(reported(built).objective, key)) == value
    if name == "AnyOrder":
        assert reported(built).objective.weight_power == 1.0


def test_auto_reports_the_decoder_that_was_trained():
    """Also if the loss is no bound: the default decoder is another model."""
    objective = dict(name="d3pm", cross_entropy=0.001, decoder="denoiser")
    process = dict(name="transition", timesteps=5, beta_end=0.5)
    sample = dict(sample__steps=5, sample__grid="uniform")
    built = build.experiment(changed(process=process, objective=objective, **sample), TOKENIZER)
    assert reported(built).objective == D3PM(decoder="denoiser") == chosen(built, "")


@pytest.mark.parametrize("name, default", [("block", 16), ("every_order", 4)])
def test_a_bound_by_blocks_takes_those_that_were_trained(name, default):
    """Unless it is given others: other blocks are another model."""
    trained = dict(objective=dict(name="block", block=8))
    built = build.experiment(changed(**trained, evals__test__objective=dict(name=name)), TOKENIZER)
    assert reported(built).objective.block == chosen(built, name).block == 8
    other = changed(**trained, evals__test__objective=dict(name=name, block=2))
    assert reported(build.experiment(other, TOKENIZER)).objective.block == 2
    masks = build.experiment(changed(evals__test__objective=dict(name=name)), TOKENIZER)
    assert reported(masks).objective.block == default


def test_a_bound_of_uniform_noise_by_blocks_takes_those_that_were_trained():
    """Other blocks, or none, if they are named; samples are drawn by the trained ones."""
    trained = dict(objective=dict(name="cross_entropy", block=8), process=MIXTURE)
    named = dict(name="uniform_elbo")
    built = build.experiment(changed(**trained, evals__test__objective=named), TOKENIZER)
    assert reported(built).objective == UniformELBO(8) == chosen(built, "uniform_elbo")
    assert sample_block(built) == 8
    for block in (0, 4):
        asked = changed(**trained, evals__test__objective=named | dict(block=block))
        assert reported(build.experiment(asked, TOKENIZER)).objective == UniformELBO(block)
    slid = changed(process=MIXTURE, objective=named, evals__test__stride=3)
    assert reported(build.experiment(slid, TOKENIZER)).stride == 3


def test_auto_reports_the_likelihood_of_a_causal_network():
    values = dict(objective=dict(name="autoregressive"), network__causal=True)
    built = build.experiment(changed(**values, sample__name="left_to_right"), TOKENIZER)
    assert type(reported(built).objective).__name__ == "Autoregressive"


def test_the_eval_batch_is_that_of_training_unless_it_is_given():
    built = build.experiment(changed(train__batch_size=6), TOKENIZER)
    assert reported(built).sequences(built) == 6
    built = build.experiment(changed(train__batch_size=6, evals__test__batch_size=4), TOKENIZER)
    assert reported(built).sequences(built) == 4


@pytest.mark.parametrize(
    "name, options, timed, exact",
    [
        ("auto", {}, True, False),
        ("along_order", {"order": "random"}, True, False),
        ("along_order", {"order": "left_to_right"}, True, True),
        ("block", {"block": 1}, False, True),
        ("block", {"block": 1}, True, False),
        ("block", {"block": 2}, False, False),
    ],
)
def test_only_the_likelihood_itself_is_called_exact(name, options, timed, exact, monkeypatch):
    def one_nat(*arguments):
        return lambda params, batch, index: {"nats": jnp.ones((1, len(batch.tokens)))}

    monkeypatch.setattr(likelihood, "make_eval_step", one_nat)
    objective = {"name": name, **options}
    config = changed(network__time_conditioning=timed, evals__test__objective=objective)
    built = build.experiment(config, TOKENIZER)
    batch = batch_of(np.zeros((2, 4), np.int32))
    assert reported(built).of_batches(built, {}, [batch], {})["exact"] is exact


def test_random_tokens_have_no_text_of_prompts_and_ends():
    """Samples are timed and planned without prompts, which hide nothing but with guidance."""
    words = {"sample.guidance": "2.0", "mesh.data": "1", "sample.stop": "<|eot_id|>"}
    config = schema.load_config("quickstart", words | {"sample.prompt": "to be"})
    built = build.experiment(config, RandomTokens(32, 256))
    assert built.prompted and not built.prompt.is_given and built.ends == (0,)
    config["sample"]["prompt"] = ""
    with pytest.raises(UserError, match="sample.guidance=2.0 steers samples towards a class or a"):
        build.experiment(config, RandomTokens(32, 256))


@pytest.mark.parametrize(
    "tokenizer, text, ids",
    [
        (Characters(" abé"), "a é", (1, 3)),
        (Characters(" abé"), " ", (0,)),
        (Bytes(), "a \n", (97,)),
        (Bytes(), "\n", (10,)),
        (Characters("ab"), " ", "' ' is not an entry of the vocabulary"),
        (Characters("ab"), "a ab", "'ab' is not an entry of the vocabulary"),
        (Bytes(), "é", "'é' is not an entry of the vocabulary"),
    ],
)
def test_characters_are_entries_of_a_vocabulary(tokenizer, text, ids):
    config = schema.load_config("quickstart", {"sample.exclude": text, "mesh.data": "1"})
    if isinstance(ids, tuple):
        built = build.experiment(config, TextDomain(tokenizer, 256))
        assert built.sampler_step.transform.excluded == ids
        return
    with pytest.raises(UserError, match=f"sample.exclude={ids}"):
        build.experiment(config, TextDomain(tokenizer, 256))


def test_random_tokens_have_no_entries_to_exclude():
    config = schema.load_config("configs/dplm_uniref50.py", {"mesh.data": "1"})
    built = build.experiment(config, RandomTokens(32, 1022))
    assert built.sampler_step.transform == Transform()
    named_ones = build.experiment(config, TextDomain(Proteins(), 1022))
    assert named_ones.sampler_step.transform.excluded == (0, 1, 2, 24)
    config["evals"] = {"path": {"name": "path"}}
    config["sample"] = {"name": "any_order", "exclude": "X"}
    with pytest.raises(UserError, match="evals.path: sample.exclude='X' gives texts with these"):
        build.experiment(config, TextDomain(Proteins(), 1022))
