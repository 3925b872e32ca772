"""Auditor: decides whether an objective is a bound of -log p, by enumeration."""

from md4_jax.auditor.audit import Audit, audit

__all__ = ["Audit", "audit"]
