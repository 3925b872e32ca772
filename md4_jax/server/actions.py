"""Actions of the playground for one model: facts, tokenisation, samples and token costs."""

import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from md4_jax.generate import pages
from md4_jax.generate.pictures import has_pictures, is_coded, size
from md4_jax.generate.traces import word
from md4_jax.protocols import Prompt, UserError
from md4_jax.server import fields

STEPS, USUAL_STEPS = tuple(2**n for n in range(11)), 64
# Keys of samplers offered on the page -> their values, or the range of a number. `any_order`
# draws as many tokens per step as the grid determines, so that its steps can be watched.
OFFERED = {
    "any_order": {"order": ("random", "left_to_right", "right_to_left")},
    "confidence": {"score": ("probability", "margin", "entropy")},
    "remask": {"strategy": ("cap", "rescale", "confidence"), "eta": (0.0, 1.0)},
}
FIXED = {"any_order": {"per_step": 0}}
# Config keys that would not give a single sample of the requested length.
PLAIN = {"block": 0, "memory": 0, "stride": 0, "stop": "", "min_entropy": 0.0, "judge": ""}
# Keys of blocks, which are invalid without `block`, for a model that was not trained in blocks.
WITHOUT_BLOCKS = {"dual_cache": False, "next_token": False}
GRIDS = ("cosine", "uniform", "log_linear")
BLANK = "_"
SETTINGS = (
    "sampler", "steps", "grid", "temperature", "top_p", "label", "guidance", "seed", "length",
    "order", "score", "strategy", "eta",
)  # fmt: skip


def _offered(model: Any) -> list[str]:
    """Returns the compatible samplers; UserError for a model that the page cannot use."""
    if model.experiment.network.classifies:
        raise UserError(f"{model.origin} is a classifier and cannot generate samples")
    if model.experiment.sampler_step.needs.hides:
        raise UserError(
            f"{model.origin} draws texts that change their length, which the page does not "
            "support: use Model.infill or Model.watch"
        )
    return model.samplers()


class Playground:
    """A model with the actions of the page."""

    def __init__(self, model: Any, name: str):
        self._model, self._name, self._domain = model, name, model.domain
        self._pictures, self._coded = has_pictures(model.domain), is_coded(model.domain)
        self._samplers = _offered(model)
        own = model.experiment.process.timesteps  # a process in discrete time has no other steps
        self._steps, self._grids = (STEPS, GRIDS) if own is None else ((own,), ("uniform",))
        self._block = getattr(model.experiment.objective, "block", 0)
        self._plain = PLAIN if self._block else PLAIN | WITHOUT_BLOCKS
        self.facts = self._facts()

    def _facts(self) -> dict[str, Any]:
        model, domain = self._model, self._domain
        sections = model.config
        classes = sections["network"].get("classes", 0)
        names = [str(name) for name in getattr(domain, "labels", ())] or [
            str(n) for n in range(classes)
        ]
        chosen = sections["sample"]["name"]
        facts = {
            "name": self._name,
            "parameters": model.size,
            "step": model.step,
            "kind": "image" if self._pictures else "text",
            "unit": "values" if self._pictures and not self._coded else f"{domain.unit}s",
            "length": model.length,
            "lengths": self._lengths(),
            "mask": domain.vocab_size,
            "wide": not self._pictures and domain.unit != "character",
            "blank": BLANK,
            "samplers": {name: OFFERED.get(name, {}) for name in self._samplers},
            "sampler": chosen if chosen in self._samplers else self._samplers[0],
            "steps": self._steps,
            "usual_steps": self._usual_steps,
            "grids": self._grids,
            "labels": names[:classes],
            "guides": bool(classes and sections["network"].get("label_dropout", 0.0)),
            "costs": not self._pictures and model.has_token_costs,
            **pages.of_images(domain),
        }
        if self._pictures:
            facts["picture"] = list(size(domain))
        if self._pictures and not self._coded:
            facts["values"] = pages.values(domain, range(domain.vocab_size))
        return facts

    @property
    def most_bytes(self) -> int:
        """Bytes that the picture of a request takes as base64, with its mask; 0 for text."""
        height, width, channels = size(self._domain) if self._pictures else (0, 0, 0)
        return 4 * (height * width * (channels + 1) // 3 + 2)

    @property
    def _usual_steps(self) -> int:
        return USUAL_STEPS if USUAL_STEPS in self._steps else self._steps[0]

    def _lengths(self) -> list[int]:
        """Returns the available lengths of samples; few, because each is compiled."""
        most = self._model.length
        if self._pictures:
            return [most]
        # A text of blocks has whole blocks, and one of edits begins with this many masks.
        least = max(16, getattr(self._model.experiment.process, "masks", 0))
        shorter = (n for n in STEPS if least <= n < most)
        return [*(n for n in shorter if n % (self._block or 1) == 0), most]

    def tokens(self, asked: fields.Asked) -> dict[str, Any]:
        """Returns the text of each token, None for a blank."""
        fields.check_keys(asked, ["text"])
        ids = self._encoded(fields.text(asked, "text"))
        return {"tokens": [None if i is None else word(self._domain, i) for i in ids]}

    def costs(self, asked: fields.Asked) -> dict[str, Any]:
        """Returns the contribution of each token of a text to the bound, in bits."""
        fields.check_keys(asked, ["text", "label"])
        text = fields.text(asked, "text")
        if BLANK in text:
            raise UserError(
                f"each {BLANK!r} is a hidden token, but the cost of a token depends on all other "
                "tokens: replace it by text, or remove it"
            )
        found = self._model.token_costs(text, label=self._label(asked))
        return {
            "tokens": [word(self._domain, int(i)) for i in found.tokens],
            "bits": [round(float(x), 4) for x in found.bits],
            "errors": [round(float(x), 4) for x in found.bits_se],
            "total": float(found.bits.sum()),
            "total_error": found.total_se,
            "exact": found.exact,
        }

    def codes(self, asked: fields.Asked) -> dict[str, Any]:
        """Returns the codes of a picture, and the picture that the autoencoder makes of them."""
        fields.check_keys(asked, ["picture"])
        if not self._coded:
            raise UserError("this model has no codes of images")
        shape = size(self._domain)
        picture = fields.octets(asked, "picture", math.prod(shape))
        if picture is None:
            raise UserError("picture is missing")
        codes = self._domain.encode(picture.reshape(shape))
        return {"codes": codes.tolist(), "picture": pages.decoded(self._domain, codes[None])[0]}

    def states(self, asked: fields.Asked) -> Iterator[dict[str, Any]]:
        """Checks a request for a sample; returns its messages, generated one by one."""
        began = time.perf_counter()
        given = "codes" if self._coded else "picture"
        own = [given, "hidden"] if self._pictures else ["text", "hidden", "continues"]
        fields.check_keys(asked, [*own, *SETTINGS])
        settings = self._settings(asked)
        prompt, shown = self._prompt(asked, settings["length"])
        if self._model.experiment.network.marked and shown < settings["length"]:
            # Tokens after the text would move the end-of-text position that the network sees.
            prompt, settings["length"] = Prompt(*(each[:shown] for each in prompt)), shown
        return self._messages(self._model.watch(prompt, **settings), prompt, shown, began)

    def _messages(
        self, states: Iterator[Any], prompt: Prompt, shown: int, began: float
    ) -> Iterator[dict]:
        """Yields the changes of each state among the first `shown` positions, then the result.

        If they are drawn first, later positions are not drawn.
        """
        sent, known = None, set()
        for state in states:
            z, confidence = state.z[:shown], np.nan_to_num(state.confidence[:shown])
            moved = np.ones(shown, bool)
            is_drawn = state.settled >= shown
            if sent is not None:
                exact = is_drawn or state.step == state.of
                least = 0.0 if exact else pages.RESOLUTION
                moved = (z != sent[0]) | (np.abs(confidence - sent[1]) > least)
                confidence = np.where(moved, confidence, sent[1])
            redrawn = self._coded and (sent is None or (z != sent[0]).any())
            sent = z, confidence
            at = np.flatnonzero(moved)
            new = set(z[at].tolist()) - known
            known |= new
            message = {"step": state.step, "of": state.of}
            message["changes"] = [[int(n), int(z[n]), pages.short(confidence[n])] for n in at]
            message["words"] = {int(i): word(self._domain, i) for i in sorted(new)}
            if redrawn:
                message["picture"] = pages.decoded(self._domain, z[None])[0]
            if state.step == 0:
                message["length"] = shown
                message["prompt"] = np.flatnonzero(prompt.mask[:shown]).tolist()
            yield message
            if is_drawn:
                break
        result = {} if self._pictures else {"text": self._text(z)}
        seconds = round(time.perf_counter() - began, 3)
        yield {"done": True, "evaluations": state.evaluations, "seconds": seconds, **result}

    def _text(self, z: np.ndarray) -> str:
        """Returns the text of symbols; V + 1, an absent token of a growing text, has none."""
        return self._domain.decode(z[z != self._domain.vocab_size + 1])

    def _settings(self, asked: fields.Asked) -> dict[str, Any]:
        """Returns keys of the section `sample`, none of which refers to a file."""
        sampler = fields.choice(asked, "sampler", self._samplers, self.facts["sampler"])
        label = self._label(asked)
        settings = {
            **self._plain,
            **FIXED.get(sampler, {}),
            "sampler": sampler,
            "steps": fields.choice(asked, "steps", self._steps, self._usual_steps),
            "grid": fields.choice(asked, "grid", self._grids, self._grids[0]),
            "temperature": fields.number(asked, "temperature", 1.0, 0.0, 10.0),
            "top_p": fields.number(asked, "top_p", 1.0, 0.01, 1.0),
            "top_k": 0,
            "label": label,
            "guidance": fields.number(asked, "guidance", 1.0, 0.0, 20.0) if label >= 0 else 1.0,
            "seed": fields.whole(asked, "seed", 0, 0, 2**32 - 1),
            "length": fields.choice(asked, "length", self._lengths(), self._model.length),
        }
        for key, values in OFFERED.get(sampler, {}).items():
            if key in asked and isinstance(values[0], str):
                settings[key] = fields.choice(asked, key, values, values[0])
            elif key in asked:
                settings[key] = fields.number(asked, key, values[0], *values)
        return settings

    def _label(self, asked: fields.Asked) -> int:
        return fields.whole(asked, "label", -1, -1, len(self.facts["labels"]) - 1)

    def _prompt(self, asked: fields.Asked, length: int) -> tuple[Prompt, int]:
        """Returns the prompt, and the number of positions of the user's text."""
        if self._pictures:
            return self._picture(asked), length
        ids = self._encoded(fields.text(asked, "text"))
        if len(ids) > length:
            raise UserError(
                f"the text has {len(ids)} {self.facts['unit']}, but the length is {length}: "
                "shorten the text or choose a greater length"
            )
        hidden = fields.places(asked, "hidden", len(ids)) | np.array([i is None for i in ids], bool)
        rest = length - len(ids)
        tokens = np.array([i or 0 for i in ids] + [0] * rest, np.int32)
        continues = fields.choice(asked, "continues", (0, 1), 0) or not ids
        return Prompt(tokens, np.pad(~hidden, (0, rest))), length if continues else len(ids)

    def _picture(self, asked: fields.Asked) -> Prompt:
        height, width, channels = self._domain.shape
        hidden = fields.octets(asked, "hidden", height * width)
        length = height * width * channels
        tokens = self._given(asked, length)
        if tokens is None:
            return Prompt(np.zeros(length, np.int32), np.zeros(length, bool))
        stays = np.zeros(height * width, bool) if hidden is None else hidden == 0
        return Prompt(np.asarray(tokens, np.int32), np.repeat(stays, channels))

    def _given(self, asked: fields.Asked, length: int) -> np.ndarray | None:
        """Returns the symbols of the picture of a request; None if there is none."""
        if self._coded:
            return fields.symbols(asked, "codes", length, self._domain.vocab_size)
        values = fields.octets(asked, "picture", length)
        return None if values is None else self._domain.encode(values.reshape(self._domain.shape))

    def _encoded(self, text: str) -> list[int | None]:
        """Returns the ids of a text, None for each blank; each piece is encoded separately."""
        if self._pictures:
            raise UserError("this model has images, not text")
        ids: list[int | None] = []
        try:
            for number, piece in enumerate(text.split(BLANK)):
                ids += [None] if number else []
                ids += [int(i) for i in self._domain.encode(piece)] if piece else []
        except UserError:
            # The offset counts from the last blank; with a symbol for each blank, from the start.
            self._domain.encode(text.replace(BLANK, self._domain.decode([0])))
            raise
        return ids
