"""Trains every family of configs/families.py and prints one table of held-out bits.

    python launch/compare.py --steps 500 --seconds 30 -- --config.data.path=text8.first10M
    python launch/compare.py --speed -- --config.bench.random_tokens=50257 --config.data.length=1024
    python launch/compare.py --families block --vary objective.block=1,4,16,64,256 -- ...

Each family is trained twice: for the same number of steps, and for the number of steps that fit
the same time at its step time, so that what else runs on the machine then does not change what
is compared. The step times are measured one after another in between, on a machine that should
be quiet. Each run has its own learning-rate schedule. Runs and their logs stay in --workdir, and
a comparison that was interrupted goes on where it was. --speed prints step times alone.
--vary trains each family once for each value of a key.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from configs.families import FAMILIES  # noqa: E402


def call(words: list[str], log: Path) -> bool:
    """Runs the program; what it says goes to a file. False if it refused what was asked."""
    command = [sys.executable, "-m", "md4_jax.main", *words]
    with log.open("w") as file:
        code = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT).returncode
    if code not in (0, 2):
        sys.exit(f"error: {' '.join(command)} ended with {code}: see {log}")
    return code == 0


class Row(NamedTuple):
    """What is trained for a row of the table: a family, and arguments of its own."""

    family: str
    name: str
    words: list[str]


def rows_of(families: list[str], vary: str) -> list[Row]:
    """Each family, once for each value of KEY=V1,V2,... where that is asked for."""
    if not vary:
        return [Row(name, name, []) for name in families]
    key, _, values = vary.partition("=")
    return [
        Row(name, f"{name}-{key.rpartition('.')[2]}-{value}", [f"--config.{key}={value}"])
        for name in families
        for value in values.split(",")
    ]


def bench(row: Row, directory: Path, extra: list[str]) -> dict | str:
    """The train part of --mode bench, kept in a file; the reason where it is refused."""
    kept = directory / f"{row.name}.bench.json"
    if not kept.exists():
        log = directory / f"{row.name}.bench.log"
        words = [f"--config=configs/families.py:{row.family}", *row.words, *extra]
        if not call([*words, "--mode=bench", "--config.bench.parts=train"], log):
            return log.read_text().strip().splitlines()[-1]
        kept.write_text(log.read_text().strip().splitlines()[-1])
    return json.loads(kept.read_text())["train"]


def train(row: Row, steps: int, workdir: Path, extra: list[str]) -> dict:
    """The bound on the test split after a run of so many steps."""
    kept = workdir / "evaluations.jsonl"
    if not kept.exists():
        words = [
            f"--config=configs/families.py:{row.family}",
            f"--workdir={workdir}",
            f"--config.train.num_steps={steps}",
            f"--config.optim.warmup_steps={min(100, steps // 5)}",
            "--config.train.seconds=0",
            "--config.evals.validation.every=0",
            *row.words,
            *extra,
        ]
        if not call(words, workdir.with_suffix(".log")):
            sys.exit(workdir.with_suffix(".log").read_text())
    results = [json.loads(line) for line in kept.read_text().splitlines()]
    return next(r for r in reversed(results) if r["eval"] == "test")


def bits(result: dict) -> str:
    """'2.900 +- 0.012', and what of it is not the integral or sum over noise."""
    parts = ("reconstruction", "prior")
    rest = [f"{p} {result[f'{p}_bits_per_token']:.3f}" for p in parts if
            result.get(f"{p}_bits_per_token", 0.0) > 5e-4]  # fmt: skip
    text = f"{result['bits_per_token']:.3f} +- {result['bits_per_token_se']:.3f}"
    return text + (f" ({', '.join(rest)})" if rest else "")


def speed_table(rows: list[Row], directory: Path, extra: list[str]) -> None:
    """One row a family: step time, tokens, share of the matrix rate and memory."""
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
    """One row a family: bits at equal steps and at equal time."""
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
