"""Plots of a run and of its samples."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from md4_jax.protocols.phrases import amount
from md4_jax.runtime.paths import Place

HELD_OUT = ("tab:orange", "tab:red", "tab:purple")
MOST = 70  # symbols side by side
LINE = 13.0  # points between the lines of labels


def _pyplot() -> Any:
    """Imports pyplot only when needed, since this takes half a second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def loss_curve(
    rows: Sequence[dict], path: Place, ladder: Sequence[float] = (), *, unit: str = "token"
) -> None:
    """Plots training loss and evaluated bounds against the step, with n-gram levels as lines.

    unit: name of a symbol, the domain's `unit`
    """
    figure, axes = _pyplot().subplots(figsize=(8, 5), dpi=120)
    for name, label, style in (
        ("train_bits_per_token", "training bound", dict(color="tab:blue", linewidth=1)),
        ("train_loss_bits", "training loss (not a bound)", dict(color="tab:gray", linewidth=1)),
    ):
        points = [(r["step"], r[name]) for r in rows if isinstance(r.get(name), float)]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    ends = "/bits_per_token"
    for number, key in enumerate(dict.fromkeys(k for r in rows for k in r if k.endswith(ends))):
        points = [(r["step"], float(r[key]), float(r[f"{key}_se"])) for r in rows if key in r]
        steps, values, errors = zip(*points, strict=True)
        label = f"{key.removesuffix(ends)}, moving average of the parameters"
        axes.errorbar(steps, values, errors, fmt="o-", color=HELD_OUT[number % 3], label=label)
    for level in ladder:
        axes.axhline(level, color="tab:green", linewidth=0.7, linestyle="--")
    _label(axes, ladder)
    axes.set_xlabel("step")
    axes.set_ylabel(f"bits per {unit}")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    _save(figure, path)


def _label(axes: Any, ladder: Sequence[float]) -> None:
    """Writes the names of n-gram levels beside a plot, without overlap if levels are close."""
    low, high = axes.get_ylim()
    size = axes.get_position().height * axes.figure.get_size_inches()[1] * 72  # points
    beside = dict(textcoords=axes.get_yaxis_transform(), xycoords=axes.get_yaxis_transform())
    line = dict(arrowstyle="-", color="tab:green", linewidth=0.7, shrinkA=0, shrinkB=0)
    heights = spread_apart(ladder, LINE * (high - low) / size)
    for order, (level, height) in enumerate(zip(ladder, heights, strict=True), start=1):
        style = dict(va="center", arrowprops=line, annotation_clip=False, **beside)
        axes.annotate(f"{order}-gram", (1.0, level), (1.03, height), **style)


def spread_apart(values: Sequence[float], least: float) -> np.ndarray:
    """Moves values apart so that they differ by at least `least`, keeping their order.

    The result has the smallest sum of squared changes: values that are too close form groups with
    equal distances, and a group keeps the mean of its values.
    """
    order = np.argsort(values, kind="stable")
    groups: list[list[float]] = []  # of values less the distance below them
    for rank, value in enumerate(np.asarray(values, float)[order]):
        groups.append([value - rank * least])
        while len(groups) > 1 and np.mean(groups[-1]) < np.mean(groups[-2]):
            groups[-2:] = [groups[-2] + groups[-1]]
    found = np.empty(len(order))
    means = [np.mean(group) for group in groups for _ in group]
    found[order] = np.array(means) + least * np.arange(len(order))
    return found


def _save(figure: Any, path: Place) -> None:
    with path.open("wb") as file:
        figure.savefig(file, format="png", bbox_inches="tight")
    _pyplot().close(figure)


def reveal_times(z: np.ndarray, grid: np.ndarray, mask: int) -> np.ndarray:
    """Returns the time at which each position is unmasked, [L].

    z [W, T + 1, L] has W windows, each along the grid t(0) < ... < t(T), and -1 at positions not
    yet reached by a window.
    """
    shown = ((z != mask) & (z >= 0)).reshape(-1, z.shape[-1])
    taken = np.argmax(shown, axis=0) % len(grid)
    return grid[len(grid) - 1 - taken]


def powers(
    symbols: Sequence[str], power: np.ndarray, tokens: np.ndarray, times: np.ndarray, path: Place
) -> None:
    """Plots GenMD4's w by symbol, and a sample's unmasking times with their means w / (w + 1)."""
    order, cut = np.argsort(-power, kind="stable"), MOST // 2
    hidden = len(order) - MOST
    if hidden > 0:  # the largest and the smallest powers
        order = np.concatenate([order[:cut], order[-cut:]])
    figure, (upper, lower) = _pyplot().subplots(2, 1, figsize=(12, 7), dpi=120, sharex=True)
    here = np.arange(len(order))
    upper.bar(here, power[order], color="tab:blue")
    upper.set_ylabel("learned power w")
    mean = power[order] / (power[order] + 1)
    lower.plot(here, mean, "k_", zorder=3, label="mean by the process, w/(w+1)")
    place = {symbol: i for i, symbol in enumerate(order)}
    shown = [(place[k], t) for k, t in zip(tokens, times, strict=True) if k in place]
    if shown:
        points = tuple(zip(*shown, strict=True))
        lower.plot(*points, "o", color="tab:orange", alpha=0.5, label="tokens of sample 0")
    lower.set_ylabel("time of the reveal (1 is first)")
    lower.set_ylim(-0.03, 1.03)
    labels = [symbols[i].replace(" ", "\N{OPEN BOX}") for i in order]
    turn = 90 if max(map(len, labels)) > 1 else 0
    lower.set_xticks(here, [x.replace("$", r"\$") for x in labels], rotation=turn, fontsize=9)
    lower.set_xlim(-1, len(order))
    lower.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False)
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        if hidden > 0:
            axes.axvline(cut - 0.5, color="tab:gray", linestyle=":")
    if hidden > 0:
        said = f"{amount(hidden, 'symbol')} between are left out"
        upper.text(cut - 0.3, power.max(), said, va="top")
    _save(figure, path)


def information_profile(
    profile: np.ndarray, losses: dict[str, Sequence], path: Place, *, unit: str = "token"
) -> None:
    """Plots Z(k) against visible tokens, and predicted losses in nats against steps.

    unit: name of a symbol, the domain's `unit`
    """
    size = dict(figsize=(11, 4.5), dpi=120, layout="constrained")
    figure, (left, right) = _pyplot().subplots(1, 2, **size)
    left.plot(np.arange(len(profile)), np.asarray(profile) / np.log(2.0))
    left.set_xlabel(f"visible {unit}s k")
    left.set_ylabel(f"cross-entropy of another {unit} Z(k), bits")
    for name in ("uniform", "cosine", "optimal"):
        values = np.asarray(losses[name]) / np.log(2.0) / len(profile)
        right.plot(losses["steps"], values, "o-", markersize=4, label=name)
    right.set_xscale("log", base=2)
    right.set_xlabel("steps")
    right.set_ylabel(f"predicted loss of parallel reveals, bits per {unit}")
    right.legend(title="grid", frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    _save(figure, path)


def frontier(rows: Sequence[dict], path: Place) -> None:
    """Plots bits under the judge and unigram entropy of samples against network evaluations.

    A row is the JSON line of --mode sample with its steps and temperature. The plot has one line
    per temperature. A symbol has the name under which the judge's bits are in the rows.
    """
    plt = _pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), dpi=120, layout="constrained")
    temperatures = sorted({row["temperature"] for row in rows})
    shades = plt.cm.plasma(np.linspace(0.0, 0.8, len(temperatures)))
    for temperature, shade in zip(temperatures, shades, strict=True):
        line = [row for row in rows if row["temperature"] == temperature]
        line.sort(key=lambda row: row["network_evaluations"])
        used = [row["network_evaluations"] for row in line]
        for axes, name in zip(
            panels, ("judge_bits_per_token", "unigram_entropy_bits"), strict=True
        ):
            # Numbers that are not finite are null in the row; a single sample has no error.
            values = np.array([row[name] for row in line], float)
            errors = np.array([row.get(f"{name}_se") for row in line], float)
            axes.errorbar(
                used, values, np.nan_to_num(errors), fmt="o-", markersize=4, capsize=2,
                color=shade, label=f"{temperature:g}",
            )  # fmt: skip
    from matplotlib import ticker

    units = ("character", "dimension")
    unit = next((u for u in units for row in rows if f"judge_bits_per_{u}" in row), "token")
    used = [row["network_evaluations"] for row in rows]
    between = (1.0,) if max(used) > 8 * min(used) else (1.0, 1.25, 1.5, 1.75)
    for axes, label in zip(
        panels,
        (f"bound on -log p under the judge, bits/{unit}", "unigram entropy, bits"),
        strict=True,
    ):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(ticker.LogLocator(2, subs=between))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("network evaluations a sequence")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    panels[1].legend(title="temperature", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _save(figure, path)
