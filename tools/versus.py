"""Times this package and other programs alternately, in one run on one machine.

    python tools/versus.py --out FILE [--rounds 5] [--seconds 600] NAME:CALLS=COMMAND ...
    python tools/versus.py --show FILE

A COMMAND starts a worker with the protocol of `versus_worker.py`; workers of other projects run in
their own environments. All are compiled and warm before the first round. In each round each worker
is called CALLS times, after an uncounted first call, together with a matrix product that measures
the speed of the machine. Calls disturbed by other programs are dropped. The table has the ratio of
each program to the first one, as median and range over rounds. FILE gets every call as JSON; --show
prints the table from it. For example, size (a):

    python tools/versus.py --out a.json "ours:3=python tools/versus_worker.py a train" \\
      "float32 of another:2=OTHER_PYTHON its_worker.py a"
"""

import argparse
import contextlib
import json
import platform
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from versus_worker import DISTURBED

from md4_jax.runtime.commit import commit

SIDE = 2048
PRODUCT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import json, jax, versus_worker
a = jax.random.normal(jax.random.key(0), ({SIDE}, {SIDE}))
product = jax.jit(lambda a: a @ a)
call = lambda: jax.block_until_ready(product(a))
call()
print("READY", flush=True)
for line in sys.stdin:
    if line.startswith("quit"):
        break
    print("TIMES", json.dumps(versus_worker.answer(call, int(line.split()[1]))), flush=True)
"""


class Program(NamedTuple):
    """A program under test: its process, its calls per round, and the facts it reports."""

    process: subprocess.Popen
    calls: int
    facts: dict[str, float]


def start(command: list[str] | str, calls: int) -> Program:
    """Starts a worker and waits until it is ready; SystemExit if it ends before."""
    process = subprocess.Popen(
        command, shell=isinstance(command, str), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    facts = {}
    for line in process.stdout:
        if line.startswith("INFO"):
            facts = json.loads(line.removeprefix("INFO"))
        if line.startswith("READY"):
            return Program(process, calls, facts)
    sys.exit(f"error: {command} ended with {process.wait()} before it was ready")


def ask(program: Program) -> dict[str, Any]:
    """Makes a worker run an uncounted call and then its calls; returns the measurements."""
    with contextlib.suppress(BrokenPipeError):  # it has ended: the loop below reads nothing
        program.process.stdin.write(f"run {program.calls + 1}\n")
        program.process.stdin.flush()
    for line in program.process.stdout:
        if line.startswith("TIMES"):
            return json.loads(line.removeprefix("TIMES"))
    code = program.process.wait()
    # A shell adds 128 to the signal that ended its program.
    killed = code in (-signal.SIGKILL, 128 + signal.SIGKILL)
    why = ", killed, as by a system without memory" if killed else ""
    sys.exit(f"error: {program.process.args} ended with {code} in a round{why}")


def typical(answer: dict[str, Any]) -> float:
    """Returns the median seconds of the undisturbed calls, or of all if there is none.

    If there are several calls, the first one of a turn is omitted: it takes up to twice as long,
    because it must reclaim memory from the previous programs.
    """
    calls = list(zip(answer["ts"], answer["oth"], strict=True))
    calls = calls[1:] or calls
    return statistics.median([t for t, o in calls if o < DISTURBED] or [t for t, _ in calls])


def rounds(programs: dict[str, Program], most: int, seconds: float) -> dict[str, list[dict]]:
    """Returns the answers of each program, one per round; starts no round after the seconds."""
    found: dict[str, list[dict]] = {name: [] for name in programs}
    began = time.monotonic()
    for _ in range(most):
        for name, program in programs.items():
            found[name].append(ask(program))
        if time.monotonic() - began > seconds:
            break
    return found


def table(made: dict[str, Any]) -> str:
    """Formats medians, and the ratio of each program to the first one by round.

    If the FLOPs of a program's products are known, includes their fraction of the rate of the
    square product in the same rounds.
    """
    each = {
        name: [typical(answer) for answer in answers] for name, answers in made["calls"].items()
    }
    base = next(name for name in each if name != "product")
    rate = 2 * SIDE**3 / statistics.median(each["product"]) / 1e9
    lines = [
        f"{made['processor']}; matrix product {rate:.0f} GFLOP/s; {len(each[base])} rounds",
        f"| program | seconds (min-max of rounds) | / {base} (min-max of rounds) "
        "| share of the matrix rate | peak GiB |",
        "|---|---|---|---|---|",
    ]
    for name, seconds in each.items():
        if name == "product":
            continue
        ratios = [a / b for a, b in zip(seconds, each[base], strict=True)]
        done = made["facts"][name].get("gflop", 0) / statistics.median(seconds) / rate
        lines.append(
            f"| {name} | {ranged(seconds, '.4f')} | {ranged(ratios, '.2f')} "
            f"| {f'{done:.0%}' if done else ''} "
            f"| {max(answer['rss'] for answer in made['calls'][name]) / 2**20:.2f} |"
        )
    return "\n".join(lines)


def ranged(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def processor() -> str:
    """Returns the name of the processor according to the kernel."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def worker(text: str) -> tuple[str, str, int]:
    """Splits NAME:CALLS=COMMAND into name, command and calls."""
    label, mark, command = text.partition("=")
    name, colon, calls = label.rpartition(":")
    if not (mark and colon and calls.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME:CALLS=COMMAND")
    return name, command, int(calls)


def measured(workers: list[tuple], most: int, seconds: float) -> dict[str, Any]:
    """Starts the programs, times them in turn, and ends them."""
    programs = {"product": start([sys.executable, "-c", PRODUCT], 4)}
    programs |= {name: start(command, calls) for name, command, calls in workers}
    found = rounds(programs, most, seconds)
    for program in programs.values():
        program.process.communicate("quit\n")
    return {
        "processor": processor(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "command": sys.argv,
        "facts": {name: program.facts for name, program in programs.items()},
        "calls": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="*", type=worker, metavar="NAME:CALLS=COMMAND")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="file for every call, as JSON")
    where.add_argument("--show", type=Path, help="such a file, whose table is printed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600.0, help="start no round after them")
    options = parser.parse_args()
    if options.show and not options.show.is_file():
        parser.error(f"--show={options.show}: there is no such file")
    if options.show:
        print(table(json.loads(options.show.read_text())))
        return
    if not options.programs:
        parser.error("no NAME:CALLS=COMMAND given")
    made = measured(options.programs, options.rounds, options.seconds)
    options.out.write_text(json.dumps(made))
    print(table(made))


if __name__ == "__main__":
    main()
