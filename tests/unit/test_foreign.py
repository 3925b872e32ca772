"""Names like package.module:attribute: what is imported, when, and what is wrong with it."""

import dataclasses
import re
import sys
import textwrap
from typing import Any, Literal

import pytest

from md4_jax.config import foreign, schema, values
from md4_jax.config import load as config
from md4_jax.data.names import NotTrusted
from md4_jax.protocols import UserError

MODULE = """
    import dataclasses
    from typing import Literal

    @dataclasses.dataclass(frozen=True)
    class Constant:
        learning_rate: float = 1e-3
        kind: Literal["plain", "bold"] = "plain"

        def build(self, num_steps):
            return "transformation", num_steps

    class Plain:
        pass

    @dataclasses.dataclass(frozen=True)
    class Empty:
        pass

    class Outer:
        Inner = Constant

    number = 3
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `mine` of one module, of which nothing is allowed or imported yet."""
    folder = tmp_path / "path" / "mine"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "optim.py").write_text(textwrap.dedent(MODULE))
    (folder / "broken.py").write_text("1 / 0")
    (folder / "hungry.py").write_text("import not_there_at_all")
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setattr(foreign, "_allowed", set())
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


def base_config(tmp_path, name: str):
    """A config file of the user with that optimizer."""
    path = tmp_path / "configs_of_mine.py"
    path.write_text(
        "from configs import base\n\n\ndef get_config():\n"
        f"    config = base.get_config()\n    config.optim = dict(name={name!r})\n"
        "    return config\n"
    )
    return str(path)


def test_a_name_that_the_user_wrote_is_imported(package, tmp_path):
    found = schema.load_config(base_config(tmp_path, "mine.optim:Constant"), {})
    assert schema.build_section("optim", found["optim"]).build(7) == ("transformation", 7)
    base = base_config(tmp_path, "mine.optim:Outer.Inner")
    assert schema.load_config(base, {})["optim"]["name"] == "mine.optim:Outer.Inner"


def test_so_is_one_on_the_command_line_whose_keys_are_those_of_its_class(package):
    given = {"optim.kind": "bold", "optim.name": "mine.optim:Constant"}
    optim = schema.load_config("configs/base.py", given)["optim"]
    assert optim == {"name": "mine.optim:Constant", "learning_rate": 3e-4, "kind": "bold"}
    assert schema.build_section("optim", optim).kind == "bold"
    for key, value, words in (
        ("optim.kynd", "bold", "unknown key in optim 'kynd'; did you mean 'kind'?"),
        ("optim.kind", "shy", "optim.kind must be one of plain, bold, not 'shy'"),
    ):
        with pytest.raises(UserError) as caught:
            schema.load_config("configs/base.py", {**given, key: value})
        assert words in str(caught.value)


def test_a_name_in_the_files_of_a_run_is_imported_only_if_it_is_trusted(
    package, tmp_path, monkeypatch
):
    asked = schema.load_config(base_config(tmp_path, "mine.optim:Constant"), {})
    config.store(tmp_path, asked)
    monkeypatch.setattr(foreign, "_allowed", set())  # another process
    del sys.modules["mine.optim"]
    with pytest.raises(UserError) as caught:
        schema.load_config(None, {}, tmp_path)
    assert "optim.name: 'mine.optim:Constant' is named in the config of a run" in str(caught.value)
    assert "--trust mine if you trust" in str(caught.value)
    assert "mine.optim" not in sys.modules
    foreign.allow(["mine"])
    assert schema.load_config(None, {}, tmp_path) == asked


def test_to_trust_one_name_or_package_is_not_to_trust_another(package):
    foreign.allow(["mine.optim:Constant", "min"])
    assert foreign.load("mine.optim:Constant").__name__ == "Constant"
    for name in ("mine.optim:Outer.Inner", "mine:Constant"):
        with pytest.raises(NotTrusted):
            foreign.load(name)


@pytest.mark.parametrize(
    "name, words",
    [
        ("mine.optin:Constant", "Python does not find the module 'mine.optin'"),
        ("yours:Constant", "Python does not find the module 'yours'"),
        ("mine.hungry:Constant", "mine.hungry imports not_there_at_all, which is not installed"),
        ("mine.broken:Constant", "importing mine.broken failed: ZeroDivisionError: division by"),
        ("mine.optim:Constand", "attribute of mine.optim 'Constand'; did you mean 'Constant'?"),
        ("mine.optim:Plain", "mine.optim:Plain must be a dataclass"),
        ("mine.optim:number", "mine.optim:number must be a dataclass"),
        ("mine.optim:Empty", "optim.name=mine.optim:Empty lacks the attributes build"),
        ("mine.optim:", "'mine.optim:' is not of the form package.module:attribute"),
        ("mine/optim.py:Constant", "is not of the form package.module:attribute"),
    ],
)
def test_what_is_wrong_with_a_name(name, words, package, tmp_path):
    with pytest.raises(UserError) as caught:
        schema.load_config(base_config(tmp_path, name), {})
    found = re.fullmatch(r"--config .*configs_of_mine.py, line \d+: (.*)", str(caught.value))
    assert words in found[1] and found[1].startswith("optim.name")


@pytest.mark.parametrize("kind", sorted(foreign.CONTRACTS))
def test_the_classes_of_the_package_have_what_those_of_others_must_have(kind):
    """So the list asks for nothing that is not needed."""
    for name, cls in schema.REGISTRIES[kind].items():
        if name != "auto":
            foreign.check_contract(kind, kind, cls)


ORDER = ("schedule", "per_round", "rounds")
FURTHER = ("step_further", "left", "rounds", "finish")


@pytest.mark.parametrize(
    ("has", "lacks", "words"),
    [
        (ORDER, "rounds", "it has schedule, and no rounds, "),
        (ORDER, "per_round", "it has schedule, and no per_round, "),
        (FURTHER, "left", "it has step_further, and no left, "),
        (ORDER, "schedule", ""),
    ],
)
def test_a_sampler_has_all_methods_of_an_ability_or_none(has, lacks, words):
    """Without `rounds`, an order would be drawn anew in each step of the grid."""
    own = {name: lambda self: None for name in (*has, "__call__") if name != lacks}
    fields = dict(needs=None, level=None, transform=None)
    cls = dataclasses.make_dataclass("Mine", [("own", int, 0)], namespace={**own, **fields})
    if not words:
        foreign.check_contract("sample", "sample.name", cls)
        return
    with pytest.raises(UserError, match=words) as caught:
        foreign.check_contract("sample", "sample.name", cls)
    assert "docs/extending.md" in str(caught.value)


def test_every_section_with_a_name_has_a_contract():
    assert set(foreign.CONTRACTS) == set(schema.REGISTRIES)


@dataclasses.dataclass
class Fields:
    """Annotations that a class of the user's own may have."""

    anything: Any = None
    words: tuple[str, ...] = ()
    one_of: Literal["a", 2] = "a"
    maybe: float | None = None


@pytest.mark.parametrize(
    "field, good, bad",
    [
        ("anything", [object(), 3, None], []),
        ("words", [(), ["a"], ("a", "b")], ["a", [1]]),
        ("one_of", ["a", 2], ["b", 3]),
        ("maybe", [None, 1, 2.5], ["1", True]),
    ],
)
def test_values_of_the_types_of_fields(field, good, bad):
    wanted = dataclasses.fields(Fields)[list(Fields.__annotations__).index(field)].type
    assert all(values.fits(value, wanted) for value in good)
    assert not any(values.fits(value, wanted) for value in bad)
