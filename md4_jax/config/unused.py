"""Refusal of keys of the command line that change nothing in --mode eval and --mode sample."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from md4_jax.config.load import flatten
from md4_jax.config.mistakes import raise_all
from md4_jax.evals import EVALUATORS

# Kinds of evaluators that draw no samples and use no judge.
OF_DATA = ("classification", "information_profile", "likelihood", "ngrams", "zero_shot")
# Patterns of keys -> the modes that use them.
OTHERS = {
    r"train\.|log\.|checkpoint\.(?!best$)": "train",
    r"audit\.": "audit",
    r"bench\.": "bench",
    r"plan\.": "plan",
}


def check(
    mode: str,
    kept: Mapping[str, Any],
    asked: Mapping[str, Any],
    assigned: Iterable[str],
    evals: Iterable[str] = (),
) -> None:
    """Raises one UserError for all keys that the mode does not use and whose values are new.

    Values of the run may be repeated, since the command that trained it may be given again.

    kept, asked  config of the run, and config of this call
    assigned     keys that the command line sets
    evals        names of the evaluators that run
    """
    before, after = dict(flatten(kept)), dict(flatten(asked))
    new = [key for key in assigned if after.get(key, "") != before.get(key, "")]
    reasons = {key: _reason(key, mode, kept, asked, tuple(evals)) for key in new}
    raise_all(
        [
            f"{key}={after.get(key)!r} changes nothing in --mode {mode}: {why}. Leave it out"
            for key, why in reasons.items()
            if why
        ]
    )


def _reason(
    key: str,
    mode: str,
    kept: Mapping[str, Any],
    asked: Mapping[str, Any],
    evals: tuple[str, ...],
) -> str:
    """Returns why a mode does not use a key; '' if it does."""
    for pattern, user in OTHERS.items():
        if re.match(pattern, key):
            return f"it is for --mode {user}"
    if key.startswith("tokenizer."):
        return "the run has kept its tokenizer"
    sample, section = asked["sample"], key.partition(".")[0]
    if mode == "sample":
        if section == "data" and not sample.get("image_from"):
            return "no data are read"
        return _of_judge(key, kept, asked) if section == "evals" else ""
    kinds = [asked["evals"][name]["name"] for name in evals]
    if not all(kind in EVALUATORS for kind in kinds):
        return ""  # one of the user's own may read anything
    if section == "sample" and all(kind in OF_DATA for kind in kinds):
        return f"{', '.join(evals)} {'draw' if len(evals) > 1 else 'draws'} no samples"
    if key == "sample.judge" and "samples" not in kinds:
        return "only evaluators of the kind samples use it"
    if section == "evals" and key.split(".")[1] not in evals:
        if sample["judge"] and "samples" in kinds:
            return _of_judge(key, kept, asked)
        return f"it is not among the evaluators that run, {', '.join(evals)}"
    return ""


def _of_judge(key: str, kept: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """Returns why a key of an evaluator does not change how sample.judge judges; '' if it does.

    See `judging.judge_of`: another run keeps its own objective.
    """
    judge, main = asked["sample"]["judge"], _main(asked)
    if not judge:
        return "no evaluator runs"
    reads = ("draws", "batch_size", "seed", *(["objective"] if judge == "self" else []))
    name, own = key.split(".")[1:3]
    if main is None or (name == main and own in reads):
        return ""
    if own in ("name", "final") and main != _main(kept):
        return ""
    return f"of evaluators sample.judge={judge!r} reads only {', '.join(reads)} of evals.{main}"


def _main(config: Mapping[str, Any]) -> str | None:
    """Returns the name of the evaluator that is `likelihood.main_bound`."""
    bounds = {k: e for k, e in config["evals"].items() if e["name"] == "likelihood"}
    return next((k for k, e in bounds.items() if e.get("final", True)), next(iter(bounds), None))
