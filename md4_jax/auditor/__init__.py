"""Auditor: decides by enumeration whether an objective is a bound on -log p."""

from md4_jax.auditor.audit import Audit, audit

__all__ = ["Audit", "audit"]
