"""Table of the runs in a folder, with their results."""

import math
from typing import Any, NamedTuple

from md4_jax.config import imports
from md4_jax.config import load as config_lib
from md4_jax.data.units import UNITS
from md4_jax.protocols import UserError
from md4_jax.protocols.phrases import plus_minus
from md4_jax.runtime.paths import Place, exists
from md4_jax.runtime.streams import printable
from md4_jax.training.report import EVALUATIONS, kept

HEAD = ("run", "objective", "network", "steps", "bits", "by", "commit")


class Found(NamedTuple):
    """Row of the table: its cells, bits per token for sorting (inf if unknown), and a remark."""

    cells: tuple[str, ...]
    bits: float
    remark: str = ""


def table(folder: Place) -> str:
    """Formats the runs in a folder, or the folder itself if it is a run, fewest bits first.

    Below the table it lists what cannot be read of each run, and why.
    UserError if there is none.
    """
    if not exists(folder):
        raise UserError(f"there is no folder {folder}: md4_jax ls DIR lists the runs of a folder")
    if not folder.is_dir():
        raise UserError(f"{folder} is a file: md4_jax ls DIR lists the runs of a folder")
    try:
        places = [folder, *sorted(folder.iterdir())]
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror or error}") from error
    if not (runs := [run for run in places if _may_be_run(run)]):
        raise UserError(f"{folder} holds no run: md4_jax ls DIR lists those of a folder")
    found = sorted(map(_found, runs), key=lambda run: run.bits)
    lines = [HEAD, *(run.cells for run in found)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    remarks = [f"{run.cells[0]}: {' '.join(run.remark.split())}" for run in found if run.remark]
    return printable("\n".join(rows + remarks))


def _may_be_run(folder: Place) -> bool:
    """Returns whether a folder holds a run or an unfinished import, or may not be entered."""
    try:
        return exists(folder / config_lib.FILE) or imports.has_begun(folder)
    except UserError:
        return True  # the row says why


def _found(run: Place) -> Found:
    name = run.name if run.name.isprintable() else ascii(run.name)
    try:
        return _read(run, name)
    except (UserError, OSError) as error:
        why = str(error)
    except (KeyError, TypeError, ValueError) as error:
        why = f"{run / config_lib.FILE} is not a config that md4_jax wrote ({error!r})"
    return Found((name, "unreadable", *[""] * (len(HEAD) - 2)), math.inf, why)


def _read(run: Place, name: str) -> Found:
    asked, remark = config_lib.stored(run) or {}, ""
    try:
        rows = kept(run)
    except OSError as error:
        rows, remark = [], f"{run / EVALUATIONS} cannot be read: {error}"
    bounds = [row for row in rows if "bits_per_token" in row and "command" not in row]
    result = next((row for row in reversed(bounds) if row["eval"] == "test"), None)
    result = result or (bounds[-1] if bounds else {})
    network = asked["network"]
    sizes = [network[key] for key in ("depth", "size") if key in network]
    cells = (
        name,
        asked["objective"]["name"],
        f"{network['name']} {' x '.join(map(str, sizes))}".strip(),
        f"{_step(run):,} of {asked['train']['num_steps']:,}",
        _bits(result),
        result.get("eval", ""),
        result.get("commit", "")[:12],
    )
    return Found(cells, _number(result.get("bits_per_token"), math.inf), remark)


def _step(run: Place) -> int:
    """Returns the step of the newest checkpoint, 0 without one."""
    folder = run / "checkpoints"
    names = [entry.name for entry in folder.iterdir()] if exists(folder) else []
    return max((int(name) for name in names if name.isdecimal()), default=0)


def _bits(result: dict[str, Any]) -> str:
    """Formats '<= 2.9011 +- 0.0140 bits/character'; '' without a result."""
    if not result:
        return ""
    unit = next(u for u in UNITS if f"bits_per_{u}" in result)
    sign = "" if result["exact"] else "<= "
    error = plus_minus(result[f"bits_per_{unit}_se"], ".4f")
    return f"{sign}{_number(result[f'bits_per_{unit}'], math.nan):.4f}{error} bits/{unit}"


def _number(kept: float | None, other: float) -> float:
    """Returns a number of a result, or `other` for None, which replaces nan in JSON."""
    return other if kept is None else kept
