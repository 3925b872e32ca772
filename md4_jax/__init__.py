"""Discrete diffusion models of text and images in JAX."""

from typing import Any

__version__ = "0.1.0"


def audit(objective: Any, process: Any, **options: Any) -> Any:
    """Decides whether an objective is a bound of -log p with a process: docs/objectives.md.

    Returns an `md4_jax.auditor.Audit`; the options are those of `md4_jax.auditor.audit`.
    """
    from md4_jax.auditor import audit as decide  # imports JAX, which takes a second

    return decide(objective, process, **options)
