"""Chat templates from the folder of a checkpoint, and the tokens that end an answer."""

import dataclasses
import datetime
import functools
import json
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Union

from md4_jax.data.surrogates import without_surrogates
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, replace

FILE = "chat.json"
TEMPLATE, TOKENS = "chat_template.jinja", "tokenizer_config.json"
OLDER_TOKENS = "special_tokens_map.json"
# Placeholder for an answer: to find the text that ends a turn, and after an unfinished answer.
ANSWER = "ANSWER"
# Variables that transformers gives to templates as none. Undefined, they would not be `none`.
ABSENT = {"tools": None, "documents": None}
Messages = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Chat:
    """Chat template and the special tokens that it may use.

    template  Jinja template as for transformers: its variables are `messages`,
              `add_generation_prompt`, the tokens, and `tools` and `documents`, which are none
    tokens    text of each special token by its name: bos_token, eos_token, ...
    day       date that the template gets as today's, such as 2026-01-31; "": the current date
    file      where the template comes from, for errors; "": unknown
    """

    template: str
    tokens: Mapping[str, str]
    day: str = ""
    file: str = dataclasses.field(default="", compare=False)

    @classmethod
    def of_folder(cls, folder: Place) -> Union["Chat", None]:
        """Reads chat_template.jinja, or tokenizer_config.json; None if neither has a template."""
        config = _json(folder / TOKENS)
        template = config.get("chat_template")
        if isinstance(template, list):  # several named templates
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default")
        if not isinstance(template, str | None):
            raise UserError(f"{folder / TOKENS} is damaged: its 'chat_template' must be text")
        file = folder / (TEMPLATE if (folder / TEMPLATE).exists() else TOKENS)
        if file.name == TEMPLATE:
            template = _text_of(file)
        if not template:
            return None
        return cls(template, _tokens(folder), file=str(file))

    @classmethod
    def of_path(cls, path: Place) -> Union["Chat", None]:
        """Reads a folder like `of_folder`, or a template file with the tokens from its folder."""
        if not path.is_file():
            return cls.of_folder(path)
        return cls(_text_of(path), _tokens(path.parent), file=str(path))

    @classmethod
    def kept(cls, folder: Place) -> Union["Chat", None]:
        """Reads the file written by `keep`; None if there is none."""
        fields = _json(folder / FILE)
        if not fields:
            return None
        template, tokens = fields.get("template"), fields.get("tokens")
        texts = [template, *tokens.values()] if isinstance(tokens, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise UserError(
                f"{folder / FILE} is damaged: it must contain a template and the texts of special "
                "tokens"
            )
        day = fields.get("day", "")
        try:
            _noon(day)
        except (TypeError, ValueError) as error:
            raise UserError(f"{folder / FILE} is damaged: its date 'day' is {day!r}") from error
        return cls(template, tokens, day, str(folder / FILE))

    def keep(self, folder: Place) -> None:
        """Writes the file that `kept` reads, atomically."""
        content = {"template": self.template, "tokens": dict(self.tokens)}
        content |= {"day": self.day} if self.day else {}
        replace(folder / FILE, json.dumps(content, indent=2) + "\n")

    def export(self, folder: Place) -> None:
        """Writes the template and tokens into tokenizer_config.json and keeps its other keys."""
        config = _json(folder / TOKENS)
        changed = {n: text for n, text in self.tokens.items() if text != _text(config.get(n))}
        config |= {**changed, "chat_template": self.template}
        replace(folder / TOKENS, json.dumps(config, indent=2) + "\n")

    def dated(self) -> "Chat":
        """Returns a copy with today's date fixed as its day, unless it has one.

        Conversations are rendered with it, so they are the same when a run is resumed.
        """
        return self if self.day else dataclasses.replace(self, day=_noon("").date().isoformat())

    def undated(self) -> "Chat":
        """Returns a copy that always uses the current date."""
        return dataclasses.replace(self, day="")

    def render(self, messages: Messages, *, answered: bool = True) -> str:
        """Returns the text of a conversation.

        answered  whether it ends where an answer begins; otherwise it ends with the last message
                  and the end of its turn
        """
        _check(messages)
        try:
            found = _compiled(self.template, self.day).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=answered,
                **ABSENT,
                **self.tokens,
            )
            return without_surrogates(found)
        except UserError:
            raise
        except Exception as error:  # the template may fail in any way
            where = f"the chat template{f' in {self.file}' if self.file else ''}"
            if line := _line(error):
                where = f"line {line} of {where}"
            said = f"{type(error).__name__}: {error}"
            raise UserError(f"{where} cannot be filled in: {said}") from error

    def prompt(self, messages: Messages) -> str:
        """Returns the prompt of an answer: the text of the conversation up to it.

        If the last message is the assistant's, its turn is left open and the answer continues it.
        """
        _check(messages)
        if messages[-1]["role"] != "assistant":
            return self.render(messages)
        begun = str(messages[-1]["content"]).strip()
        if not begun and len(messages) == 1:
            raise UserError(
                "the only message is an empty message of the assistant: begin with a message of "
                "the user"
            )
        if not begun:
            return self.render(messages[:-1])
        last = {**messages[-1], "content": begun + ANSWER}
        before, _, _ = self.render([*messages[:-1], last], answered=False).rpartition(ANSWER)
        if not before.endswith(without_surrogates(begun)):
            raise UserError(
                "the chat template changes the text of the assistant's last message, so the "
                "answer cannot be continued: leave that message out"
            )
        return before

    def ends(self, special: Sequence[str]) -> set[str]:
        """Returns the special tokens that end an answer.

        They are eos_token and the first special token that the template writes after an answer.

        special: all special tokens of the vocabulary
        """
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
        _, _, after = self.render(talk, answered=False).rpartition(ANSWER)
        found = sorted((after.find(token), token) for token in special if token in after)
        return {token for _, token in found[:1]} | ({self.tokens.get("eos_token")} & set(special))


def _check(messages: Messages) -> None:
    """Raises UserError if the messages are not a conversation."""
    if not messages:
        raise UserError("a chat needs at least one message")
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise UserError(
                f"a message must be a dict with the keys 'role' and 'content', not {message!r}"
            )
        if message["content"] is None:
            raise UserError(f"a message has no content: {message!r}")


@functools.lru_cache(maxsize=16)
def _compiled(template: str, day: str) -> Any:
    """Compiles a template with Jinja, cached: this takes longer than rendering it."""
    return _environment(day).from_string(template)


def _environment(day: str) -> Any:
    """Returns a sandboxed Jinja environment, because templates may come from untrusted sources."""
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise UserError("chat templates need a package: pip install -e '.[chat]'") from error
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[
            "jinja2.ext.loopcontrols",
            "md4_jax.data.generation_blocks.GenerationBlocks",
        ],
    )
    made.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: _noon(day).strftime(form),
    }
    made.filters["tojson"] = _to_json
    return made


def _line(error: Exception) -> int:
    """Returns the line of a template at which filling it in failed; 0 if it is not known."""
    frames = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == "<template>"  # Jinja sets it, with lines of the template
    ]
    return getattr(error, "lineno", None) or (frames[-1] if frames else 0)


def _refuse(said: str) -> None:
    """Raises the error that a template reports about its messages."""
    raise UserError(f"the chat template refuses the messages: {said}")


def _noon(day: str) -> datetime.datetime:
    """Returns noon of a day, or the current time for ""; ValueError if it is not a date."""
    if not day:
        return datetime.datetime.now()
    return datetime.datetime.combine(datetime.date.fromisoformat(day), datetime.time(12))


def _to_json(value: Any, indent: int | None = None) -> str:
    """Returns a value as JSON, without HTML escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _tokens(folder: Place) -> dict[str, str]:
    """Returns the texts of the special tokens of a folder by name, as transformers reads them."""
    config = _json(folder / TOKENS)
    if "added_tokens_decoder" not in config:
        config |= _json(folder / OLDER_TOKENS)
    texts = {name: _text(value) for name, value in config.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


def _text(token: Any) -> str | None:
    """Returns the text of a special token, given as text or as a dict with it."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _text_of(file: Place) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not text in UTF-8: {error}") from error


def _json(file: Place) -> dict[str, Any]:
    """Returns a JSON object; {} if there is no file."""
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not readable JSON: {error}") from error
    return found if isinstance(found, dict) else {}
