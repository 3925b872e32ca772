"""Measures how the time of a training step grows with batch, length, depth, width and vocabulary.

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python tools/growth.py [--out growth.png]

Each point is one run of --mode bench in float32 with AdamW and the moving average. The speed of a
machine varies, so a matrix product of 2048 x 2048 x 2048 is timed between the windows, and steps
are compared by seconds times the rate of this product. The slope is that of a line fitted to the
upper half of the points on logarithmic axes. The table is printed; --out also plots it.
"""

import argparse
import math
from typing import NamedTuple

import numpy as np
import program

BASE = (
    "network.size=256 network.depth=4 network.heads=4 network.scan_blocks=false "
    "bench.random_tokens=27 data.length=256 train.batch_size=8"
)


class Axis(NamedTuple):
    """Varied quantity: name, keys set to each value, values, expected slope."""

    name: str
    keys: str
    values: tuple[int, ...]
    expected: str


AXES = (
    Axis("batch", "train.batch_size={0}", (1, 2, 4, 8, 16, 32), "1"),
    Axis("length", "data.length={0} train.batch_size=2", (64, 128, 256, 512, 1024, 2048), "1 to 2"),
    Axis("depth", "network.depth={0}", (1, 2, 4, 8, 16), "1"),
    Axis("width", "network.size={0} train.batch_size=4", (64, 128, 256, 512, 1024), "1 to 2"),
    Axis(
        "vocabulary",
        "bench.random_tokens={0} network.depth=1 train.batch_size=4",
        (64, 256, 1024, 4096, 16384, 65536),
        "0 to 1",
    ),
)


def slope(x: list[float], y: list[float]) -> float:
    """Returns the slope of the line fitted to the upper half of the points, at least two."""
    half = max(2, math.ceil(len(x) / 2))
    return float(np.polyfit(np.log(x[-half:]), np.log(y[-half:]), 1)[0])


def draw(rows: dict[str, tuple[list[float], list[float], float]], path: str) -> None:
    """Draws one panel per axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, panels = pyplot.subplots(1, len(rows), figsize=(3 * len(rows), 3.2), sharey=True)
    for panel, (name, (x, y, fitted)) in zip(panels, rows.items(), strict=True):
        panel.loglog(x, y, "o-")
        panel.set_title(f"{name}, slope {fitted:.2f}", fontsize=10)
        panel.set_xticks(x, [f"{v:g}" for v in x], fontsize=7, rotation=45)
        panel.xaxis.set_minor_locator(ticker.NullLocator())
        panel.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("seconds of a step at the first point's rate")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="", help="a picture, .png")
    out = parser.parse_args().out
    print("| axis | value: seconds at the first rate | slope | expected |\n|---|---|---|---|")
    rows, first = {}, 0.0
    for axis in AXES:
        seconds = []
        for value in axis.values:
            overrides = f"{BASE} {axis.keys.format(value)}"
            n = program.bench("configs/base.py", overrides, windows=3, seconds=0.5)
            first = first or n["matrix_gflops"]
            seconds.append(n["seconds"] * n["matrix_gflops"] / first)
        x = [float(value) for value in axis.values]
        rows[axis.name] = x, seconds, slope(x, seconds)
        listed = ", ".join(f"{v}: {s:.3g}" for v, s in zip(axis.values, seconds, strict=True))
        print(
            f"| {axis.name} | {listed} | {rows[axis.name][2]:.2f} | {axis.expected} |", flush=True
        )
    if out:
        draw(rows, out)


if __name__ == "__main__":
    main()
