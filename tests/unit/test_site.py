"""The documentation site builds from docs/ without a warning."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ("sphinx", "myst_parser", "furo")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for name in NEEDED:
        pytest.importorskip(name, reason="the site needs pip install -e '.[docs]'")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", out]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return out


@pytest.mark.slow
def test_the_site_builds_without_a_warning(site):
    """Equations are typeset, docstrings are there, and the sidebar leads to every page."""
    bound = (site / "families" / "md4.html").read_text()
    assert '<div class="math"><math' in bound and "<mfrac>" in bound and "$$" not in bound
    assert "Reads a trained model." in (site / "api.html").read_text()
    sidebar = (site / "index.html").read_text().partition('class="sidebar-tree"')[2]
    led = set(re.findall(r'href="([\w/]+)\.html"', sidebar.partition("</div>")[0]))
    pages = {str(p.relative_to(ROOT / "docs").with_suffix("")) for p in page_files()} - {"index"}
    assert pages - led == set()


def page_files() -> list[Path]:
    """The pages of the site; notebooks/ has its own way to be shown."""
    inside = (ROOT / "docs").rglob("*.md")
    return [path for path in inside if "notebooks" not in path.parts]


@pytest.mark.slow
def test_pages_ask_no_other_machine_for_anything(site):
    """Scripts, styles and pictures are files of the site."""
    wrong = []
    for page in site.rglob("*.html"):
        asked = re.findall(
            r'<(?:script|img|link)[^>]*(?:src|href)="(\w+://[^"]*)"', page.read_text()
        )
        wrong += [(page.name, address) for address in asked]
    assert wrong == []


@pytest.fixture
def conf(monkeypatch):
    """The names of docs/conf.py."""
    pytest.importorskip("sphinx", reason="the site needs pip install -e '.[docs]'")
    monkeypatch.setenv("MD4_JAX_DOCS_CODE", "https://code.example/main/")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return runpy.run_path(str(ROOT / "docs" / "conf.py"))


def test_links_out_of_docs_lead_to_the_code_where_its_address_is_known(conf):
    families = ROOT / "docs" / "families"
    assert conf["outward"]("[a](../../configs/base.py) [b](md4.md#t-steps)", families) == (
        "[a](https://code.example/main/configs/base.py) [b](md4.md#t-steps)"
    )
    conf["outward"].__globals__["CODE"] = ""
    assert conf["outward"]("in [data](../md4_jax/data) here", ROOT / "docs") == "in data here"


def test_the_tree_is_that_of_the_index(conf):
    text = conf["tree"]("# T\n\n## Start\n\n* [Use it](use.md), quickly\n")
    assert ":caption: Start\n\nuse\n```" in text
    assert "\nfaq\n" in text.partition(":caption: More")[2]
