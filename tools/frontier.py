"""Samples a trained run at several numbers of steps and temperatures, and plots the trade-off.

    python tools/frontier.py --workdir runs/quickstart \
        --steps 8,16,32,64,128,256 --temperatures 0.7,0.8,0.9,1.0 -- --config.sample.num=64

Each point is one run of --mode sample. It has the bound on -log p of the samples under --judge
(the run itself, or the directory of another run with the same tokenizer), their unigram entropy,
and the network evaluations per sequence. Read bits and entropy together: repetitive samples have
low bits and a low entropy. Rows are written to WORKDIR/figures/frontier.jsonl. Existing points are
not recomputed unless the run has a newer checkpoint or eval.checkpoint has changed. The plot is
frontier.png beside it.
"""

import argparse
import json
import sys
from pathlib import Path

import program

from md4_jax.config import files
from md4_jax.config import load as config
from md4_jax.generate import figures
from md4_jax.protocols import UserError
from md4_jax.runtime.commit import commit
from md4_jax.runtime.paths import place


def whole(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def real(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def newest(workdir: Path) -> int:
    """Returns the step of the newest checkpoint; eval.checkpoint may select another one."""
    steps = [int(p.name) for p in (workdir / "checkpoints").glob("*") if p.name.isdigit()]
    if not steps:
        sys.exit(f"error: --workdir {workdir} holds no trained run")
    return max(steps)


def checkpoint(flags: argparse.Namespace) -> str:
    """Returns eval.checkpoint of the config: the checkpoint that --mode sample uses."""
    try:
        run = place(str(flags.workdir))
        asked = files.load(flags.config) if flags.config else config.stored(run)
    except UserError as error:
        sys.exit(f"error: {error}")
    return str((asked or {}).get("eval", {}).get("checkpoint", "newest"))


def matches(row: dict, asked: dict) -> bool:
    """Returns whether a row belongs to this point; older rows have only the newest step."""
    return asked.items() <= {"newest": row.get("step"), "checkpoint": "newest", **row}.items()


def point(flags: argparse.Namespace, settings: dict[str, float]) -> dict:
    """Runs --mode sample with these settings and returns its numbers."""
    words = [f"--config={flags.config}"] if flags.config else []
    words += [f"--workdir={flags.workdir}", "--mode=sample"]
    words += [f"--config.sample.judge={flags.judge}"]
    words += [f"--config.sample.{key}={value}" for key, value in settings.items()]
    try:
        result = program.numbers([*words, *flags.extra])
    except program.Refused as error:
        sys.exit(f"error: {error}")
    return {**settings, "extra": flags.extra, "commit": commit(), **result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", help="that the run was trained with; its own if not given")
    parser.add_argument("--workdir", required=True, type=Path, help="of the trained run")
    parser.add_argument("--steps", type=whole, default="8,16,32,64,128,256")
    parser.add_argument("--temperatures", type=real, default="1.0")
    parser.add_argument("--judge", default="self", help="self, or the workdir of another run")
    parser.add_argument("extra", nargs="*", help="after --: arguments for every point")
    flags = parser.parse_args()
    if not flags.judge:
        parser.error("--judge must name one: self, or the workdir of another run")
    flags.workdir = flags.workdir.absolute()
    taken = {"newest": newest(flags.workdir), "checkpoint": checkpoint(flags)}
    kept = flags.workdir / "figures" / "frontier.jsonl"
    kept.parent.mkdir(exist_ok=True)
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    chosen = []
    for temperature in flags.temperatures:
        for steps in flags.steps:
            settings = {"steps": steps, "temperature": temperature}
            asked = {**settings, **taken, "extra": flags.extra, "judge": flags.judge}
            row = next((r for r in rows if matches(r, asked)), None)
            if row is None:
                row = {**point(flags, settings), **taken}
                rows.append(row)
                with kept.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            chosen.append(row)
            print(json.dumps(row), flush=True)
    picture = kept.with_suffix(".png")
    figures.frontier(chosen, picture)
    print(f"frontier: {picture}")


if __name__ == "__main__":
    main()
