"""The domain and the data source of a config."""

from collections.abc import Mapping
from typing import Any

from md4_jax.config.schema import fields, make
from md4_jax.data.domains import DOMAIN_FILE, Domain, domain_of, read_domain
from md4_jax.options import DataOptions
from md4_jax.runtime.paths import Place


def domain_and_source(config: Mapping[str, Any], workdir: Place | None) -> tuple[Domain, Any]:
    """Returns the domain, of the run or fitted to the training split, and the source."""
    length = fields(DataOptions, config["data"]).length
    source = make("data", config["data"])
    kept = workdir / DOMAIN_FILE if workdir else None
    if kept is not None and kept.exists():
        return read_domain(kept, length), source
    return domain_of(source, lambda: make("tokenizer", config["tokenizer"]), length), source
