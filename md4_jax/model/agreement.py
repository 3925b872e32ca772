"""Comparison of a model's process and objective with those that its layout implies."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from md4_jax.config.schema import build_section
from md4_jax.model import experts, gemma
from md4_jax.model.peer import Peer
from md4_jax.processes.capabilities import RevealsMasks, RevealsParts
from md4_jax.processes.schedules import SCHEDULES

# Bounds of masks for networks that output probabilities; those of score_entropy output scores.
MASKED = (
    "md4", "md4_discrete", "any_order", "t_dce", "lambda_dce", "along_order", "block",
    "every_order", "eso", "eso_orders", "wedlm", "sdlm", "reparameterized", "proseco",
)  # fmt: skip
SCORES = "score_entropy"
ORDERED = ("eso", "eso_orders", "wedlm")
WINDOWS = ("sdlm",)
# Kinds whose config.json says whether the network has a time input, and kinds with a key for the
# block size.
TIMED = ("mdlm", "proseco", "bd3lm", "udlm", "mdm_prime")
BLOCKS = {"bd3lm": "block_size", gemma.KIND: "canvas_length"} | dict.fromkeys(
    (kind for kind in experts.KINDS if kind.startswith("llada2")), "block_size"
)


class Difference(NamedTuple):
    """Key with the value `ours` in the model and `theirs` in the config read from its layout."""

    key: str
    ours: Any
    theirs: Any


class Meaning(NamedTuple):
    """Meaning of a network's outputs: its options, the process, the section `objective`."""

    options: Any
    process: Any
    objective: Mapping[str, Any]

    @property
    def block(self) -> int:
        """Returns the number of tokens of a block; 0: the network reads whole texts."""
        return getattr(self._built, "block", 0)

    @property
    def block_size(self) -> int | None:
        """Returns the positions of a window or block that samples are not drawn in, or None."""
        return getattr(self._built, "block_size", None)

    @property
    def alpha_0(self) -> float | None:
        """Returns the fraction of tokens that are drawn by diffusion (Eso-LM), or None."""
        return getattr(self._built, "alpha_0", None)

    @property
    def scaled(self) -> bool | None:
        """Returns whether scores are without the noise factor; None: there are no scores."""
        return getattr(self._built, "scaled", None)

    @property
    def _built(self) -> Any:
        return build_section("objective", self.objective)


def differences(own: Meaning, read: Mapping[str, Any]) -> list[Difference]:
    """Returns the differences between a model and the config that is read from its layout.

    read: config, with sections process and objective. Keys that affect only training are ignored.
    """
    theirs = build_section("process", read["process"], vocab_size=own.options.vocab_size)
    found = _of_process(own.options, own.process, theirs)
    objective = read["objective"]
    names = own.objective["name"], objective["name"]
    is_masked = isinstance(own.process, RevealsMasks) and names[0] in (*MASKED, SCORES)
    forms = ((SCORES,), ORDERED, WINDOWS)
    if is_masked and any((names[0] in some) != (names[1] in some) for some in forms):
        found.append(Difference("objective.name", *names))
    if None not in (own.scaled, objective.get("scaled")) and own.scaled != objective["scaled"]:
        found.append(Difference("objective.scaled", own.scaled, objective["scaled"]))
    if own.block != objective.get("block", 0):
        found.append(Difference("objective.block", own.block, objective.get("block", 0)))
    return found


def with_changes(told: Mapping[str, Any], found: Peer, own: Meaning) -> dict[str, Any]:
    """Returns config.json with its keys of process and objective set to those of the model.

    found: the model that is read from it without these changes
    """
    told, process, objective = dict(told), found.sections["process"], found.sections["objective"]
    conditioning = getattr(own.process, "conditioning", "")
    if found.kind in TIMED and conditioning != process["conditioning"]:
        told["time_conditioning"] = conditioning != "zero"
    if found.kind == "md4":
        name = next((n for n, x in SCHEDULES.items() if x() == own.process.schedule), None)
        if name not in (None, process["schedule"]["name"]):
            told["noise_schedule"] = name
    if None not in (own.scaled, objective.get("scaled")) and own.scaled != objective["scaled"]:
        told["model"] = {**told.get("model", {}), "scale_by_sigma": own.scaled}
    if own.block_size not in (None, objective.get("block_size", own.block_size)):
        told["block_size"] = own.block_size
    if None not in (own.alpha_0, told.get("alpha_0")):
        told["alpha_0"] = own.alpha_0
    if found.kind in BLOCKS and own.block not in (0, objective.get("block")):
        told[BLOCKS[found.kind]] = own.block
    return told


def _of_process(options: Any, ours: Any, theirs: Any) -> list[Difference]:
    """Returns the differences of processes that affect the network's outputs."""
    if type(ours) is not type(theirs):
        return [Difference("process.name", type(ours).__name__, type(theirs).__name__)]
    reads = getattr(options, "time_conditioning", False)
    timed = reads and getattr(theirs, "conditioning", "") != "zero"
    # Without a time input, predictions of masked tokens do not depend on the schedule.
    free = () if timed or not isinstance(ours, RevealsMasks | RevealsParts) else ("schedule",)
    free += () if reads else ("conditioning",)
    fields = (field.name for field in dataclasses.fields(ours) if field.name not in free)
    pairs = ((name, getattr(ours, name), getattr(theirs, name)) for name in fields)
    return [Difference(f"process.{name}", a, b) for name, a, b in pairs if a != b]
