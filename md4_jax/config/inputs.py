"""The tokenizer and the data source of a config."""

from collections.abc import Mapping
from typing import Any

from md4_jax.config.schema import make
from md4_jax.corpus import TOKENIZER_FILE, read_tokenizer
from md4_jax.runtime.paths import Place


def tokenizer_and_source(config: Mapping[str, Any], workdir: Place | None) -> tuple[Any, Any]:
    """The tokenizer (the run's own if it has one, else fitted to the training split) and source."""
    source = make("data", config["data"])
    kept = workdir / TOKENIZER_FILE if workdir else None
    if kept is not None and kept.exists():
        return read_tokenizer(kept), source
    tokenizer = make("tokenizer", config["tokenizer"])
    return tokenizer.fit(source.documents("train")), source
