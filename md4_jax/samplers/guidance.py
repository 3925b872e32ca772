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
        return _free(network, params, context, prompt), params["process"]
    return weighed(network, params, context, weight, prompt)


def weighed(
    network: Network,
    params: Params,
    context: Mapping[str, Array],
    weight: Array | float,
    prompt: Prompt | None = None,
) -> tuple[Denoiser, Any]:
    """Returns the same as `guided` with two network calls for any weight, which may be traced."""
    process, free = params["process"], _free(network, params, context, prompt)
    told = network.denoiser(params, context)
    if process.shows_clean:
        return both(told, free, functools.partial(combined, weight=weight)), process
    return both(told, free, lambda *each: jnp.stack(each)), GuidedProcess(process, weight)


def _free(
    network: Network, params: Params, context: Mapping[str, Array], prompt: Prompt | None
) -> Denoiser:
    """Returns the denoiser without the label or, if there is no label, without the prompt."""
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


def combined(told: Array, free: Array, weight: Array | float) -> Array:
    """Returns w log p(. | y) + (1 - w) log p(.); -inf where one of the two is -inf."""
    possible = (told > -jnp.inf) & (free > -jnp.inf)
    return jnp.where(possible, weight * told + (1.0 - weight) * free, -jnp.inf)


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


def _rates(told: Array, free: Array, weight: float) -> Array:
    return rates_of(combined(jnp.log(told), jnp.log(free), weight))


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
    told, free = (function(each, *rest) for each in outputs)
    return rule(told, free, weight)


def both(told: Denoiser, free: Denoiser, join: Callable[[Array, Array], Array]) -> Denoiser:
    """Combines two denoisers into one with logits join(logits of told, logits of free).

    Its features are those of both, concatenated, so that caches and gathers work as before.
    """

    def unembed(h: Array) -> Array:
        one, other = jnp.split(h, 2, axis=-1)
        return join(told.unembed(one), free.unembed(other))

    return Denoiser(
        _side_by_side(told.features, free.features),
        unembed,
        Accelerator(told.accelerator.groups, _side_by_side(told.features_at, free.features_at)),
        _blockwise(told.blocks, free.blocks) if told.blocks and free.blocks else None,
        lambda count: both(told.repeated(count), free.repeated(count), join),
        ordered=_ordered(told.ordered, free.ordered) if told.ordered and free.ordered else None,
    )


def _side_by_side(one: Callable, other: Callable) -> Callable:
    return lambda *arguments: jnp.concatenate([one(*arguments), other(*arguments)], axis=-1)


def _ordered(told: Ordered, free: Ordered) -> Ordered:
    """Combines the functions of both, with a pair of caches."""

    def append(*arguments: Any) -> tuple[Array, Any]:
        *read, caches = arguments
        first, second = told.append(*read, caches[0]), free.append(*read, caches[1])
        return jnp.concatenate([first[0], second[0]], axis=-1), (first[1], second[1])

    return Ordered(
        _side_by_side(told.features, free.features),
        _side_by_side(told.predictions, free.predictions),
        lambda rows, length: (told.empty_cache(rows, length), free.empty_cache(rows, length)),
        append,
        told.padding,
    )


def _blockwise(told: Blockwise, free: Blockwise) -> Blockwise:
    """Combines the functions of both, with a pair of caches."""

    def of_both(one: Callable, other: Callable) -> Callable:
        def append(z: Array, t: Array, caches: tuple[Any, Any]) -> tuple[Array, Any]:
            first, second = one(z, t, caches[0]), other(z, t, caches[1])
            return jnp.concatenate([first[0], second[0]], axis=-1), (first[1], second[1])

        return append

    def following(caches: tuple[Any, Any]) -> tuple[Array, Array]:
        one, follows = told.following(caches[0])
        return jnp.concatenate([one, free.following(caches[1])[0]], axis=-1), follows

    def around(z: Array, t: Array, begin: Array, caches: Any) -> tuple[Array, Any]:
        one, first = told.around(z, t, begin, caches and caches[0])
        other, second = free.around(z, t, begin, caches and caches[1])
        return jnp.concatenate([one, other], axis=-1), (first, second)

    def beginning(caches: tuple[Any, Any], first: Array) -> tuple[Any, Any]:
        return told.beginning(caches[0], first), free.beginning(caches[1], first)

    return Blockwise(
        _side_by_side(told.features, free.features) if told.features and free.features else None,
        lambda rows, window: (told.empty_cache(rows, window), free.empty_cache(rows, window)),
        of_both(told.append_block, free.append_block),
        around if told.around and free.around else None,
        following if told.following and free.following else None,
        of_both(told.read_block, free.read_block) if told.read_block and free.read_block else None,
        beginning=beginning if told.beginning and free.beginning else None,
    )
