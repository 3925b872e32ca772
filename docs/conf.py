"""Settings of the documentation site: pip install -e '.[docs]', then sphinx-build docs site.

Markdown is the source, so that the pages also read well on a code host. Nothing in them is written
for this site alone: the tree of pages is the lists of links in index.md.
"""

import os
import re
import sys
from pathlib import Path

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the docstrings are those of this checkout

project, author, copyright = "md4_jax", "md4_jax contributors", "md4_jax contributors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_math_renderer = "mathml"  # of this file: no script, so that the pages work offline
exclude_patterns = ["notebooks", "results"]
html_theme, html_title = "furo", "md4_jax"
html_static_path, html_css_files = ["_static"], ["site.css"]
html_copy_source = False
smartquotes = False  # --mode stays as it is typed
html_theme_options = {"navigation_with_keys": True}
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
highlight_language = "none"  # indented blocks are commands, output and drawings
autodoc_member_order, autodoc_typehints_format = "bysource", "short"
# Address of the code, such as https://HOST/OWNER/NAME/blob/main. Without it links to source files
# are downloads, and links to folders plain text.
CODE = os.environ.get("MD4_JAX_DOCS_CODE", "").rstrip("/")
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def tree(index: str) -> str:
    """Makes the sidebar from index.md: each heading with the pages that are linked below it."""
    parts = re.split(r"^## (.+)$", index, flags=re.M)
    listed = dict(zip(parts[1::2], parts[2::2], strict=True))
    pages = {title: re.findall(r"^\* \[[^\]]*\]\((.+?)\.md\)", body, re.M)
             for title, body in listed.items()}  # fmt: skip
    known = {page for names in pages.values() for page in names} | {"index"}
    found = (path.relative_to(HERE) for path in sorted(HERE.rglob("*.md")))
    pages["More"] = [
        str(path.with_suffix("")) for path in found
        if str(path.with_suffix("")) not in known and path.parts[0] not in exclude_patterns
    ]  # fmt: skip
    blocks = [
        f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(names) + "\n```\n"
        for title, names in pages.items() if names
    ]  # fmt: skip
    return index + "\n" + "\n".join(blocks)


def outward(page: str, folder: Path) -> str:
    """Points links that leave docs/ to the code, if its address is known."""

    def link(match: re.Match) -> str:
        text, name, anchor = match.groups()
        target = (folder / name).resolve()
        if target.suffix == ".md" and target.is_relative_to(HERE):
            return match.group()
        if CODE and target.is_relative_to(HERE.parent):
            return f"[{text}]({CODE}/{target.relative_to(HERE.parent).as_posix()}{anchor or ''})"
        return text if target.is_dir() or target.suffix == ".md" else match.group()

    return LINK.sub(link, page)


def on_source(app, name: str, content: list[str]) -> None:
    """Changes the text of a page before it is parsed."""
    content[0] = outward(content[0], (HERE / name).parent)
    if name == "index":
        content[0] = tree(content[0])


def on_docstring(app, kind, name, thing, options, lines: list[str]) -> None:
    """Shows docstrings, which are plain text: tables of arguments keep their columns."""
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines).strip())
    found: list[str] = []
    for paragraph in paragraphs:
        if re.search(r"\S {2,}\S|^ ", paragraph, re.M):
            found += ["::", "", *("    " + line for line in paragraph.splitlines()), ""]
        else:
            pieces = re.split(r"`([^`]+)`", paragraph)  # prose and code in turn
            pieces[::2] = [re.sub(r"([*_|\\])", r"\\\1", piece) for piece in pieces[::2]]
            found += ["``".join(pieces), ""]
    lines[:] = found


def mathml(node: nodes.Node, block: bool) -> str:
    """Returns an equation as MathML, which browsers typeset themselves."""
    tex = node.astext()
    tex = re.sub(r"\\[bB]ig *([(\[])", r"\\left\1", tex)  # brackets that grow by themselves
    try:
        return tex2mathml(re.sub(r"\\[bB]ig *([)\]])", r"\\right\1", tex), as_block=block)
    except MathError as error:
        logging.getLogger(__name__).warning("%s in %s", error, tex, location=node)
        return ""


def on_inline(translator, node) -> None:
    """Writes an equation within a line."""
    translator.body.append(mathml(node, block=False))
    raise nodes.SkipNode


def on_block(translator, node) -> None:
    """Writes an equation of its own."""
    translator.body.append(f'<div class="math">{mathml(node, block=True)}</div>')
    raise nodes.SkipNode


def setup(app) -> None:
    """Registers the changes of this file with Sphinx."""
    app.add_html_math_renderer("mathml", (on_inline, None), (on_block, None))
    app.connect("source-read", on_source)
    app.connect("autodoc-process-docstring", on_docstring)
