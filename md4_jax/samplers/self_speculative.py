"""Self-speculative decoding: a network drafts tokens from masks, then verifies them causally."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import Array, Denoiser, Needs, UserError, pytree
from md4_jax.runtime.scopes import turns
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.drafts import BlockDrafter, Drafter, Reading, WindowDrafter
from md4_jax.samplers.draw import draw_from, draw_with
from md4_jax.samplers.front import ended, first_mask
from md4_jax.samplers.left_to_right import one_by_one, steps_of
from md4_jax.samplers.transforms import Transform


@pytree("transform")
@dataclasses.dataclass(frozen=True)
class SelfSpeculative:
    """Draws x_n ~ p(x_n | x_{<n}) from left to right, several tokens in few evaluations.

    A draft guesses the next tokens from masks, all at once. The network then reads them as clean
    tokens, from left to right, which gives the exact distribution of each given those before it. A
    token is drawn from each of these. The first guesses stay while they are the tokens so drawn;
    in place of the next one, the drawn token stays. So each round keeps 1 to `size` tokens:

    of a network with a causal context (Nemotron-Labs-Diffusion, arXiv:2607.05722): the block of the
        last token and size - 1 masks drafts; the block with the drafted tokens verifies
    of one that was trained on windows (SDLM, arXiv:2509.24007): one evaluation reads a window that
        begins at each drafted token. The first prediction of each verifies the next token, and the
        other predictions of the last window that holds are the next draft

    The noise of a position is the same in its draft and in each verification, since its key depends
    on the position alone. So the tokens are those of `cached=False` with the same seed, at any
    temperature, whatever the drafts are; and a draft from nearly the right distribution is nearly
    always right.

    width    size of a block or window, with its first token; 0: that of the training. A block of 1
             drafts nothing. Windows may reach beyond the text
    cached   False: draws the same tokens one by one, each with an evaluation that reads the text
    stops    as of `Front`
    trained  block or window of the training, 0: none
    in_windows  whether the network was trained on windows

    The grid has no effect on the distribution. The first token of a text without a prompt is drawn
    from a single mask. Given tokens to the right of a mask are kept, but only tokens to their right
    depend on them.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,), verifies=True)
    level: ClassVar[None] = None

    width: int = 0
    cached: bool = True
    stops: tuple[int, ...] = ()
    trained: int = 4
    in_windows: bool = False
    transform: Transform = Transform()

    def __post_init__(self):
        least = 2 if self.in_windows else 1
        if self.width != 0 and self.width < least:
            why = ", for a model of windows" if self.in_windows else ""
            raise UserError(f"sample.width must be 0, or at least {least}{why}, not {self.width}")
        if not self.size:
            raise UserError(
                "sample.width=0 is the size of the blocks of the training, but this model was "
                "trained without blocks: set sample.width to the number of tokens of a block, such "
                "as 8"
            )

    @property
    def size(self) -> int:
        """Number of positions of a block or window."""
        return self.width or self.trained

    def __call__(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        chain: Chain,
        s: Array,
        t: Array,
        keys: Array,
    ) -> Chain:
        drafter = self._drafter(denoiser, process)

        def draw(n: Array, chain: Chain) -> tuple[Array, Array]:
            index_Bx1 = jnp.full((len(chain.z), 1), n)
            return draw_from(denoiser, self.transform, drafter.whole(chain.z, n), index_Bx1, keys)

        return one_by_one(process, chain, s, t, draw)

    def filled_in(self, grid: np.ndarray, length: int) -> np.ndarray:
        """Returns the step of the grid, 0 the first, that fills each position: int [length]."""
        return steps_of(grid, length)

    def is_cached(self, denoiser: Denoiser) -> bool:
        """Returns whether drafts are verified with a cache of the tokens so far."""
        return self.cached

    def positions_each(self, length: int) -> int:
        """Returns how many positions an evaluation reads: a block, or tokens and their windows."""
        return self.size * (1 + self.size if self.in_windows else 1)

    def positions_read(self, process: Any, grid: np.ndarray, length: int) -> float:
        """Returns how many positions are read if no draft is right: the most."""
        evaluations = 1 if self.in_windows or self.size == 1 else 2
        return float(length * evaluations * self.positions_each(length))

    def fill_cached(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        chain: Chain,
        keys_of: Callable[[Array], Array],
    ) -> Chain:
        """Draws the same tokens as the steps of a whole grid, by drafts that are verified.

        keys_of: n -> keys [B] of the step that fills position n
        """
        length = chain.z.shape[1]
        keys_BxL = jax.vmap(keys_of, out_axes=1)(jnp.arange(length))
        drafter = self._drafter(denoiser, process)

        def draw(h: Array, index: Array) -> tuple[Array, Array]:
            keys = jax.vmap(lambda keys, n: keys[n])(keys_BxL, jnp.minimum(index, length - 1))
            keys = jax.vmap(jax.vmap(jax.random.fold_in))(keys, index)
            return draw_with(denoiser, self.transform, h, keys)

        def closed(state: Reading) -> Reading:
            z = ended(self.stops, process, state.z[:, :length], chain.prompt_mask)
            return state._replace(z=state.z.at[:, :length].set(z))

        def left(state: Reading) -> Array:
            return jnp.any(process.is_noise(state.z[:, :length]), axis=1)

        def body(state: Reading) -> Reading:
            return closed(drafter.round(state, left(state), draw))

        first = first_mask(process, chain.z)
        state = closed(drafter.begin(chain, first, draw))
        with turns(length):
            state = jax.lax.while_loop(lambda state: jnp.any(left(state)), body, state)
        return chain._replace(
            z=state.z[:, :length],
            confidence=state.confidence[:, :length],
            evaluations=chain.evaluations + state.evaluations,
        )

    def _drafter(self, denoiser: Denoiser, process: RevealsMasks) -> Drafter:
        make = WindowDrafter if self.in_windows else BlockDrafter
        return make(denoiser, process.mask_id, self.size)
