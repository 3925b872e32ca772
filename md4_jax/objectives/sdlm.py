"""Loss of SDLM, next tokens from windows of masks after clean text: docs/families/sdlm.md."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.objectives.head import at_positions
from md4_jax.objectives.token_nats import token_nats
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import Array, Batch, Denoiser, Needs, Network, UserError


@dataclasses.dataclass(frozen=True)
class SDLM:
    """Cross-entropy of the next tokens, from windows of one token and masks, in nats [B].

    Next sequence prediction, SDLM (arXiv:2509.24007). A window at s has the token x_s and D - 1
    masks. Its positions see one another and the clean tokens before s, which see only themselves
    and those to their left. Position s + j - 1 predicts x_{s+j}:

        L(x) = E_r[ sum_n -log mu(x_{<s}, window at s)[x_n] ],   s < n <= s + D, s = r mod D,

    so that each token is as often the first, the second, ... of a window. r is uniform in 0..D-1.
    The window at the beginning of a text is shorter, as is that at its end. The first token of a
    text is not predicted. The network reads windows and clean text in one pass (ordered.streams).

    block_size  D, positions of a window
    draws       'window', the loss above, for training alone. 'token' is the exact likelihood of
                drawing one token after another, each the first of its window:

                    -log p(x) = sum_n -log mu(x_{<n-1}, window at n - 1)[x_n].

                The first token is drawn from a single mask. It takes D passes. `LongestPrefix` with
                limit=1 draws from it, but for the last D - 1 tokens: its windows reach beyond texts

    `for_evaluation` is that likelihood. The schedule has no effect, nor keys.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,), ordered=True, windows=True)

    block_size: int = 4
    draws: str = "window"

    def __post_init__(self):
        if self.block_size < 2:
            raise UserError(
                f"objective.block_size must be at least 2, not {self.block_size}: windows of one "
                "token are autoregressive, objective.name='autoregressive'"
            )
        if self.draws not in ("window", "token"):
            raise UserError(f"objective.draws must be 'window' or 'token', not {self.draws!r}")

    @property
    def stream_block(self) -> int:
        """Positions of a block in the pass of windows and clean text."""
        return self.block_size

    def is_bound(self, process: RevealsMasks) -> bool:
        return self.draws == "token"

    def is_exact(self, network: Network) -> bool:
        return self.draws == "token"

    def for_evaluation(self) -> "SDLM":
        """Returns the likelihood of drawing one token after another."""
        return dataclasses.replace(self, draws="token")

    def __call__(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        if self.draws == "token":
            return jnp.sum(self.of_tokens(denoiser, process, batch, u, keys), axis=1), {}
        begin = jnp.minimum(jnp.floor(u * self.block_size), self.block_size - 1).astype(jnp.int32)
        return self.loss_at(denoiser, process, batch, begin), {}

    def loss_at(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, begin: Array
    ) -> Array:
        """Returns the loss with windows at begin[b], begin[b] + D, ... and at 0, in nats [B]."""
        place = jnp.arange(batch.tokens.shape[1])
        starts = (self._within(begin, place) == 0) | (place == 0)
        counts = jnp.asarray(batch.loss_mask) & (place > 0)
        return jnp.sum(self._nats(denoiser, process, batch, begin, starts, counts), axis=1)

    def of_tokens(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> Array:
        """Returns -log p(x_n | x_{<n}) of each token that counts, 0 for others: [B, L]."""
        del u, keys
        rows, length = batch.tokens.shape
        place = jnp.arange(length)

        @jax.checkpoint
        def at(first: Array) -> Array:
            begin = jnp.full(rows, first)
            starts = self._within(begin, place) == 0
            # With windows from 1 on, the position 0 is a mask alone.
            follows = jnp.where(place == 0, first == 1, jnp.roll(starts, 1, axis=1))
            counts = jnp.asarray(batch.loss_mask) & follows
            return self._nats(denoiser, process, batch, begin, starts, counts)

        return jnp.sum(jax.lax.map(at, jnp.arange(self.block_size)), axis=0)

    def _within(self, begin: Array, place: Array) -> Array:
        """Returns the number of each position in its window, [B, L]."""
        return (place - begin[:, None]) % self.block_size

    def _nats(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        batch: Batch,
        begin: Array,
        starts: Array,
        counts: Array,
    ) -> Array:
        """Returns -log mu of the tokens that are marked by counts, 0 for others: [B, L].

        begin   int32 [B]: windows begin at begin + D k
        starts  bool [B, L], positions whose token is shown in its window
        """
        x = batch.tokens
        place = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape)
        z = jnp.where(starts, x, process.mask_id)
        window = (place - begin[:, None]) // self.block_size
        rank = jnp.zeros_like(place)  # the same, so that the positions of a window see one another
        h = denoiser.ordered.streams(z, x, jnp.zeros(len(x)), rank, window, place)
        h = jnp.concatenate([h[:, :1], h[:, :-1]], axis=1)
        return at_positions(denoiser, h, counts, reduce=token_nats, padded=True, rows=(x,))
