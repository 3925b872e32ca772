"""Classifier-free guidance towards a class or a prompt: docs/samplers.md#guidance."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from md4_jax.protocols import (
    Accelerator,
    Array,
    Blockwise,
    Conditioned,
    Denoiser,
    Network,
    Ordered,
    Params,
    Process,
    Prompt,
)

# Largest log of a rate: a position with this rate always jumps, and sums of such rates are finite.
MOST = 60.0


def guided(
    network: Network,
    params: Params,
    context: Mapping[str, Array],
    weight: float,
    prompt: Prompt | None = None,
) -> tuple[Denoiser, Any]:
    """Returns the denoiser and the process for sampling with guidance (arXiv:2412.10193).

    weight  w. 0: the label y of the context is ignored; 1: usual conditioning on it; above 1:
            samples are more typical of the label
    prompt  of the batch. With masks and no label, y is the prompt, and p(x | z) is the prediction
            with masks in place of the prompt (LLaDA, arXiv:2502.09992)

    Masks: mu prop p(x | z, y)^w p(x | z)^(1 - w); a reveal's probability does not depend on x.
    Other noise: p(z_s | z_t) prop p(z_s | z_t, y)^w p(z_s | z_t)^(1 - w), see `GuidedProcess`.
    Both are normalised at each position. Each evaluation calls the network twice.
    """
    if weight == 1.0:
        return network.denoiser(params, context), params["process"]
    if weight == 0.0:
        return _unconditional(network, params, context, prompt), params["process"]
    return weighed(network, params, context, weight, prompt)


def weighed(
    network: Network,
    params: Params,
    context: Mapping[str, Array],
    weight: Array | float,
    prompt: Prompt | None = None,
) -> tuple[Denoiser, Any]:
    """Returns the same as `guided` with two network calls for any weight, which may be traced."""
    process, uncond = params["process"], _unconditional(network, params, context, prompt)
    cond = network.denoiser(params, context)
    if process.shows_clean:
        return both(cond, uncond, functools.partial(combined, weight=weight)), process
    return both(cond, uncond, lambda *each: jnp.stack(each)), GuidedProcess(process, weight)


def _unconditional(
    network: Network, params: Params, context: Mapping[str, Array], prompt: Prompt | None
) -> Denoiser:
    """Returns the unconditional denoiser: without the label or, lacking one, without the prompt."""
    if "label" in context or prompt is None:
        return network.denoiser(params, {k: v for k, v in context.items() if k != "label"})
    mask = jnp.asarray(prompt.mask)
    if network.causal:  # which reads each token one position later, behind the start of the text
        mask = jnp.pad(mask[:, :-1], ((0, 0), (1, 0)))
    hide = Prompt(jnp.full(mask.shape, params["process"].mask_id), mask)
    return shown(network.denoiser(params, context), hide)


def with_clean_prompt(denoiser: Denoiser, process: Process, prompt: Prompt) -> Denoiser:
    """Returns the denoiser for a network that was trained on clean prompts.

    The chain's own prompt is clean with masks, and has the noise of its time otherwise. `Blocks`
    does the same in each block.
    """
    if process.shows_clean:
        return denoiser
    return shown(denoiser, prompt)._replace(blocks=denoiser.blocks)


def shown(denoiser: Denoiser, prompt: Prompt) -> Denoiser:
    """Returns the denoiser that sees the tokens of a prompt [B, L] in place of the chain's."""

    def show(z: Array | Conditioned) -> Array | Conditioned:
        if isinstance(z, Conditioned):
            return z._replace(tokens=show(z.tokens))
        return jnp.where(prompt.mask, prompt.tokens, z)

    at = denoiser.accelerator.features_at
    if at is not None:
        at = lambda z, t, index: denoiser.accelerator.features_at(show(z), t, index)  # noqa: E731
    return denoiser._replace(
        features=lambda z, t: denoiser.features(show(z), t),
        accelerator=denoiser.accelerator._replace(features_at=at, features_where=None),
        blocks=None,
        ordered=None,
        rebind=lambda count: shown(
            denoiser.repeated(count), Prompt(*(jnp.repeat(x, count, axis=0) for x in prompt))
        ),
    )


def calls(weight: float) -> int:
    """Returns the number of network calls of one evaluation."""
    return 1 if weight in (0.0, 1.0) else 2


def combined(cond: Array, uncond: Array, weight: Array | float) -> Array:
    """Returns w log p(. | y) + (1 - w) log p(.) of these two; -inf where one of them is -inf."""
    possible = (cond > -jnp.inf) & (uncond > -jnp.inf)
    return jnp.where(possible, weight * cond + (1.0 - weight) * uncond, -jnp.inf)


class Derived:
    """A process with the public attributes of another one, except for some changed functions.

    changed  functions by name; each one replaces the process's function of this name, if any
    without  names of attributes to remove
    """

    def __init__(
        self, process: Process, changed: Mapping[str, Callable], without: tuple[str, ...] = ()
    ):
        names = {name for name in dir(process) if name[0] != "_"} - {*without}
        # Attributes of the instance, which protocol checks find in every Python version.
        vars(self).update({name: getattr(process, name) for name in names - changed.keys()})
        vars(self).update({name: changed[name] for name in names & changed.keys()})


class GuidedProcess(Derived):
    """A process of noise other than masks, with steps that combine two outputs of the network.

    Its functions take the outputs with and without the label, [2, B, L, V], and return

        reverse_logits, clean_logits  w log p(. | y) + (1 - w) log p(.) of the step
        log_score                     the same of scores, so that p_t(z | y)^w p_t(z)^(1 - w) has
                                      these ratios
        reverse_rates                 R(. | y)^w R^(1 - w) (arXiv:2406.01572)
    """

    def __init__(self, process: Process, weight: Array | float):
        steps = {
            name: functools.partial(_step, getattr(process, name), rule, weight)
            for name, rule in RULES.items()
            if hasattr(process, name)
        }
        super().__init__(process, steps)


def _rates(cond: Array, uncond: Array, weight: float) -> Array:
    return rates_of(combined(jnp.log(cond), jnp.log(uncond), weight))


def rates_of(logs: Array) -> Array:
    """Computes rates [..., V] from their logs, without overflow in sums and products with t.

    If a rate of a position is above e^MOST, all rates of the position are divided by the same
    number. It still always jumps, with the same probability of each symbol.
    """
    most = jnp.max(logs, axis=-1, keepdims=True)
    return jnp.exp(logs - jnp.maximum(most - MOST, 0.0))


RULES: dict[str, Callable[[Array, Array, float], Array]] = {
    "reverse_logits": combined,
    "clean_logits": combined,
    "log_score": combined,
    "reverse_rates": _rates,
}


def _step(
    function: Callable, rule: Callable, weight: Array | float, outputs: Array, *rest
) -> Array:
    cond, uncond = (function(each, *rest) for each in outputs)
    return rule(cond, uncond, weight)


def both(cond: Denoiser, uncond: Denoiser, join: Callable[[Array, Array], Array]) -> Denoiser:
    """Combines a conditional and an unconditional denoiser: its logits are join of both logits.

    Its features are those of both, concatenated, so that caches and gathers work as before. The
    quality of tokens is that of the conditional one.
    """

    def unembed(h: Array) -> Array:
        one, other = jnp.split(h, 2, axis=-1)
        return join(cond.unembed(one), uncond.unembed(other))

    return Denoiser(
        _side_by_side(cond.features, uncond.features),
        unembed,
        Accelerator(cond.accelerator.groups, _side_by_side(cond.features_at, uncond.features_at)),
        _if_both(_blockwise, cond.blocks, uncond.blocks),
        lambda count: both(cond.repeated(count), uncond.repeated(count), join),
        ordered=_if_both(_ordered, cond.ordered, uncond.ordered),
        quality=cond.quality and (lambda h: cond.quality(jnp.split(h, 2, axis=-1)[0])),
    )


def _if_both(join: Callable, one: Any, other: Any) -> Any:
    """Returns join(one, other), or None if one of them is missing."""
    return join(one, other) if one and other else None


def _side_by_side(one: Callable, other: Callable) -> Callable:
    return lambda *arguments: jnp.concatenate([one(*arguments), other(*arguments)], axis=-1)


def _ordered(cond: Ordered, uncond: Ordered) -> Ordered:
    """Combines the functions of both, with a pair of caches."""

    def append(*arguments: Any) -> tuple[Array, Any]:
        *read, caches = arguments
        first, second = cond.append(*read, caches[0]), uncond.append(*read, caches[1])
        return jnp.concatenate([first[0], second[0]], axis=-1), (first[1], second[1])

    return Ordered(
        _side_by_side(cond.features, uncond.features),
        _side_by_side(cond.predictions, uncond.predictions),
        lambda rows, length: (cond.empty_cache(rows, length), uncond.empty_cache(rows, length)),
        append,
        cond.padding,
    )


def _blockwise(cond: Blockwise, uncond: Blockwise) -> Blockwise:
    """Combines the functions of both, with a pair of caches."""

    def of_both(one: Callable, other: Callable) -> Callable:
        def append(z: Array, t: Array, caches: tuple[Any, Any]) -> tuple[Array, Any]:
            first, second = one(z, t, caches[0]), other(z, t, caches[1])
            return jnp.concatenate([first[0], second[0]], axis=-1), (first[1], second[1])

        return append

    def following(caches: tuple[Any, Any]) -> tuple[Array, Array]:
        one, follows = cond.following(caches[0])
        return jnp.concatenate([one, uncond.following(caches[1])[0]], axis=-1), follows

    def around(z: Array, t: Array, begin: Array, caches: Any, *known: bool) -> tuple[Array, Any]:
        one, first = cond.around(z, t, begin, caches and caches[0], *known)
        other, second = uncond.around(z, t, begin, caches and caches[1], *known)
        return jnp.concatenate([one, other], axis=-1), (first, second)

    def beginning(caches: tuple[Any, Any], first: Array) -> tuple[Any, Any]:
        return cond.beginning(caches[0], first), uncond.beginning(caches[1], first)

    return Blockwise(
        _if_both(_side_by_side, cond.features, uncond.features),
        lambda rows, window: (cond.empty_cache(rows, window), uncond.empty_cache(rows, window)),
        of_both(cond.append_block, uncond.append_block),
        around if cond.around and uncond.around else None,
        following if cond.following and uncond.following else None,
        _if_both(of_both, cond.read_block, uncond.read_block),
        beginning=beginning if cond.beginning and uncond.beginning else None,
        anywhere=cond.anywhere,
    )
