"""Samples written as text, JSON lines and pictures, and their statistics."""

import json
from typing import Any

import numpy as np

from md4_jax.generate import diversity, figures, traces
from md4_jax.protocols import Params
from md4_jax.runtime.paths import Place


def write_samples(
    directory: Place, step: int, texts: list[str], samples: Any, facts: dict
) -> Place:
    """Writes step_N.txt to read and step_N.jsonl for programs, beside older files."""
    directory.mkdir(parents=True, exist_ok=True)
    stem, count = f"step_{step:08d}", 1
    while (directory / f"{stem}.txt").exists():
        count += 1
        stem = f"step_{step:08d}-{count}"
    body = "\n\n".join(f"--- sample {i} ---\n{text}" for i, text in enumerate(texts))
    path = directory / f"{stem}.txt"
    path.write_text(body + "\n", encoding="utf-8")
    with (directory / f"{stem}.jsonl").open("w", encoding="utf-8") as file:
        for i, text in enumerate(texts):
            row = {
                "sample": i,
                "step": step,
                **facts,
                "network_evaluations": int(samples.evaluations[i]),
                "text": text,
                "tokens": samples.tokens[i][: samples.lengths[i]].tolist(),
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path


def of_samples(drawn: Any) -> dict[str, Any]:
    """Cost and diversity of samples, by name, for a line of JSON."""
    used = drawn.evaluations
    return {
        "samples": len(drawn.tokens),
        "length": float(drawn.lengths.mean()),
        "length_min": int(drawn.lengths.min()),
        "length_max": int(drawn.lengths.max()),
        "network_evaluations": float(used.mean()),
        "network_evaluations_min": int(used.min()),
        "network_evaluations_max": int(used.max()),
        "seconds_per_sequence": drawn.seconds / len(drawn.tokens),
        **diversity.numbers(
            [row[:end] for row, end in zip(drawn.tokens, drawn.lengths, strict=True)]
        ),
    }


def trace(samples: Place, drawn: Any, experiment: Any, params: Params) -> list[Place]:
    """Draws the path of the first sample, and GenMD4's powers, beside the file of the samples."""
    path = traces.trajectory(drawn.frames, drawn.prompt_mask[0], experiment.domain)
    gif, page = samples.with_suffix(".gif"), samples.with_suffix(".html")
    traces.gif(path, gif)
    name = experiment.config["sample"]["name"]
    traces.html(
        path, page, f"Sample 0 of {samples.stem}: {name}, {experiment.config['objective']['name']}"
    )
    made = [gif, page]
    for learned, values in params["process"].learned().items():
        symbols = [traces.word(experiment.domain, i) for i in range(experiment.domain.vocab_size)]
        times = figures.reveal_times(drawn.frames[0], experiment.grid, experiment.process.mask_id)
        free = ~drawn.prompt_mask[0]
        made.append(samples.with_suffix(f".{learned}.png"))
        figures.powers(symbols, np.asarray(values), drawn.tokens[0][free], times[free], made[-1])
    return made
