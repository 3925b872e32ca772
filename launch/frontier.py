"""Samples a trained run at several numbers of steps and temperatures, and draws the trade-off.

    python launch/frontier.py --config configs/quickstart.py --workdir runs/quickstart \
        --steps 8,16,32,64,128,256 --temperatures 0.7,0.8,0.9,1.0 -- --config.sample.num=64

Each point is one run of --mode sample: the bound on -log p of the samples under --judge (the
run itself, or the directory of another one with the same tokenizer), their unigram entropy, and
the network evaluations that a sequence took. Low bits with a low entropy are repetition, not
quality: read both. The rows go to WORKDIR/figures/frontier.jsonl, and are not made twice; the
picture to frontier.png beside it.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from md4_jax import figures  # noqa: E402


def numbers(text: str, kind: type) -> list:
    return [kind(word) for word in text.split(",")]


def point(flags: argparse.Namespace, settings: dict[str, float]) -> dict:
    """The numbers of one run of --mode sample."""
    words = [f"--config={flags.config}", f"--workdir={flags.workdir}", "--mode=sample"]
    words += [f"--config.sample.judge={flags.judge}"]
    words += [f"--config.sample.{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "md4_jax.main", *words, *flags.extra]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr.strip() or done.stdout.strip())
    return {**settings, "extra": flags.extra, **json.loads(done.stdout.strip().splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", required=True, help="that the run was trained with")
    parser.add_argument("--workdir", required=True, type=Path, help="of the trained run")
    parser.add_argument("--steps", default="8,16,32,64,128,256")
    parser.add_argument("--temperatures", default="1.0")
    parser.add_argument("--judge", default="self")
    parser.add_argument("extra", nargs="*", help="after --: arguments for every point")
    flags = parser.parse_args()
    flags.workdir = flags.workdir.absolute()
    if not flags.workdir.is_dir():
        sys.exit(f"error: --workdir {flags.workdir} holds no run")
    kept = flags.workdir / "figures" / "frontier.jsonl"
    kept.parent.mkdir(exist_ok=True)
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    chosen = []
    for temperature in numbers(flags.temperatures, float):
        for steps in numbers(flags.steps, int):
            settings = {"steps": steps, "temperature": temperature}
            asked = {**settings, "extra": flags.extra, "judge": flags.judge}
            row = next((r for r in rows if asked.items() <= r.items()), None)
            if row is None:
                row = point(flags, settings)
                with kept.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            chosen.append(row)
            print(json.dumps(row), flush=True)
    picture = kept.with_suffix(".png")
    figures.frontier(chosen, picture)
    print(f"frontier: {picture}")


if __name__ == "__main__":
    main()
