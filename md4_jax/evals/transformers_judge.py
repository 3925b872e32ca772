"""Causal models that the library transformers computes, as judges of texts."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from md4_jax.data.tokenizers import END_OF_TEXT
from md4_jax.evals.judged import Judged, decoded, padded
from md4_jax.protocols import UserError

MARK = "transformers:"


def check_readable(key: str, name: str) -> None:
    """Raises UserError, which names the key, unless the library reads config and tokenizer.

    Weights are not read: they may take minutes, and memory that training needs.

    name: without the mark
    """
    import transformers

    _read(key, name, transformers.AutoConfig, transformers.AutoTokenizer)


def _read(key: str, name: str, *classes: Any, **options: Any) -> list[Any]:
    """Returns `from_pretrained` of these classes of the library; UserError names the key."""
    try:
        return [each.from_pretrained(name, **options) for each in classes]
    except (OSError, ValueError) as error:
        raise UserError(f"{key}={MARK}{name} cannot be read: {error}") from error


class TransformersJudge:
    """Causal model of the transformers library, from the hub or a folder, on CPU or GPU.

    The first token of a text has no probability, because the model has no input before it.
    """

    counts_first: ClassVar[bool] = False

    def __init__(self, key: str, name: str):
        import torch
        import transformers

        causal = transformers.AutoModelForCausalLM
        (model,) = _read(key, name, causal, dtype=torch.float32)
        (self._tokenizer,) = _read(key, name, transformers.AutoTokenizer)
        self._torch, self._device = torch, "cuda" if torch.cuda.is_available() else "cpu"
        self._model = model.to(self._device).eval()

    @property
    def length(self) -> int:
        """Returns the largest number of tokens of a text."""
        return int(getattr(self._model.config, "max_position_embeddings", 1024))

    @property
    def end(self) -> int | None:
        """Returns the id of the end-of-text token; None if there is none."""
        return self._tokenizer.eos_token_id

    def tokens(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the tokens of texts; END_OF_TEXT is encoded as the end-of-text token."""
        texts = [self._marked(text) for text in texts]
        found = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [np.asarray(row, np.int32) for row in found]

    def counted(self, text: str, ids: np.ndarray) -> str:
        """Returns the part of a text that its first tokens `ids` cover, except the first one."""
        if not self._tokenizer.is_fast:
            plain = functools.partial(self._tokenizer.decode, clean_up_tokenization_spaces=False)
            return decoded(lambda own: plain(own.tolist()), ids[1:], self.end)
        text = self._marked(text)
        given = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        places = given["offset_mapping"]
        covered = text[places[0][1] : places[len(ids) - 1][1]]
        return covered.replace(self._end_of_text, END_OF_TEXT)

    def _marked(self, text: str) -> str:
        """Replaces END_OF_TEXT by the tokenizer's own end-of-text token."""
        return text.replace(END_OF_TEXT, self._end_of_text)

    @functools.cached_property
    def _end_of_text(self) -> str:
        """The vocabulary's end-of-text token; END_OF_TEXT if it contains that, or has none."""
        known = self.end is None or END_OF_TEXT in self._tokenizer.get_vocab()
        return END_OF_TEXT if known else self._tokenizer.eos_token

    def judge(self, ids: list[np.ndarray], batch_size: int) -> Judged:
        """Returns the costs of texts, given their tokens; the first token has no cost."""
        torch, nats = self._torch, []
        for filled, sizes, out in self._outputs(ids, batch_size):
            logits = torch.log_softmax(out.logits[:, :-1].float(), dim=-1)
            picked = -logits.gather(-1, filled[:, 1:, None])[..., 0]
            counts = torch.arange(1, filled.shape[1], device=self._device) < sizes[:, None]
            nats.append(torch.where(counts, picked, 0.0).double().sum(dim=1).cpu().numpy())
        return Judged(np.concatenate(nats), np.array([len(row) - 1 for row in ids]), ids)

    def features(self, ids: list[np.ndarray], batch_size: int) -> np.ndarray:
        """Returns the last hidden state of the last token of each text: float32 [N, D]."""
        found = []
        for _, sizes, out in self._outputs(ids, batch_size):
            rows = self._torch.arange(len(sizes), device=self._device)
            found.append(out.hidden_states[-1][rows, sizes - 1].float().cpu().numpy())
        return np.concatenate(found)

    def _outputs(self, ids: list[np.ndarray], batch_size: int) -> Iterator[tuple]:
        """Yields (tokens [B, L], number of tokens [B], outputs of the model)."""
        torch = self._torch
        for first in range(0, len(ids), batch_size):
            rows = ids[first : first + batch_size]
            sizes = torch.tensor([len(row) for row in rows], device=self._device)
            filled = padded(rows, 0, max(map(len, rows))).astype(np.int64)
            tokens = torch.tensor(filled, device=self._device)
            mask = torch.arange(tokens.shape[1], device=self._device) < sizes[:, None]
            with torch.no_grad():
                yield (
                    tokens,
                    sizes,
                    self._model(
                        input_ids=tokens, attention_mask=mask.long(), output_hidden_states=True
                    ),
                )
