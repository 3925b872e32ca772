"""Block of chat templates around the assistant's tokens, an extension of Jinja by transformers."""

from collections.abc import Callable
from typing import ClassVar

from jinja2 import nodes, parser
from jinja2.ext import Extension


class GenerationBlocks(Extension):
    """Renders {% generation %} ... {% endgeneration %} as its body, which has a scope of its own.

    transformers takes its tokens for the assistant's. Here `messages.sequences` finds them, for
    all templates in the same way.
    """

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

    def _rendered(self, caller: Callable[[], str]) -> str:
        return caller()
