"""Samples written as text, JSON lines and pictures, and their statistics."""

import dataclasses
import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from md4_jax.generate import diversity, figures, image_traces, pages, pictures, traces
from md4_jax.generate.prompts import template_lines
from md4_jax.options.guide import ClassifierOptions
from md4_jax.protocols import Params, Prompt
from md4_jax.protocols.phrases import amount
from md4_jax.runtime.paths import Place, alone, is_remote

# Keys of the section `sample` that do not affect samples, and those that `record` renames.
WITHOUT_EFFECT = ("batch_size", "trace", "judge", "name", "reward")


def listed(texts: Sequence[str]) -> str:
    """Returns the samples for reading, each below its number."""
    return "\n\n".join(f"--- sample {i} ---\n{text}" for i, text in enumerate(texts)) + "\n"


def write_samples(
    directory: Place,
    step: int,
    texts: list[str],
    samples: Any,
    facts: dict,
    own: Sequence[dict] = (),
) -> Place:
    """Writes step_N.txt for reading and step_N.jsonl for programs, keeping older files.

    facts, own  further fields of the JSON rows: common to all rows, and of each row
    """
    rows = [
        {
            "sample": i,
            "step": step,
            **facts,
            **(own[i] if own else {}),
            "network_evaluations": int(samples.evaluations[i]),
            **({"reward": float(samples.steered.rewards[i])} if samples.steered else {}),
            "text": text,
            "tokens": samples.tokens[i][: samples.lengths[i]].tolist(),
        }
        for i, text in enumerate(texts)
    ]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    bodies = {".txt": listed(texts), ".jsonl": lines}
    return _write(
        directory,
        step,
        {
            ending: lambda file, body=body: file.write_text(body, encoding="utf-8")
            for ending, body in bodies.items()
        },
    )


def write_pictures(
    directory: Place, step: int, domain: Any, samples: Any, prompts: Sequence[Prompt]
) -> Place:
    """Writes step_N.png, and step_N.npy with the symbols, uint8 (codes: uint16) [N, H, W, C].

    With images as prompts also step_N.inpaint.png: originals, sampler inputs, samples.
    """
    symbols = samples.tokens.reshape(-1, *domain.shape)
    symbols = symbols.astype(np.min_scalar_type(domain.vocab_size - 1))

    def write_symbols(path: Place) -> None:
        with path.open("wb") as file:
            np.save(file, symbols)

    files: dict[str, Callable[[Place], Any]] = {
        ".png": lambda file: pictures.samples(domain, samples.tokens, file),
        ".npy": write_symbols,
    }
    if samples.prompt_mask.any():
        files[".inpaint.png"] = lambda file: pictures.filled_in(
            domain, prompts, samples.tokens, samples.prompt_mask, file
        )
    return _write(directory, step, files)


def write_rows(directory: Place, step: int, domain: Any, rows: np.ndarray, name: str) -> Place:
    """Writes rows of images, symbols [N, M, L], as step_N.NAME.png."""
    picture = pictures.grid(pictures.coloured(domain, rows), pictures.factor(pictures.size(domain)))
    return _write(directory, step, {f".{name}.png": lambda file: pictures.save(picture, file)})


def _write(directory: Place, step: int, files: Mapping[str, Callable[[Place], Any]]) -> Place:
    """Writes step_N with each ending, and a suffix if one of them exists; returns the first.

    Until all are complete they have hidden names, and the first one is renamed last. If writing
    fails they are deleted. Another process may write samples of the same step at the same time.

    files  functions that write a file, by ending
    """
    directory.mkdir(parents=True, exist_ok=True)
    if is_remote(directory):  # where every write is atomic
        stem = _new_stem(directory, step, files)
        for ending, write in reversed(files.items()):
            write(directory / f"{stem}{ending}")
        return directory / f"{stem}{next(iter(files))}"
    own = uuid.uuid4().hex
    partial = {ending: directory / f".{own}{ending}.partial" for ending in files}
    try:
        for ending, write in files.items():
            write(partial[ending])
        with alone(directory):
            stem = _new_stem(directory, step, files)
            for ending, path in reversed(partial.items()):
                path.rename(directory / f"{stem}{ending}")
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)
    return directory / f"{stem}{next(iter(files))}"


def _new_stem(directory: Place, step: int, endings: Iterable[str]) -> str:
    """Returns step_N, with a suffix if a file with this name and one of the endings exists."""
    stem, count = f"step_{step:08d}", 1
    while any((directory / f"{stem}{ending}").exists() for ending in endings):
        count += 1
        stem = f"step_{step:08d}-{count}"
    return stem


def of_samples(drawn: Any) -> dict[str, Any]:
    """Returns cost and diversity of samples, by name, for a line of JSON."""
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
        **(drawn.steered.numbers() if drawn.steered else {}),
        **diversity.numbers(
            [row[:end] for row, end in zip(drawn.tokens, drawn.lengths, strict=True)]
        ),
    }


def trace(samples: Place, drawn: Any, experiment: Any, params: Params) -> list[Place]:
    """Draws trajectories of the first samples, and GenMD4's powers, beside the samples' file."""
    domain, traced = experiment.domain, drawn.paths[0].z.shape[2]
    found = []
    for n in range(min(traced, len(drawn.tokens))):
        frames, number = drawn.path(n)
        found.append(traces.trajectory(frames, drawn.prompt_mask[n], domain, number))
    gif, page = samples.with_suffix(".gif"), samples.with_suffix(".html")
    made = [gif]
    if pictures.has_pictures(domain):
        made.insert(0, samples.with_suffix(".path.png"))
        image_traces.paths(domain, drawn.frames[0][0, :, : pictures.TRACED], made[0])
        image_traces.gif(found[0], gif, domain)
    else:
        traces.gif(found[0], gif)
    made.append(page)
    pages.write(found, page, f"{samples.stem}: {settings(experiment)}", domain)
    for learned, values in params["process"].learned().items():
        symbols = [traces.word(domain, i) for i in range(domain.vocab_size)]
        times = figures.reveal_times(
            drawn.frames[0][:, :, 0], experiment.grid, experiment.process.mask_id
        )
        free = ~drawn.prompt_mask[0]
        made.append(samples.with_suffix(f".{learned}.png"))
        figures.powers(symbols, np.asarray(values), drawn.tokens[0][free], times[free], made[-1])
    return made


def record(experiment: Any) -> dict[str, Any]:
    """Returns the settings needed to draw the same samples again, for each row of their file.

    These are all keys of the section `sample` that differ from their defaults and have an effect.
    """
    asked, own, step = experiment.config["sample"], experiment.sample, experiment.sampler_step
    plain = {
        field.name: field.default
        for options in (step, step.transform, own, experiment.prompt, ClassifierOptions())
        if dataclasses.is_dataclass(options)
        for field in dataclasses.fields(options)
    }
    changed = {
        key: value
        for key, value in asked.items()
        if key not in WITHOUT_EFFECT and (key not in plain or value != plain[key])
    }
    steered = {"reward_options": asked["reward"]} if experiment.steering else {}
    of_class = {"label": own.label, "guidance": own.guidance} if own.label >= 0 else {}
    return changed | {
        "seed": own.seed,
        "sampler": asked["name"],
        "steps": len(experiment.grid) - 1,
        "grid": str(own.grid),
        "temperature": asked.get("temperature", 1.0),
        **of_class,
        **steered,
    }


def of_rows(experiment: Any, labels: Sequence[int] | None) -> list[dict[str, Any]]:
    """Returns the fields of each row of the samples' file: its template and its class.

    labels  classes of the samples; None: they have none
    """
    lines, num = template_lines(experiment.prompt), experiment.sample.num
    count = len(lines) * num if labels is None else len(labels)
    templates = [{"template": lines[i // num]} if lines else {} for i in range(count)]
    classes = [{}] * count if labels is None else [{"label": int(label)} for label in labels]
    return [one | other for one, other in zip(templates, classes, strict=True)]


def settings(experiment: Any) -> str:
    """Returns e.g. 'remask, 64 steps, cosine grid, temperature 0.9, seed 0, objective md4'."""
    asked, own = experiment.config["sample"], experiment.sample
    grid = f"{own.grid} grid" if isinstance(own.grid, str) and own.grid[:1] not in "([" else ""
    label = f"label {own.label}, guidance {own.guidance:g}" if own.label >= 0 else ""
    if experiment.guide:
        strength = experiment.guide.options.classifier_strength
        label = f"label {experiment.guide.label}, classifier strength {strength:g}"
    parts = [asked["name"], amount(len(experiment.grid) - 1, "step"), grid]
    parts += [f"temperature {asked.get('temperature', 1.0):g}", label, f"seed {own.seed}"]
    return ", ".join([*filter(None, parts), f"objective {experiment.config['objective']['name']}"])
