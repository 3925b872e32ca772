"""Training loss for infilling of variable length: docs/families/resizing.md."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp

from md4_jax.objectives.flexmdm import texts
from md4_jax.objectives.head import at_noise
from md4_jax.objectives.token_nats import token_nats
from md4_jax.processes.draws import split_keys, uniforms
from md4_jax.processes.lengths import ResizesMasks
from md4_jax.protocols import Array, Batch, Denoiser, Needs, UserError


class Lesson(NamedTuple):
    """Noisy text and the targets of its masks.

    z        int32 [B, L], the text with its masks, then `absent_id`
    targets  int32 [B, L], the target of each mask; undefined elsewhere
    """

    z: Array
    targets: Array


class Gap(NamedTuple):
    """Part of each text that is to be filled, followed by surplus masks.

    inside   bool [B, L], the tokens of the gap
    end      int32 [B], the position after its last token
    deleted  int32 [B], number of surplus masks
    """

    inside: Array
    end: Array
    deleted: Array


@dataclasses.dataclass(frozen=True)
class DreamOn:
    """Cross-entropy of the masks of one gap of each text, in nats (DreamOn, arXiv:2602.01326).

    A gap is a random part of the text, with at least one token on either side of it. Its tokens
    are masked with probability r ~ U(0, 1), and surplus masks are added after them. Then each pair
    of neighbouring masks is merged into one with probability p. The loss is

        (1 - r) (sum of -log mu_n[expand or the token] + deletions * mean of -log mu_n[delete])

    over the remaining masks: `expand` is the target of a merged mask, and `delete` that of a
    surplus mask. It is a training-only loss, not a likelihood.

    merge         largest p. p is merge (1 - the fraction of masks in the gap), unless:
    merge_evenly  probability, for each text, that p is `merge` whatever the fraction
    most_deleted  largest number of surplus masks; the number is uniform from 0 on. Tokens for which
                  there is no room at the end of a text are dropped
    deletions     total weight of the surplus masks of a text. In DreamOn's code those of the eight
                  texts of a device together have the weight of one token
    """

    needs: ClassVar[Needs] = Needs((ResizesMasks,), hides=True)

    merge: float = 0.5
    merge_evenly: float = 0.5
    most_deleted: int = 63
    deletions: float = 0.125

    def __post_init__(self):
        for key in ("merge", "merge_evenly"):
            if not 0 <= getattr(self, key) <= 1:
                raise UserError(f"objective.{key} must lie in [0, 1], not {getattr(self, key)}")
        for key in ("most_deleted", "deletions"):
            if getattr(self, key) < 0:
                raise UserError(f"objective.{key} must not be negative, not {getattr(self, key)}")

    def is_bound(self, process: Any) -> bool:
        return False

    def __call__(
        self, denoiser: Denoiser, process: ResizesMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        of_gap, of_masks = split_keys(keys)
        lesson = self.lesson(process, batch, self.gap(process, batch, of_gap), u, of_masks)
        masks = lesson.z == process.mask_id
        extra = {
            "masked": jnp.mean(masks, axis=1, dtype=jnp.float32),
            "expansions": _count(masks & (lesson.targets == process.expand_id)),
            "deletions": _count(masks & (lesson.targets == process.delete_id)),
        }
        return (1.0 - u) * self.nats(denoiser, process, lesson, u), extra

    def gap(self, process: ResizesMasks, batch: Batch, keys: Array) -> Gap:
        """Draws the gap of each text among tokens that count, and its number of surplus masks."""
        draws = uniforms(keys, 3)
        x, length = batch.tokens, batch.tokens.shape[1]
        counts = jnp.asarray(batch.loss_mask)
        number = jnp.sum(counts, axis=1)
        first = jnp.where(number > 2, 1, 0)
        start = first + _below(draws[:, 0], number - 2)
        stop = start + 1 + _below(draws[:, 1], number - 1 - start)
        rank = jnp.cumsum(counts, axis=1) - 1
        inside = counts & (rank >= start[:, None]) & (rank < stop[:, None])
        end = jnp.max(jnp.where(inside, jnp.arange(length) + 1, 0), axis=1)
        # The symbols that change the length of a text cannot be tokens of a gap.
        inside &= (x != process.expand_id) & (x != process.delete_id)
        room = jnp.minimum(self.most_deleted, length - end)
        deleted = jnp.where(end > 0, _below(draws[:, 2], room + 1), 0)
        return Gap(inside, end.astype(jnp.int32), deleted)

    def lesson(
        self, process: ResizesMasks, batch: Batch, gap: Gap, ratio: Array, keys: Array
    ) -> Lesson:
        """Masks the tokens of the gaps with probability ratio [B], and merges masks."""
        of_mask, of_merge, of_rule = split_keys(keys, 3)
        x, _ = texts(process, batch)
        length = x.shape[1]
        place, end, more = jnp.arange(length), gap.end[:, None], gap.deleted[:, None]
        source = jnp.where(place < end, place, jnp.maximum(place - more, 0))
        extra = (place >= end) & (place < end + more)
        symbols = jnp.where(extra, process.delete_id, jnp.take_along_axis(x, source, axis=1))
        inside = extra | jnp.take_along_axis(gap.inside, source, axis=1) & (place < end)
        chosen = inside & (uniforms(of_mask, length) < ratio[:, None])
        masks = chosen | extra
        probability = self._probability(jnp.sum(chosen, axis=1), jnp.sum(inside, axis=1), of_rule)
        pairs = masks & ~extra & jnp.pad(masks[:, 1:], ((0, 0), (0, 1)))
        merged = pairs & (uniforms(of_merge, length) < probability[:, None])
        hidden = jnp.pad(merged[:, :-1], ((0, 0), (1, 0)))
        z = jnp.where(masks, process.mask_id, symbols)
        targets = jnp.where(merged, process.expand_id, symbols)
        return Lesson(*_packed(process, z, targets, ~hidden & (symbols != process.absent_id)))

    def _probability(self, masked: Array, inside: Array, keys: Array) -> Array:
        """Returns the probability with which neighbouring masks of each text merge, [B]."""
        evenly = uniforms(keys, 1)[:, 0] < self.merge_evenly
        share = masked / jnp.maximum(inside, 1)
        return self.merge * jnp.where(evenly, 1.0, 1.0 - share)

    def nats(self, denoiser: Denoiser, process: ResizesMasks, lesson: Lesson, t: Array) -> Array:
        """Returns the sum over the masks without the factor 1 - r, [B]."""
        z, targets = lesson
        held, masks = z != process.absent_id, z == process.mask_id
        seen = denoiser.within(jnp.where(held, 0, -1).astype(jnp.int32))
        h_BxLxD = seen.features(jnp.where(held, z, process.mask_id), t)
        nats = at_noise(seen, h_BxLxD, masks, reduce=token_nats, padded=True, rows=(targets,))
        deleted = masks & (targets == process.delete_id)
        of_deleted = jnp.sum(jnp.where(deleted, nats, 0.0), axis=1)
        mean = of_deleted / jnp.maximum(_count(deleted), 1.0)
        return jnp.sum(jnp.where(deleted, 0.0, nats), axis=1) + self.deletions * mean


def _count(marked: Array) -> Array:
    return jnp.sum(marked, axis=1, dtype=jnp.float32)


def _below(draw: Array, count: Array) -> Array:
    """Maps a uniform in [0, 1) to an integer 0..count-1; 0 if count is 0."""
    count = jnp.maximum(count, 1)
    return jnp.minimum((draw * count).astype(jnp.int32), count - 1)


def _packed(process: ResizesMasks, z: Array, targets: Array, kept: Array) -> tuple[Array, Array]:
    """Moves kept symbols to the first positions and pads with absent_id."""
    order = jnp.argsort(~kept, axis=1, stable=True)
    held = jnp.arange(z.shape[1]) < jnp.sum(kept, axis=1, keepdims=True)
    z, targets = (jnp.take_along_axis(rows, order, axis=1) for rows in (z, targets))
    return jnp.where(held, z, process.absent_id), targets
