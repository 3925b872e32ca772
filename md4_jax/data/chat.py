"""Form of a conversation: the chat template of a checkpoint's folder, and where an answer ends."""

import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Union

from md4_jax.data.surrogates import without_surrogates
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, replace

FILE = "chat.json"
TEMPLATE, TOKENS = "chat_template.jinja", "tokenizer_config.json"
# Stands for an answer when the end of a turn is looked up, and behind one that goes on.
ANSWER = "ANSWER"
Messages = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Chat:
    """Template of a conversation and the special tokens that it may name.

    template  in Jinja, as transformers reads it: it gets `messages`, `add_generation_prompt` and
              the tokens
    tokens    text of each special token by its name: bos_token, eos_token, ...
    day       date that the template is told when it asks for today's, as 2026-01-31; "": today's
    """

    template: str
    tokens: Mapping[str, str]
    day: str = ""

    @classmethod
    def of_folder(cls, folder: Place) -> Union["Chat", None]:
        """Reads chat_template.jinja, or tokenizer_config.json; None if neither has a template."""
        told = _json(folder / TOKENS)
        template = told.get("chat_template")
        if isinstance(template, list):  # several, each with its name
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default")
        if (folder / TEMPLATE).exists():
            template = (folder / TEMPLATE).read_text(encoding="utf-8")
        if not template:
            return None
        return cls(template, _tokens(told))

    @classmethod
    def of_path(cls, path: Place) -> Union["Chat", None]:
        """Reads a folder as `of_folder`, or a file that holds a template, with tokens beside it."""
        if not path.is_file():
            return cls.of_folder(path)
        return cls(path.read_text(encoding="utf-8"), _tokens(_json(path.parent / TOKENS)))

    @classmethod
    def kept(cls, folder: Place) -> Union["Chat", None]:
        """Reads what `keep` has written; None if it has written nothing."""
        told = _json(folder / FILE)
        if not told:
            return None
        template, tokens = told.get("template"), told.get("tokens")
        texts = [template, *tokens.values()] if isinstance(tokens, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise UserError(f"{folder / FILE} is damaged: it needs a template and texts of tokens")
        day = told.get("day", "")
        try:
            _noon(day)
        except (TypeError, ValueError) as error:
            raise UserError(f"{folder / FILE} is damaged: its day is {day!r}") from error
        return cls(template, tokens, day)

    def keep(self, folder: Place) -> None:
        """Writes the file that `kept` reads, whole or not at all."""
        content = {"template": self.template, "tokens": dict(self.tokens)}
        content |= {"day": self.day} if self.day else {}
        replace(folder / FILE, json.dumps(content, indent=2) + "\n")

    def export(self, folder: Place) -> None:
        """Writes the template and tokens into tokenizer_config.json, whose other keys stay."""
        told = _json(folder / TOKENS)
        changed = {n: text for n, text in self.tokens.items() if text != _text(told.get(n))}
        told |= {**changed, "chat_template": self.template}
        replace(folder / TOKENS, json.dumps(told, indent=2) + "\n")

    def dated(self) -> "Chat":
        """Returns the form with today as its day for good, unless it has one.

        Conversations are written with it, so that they are the same when a run goes on.
        """
        return self if self.day else dataclasses.replace(self, day=_noon("").date().isoformat())

    def undated(self) -> "Chat":
        """Returns the form that tells a template the day on which it is filled in."""
        return dataclasses.replace(self, day="")

    def render(self, messages: Messages, *, answered: bool = True) -> str:
        """Returns the text of a conversation.

        answered  whether it ends where an answer begins; otherwise it ends with the last message,
                  whose turn is closed
        """
        _check(messages)
        try:
            found = _compiled(self.template, self.day).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=answered,
                **self.tokens,
            )
            return without_surrogates(found)
        except UserError:
            raise
        except Exception as error:  # the template may fail in any way
            said = f"{type(error).__name__}: {error}"
            raise UserError(f"the chat template cannot be filled in: {said}") from error

    def prompt(self, messages: Messages) -> str:
        """Returns the text after which the answer comes.

        If the last message is the assistant's, its turn stays open, so that the answer goes on.
        """
        _check(messages)
        if messages[-1]["role"] != "assistant":
            return self.render(messages)
        begun = str(messages[-1]["content"]).strip()
        if not begun and len(messages) == 1:
            raise UserError(
                "the only message is an empty one of the assistant: begin with one of the user"
            )
        if not begun:
            return self.render(messages[:-1])
        last = {**messages[-1], "content": begun + ANSWER}
        before, _, _ = self.render([*messages[:-1], last], answered=False).rpartition(ANSWER)
        if not before.endswith(without_surrogates(begun)):
            raise UserError("the chat template changes the assistant's last message: leave it out")
        return before

    def ends(self, special: Sequence[str]) -> set[str]:
        """Returns the special tokens that end an answer.

        They are eos_token, and what the template writes first after the text of an answer.
        special: all special tokens of the vocabulary
        """
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
        _, _, after = self.render(talk, answered=False).rpartition(ANSWER)
        found = sorted((after.find(token), token) for token in special if token in after)
        return {token for _, token in found[:1]} | ({self.tokens.get("eos_token")} & set(special))


def _check(messages: Messages) -> None:
    """Raises UserError for what is no conversation."""
    if not messages:
        raise UserError("a chat needs at least one message")
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise UserError(
                f"a message is a dict with the keys 'role' and 'content', not {message!r}"
            )
        if message["content"] is None:
            raise UserError(f"a message has no content: {message!r}")


@functools.lru_cache(maxsize=16)
def _compiled(template: str, day: str) -> Any:
    """Returns a template that Jinja has compiled, which takes longer than to fill it in."""
    return _environment(day).from_string(template)


def _environment(day: str) -> Any:
    """Returns the Jinja environment of templates, in which a stranger's code reaches nothing."""
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise UserError("chat templates need a package: pip install -e '.[chat]'") from error
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    made.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: _noon(day).strftime(form),
    }
    made.filters["tojson"] = _to_json
    return made


def _refuse(said: str) -> None:
    """Raises what a template has against its messages."""
    raise UserError(f"the chat template refuses the messages: {said}")


def _noon(day: str) -> datetime.datetime:
    """Returns noon of a day, or this moment; ValueError for what is no date."""
    if not day:
        return datetime.datetime.now()
    return datetime.datetime.combine(datetime.date.fromisoformat(day), datetime.time(12))


def _to_json(value: Any, indent: int | None = None) -> str:
    """Writes a value as JSON, without the escapes of HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _tokens(told: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of the special tokens that a tokenizer_config.json names."""
    texts = {name: _text(value) for name, value in told.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


def _text(token: Any) -> str | None:
    """Returns the text of a special token, which may stand in a dict."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _json(file: Place) -> dict[str, Any]:
    """Returns a JSON object; {} if there is no file."""
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not readable JSON: {error}") from error
    return found if isinstance(found, dict) else {}
