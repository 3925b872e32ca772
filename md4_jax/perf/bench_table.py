"""Times of the parts of a run as a table."""

import math
from typing import Any

from md4_jax.options.parts import BENCH_PARTS
from md4_jax.perf import names


def table(result: dict[str, Any]) -> str:
    """Formats the numbers as a Markdown table, followed by the operation names of each part."""
    parts = [name for name in BENCH_PARTS if name in result]
    unit = "image" if any("images_per_second" in result[name] for name in parts) else "token"
    digits = 1 if unit == "image" else 0
    head = (
        f"| part | s (min-max) | {unit}s/s | GFLOP (formula; compiler) | "
        "of the matrix rate (formula; compiler) | compile s | peak RSS GiB |"
    )
    lines = [head, "|---" * 7 + "|"]
    for name in parts:
        n = result[name]
        work = share = compiled = ""
        if "model_gflop" in n:
            work = f"{n['model_gflop']:.1f}; {n['compiler_gflop'] or math.nan:.1f}"
            share = f"{n['model_utilisation']:.0%}; {n['compiler_utilisation'] or math.nan:.0%}"
            compiled = f"{n['compile_seconds']:.1f}"
        times = f"{n['seconds']:.4g} ({n['seconds_min']:.4g}-{n['seconds_max']:.4g})"
        lines.append(
            f"| {name} | {times} | {n[f'{unit}s_per_second']:,.{digits}f} | {work} | {share} | "
            f"{compiled} | {n['peak_rss_gib']:.2f} |"
        )
    lists = [
        names.table(name, numbers["names"])
        for name, numbers in result.items()
        if isinstance(numbers, dict) and "names" in numbers
    ]
    return "\n\n".join(["\n".join(lines), *lists])
