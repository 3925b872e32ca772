"""docs/configs.md lists every config, docs/recipes.md the parameters of published ones."""

import json
import math
import re
import sys

import jax
import pytest
from every_config import spelled

from md4_jax.config import build, inputs, schema
from md4_jax.data.random_tokens import RandomTokens
from md4_jax.runtime.commit import PACKAGE_ROOT

sys.path.insert(0, str(PACKAGE_ROOT / "tools"))

import recipes_table

LIST = (PACKAGE_ROOT / "docs" / "configs.md").read_text()
PAGE = (PACKAGE_ROOT / "docs" / "recipes.md").read_text()
ROW = re.compile(r"^\| (`[^|]+) \|.*\| ([\d,]{9,}) \|$", re.M)
PARAMETERS = {
    name: int(number.replace(",", ""))
    for names, number in ROW.findall(PAGE)
    for name in recipes_table.NAME.findall(names)
}


def test_every_config_is_on_the_page():
    names = [name.removeprefix("configs/") for name in spelled()]
    listed = {name.partition(":")[0] for name in recipes_table.NAME.findall(LIST)}
    assert [name for name in names if name.partition(":")[0] not in listed] == []
    published = recipes_table.published()
    assert set(published) == set(PARAMETERS) and set(published) <= set(names)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_the_page_has_the_number_of_parameters(name):
    config = schema.load_config(f"configs/{name}", {"mesh.data": "1", "mesh.fsdp": "1"})
    symbols = recipes_table.symbols(name)
    domain = RandomTokens(symbols) if symbols else inputs.domain_and_source(config, None)[0]
    built = build.experiment(config, domain)
    params = jax.eval_shape(built.network.init, jax.random.key(0))
    schedule = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(built.process.init()))
    assert built.network.size(params) + schedule == PARAMETERS[name]


FITS = {
    "arguments": 2**30, "outputs": 0, "temporaries": 2**31, "flops": 2e12, "compile": 61.0,
    "collectives": {"all-reduce": [3, 2**20], "all-gather": [1, 2**21]},
}  # fmt: skip


def test_the_table_says_what_fits_and_with_how_many_microbatches(monkeypatch):
    asked = []

    def numbers(words):
        asked.append(words)
        if not words[-1].endswith("microbatches=4"):
            needs = 17.5 if "microbatches" in words[-1] else 20.0
            said = (
                f"the train program needs {needs} GiB on each chip, but a chip has 16: 1. Try less"
            )
            raise recipes_table.program.Refused(said)
        return {"train": FITS}

    monkeypatch.setattr(recipes_table.program, "numbers", numbers)
    found = recipes_table.planned("owt.py", "v5e:8x8")
    assert (found["microbatches"], len(asked)) == (4, 3)
    assert found["refused"].endswith("needs 20.0 GiB on each chip, but a chip has 16: 1")
    assert "plan.random_tokens=50257" in " ".join(asked[0])
    assert json.loads(json.dumps(found)) == found
    row = recipes_table.table({"owt.py": found}).splitlines()[-1]
    assert row == "| `owt.py` | 4 | 1.0, 2.0 | 2.00 | 3 | 61 |"
    split = recipes_table.table({"owt.py": found | {"fsdp": 8}}).splitlines()[-1]
    assert split.startswith("| `owt.py` | 4, `mesh.fsdp=8` | 1.0, ")
    monkeypatch.setattr(recipes_table, "MICROBATCHES", (1, 2))
    small = recipes_table.planned("owt.py", "v5e:8x8")
    assert "does not fit: the train program" in recipes_table.table({"owt.py": small})


@pytest.mark.parametrize(
    "said",
    [
        "Ran out of memory in memory space hbm. Used 70.1G of 15.75G hbm",
        "the total memory required for HLO temporaries (70.10G) exceeds available HBM (15.75G).",
    ],
)
def test_counts_that_cannot_fit_are_not_tried(said, monkeypatch):
    asked = []

    def numbers(words):
        asked.append(words[-1])
        raise recipes_table.program.Refused(f"a program does not fit the chip: {said}")

    monkeypatch.setattr(recipes_table.program, "numbers", numbers)
    assert "microbatches" not in recipes_table.planned("text8.py", "v5e:8x8")
    ends = ["random_tokens=27", "microbatches=8", "fsdp=8", "microbatches=8"]
    assert [word.rpartition(".")[2] for word in asked] == ends


def test_other_refusals_are_not_taken_for_a_chip_that_is_too_small(monkeypatch):
    def numbers(words):
        raise recipes_table.program.Refused("--topology v9: no such thing")

    monkeypatch.setattr(recipes_table.program, "numbers", numbers)
    with pytest.raises(recipes_table.program.Refused, match="no such thing"):
        recipes_table.planned("owt.py", "v9")


def test_the_page_is_written_between_its_marks(monkeypatch, tmp_path):
    monkeypatch.setattr(recipes_table, "PAGE", tmp_path / "page.md")
    first, last = recipes_table.MARKS
    recipes_table.PAGE.write_text(f"before\n{first}old{last}after\n")
    kept = {"owt.py": {"microbatches": 1, "train": FITS}}
    for _ in range(2):
        recipes_table.render(kept)
    page = recipes_table.PAGE.read_text()
    assert page == f"before\n{first}\n{recipes_table.table(kept)}\n{last}after\n"
