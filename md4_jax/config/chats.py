"""Chat template of a config: from the run, from a named folder, or from the tokenizer."""

from collections.abc import Mapping
from typing import Any

from md4_jax.config import load as config_lib
from md4_jax.data.chat import FILE, TEMPLATE, TOKENS, Chat
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, cache_root, exists, place


def of_run(
    config: Mapping[str, Any], workdir: Place | None, initial: Place | None = None
) -> Chat | None:
    """Returns the chat template of a run: the stored one, or else the one its config refers to.

    The config refers to the template of data.chat_template. Without it, and with
    data.messages_key, it is that of the initial run, or else that in the tokenizer's folder. The
    template has its date filled in, as a stored one has.

    initial: directory of the run with the initial parameters
    Returns None if the config refers to no template; UserError if the template does not exist.
    """
    kept = Chat.kept(workdir) if workdir else None
    section = config["data"]
    sources = [section, *section.get("parts", {}).values()]
    key = next(filter(None, (source.get("messages_key", "") for source in sources)), "")
    if kept is not None:
        _check_same(config, workdir, kept)
    if kept is not None or not (section.get("chat_template") or key):
        return kept
    if section.get("chat_template"):
        return named(section).dated()
    found = Chat.kept(initial) if initial else None
    found = found or _of_tokenizer(config.get("tokenizer", {}))
    return (found or named({**section, "messages_key": key})).dated()


def _check_same(config: Mapping[str, Any], workdir: Place, kept: Chat) -> None:
    """Raises UserError if the config names another template than the stored one of the run."""
    before = config_lib.stored(workdir)
    asked = config["data"].get("chat_template")
    if not asked or before is None or asked == before["data"].get("chat_template"):
        return
    found = named(config["data"])
    if (found.template, found.tokens) != (kept.template, kept.tokens):
        raise UserError(
            f"data.chat_template={asked} differs from the chat template in {workdir / FILE}, with "
            "which the run began. A run keeps its template: leave data.chat_template out, or use "
            "another --workdir"
        )


def named(section: Mapping[str, Any]) -> Chat:
    """Returns the template that data.chat_template names; UserError if there is none."""
    asked = section.get("chat_template", "")
    if not asked:
        raise UserError(
            f"data.messages_key={section['messages_key']!r} needs a chat template, and the folder "
            f"of the tokenizer has none (neither {TEMPLATE} nor chat_template in {TOKENS}): set "
            "data.chat_template to a folder that has one, or to a Jinja file"
        )
    path = place(asked, "data.chat_template")
    found = Chat.of_path(path) if exists(path) else None
    if found is None:
        raise UserError(
            f"data.chat_template={asked} was not found or contains no chat template: it must be a "
            f"Jinja file, or a folder with {TEMPLATE} or with chat_template in {TOKENS}"
        )
    return found


def _of_tokenizer(section: Mapping[str, Any]) -> Chat | None:
    """Returns the template in the folder of the tokenizer."""
    if section.get("path"):
        path = place(section["path"], "tokenizer.path")
        return Chat.of_folder(path if path.is_dir() else path.parent)
    if section.get("hub"):
        return Chat.of_folder(cache_root() / "tokenizers" / section["hub"])
    return None
