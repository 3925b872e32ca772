"""Audit of the objectives of a config: --mode audit."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from md4_jax.auditor import audit
from md4_jax.auditor.audit import why_not
from md4_jax.auditor.options import AuditOptions
from md4_jax.auditor.report import numbers, text
from md4_jax.config.evaluators import evaluators
from md4_jax.config.fit import Component, check_process, objective_name
from md4_jax.config.schema import build_section, options_from
from md4_jax.protocols import UserError

SYMBOLS = 3
# Keys of a process that are ids of symbols: those that change the length of a text (`resizing`).
IDS = ("expand", "delete")


def objectives(config: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Returns ({key: objective}, process) for a small vocabulary.

    There is one key for training and one for each evaluator with another objective. UserError for
    an objective that does not fit the process.
    """
    process = build_section("process", _of_few(config["process"]), vocab_size=SYMBOLS)
    objective = build_section("objective", config["objective"])
    network = SimpleNamespace(causal=config["network"].get("causal", False))
    found = {"objective": objective}
    for name, evaluator in evaluators(config, objective, process, network).items():
        own = getattr(evaluator, "objective", None)
        if own is not None and own not in found.values():
            found[f"evals.{name}.objective"] = own
    for key, one in found.items():
        part = Component(key, objective_name(one), one)
        check_process(process, config["process"]["name"], part)
        if why := why_not(one, process):
            raise UserError(f"{key}.name={part.name!r} cannot be audited: {why}")
    return found, process


def _of_few(section: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the section `process` for a small vocabulary.

    Ids of symbols belong to the full vocabulary. Here they are the default, the last two symbols;
    the choice does not change the bound.
    """
    return {key: value for key, value in section.items() if key not in IDS}


def _with_key(say: Callable[[str], None], key: str, line: str) -> None:
    """Prints a line that begins with the key of its objective."""
    say(f"{key}: {line}")


def run(config: Mapping[str, Any], say: Callable[[str], None]) -> int:
    """Audits the objectives of a config; returns 1 if one claims to be a bound but is not.

    Prints each result, with a counterexample if there is one, and then one line of JSON.
    """
    options = options_from(AuditOptions, config.get("audit", {}))
    found, process = objectives(config)
    results = {}
    for key, objective in found.items():
        keyed = partial(_with_key, say, key)
        result = audit(objective, process, steps=options.steps, seed=options.seed, say=keyed)
        say(f"{key}: {text(result)}\n")
        results[key] = numbers(result)
    say(json.dumps(results))
    return int(not all(result["passed"] for result in results.values()))
