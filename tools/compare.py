"""Trains every family of configs/families.py and prints one table of held-out bits.

    python tools/compare.py --steps 500 --seconds 30 -- --config.data.path=text8.first10M
    python tools/compare.py --speed -- --config.bench.random_tokens=50257 --config.data.length=1024
    python tools/compare.py --families block --vary objective.block=1,4,16,64,256 -- ...

Each family is trained twice. The first run has --steps steps. The second has as many steps as fit
into --seconds at the step time of the family. Step times are measured one after another on an
otherwise idle machine; the training runs may share it. Each run has a learning-rate schedule of its
own length. Runs and logs are kept in --workdir, and an interrupted comparison continues from there.
--speed only prints step times. --vary trains each family once per value of a key.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

import program

from configs.families import FAMILIES


class Row(NamedTuple):
    """One row of the table: a family, its label, and additional arguments."""

    family: str
    name: str
    words: list[str]


def rows_of(families: list[str], vary: str) -> list[Row]:
    """Returns a row for each family, or for each family and value of vary = KEY=V1,V2,..."""
    if not vary:
        return [Row(name, name, []) for name in families]
    key, _, values = vary.partition("=")
    return [
        Row(name, f"{name}-{key.rpartition('.')[2]}-{value}", [f"--config.{key}={value}"])
        for name in families
        for value in values.split(",")
    ]


def bench(row: Row, directory: Path, extra: list[str]) -> dict | str:
    """Times the training step and stores the numbers in a file; returns the message of an error."""
    kept = directory / f"{row.name}.bench.json"
    if not kept.exists():
        words = program.config_words(f"configs/families.py:{row.family}", "bench.parts=train")
        try:
            found = program.numbers(
                ["--mode=bench", *words, *row.words, *extra], directory / f"{row.name}.bench.log"
            )
        except program.Refused as error:
            return f"refused: {error}"
        kept.write_text(json.dumps(found))
    return json.loads(kept.read_text())["train"]


def train(row: Row, steps: int, workdir: Path, extra: list[str]) -> dict:
    """Trains for this number of steps, unless already done; returns the final evaluation."""
    keys = f"train.num_steps={steps} optim.warmup_steps={min(100, steps // 5)} "
    keys += "train.seconds=0 evals.validation.every=0"
    words = program.config_words(f"configs/families.py:{row.family}", keys)
    try:
        return program.train([*words, *row.words, *extra], workdir)
    except program.Refused as error:
        sys.exit(f"error: {error}")


def bits(result: dict) -> str:
    """Formats a result as '2.900 +- 0.012', with its reconstruction and prior parts if any."""
    parts = ("reconstruction", "prior")
    rest = [f"{p} {result[f'{p}_bits_per_token']:.3f}" for p in parts if
            result.get(f"{p}_bits_per_token", 0.0) > 5e-4]  # fmt: skip
    text = f"{result['bits_per_token']:.3f} +- {result['bits_per_token_se']:.3f}"
    return text + (f" ({', '.join(rest)})" if rest else "")


def speed_table(rows: list[Row], directory: Path, extra: list[str]) -> None:
    """Prints step time, tokens/s, fraction of the matrix rate and memory of each family."""
    print(
        "| family | s/step (min-max) | tokens/s | of the matrix rate (formula; compiler) "
        "| temporaries MiB | peak RSS GiB |\n|---|---|---|---|---|---|",
        flush=True,
    )
    for row in rows:
        n = bench(row, directory, extra)
        if isinstance(n, str):
            print(f"| {row.name} | {n} | | | | |", flush=True)
            continue
        print(
            f"| {row.name} | {n['seconds']:.3f} ({n['seconds_min']:.3f}-{n['seconds_max']:.3f}) "
            f"| {n['tokens_per_second']:,.0f} | {n['model_utilisation']:.0%}; "
            f"{n['compiler_utilisation']:.0%} | {n['temporary_mib']:,.0f} "
            f"| {n['peak_rss_gib']:.2f} |",
            flush=True,
        )


def likelihood_table(flags: argparse.Namespace, rows: list[Row], directory: Path) -> None:
    """Prints the bits of each family at equal steps and at equal time."""
    for row in rows:
        train(row, flags.steps, directory / f"{row.name}-steps", flags.extra)
    speed = {row.name: bench(row, directory, flags.extra) for row in rows}
    print(
        f"| family | bound | ms/step | bits, {flags.steps} steps | steps in {flags.seconds:g} s "
        "| bits, equal time |\n|---|---|---|---|---|---|",
        flush=True,
    )
    for row in rows:
        name, seconds = row.name, speed[row.name]["seconds"]
        fitting = max(1, round(flags.seconds / seconds))
        same = train(row, flags.steps, directory / f"{name}-steps", flags.extra)
        timed = train(row, fitting, directory / f"{name}-time", flags.extra)
        _, objective, bound, *_ = FAMILIES[row.family]
        bound = objective if bound == "auto" else bound
        print(
            f"| {name} | {bound} | {1e3 * seconds:.0f} | {bits(same)} "
            f"| {fitting} | {bits(timed)} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=500, help="of the equal-steps runs")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the equal-time runs")
    parser.add_argument("--speed", action="store_true", help="step times alone")
    parser.add_argument("--workdir", default="runs/compare")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--vary", default="", help="KEY=V1,V2,...: each family with each value")
    parser.add_argument("extra", nargs="*", help="after --: arguments for every run")
    flags = parser.parse_args()
    directory = Path(flags.workdir).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    families = flags.families.split(",")
    for name in families:
        if name not in FAMILIES:
            sys.exit(f"error: unknown family {name!r}; known are {', '.join(FAMILIES)}")
    rows = rows_of(families, flags.vary)
    if flags.speed:
        speed_table(rows, directory, flags.extra)
    else:
        likelihood_table(flags, rows, directory)


if __name__ == "__main__":
    main()
