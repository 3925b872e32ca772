"""Reading config files, overrides from the command line, and comparing with a run's own."""

import dataclasses
import json
import sys
import types
from pathlib import Path

import pytest

import md4_jax
from md4_jax.config import build, command, evaluators, files, inputs, schema
from md4_jax.config import load as config
from md4_jax.config.older import added
from md4_jax.config.schema import type_of
from md4_jax.data import bpe_files
from md4_jax.networks import NETWORKS
from md4_jax.protocols import UserError
from md4_jax.runtime import commit as commits
from md4_jax.runtime import paths


def sample_config():
    return {
        "train": {"batch_size": 4, "ema": 0.9, "num_steps": 10, "seconds": 0.0},
        "objective": {"name": "md4_discrete", "timesteps": 8, "reconstruction": "model"},
        "evals": {
            "test": {
                "name": "likelihood",
                "objective": {"name": "any_order", "weight_power": 1.0},
                "every": 0,
            }
        },
        "data": {"name": "text8", "path": None, "separate_documents": False},
    }


def overridden(**assignments):
    changed = sample_config()
    config.override(changed, {k.replace("__", "."): v for k, v in assignments.items()}, type_of)
    return changed


@pytest.mark.parametrize(
    "text, current, value",
    [
        ("8", 4, 8),
        ("1e-3", 0.9, 1e-3),
        ("true", False, True),
        ("False", True, False),
        ("None", None, None),
        ("7", None, 7),
        ("a/b.txt", None, "a/b.txt"),
        ("7", "seven", "7"),
        ("None", "text", "None"),
        ("(1, 2)", None, (1, 2)),
        ("1e6", 4, 1_000_000),
        ("2.5", 4, 2.5),
        ("1e3", 0.5, 1000.0),
        ("1e3", False, 1000.0),
        ("inf", 4, "inf"),
        ("1e999", 4, float("inf")),
    ],
)
def test_a_text_becomes_the_type_of_its_key(text, current, value):
    parsed = config.parse(text, current)
    assert parsed == value and type(parsed) is type(value)


def test_an_override_sets_one_key():
    changed = overridden(train__batch_size="64", evals__test__objective__weight_power="0.5")
    expected = sample_config()
    expected["train"]["batch_size"] = 64
    expected["evals"]["test"]["objective"]["weight_power"] = 0.5
    assert changed == expected


def test_a_new_name_drops_the_arguments_that_it_does_not_take():
    assert overridden(objective__name="md4")["objective"] == {"name": "md4"}
    # Whatever the order on the command line, its own arguments are set after it.
    changed = overridden(objective__weight_power="0.0", objective__name="any_order")
    assert changed["objective"] == {"name": "any_order", "weight_power": 0.0}
    # What it does not take is left for `sections` to refuse, and not dropped unseen.
    changed = overridden(objective__timesteps="5", objective__name="md4")
    assert changed["objective"] == {"name": "md4", "timesteps": 5}
    assert overridden(objective__name="md4_discrete") == sample_config()
    changed = overridden(evals__test__objective__name="md4")
    assert changed["evals"]["test"] == {
        "name": "likelihood",
        "objective": {"name": "md4"},
        "every": 0,
    }


@pytest.mark.parametrize(
    "key, words",
    [
        ("trian__batch_size", r"unknown config section 'trian'; did you mean 'train'\?"),
        ("train__batch_size__more", "unknown config section 'train.batch_size'"),
        ("evals__test__objectve__name", r"did you mean 'evals.test.objective'\?"),
        ("seed", "unknown config section 'seed'"),
    ],
)
def test_an_unknown_section_is_refused_and_the_nearest_named(key, words):
    with pytest.raises(UserError, match=words):
        overridden(**{key: "1"})


@pytest.mark.parametrize(
    "key, words",
    [
        (
            "train",
            "^train must be a section, not None: set its keys, --config.train.KEY=VALUE$",
        ),
        ("evals.test", "such as --config.evals.test.every=0 --config.evals.test.final=False"),
    ],
)
def test_a_section_is_no_value(key, words):
    with pytest.raises(UserError, match=words):
        config.override(sample_config(), {key: "None"}, type_of)


def test_unknown_names_list_the_known_ones():
    error = config.unknown("schedule", "cosin", ["linear", "cosine"])
    assert "did you mean 'cosine'?" in str(error) and "cosine, linear" in str(error)
    assert "did you mean" not in str(config.unknown("schedule", "xyz", ["linear"]))


def test_flatten_and_sections():
    flat = dict(config.flatten({"a": {"b": (1, 2), "c": {"d": 3}}, "e": 4}))
    assert flat == {"a.b": [1, 2], "a.c.d": 3, "e": 4}
    assert config.sections(sample_config()) == [
        "train", "objective", "evals", "evals.test", "evals.test.objective", "data"
    ]  # fmt: skip


def test_the_same_config_may_go_on_and_so_may_one_that_differs_in_free_sections(tmp_path):
    old, new = sample_config(), sample_config()
    config.check_same(old, new, tmp_path)
    new["evals"]["test"]["every"] = 7
    new["train"]["seconds"] = 60.0
    new["mesh"] = {"data": 8}
    new["sample"], new["checkpoint"], new["log"] = {"num": 1}, {"every": 1}, {"every": 1}
    config.check_same(old, new, tmp_path)


def test_a_run_of_before_a_key_goes_on_with_what_was_done_then(tmp_path):
    old, new = sample_config(), sample_config()
    new["data"]["windows"] = "grid"
    config.check_same(old, new, tmp_path)
    config.check_same(new, old, tmp_path)
    new["data"]["windows"] = "every"
    for before, after in ((old, new), (new, old)):
        with pytest.raises(UserError, match="data.windows: 'grid|every' in the workdir"):
            config.check_same(before, after, tmp_path)


def test_every_key_that_differs_is_listed(tmp_path):
    old, new = sample_config(), sample_config()
    new["train"] |= {"batch_size": 8, "microbatches": 2}
    new["audit"] = {"steps": 3}  # may differ, as microbatches may
    new["objective"]["weight"] = 1
    del new["objective"]["timesteps"]
    with pytest.raises(UserError) as caught:
        config.check_same(old, new, tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(str(tmp_path)) and "use another --workdir" in lines[-1]
    assert [line.strip() for line in lines[1:-1]] == [
        "objective.timesteps: only in the workdir",
        "objective.weight: only in what is asked for",
        "train.batch_size: 4 in the workdir, 8 asked for",
    ]


def test_a_stored_config_comes_back(tmp_path):
    assert config.stored(tmp_path) is None
    config.store(tmp_path, sample_config())
    assert config.stored(tmp_path) == sample_config()
    content = json.loads((tmp_path / config.FILE).read_text())
    assert content["package"] == "md4_jax" and content["version"] and content["commit"]
    assert [path.name for path in tmp_path.iterdir()] == [config.FILE]


def test_a_tuple_is_the_same_config_after_it_was_stored(tmp_path):
    config.store(tmp_path, {"data": {"fields": (1, 2)}})
    config.check_same(config.stored(tmp_path), {"data": {"fields": (1, 2)}}, tmp_path)


def test_a_run_keeps_its_rates_under_their_name_of_today(tmp_path):
    """'gaussian' of process rates is one of two now; that of process transition stays."""
    for name, kernel in (("rates", "gaussian_symmetric"), ("transition", "gaussian")):
        config.store(tmp_path, {"process": {"name": name, "kernel": "gaussian"}})
        assert config.stored(tmp_path) == {"process": {"name": name, "kernel": kernel}}


def test_a_run_with_one_eval_section_has_the_evaluators_that_it_stood_for(tmp_path):
    """tests/unit/stored: as written by a version that had no `evals`."""
    stored = Path(__file__).with_name("stored") / "config_with_eval.json"
    (tmp_path / config.FILE).write_bytes(stored.read_bytes())
    found = config.stored(tmp_path)
    schema.check_keys(found)
    shared = {"draws": 2, "batch_size": 64, "stride": 0, "seed": 0, "objective": {"name": "auto"}}
    bound = {"name": "likelihood", **shared}
    assert "eval" not in found and found["evals"] == {
        "validation": {
            **bound, "split": "validation", "every": 10, "final": False, "limit": 64
        },
        "test": {**bound, "split": "validation", "every": 0, "final": True},
        "ngrams": {"name": "ngrams", "split": "validation", "final": True, "order": 3},
        "samples": {"name": "samples", "every": 0, "final": True},
    }  # fmt: skip
    # It goes on with the config of today, in which what evaluates is free.
    tiny = Path(__file__).parents[1] / "e2e" / "tiny.py"
    config.check_same(found, schema.load_config(str(tiny), {"network.depth": "2"}), tmp_path)


def test_a_run_on_files_of_owt_goes_on_with_its_directory_alone(tmp_path):
    """Written when configs/owt.py read data.path, and had fewer keys for checkpoints."""
    stored = Path(__file__).with_name("stored") / "config_of_owt_text.json"
    (tmp_path / config.FILE).write_bytes(stored.read_bytes())
    kept = config.stored(tmp_path)
    assert (kept["data"]["name"], kept["data"]["test"]) == ("text", 100_000.0)
    assert "eval" not in kept and set(kept["checkpoint"]) == {"every", "keep"}
    found = schema.load_config(None, {}, tmp_path)
    rules = {"every": 5000, "seconds": 0.0, "keep": 3, "keep_every": 0, "best": ""}
    rules["retries"] = 5
    added = {"audit": {"steps": 80, "seed": 0}, "bench": {**kept["bench"], "names": 0}}
    assert found == {**kept, "checkpoint": rules, "eval": {"checkpoint": "newest"}} | added
    domain = types.SimpleNamespace(vocab_size=50257, eot_id=50256, unit="token", shape=(1024,))
    made = build.experiment({**found, "mesh": {"data": 1}}, domain)
    assert made.checkpoint.keep == 3 and made.eval.checkpoint == "newest"
    assert schema.build_section("data", found["data"]).path == "data/openwebtext/*.jsonl"
    new = {"checkpoint.best": "validation", "checkpoint.keep_every": "7", "eval.checkpoint": "best"}
    found = schema.load_config(None, new, tmp_path)
    made = build.experiment({**found, "mesh": {"data": 1}}, domain)
    assert (made.checkpoint.best, made.checkpoint.keep_every) == ("validation", 7)
    assert made.eval.checkpoint == "best"


def test_an_old_run_without_n_gram_models_has_none(tmp_path):
    config.store(tmp_path, {"eval": {"ngram_order": 0, "every": 0}})
    assert config.stored(tmp_path)["evals"]["ngrams"]["final"] is False


def test_a_new_evaluator_begins_with_its_name():
    changed = overridden(
        evals__other__data__path="FILE", evals__other__name="likelihood",
        evals__other__objective__name="block", evals__other__draws="3",
    )  # fmt: skip
    assert changed["evals"]["other"] == {
        "name": "likelihood", "data": {"path": "FILE"}, "objective": {"name": "block"}, "draws": 3
    }  # fmt: skip
    assert changed["evals"]["test"] == sample_config()["evals"]["test"]


@pytest.mark.parametrize(
    "key, words",
    [
        ("evals__tets__draws", "'evals.tets'; did you mean 'evals.test'.*--config.evals.tets.name"),
        ("evals__other__data__name", "unknown config section 'evals.other'"),
        ("evals__test__dat__path", "unknown config section 'evals.test.dat'"),
    ],
)
def test_an_evaluator_without_a_name_is_not_made(key, words):
    with pytest.raises(UserError, match=words):
        overridden(**{key: "1"})


@pytest.mark.parametrize(
    "content, words",
    [
        ("{", "is not readable JSON"),
        ("[]", "was not written by md4_jax"),
        ('{"package": "other"}', "was not written by md4_jax"),
        ('{"package": "md4_jax", "config": 3}', "was not written by md4_jax"),
        ("\udcff", "is not readable JSON: 'utf-8' codec"),
        ("1" * 5000, "is not readable JSON: Exceeds the limit"),
    ],
)
def test_a_directory_of_somebody_else(content, words, tmp_path):
    (tmp_path / config.FILE).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=words):
        config.stored(tmp_path)


def test_a_config_that_may_not_be_read(tmp_path, monkeypatch):
    (tmp_path / config.FILE).write_text("{}")

    def refuse(path, *arguments):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(type(paths.place(tmp_path)), "read_text", refuse)
    with pytest.raises(UserError, match=r"config\.json cannot be read: Permission denied$"):
        config.stored(paths.place(tmp_path))


def test_checkpoints_without_a_config(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="holds checkpoints but no config.json"):
        config.stored(tmp_path)


OF_BASE = "from configs import base\ndef get_config(): c = base.get_config(); "


@pytest.mark.parametrize(
    "content, words",
    [
        ("def get_config(:", r"SyntaxError: .*\(mine.py, line 1\)"),
        ("x = 1", r"a function get_config\(\), and this is without one: see configs/quickstart"),
        ("get_config = 3", "this is without one"),
        ("def get_config():\n    pass", "ConfigDict, not NoneType. Does it lack a return"),
        ("def get_config(size):\n    pass", "its get_config needs an argument: .*mine.py:NAME$"),
        ("def get_config():\n    return {}", "must return an ml_collections.ConfigDict"),
        ("def get_config():\n    return 1 / 0", "mine.py, line 2: ZeroDivisionError"),
        (
            OF_BASE + "c.trian.batch_size = 8",
            "section 'trian'; did you mean 'train'",
        ),
        (
            OF_BASE + "c['trian'].size = 8",
            "section 'trian'; did you mean 'train'",
        ),
        (
            OF_BASE + "c.train.seed = c.train.sede",
            "unknown config key 'sede'; did you mean 'seed'.*num_steps",
        ),
        (OF_BASE + "c.train.seed = 'x'", "line 2: seed must be a whole number, not 'x'$"),
        (
            OF_BASE + "import numpy; c.train.seed = numpy.int64(8)",
            "line 2: seed must be a whole number, not 8 of the type numpy.int64$",
        ),
        (OF_BASE + "c.train = [1]", r"line 2: train must be a section \(a dict\), not \[1\]$"),
        ("import sys\nsys.exit(0)", r"mine.py, line 2: it ends the program by exit\(0\), but"),
        (OF_BASE + "exit()", r"mine.py, line 2: it ends the program by exit\(\), but a config"),
    ],
)
def test_a_config_file_that_cannot_be_made(content, words, tmp_path, monkeypatch):
    path = tmp_path / "mine.py"
    path.write_text(content)
    with pytest.raises(UserError, match=words):
        files.load(str(path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        files.load("mine.py")


def test_a_config_file_of_the_user(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from configs import base\n\n\ndef get_config():\n"
        "    config = base.get_config()\n    config.train.batch_size = 3\n    return config\n"
    )
    loaded = files.load(str(path))
    assert type(loaded) is dict and loaded["train"]["batch_size"] == 3
    with pytest.raises(UserError, match="there is no such file"):
        files.load(str(tmp_path / "none.py"))
    with pytest.raises(UserError, match=r"Did you mean 'quickstart'\? Known: ar_text8_fast, "):
        files.load("configs/quikstart.py")


def test_a_mistake_in_the_users_file_is_found_there(tmp_path, monkeypatch):
    """Its line is named; the command line is not to blame, and may set another value."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from configs import base\n\n\ndef get_config(size=64):\n    config = base.get_config()\n"
        "    config.network.update(\n        size=int(size), dept=3\n    )\n"
        "    config.train['stepz'] = 3\n    return config\n"
    )
    with pytest.raises(UserError) as caught:
        schema.load_config("mine.py", {"train.num_stepz": "3"})
    found = sorted(caught.value.messages, key=lambda message: message.rpartition("line")[2])
    assert found[0].startswith("--config mine.py, line 7: unknown key in network 'dept'; did you")
    assert found[1].startswith("--config mine.py, line 9: unknown key in train 'stepz'; did you")
    assert found[2].startswith("unknown key in train 'num_stepz'")
    Path("mine.py").write_text(Path("mine.py").read_text().replace("config.train['stepz'] = 3", ""))
    with pytest.raises(UserError, match="^--config mine.py:32, line 7: unknown key in network"):
        schema.load_config("mine.py:32", {})


def test_a_config_file_of_the_user_imports_another_beside_it(tmp_path):
    """Which hides no other module of its name, such as `types`."""
    own = "from configs import base\nSIZE = 3\ndef get_config():\n    return base.get_config()\n"
    (tmp_path / "file_beside_the_config.py").write_text(own)
    (tmp_path / "string.py").write_text("digits = ''")
    path = tmp_path / "mine.py"
    path.write_text(
        "import string\n\nimport file_beside_the_config as other\n\n\ndef get_config():\n"
        "    config = other.get_config()\n"
        "    config.train.batch_size = other.SIZE + len(string.digits)\n    return config\n"
    )
    before = list(sys.path)
    assert files.load(str(path))["train"]["batch_size"] == 13
    assert sys.path == before


def same(one: dict, other: dict) -> bool:
    """Compares values; JSON has lists for tuples."""
    return dict(config.flatten(one)) == dict(config.flatten(other))


def test_a_run_has_a_config_of_its_own(tmp_path):
    base = str(commits.PACKAGE_ROOT / "configs" / "base.py")
    asked = schema.load_config(base, {"train.seed": "3"})
    config.store(tmp_path, asked)
    assert same(schema.load_config(None, {}, tmp_path), asked)
    changed = schema.load_config(None, {"sample.num": "7", "mesh.data": "2"}, tmp_path)
    assert (changed["sample"]["num"], changed["mesh"]["data"]) == (7, 2)
    assert changed["train"]["seed"] == 3 and same(config.stored(tmp_path), asked)
    with pytest.raises(UserError, match="train.seed: 3 in the workdir, 4 asked for"):
        schema.load_config(None, {"train.seed": "4"}, tmp_path)
    # A file goes before it.
    assert schema.load_config(base, {}, tmp_path)["train"]["seed"] == 0


def test_sections_that_a_run_does_not_have_yet(tmp_path):
    asked = schema.load_config(str(commits.PACKAGE_ROOT / "configs" / "base.py"), {})
    config.store(tmp_path, {k: v for k, v in asked.items() if k not in ("bench", "plan")})
    found = schema.load_config(None, {"plan.topology": "cpu:8"}, tmp_path)
    assert same(found, {**asked, "plan": {**asked["plan"], "topology": "cpu:8"}})


@pytest.mark.parametrize("name", NETWORKS)
def test_what_a_run_leaves_out_is_the_default_of_its_network(name, tmp_path):
    """Or it could go on with another network of the same shapes."""
    sections, kept = added({"network": {"name": name}}), {"network": {"name": name}}
    for field in dataclasses.fields(NETWORKS[name]):
        key, default = f"network.{field.name}", field.default
        if key in sections:
            default = list(default) if isinstance(default, tuple) else default
            assert sections[key] == default, key
            config.check_same(kept, {"network": {"name": name, field.name: default}}, tmp_path)
    other = {"network": {"name": name, "norm_eps": 0.125}}
    with pytest.raises(UserError, match="network.norm_eps"):
        config.check_same(kept, other, tmp_path)


def test_a_run_from_before_todays_tables_goes_on(tmp_path):
    """Every config had the keys of the tables, which most runs did not use."""
    old = {"network": {"size": 8, "tables": 0, "tables_rate": 0.05, "tables_draws": 4}}
    config.store(tmp_path, old)
    today = {"network": {"size": 8, "tables": 0, "tables_tokens": 2**25}}
    config.check_same(config.stored(tmp_path), today, tmp_path)


@pytest.mark.parametrize("key", ["tables_rate", "tables_draws", "tables_tokens"])
def test_a_run_whose_tables_are_of_an_earlier_kind_is_named(tmp_path, key):
    config.store(tmp_path, {"network": {"tables": 64, key: 4}})
    with pytest.raises(UserError, match="network.tables=64: this run has tables of an earl"):
        config.stored(tmp_path)


def test_what_a_run_has_stored_goes_before_defaults(tmp_path):
    base = str(commits.PACKAGE_ROOT / "configs" / "base.py")
    asked = schema.load_config(base, {"plan.topology": "cpu:8", "bench.windows": "9"})
    config.store(tmp_path, asked)
    assert same(schema.load_config(None, {}, tmp_path), asked)


@pytest.mark.parametrize("path", ["data", "evals.other.data"])
def test_files_for_a_config_of_another_source_need_its_name(path):
    keys = {f"{path}.path": "books/a.txt", "evals.other.name": "likelihood"}
    end = rf"; for files of your own add --config\.{path}\.name=text$"
    with pytest.raises(UserError, match=rf"belongs to {path}\.name='.*{end}"):
        schema.load_config("quickstart", keys)
    schema.load_config("quickstart", keys | {f"{path}.name": "text"})


def test_an_evaluator_that_is_misspelt_is_looked_for_among_the_kinds_too():
    said = str(evaluators.unknown_evaluator("zero_shott", ["test", "validation"]))
    assert "'zero_shott'; did you mean 'zero_shot'? Known: " in said and "ngrams" in said
    assert said.endswith("are test, validation. The other names are kinds of evaluators")
    assert "mean 'mine_too'?" in str(evaluators.unknown_evaluator("mine_to", ["mine_too"]))


def test_the_run_to_begin_with_is_looked_for_before_anything_is_fetched(tmp_path, monkeypatch):
    def fetch(name):
        raise AssertionError(name)

    monkeypatch.setattr(bpe_files, "from_hub", fetch)
    keys = {"tokenizer.name": "bpe", "tokenizer.hub": "gpt2", "train.initial": "/nowhere"}
    asked = schema.load_config("quickstart", keys)
    with pytest.raises(UserError, match="^train.initial=/nowhere holds no run; --mode import"):
        inputs.domain_and_source(asked, paths.place(tmp_path / "new"))


def test_another_source_keeps_the_keys_of_all_sources_alone():
    data = {"name": "text", "path": "FILE", "test": 0.1, "length": 7}
    assert config.merged(data, {"path": "OTHER"}) == data | {"path": "OTHER"}
    assert config.merged(data, {"name": "shakespeare"}) == {"name": "shakespeare", "length": 7}


@pytest.mark.parametrize("flags, is_said", [([], True), (["--config=c.py"], False)])
def test_the_command_that_evaluates_again_names_what_holds_the_config(flags, is_said):
    """Without --config that is the workdir of the run; training names its workdir in any case."""
    for mode, expected in (("bench", is_said), ("train", True)):
        parsed, _ = command.parse([*flags, f"--mode={mode}", "--workdir=/RUN"])
        line = command.again(parsed, paths.place("/RUN"), {})
        assert ("--workdir=/RUN" in line) is expected, line


def test_a_folder_of_runs_and_a_checkpoint_are_no_run(tmp_path):
    for name in "abcdef":
        (tmp_path / name / "checkpoints" / "20").mkdir(parents=True)
        (tmp_path / name / config.FILE).write_text("{}")
    said = rf"^{tmp_path} is a folder of runs \(a, b, c, d, e, \.\.\.\): name one$"
    with pytest.raises(UserError, match=said):
        schema.load_config(None, {}, paths.place(tmp_path))
    with pytest.raises(UserError, match=said):
        md4_jax.load(tmp_path)
    said = f"^{tmp_path}/a/checkpoints/20 is .*: give --workdir {tmp_path}/a and --config.eval.che"
    with pytest.raises(UserError, match=f"{said}ckpoint=20$"):
        schema.load_config(None, {}, paths.place(tmp_path / "a" / "checkpoints" / "20"))


def test_neither_a_config_nor_a_run(tmp_path):
    for workdir in (None, tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match="--config FILE.*--workdir of a run"):
            schema.load_config(None, {}, workdir)


@pytest.mark.parametrize(
    "change, words",
    [
        ("del config.evals", "the config has no section 'evals'"),
        ("config.evals = 3", "evals must be a section"),
    ],
)
def test_a_config_without_evaluators_is_refused_in_words(change, words, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from configs import base\n\n\ndef get_config():\n    config = base.get_config()\n"
        f"    config = type(config)(config.to_dict(), type_safe=False)\n    {change}\n"
        "    return config\n"
    )
    with pytest.raises(UserError, match=words):
        schema.load_config(str(file), {})
    with pytest.raises(UserError, match="evals"):  # also with keys under a kind of evaluator
        schema.load_config(str(file), {"evals.path.limit": "3"})


def test_the_command_line_may_add_the_second_schedule_of_insertion():
    base = str(commits.PACKAGE_ROOT / "configs" / "base.py")
    changes = {"process.insertion.name": "power", "process.insertion.exponent": "2"}
    found = schema.load_config(base, {"process.name": "insertion", **changes})
    assert found["process"]["insertion"] == {"name": "power", "exponent": 2}
    with pytest.raises(UserError, match="unknown key in process 'insertion'"):
        schema.load_config(base, changes)
    with pytest.raises(UserError, match=r"To add it give --config.process.insertion.name=linear$"):
        schema.load_config(base, {"process.name": "insertion", "process.insertion.exponent": "2"})


def test_a_run_without_a_reward_may_be_given_one(tmp_path):
    asked = schema.load_config(str(commits.PACKAGE_ROOT / "configs" / "base.py"), {})
    del asked["sample"]["reward"]
    config.store(tmp_path, asked)
    changes = {"sample.reward.pattern": "the", "sample.reward.name": "pattern"}
    found = schema.load_config(None, changes, tmp_path)["sample"]["reward"]
    assert found == {"name": "pattern", "pattern": "the"}
    found = schema.load_config(None, {"sample.reward.particles": "2"}, tmp_path)["sample"]["reward"]
    assert found == {"name": "none", "particles": 2}


def test_a_folder_that_may_not_be_listed_may_be_entered(tmp_path, monkeypatch):
    def refuse(folder):
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr(type(paths.place(tmp_path)), "iterdir", refuse)
    config.check_one(paths.place(tmp_path))


@pytest.mark.parametrize(
    ("key", "is_place"),
    [
        ("data.path", True), ("data.parts.web.path", True), ("evals.wiki.data.path", True),
        ("evals.zero_shot.path", True), ("data.store", True), ("data.length", False),
        ("evals.wiki.data.length", False), ("train.initial", False),
    ],
)  # fmt: skip
def test_machines_may_have_data_in_different_places(key, is_place):
    assert config.is_place(key) == is_place
