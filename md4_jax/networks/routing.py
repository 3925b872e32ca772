"""Which experts a router may choose from: those of some groups, or those of a token's block."""

from typing import Any

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array, UserError


def allowed(o: Any, ranked_BxLxE: Array) -> Array:
    """Returns the scores by which experts are chosen, with -inf for those that may not be chosen.

    o: options of `Transformer`
    """
    if o.router_groups > 1:
        ranked_BxLxE = within_groups(ranked_BxLxE, o.router_groups, o.router_groups_taken)
    if o.router_block:
        ranked_BxLxE = within_blocks(ranked_BxLxE, o.router_block, o.router_block_taken)
    return ranked_BxLxE


def within_groups(ranked: Array, groups: int, taken: int) -> Array:
    """Returns scores [..., E] with -inf for experts of groups that are not chosen."""
    by_group = ranked.reshape(*ranked.shape[:-1], groups, -1)
    best = jnp.sum(jax.lax.top_k(by_group, 2)[0], axis=-1)
    _, open_groups = jax.lax.top_k(best, taken)
    is_open = jnp.any(open_groups[..., None] == jnp.arange(groups), axis=-2)
    return jnp.where(is_open[..., None], by_group, -jnp.inf).reshape(ranked.shape)


def within_blocks(ranked_BxLxE: Array, block: int, taken: int) -> Array:
    """Returns scores with -inf for all but `taken` experts of each block of tokens.

    These have the largest scores of any token of the block (block routing of LLaDA2.2). The first
    block begins at the first token, and the last one may be shorter.
    """
    batch, length, experts = ranked_BxLxE.shape
    padding = ((0, 0), (0, -length % block), (0, 0))
    padded = jnp.pad(ranked_BxLxE, padding, constant_values=-jnp.inf)
    by_block = padded.reshape(batch, -1, block, experts)
    _, shared_BxGxT = jax.lax.top_k(jnp.max(by_block, axis=2), taken)
    is_open = jnp.any(shared_BxGxT[..., None] == jnp.arange(experts), axis=-2)
    kept = jnp.where(is_open[:, :, None], by_block, -jnp.inf)
    return kept.reshape(batch, -1, experts)[:, :length]


def check_routing(o: Any) -> None:
    """Raises UserError for inconsistent keys of the choice of experts."""
    groups, taken = o.router_groups, o.router_groups_taken
    if not 1 <= taken <= groups:
        raise UserError(
            f"network.router_groups_taken={taken} must lie between 1 and network.router_groups="
            f"{groups}"
        )
    if o.experts % groups or (groups > 1 and o.experts < 2 * groups):
        raise UserError(
            f"network.experts={o.experts} must be a multiple of network.router_groups={groups}, "
            "with two experts or more in each group"
        )
    within = o.experts // groups * taken
    if not 1 <= o.experts_per_token <= within:
        raise UserError(
            f"network.experts_per_token={o.experts_per_token} must lie between 1 and {within}, "
            f"the number of experts in network.router_groups_taken={taken} groups"
        )
    if not o.router_block:
        return
    if o.router_block < 0 or groups > 1:
        raise UserError(
            f"network.router_block={o.router_block} must not be negative, and needs "
            f"network.router_groups=1, not {groups}"
        )
    if not o.experts_per_token <= o.router_block_taken <= o.experts:
        raise UserError(
            f"network.router_block_taken={o.router_block_taken} must lie between "
            f"network.experts_per_token={o.experts_per_token} and network.experts={o.experts}"
        )


def check_window(o: Any, block: int) -> None:
    """Raises UserError if blocks of block diffusion are not whole blocks of the router."""
    if o.router_block and block % o.router_block:
        raise UserError(
            f"network.router_block={o.router_block}: tokens of a block share experts, so that "
            f"objective.block and the blocks that are sampled must be multiples of it, not {block}"
        )


def check_elsewhere(o: Any) -> None:
    """Raises UserError if tokens share experts, for windows that begin anywhere in a text."""
    if o.router_block:
        raise UserError(
            f"sample.dual_cache=True needs network.router_block=0, not {o.router_block}: the "
            "tokens of a window that begins elsewhere would share other experts"
        )
