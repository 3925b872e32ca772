"""The pages in docs/ quote the code as it is, and their links lead somewhere."""

import ast
import itertools
import re
import textwrap
from pathlib import Path

import pytest

from configs.families import FAMILIES

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# "[path](link), `name` and `name`:" and after it the quotation.
EXCERPT = re.compile(
    r"^(\[[^\]]*\]\(([^)\n]+\.py)\),[^\n]*(?:\n[^\n]+)*)\n\n```python\n(.*?)```", re.M | re.S
)
FENCE = re.compile(r"^```python$", re.M)


def plain(text: str) -> str:
    """The text with every run of whitespace as one space."""
    return " ".join(text.split())


def definition(source: str, name: str) -> str:
    """The source of a function or class, as Class.method or a name alone; '' if there is none."""
    body = ast.parse(source).body
    for part in name.split("."):
        found = [node for node in body if getattr(node, "name", None) == part]
        if not found:
            return ""
        body = found[0].body
    return "".join(source.splitlines(keepends=True)[found[0].lineno - 1 : found[0].end_lineno])


def missing(lead: str, path: Path, excerpt: str) -> list[str]:
    """The pieces of an excerpt, between lines of `...`, that its functions do not hold."""
    source = path.read_text()
    names = re.findall(r"`([\w.]+)`", lead.partition(")")[2])
    bodies = [definition(source, name) for name in names]
    gone = [name for name, body in zip(names, bodies, strict=True) if not body]
    pieces = re.split(r"^\s*\.\.\.$", textwrap.dedent(excerpt), flags=re.M)
    return gone + [piece for piece in pieces if not any(plain(piece) in plain(b) for b in bodies)]


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_code_that_a_page_quotes_is_there(page):
    text = page.read_text()
    found = EXCERPT.findall(text)
    assert len(found) == len(FENCE.findall(text)), "a quotation without '[path](link), `name`:'"
    wrong = {}
    for lead, link, excerpt in found:
        lost = missing(lead, page.parent / link, excerpt)
        if lost:
            wrong[plain(lead)] = lost
    assert wrong == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_links_of_a_page_lead_somewhere(page):
    wrong = []
    for link in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


def test_every_page_of_docs_can_be_reached_from_the_readme():
    seen, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page in seen:
            continue
        seen.add(page)
        names = [link.partition("#")[0] for link in LINK.findall(page.read_text())]
        left += [
            (page.parent / name).resolve()
            for name in names
            if name.endswith(".md") and not re.match(r"[a-z]+:", name)
        ]
    assert set((ROOT / "docs").rglob("*.md")) - seen == set()


@pytest.mark.parametrize(
    "page, heading",
    [
        ("README.md", "## What it trains"),
        ("docs/index.md", "## Families"),
        ("docs/choose_a_family.md", "# Choose a family"),
        ("docs/objectives.md", "# Objectives"),
    ],
)
def test_a_list_of_the_families_has_each(page, heading):
    """Each page of a family, and in the README each name of configs/families.py."""
    text = (ROOT / page).read_text()
    level = heading.partition(" ")[0]
    (section,) = re.findall(rf"^{heading}\n(.*?)(?=^{level} |\Z)", text, flags=re.M | re.S)
    own = {path.stem for path in (ROOT / "docs" / "families").glob("*.md")} - {"notation"}
    assert own - set(re.findall(r"families/(\w+)\.md", section)) == set()
    if page == "README.md":
        assert set(FAMILIES) - set(re.findall(r"`(\w+)`", section)) == set()


def test_commands_name_files_that_exist():
    """Configs and scripts in the commands of all pages."""
    wrong = []
    for page in PAGES:
        words = re.findall(
            r"(?<![\w/.])((?:configs|tools|launch|tests)/[\w/]+\.\w+)", page.read_text()
        )
        wrong += [(page.name, word) for word in words if not (ROOT / word).exists()]
    assert wrong == []


def test_the_drawing_of_the_floors_is_that_of_the_package(monkeypatch):
    """Every room stands once, above all that it imports."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    import floors

    graph = floors.rooms()
    text = (ROOT / "docs/architecture.md").read_text()
    drawing = re.search(r"(?:^    \S.*\n)+", text, re.M).group()
    stacked = [
        list(itertools.takewhile(graph.__contains__, line.split())) for line in drawing.splitlines()
    ]
    height = {room: -number for number, line in enumerate(stacked) for room in line}
    assert sorted(itertools.chain(*stacked)) == sorted(graph)
    wrong = [(a, b) for a, below in graph.items() for b in below if height[a] <= height[b]]
    assert wrong == []


def test_docstrings_name_pages_that_exist():
    wrong = []
    for folder in ("md4_jax", "configs", "tests", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            pages = re.findall(r"docs/[\w/]+\.md", path.read_text())
            wrong += [(path.name, page) for page in pages if not (ROOT / page).exists()]
    assert wrong == []


def test_an_excerpt_that_is_not_in_the_code_is_found():
    """What the first test of this file would say."""
    path = ROOT / "md4_jax/objectives/md4.py"
    lead = "[objectives/md4.py](md4.py), `MD4.loss_at`"
    kept = "return weight * masked_nats(denoiser, process, batch, z, t)\n"
    assert missing(lead, path, kept) == []
    assert missing(lead, path, kept.replace("*", "+")) != []
    assert missing(lead.replace("loss_at", "loss_of"), path, kept) != []
