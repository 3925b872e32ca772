"""Trains every family of configs/families.py and prints one table of held-out bits.

    python launch/compare.py --steps 500 --seconds 30 -- --config.data.path=text8.first10M
    python launch/compare.py --speed -- --config.bench.random_tokens=50257 --config.data.length=1024

Each family is trained twice: for the same number of steps, and for the number of steps that fit
the same time at its step time, so that what else runs on the machine then does not change what
is compared. The step times are measured one after another in between, on a machine that should
be quiet. Each run has its own learning-rate schedule. Runs and their logs stay in --workdir, and
a comparison that was interrupted goes on where it was. --speed prints step times alone.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

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


def bench(family: str, directory: Path, extra: list[str]) -> dict | str:
    """The train part of --mode bench, kept in a file; the reason where it is refused."""
    kept = directory / f"{family}.bench.json"
    if not kept.exists():
        log = directory / f"{family}.bench.log"
        config = f"--config=configs/families.py:{family}"
        if not call([config, "--mode=bench", "--config.bench.parts=train", *extra], log):
            return log.read_text().strip().splitlines()[-1]
        kept.write_text(log.read_text().strip().splitlines()[-1])
    return json.loads(kept.read_text())["train"]


def train(family: str, steps: int, workdir: Path, extra: list[str]) -> dict:
    """The last evaluation of a run of so many steps."""
    kept = workdir / "evaluations.jsonl"
    if not kept.exists():
        words = [
            f"--config=configs/families.py:{family}",
            f"--workdir={workdir}",
            f"--config.train.num_steps={steps}",
            f"--config.optim.warmup_steps={min(100, steps // 5)}",
            "--config.train.seconds=0",
            "--config.eval.every=0",
            *extra,
        ]
        if not call(words, workdir.with_suffix(".log")):
            sys.exit(workdir.with_suffix(".log").read_text())
    return json.loads(kept.read_text().splitlines()[-1])


def bits(result: dict) -> str:
    """'2.900 +- 0.012', and what of it is not the integral or sum over noise."""
    parts = ("reconstruction", "prior")
    rest = [f"{p} {result[f'{p}_bits_per_token']:.3f}" for p in parts if
            result.get(f"{p}_bits_per_token", 0.0) > 5e-4]  # fmt: skip
    text = f"{result['bits_per_token']:.3f} +- {result['bits_per_token_se']:.3f}"
    return text + (f" ({', '.join(rest)})" if rest else "")


def speed_table(families: list[str], directory: Path, extra: list[str]) -> None:
    """One row a family: step time, tokens, share of the matrix rate and memory."""
    print(
        "| family | s/step (min-max) | tokens/s | of the matrix rate (formula; compiler) "
        "| temporaries MiB | peak RSS GiB |\n|---|---|---|---|---|---|",
        flush=True,
    )
    for name in families:
        n = bench(name, directory, extra)
        if isinstance(n, str):
            print(f"| {name} | {n} | | | | |", flush=True)
            continue
        print(
            f"| {name} | {n['seconds']:.3f} ({n['seconds_min']:.3f}-{n['seconds_max']:.3f}) "
            f"| {n['tokens_per_second']:,.0f} | {n['model_utilisation']:.0%}; "
            f"{n['compiler_utilisation']:.0%} | {n['temporary_mib']:,.0f} "
            f"| {n['peak_rss_gib']:.2f} |",
            flush=True,
        )


def likelihood_table(flags: argparse.Namespace, families: list[str], directory: Path) -> None:
    """One row a family: bits at equal steps and at equal time."""
    for name in families:
        train(name, flags.steps, directory / f"{name}-steps", flags.extra)
    speed = {name: bench(name, directory, flags.extra) for name in families}
    print(
        f"| family | bound | ms/step | bits, {flags.steps} steps | steps in {flags.seconds:g} s "
        "| bits, equal time |\n|---|---|---|---|---|---|",
        flush=True,
    )
    for name in families:
        seconds = speed[name]["seconds"]
        fitting = max(1, round(flags.seconds / seconds))
        same = train(name, flags.steps, directory / f"{name}-steps", flags.extra)
        timed = train(name, fitting, directory / f"{name}-time", flags.extra)
        print(
            f"| {name} | {FAMILIES[name][2]} | {1e3 * seconds:.0f} | {bits(same)} | {fitting} "
            f"| {bits(timed)} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=500, help="of the equal-steps runs")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the equal-time runs")
    parser.add_argument("--speed", action="store_true", help="step times alone")
    parser.add_argument("--workdir", default="runs/compare")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("extra", nargs="*", help="after --: arguments for every run")
    flags = parser.parse_args()
    directory = Path(flags.workdir).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    families = flags.families.split(",")
    for name in families:
        if name not in FAMILIES:
            sys.exit(f"error: unknown family {name!r}; known are {', '.join(FAMILIES)}")
    if flags.speed:
        speed_table(families, directory, flags.extra)
    else:
        likelihood_table(flags, families, directory)


if __name__ == "__main__":
    main()
