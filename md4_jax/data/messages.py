"""Messages of a conversation, and the assistant's answers in its rendered text."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from md4_jax.data.chat import Chat, Messages
from md4_jax.data.surrogates import without_surrogates
from md4_jax.protocols import UserError
from md4_jax.protocols.phrases import amount

# Names of roles, including those of ShareGPT -> the names that templates use.
ROLES = {role: role for role in ("system", "user", "assistant", "tool")}
ROLES |= {"human": "user", "gpt": "assistant"}
SPELLINGS = (("role", "content"), ("from", "value"))
TURNS = ("all", "last", "each")


class Turn(NamedTuple):
    """Answer of the assistant, with its end, and the text since the previous answer."""

    context: str
    answer: str


def conversation(where: str, value: Any) -> tuple[dict[str, Any], ...]:
    """Returns the messages of a record in the form for templates: dicts with role and content.

    A message is {"role": ..., "content": ...}, or {"from": ..., "value": ...} as in ShareGPT. Other
    keys are kept unless they are null.

    where: the place of the record, for UserError if it is not a list of such messages
    """
    if not isinstance(value, list) or not value:
        said = "an empty list" if value == [] else f"a {type(value).__name__}"
        raise UserError(f"{where} must be a conversation, which is a list of messages, not {said}")
    return tuple(_message(f"{where}, message {n}", one) for n, one in enumerate(value, 1))


def _message(where: str, value: Any) -> dict[str, Any]:
    fields = {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else {}
    names = next((names for names in SPELLINGS if fields.keys() >= set(names)), None)
    if names is None:
        said = (
            ", ".join(map(_shown, value.items())) if isinstance(value, dict) else f"{value!r:.80}"
        )
        raise UserError(
            f"{where}: it needs the keys 'role' and 'content', or 'from' and 'value', but has "
            f"{said or '{}'}"
        )
    role, content = (fields.pop(name) for name in names)
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(
            f"{where}: the role {role!r:.80} is not known; known are {', '.join(ROLES)}"
        )
    if not isinstance(content, str):
        raise UserError(f"{where}: {names[1]!r} must be text, not {spelled(content)}")
    return {"role": ROLES[role], "content": content, **fields}


def spelled(value: Any) -> str:
    """Describes a JSON value that is not text: 'a number: 3'."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"a number: {value}"
    kinds = {list: "a list", dict: "an object"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def check_answers(
    where: str, better: tuple[str, Sequence[Any]], worse: tuple[str, Sequence[Any]]
) -> None:
    """Raises UserError unless two conversations differ only in the last answer.

    better, worse  the key of a conversation in the record, and the messages
    """
    for key, messages in (better, worse):
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise UserError(
                f"{where}: the last message of {key!r} must be an answer of the assistant to a "
                "message before it, because data.rejected_key compares last answers"
            )
    names = f"{better[0]!r} and {worse[0]!r}"
    if len(better[1]) != len(worse[1]):
        raise UserError(
            f"{where}: {names} must be the same up to their last message, but they have "
            f"{len(better[1])} and {amount(len(worse[1]), 'message')}"
        )
    for number, (one, other) in enumerate(zip(better[1][:-1], worse[1], strict=False), 1):
        if one != other:
            raise UserError(
                f"{where}: {names} must be the same up to their last message, but they differ in "
                f"message {number}"
            )


def _shown(item: tuple[Any, Any]) -> str:
    """Describes a key of a message; null is shown, but treated like a missing key."""
    return f"{item[0]} (null)" if item[1] is None else str(item[0])


def sequences(
    chat: Chat, messages: Messages, turns: str, ends: Iterable[str]
) -> Iterator[list[Turn]]:
    """Yields, for each sequence of a conversation, the assistant's turns in it.

    A sequence ends with its last turn. A message of the assistant that begins a conversation is not
    an answer; it is context.

    turns  "all": one sequence with all turns; "last": one with the last turn and the others as
           context; "each": one for each turn, with all text before it as context
    ends   special tokens that end an answer. Text that the template writes after them does not
           count, nor does white space after an answer without such a token

    Raises UserError if the template renders the start of a conversation differently once more
    messages follow, or begins an answer with text that is missing from its generation prompt.
    """
    places = [k for k, one in enumerate(messages) if k and one["role"] == "assistant"]
    if turns == "each":
        for place in places:
            yield _turns(chat, messages, [place], ends)
    elif places:
        yield _turns(chat, messages, places if turns == "all" else places[-1:], ends)


def _turns(
    chat: Chat, messages: Messages, places: Sequence[int], ends: Iterable[str]
) -> list[Turn]:
    """Returns the turns at these indices, as differences of rendered prefixes."""
    whole = chat.render(messages[: places[-1] + 1], answered=False)
    found, done = [], 0
    for place in places:
        asked = chat.render(messages[:place])
        answered = whole
        if place != places[-1]:
            answered = chat.render(messages[: place + 1], answered=False)
        said = without_surrogates(messages[place]["content"].strip())
        _check_begun(chat, messages[:place], asked, answered[len(asked) :], said)
        stop = _end(answered, len(asked), said, ends)
        is_prefix = whole.startswith(answered[:stop]) and answered.startswith(asked)
        if not is_prefix or len(asked) < done:
            raise UserError(
                f"the chat template writes message {place + 1}, or the text before it, "
                "differently once the conversation continues, so that the tokens of the "
                "assistant's answer cannot be identified. Set data.turns=each (or last) if only "
                "earlier answers change, or set data.chat_template to another template"
            )
        found.append(Turn(whole[done : len(asked)], whole[len(asked) : stop]))
        done = stop
    return found


def _check_begun(chat: Chat, before: Messages, asked: str, answer: str, said: str) -> None:
    """Raises UserError if an answer's header is not in the generation prompt and would count."""
    begins = answer.partition(said)[0] if said else ""
    if begins.strip() and asked == chat.render(before, answered=False):
        raise UserError(
            f"the chat template begins an answer with {begins.strip()[:40]!r}, but does not write "
            "this text when it asks for an answer (add_generation_prompt), so that the model "
            "would have to generate it: set data.chat_template to a template that writes it"
        )


def _end(text: str, start: int, said: str, ends: Iterable[str]) -> int:
    """Returns the index after the first token that ends the answer, or else after the last word."""
    place = text.find(said, start)
    begin = start if place < 0 else place + len(said)
    found = [text.find(end, begin) + len(end) for end in ends if end in text[begin:]]
    return min(found, default=max(start, len(text.rstrip())))
