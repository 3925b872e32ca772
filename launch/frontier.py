"""Samples a trained run at several numbers of steps and temperatures, and draws the trade-off.

    python launch/frontier.py --workdir runs/quickstart \
        --steps 8,16,32,64,128,256 --temperatures 0.7,0.8,0.9,1.0 -- --config.sample.num=64

Each point is one run of --mode sample: the bound on -log p of the samples under --judge (the
run itself, or the directory of another one with the same tokenizer), their unigram entropy, and
the network evaluations that a sequence took. Low bits with a low entropy are repetition, not
quality: read both. The rows go to WORKDIR/figures/frontier.jsonl, and none is made twice for one
checkpoint; the picture to frontier.png beside it.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from md4_jax import figures  # noqa: E402
from md4_jax.config.load import commit  # noqa: E402


def whole(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def real(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def newest(workdir: Path) -> int:
    """The step of the newest checkpoint, which is the one that is sampled."""
    steps = [int(p.name) for p in (workdir / "checkpoints").glob("*") if p.name.isdigit()]
    if not steps:
        sys.exit(f"error: --workdir {workdir} holds no trained run")
    return max(steps)


def point(flags: argparse.Namespace, settings: dict[str, float]) -> dict:
    """The numbers of one run of --mode sample."""
    words = [f"--config={flags.config}"] if flags.config else []
    words += [f"--workdir={flags.workdir}", "--mode=sample"]
    words += [f"--config.sample.judge={flags.judge}"]
    words += [f"--config.sample.{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "md4_jax.main", *words, *flags.extra]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stderr.strip() or done.stdout.strip())
    result = json.loads(done.stdout.strip().splitlines()[-1])
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
    step = newest(flags.workdir)
    kept = flags.workdir / "figures" / "frontier.jsonl"
    kept.parent.mkdir(exist_ok=True)
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    chosen = []
    for temperature in flags.temperatures:
        for steps in flags.steps:
            settings = {"steps": steps, "temperature": temperature}
            asked = {**settings, "extra": flags.extra, "judge": flags.judge, "step": step}
            row = next((r for r in rows if asked.items() <= r.items()), None)
            if row is None:
                row = point(flags, settings)
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
