"""Division of a network's parameters into trained and frozen ones."""

import re

import jax
import jax.numpy as jnp

from md4_jax.protocols import Network, Params, UserError
from md4_jax.runtime.sharding import path_name


def divided(whole: Params, network: Network, trainable: str) -> tuple[Params, Params]:
    """Divides {'network', 'process'} into (trained, frozen), both nested like the whole.

    trainable: the key train.trainable. A parameter of the network is trained if the expression
    matches a part of its path. If it is '', the adapters and `network.added` are trained, or all
    parameters if there are no adapters. Parameters of the process are always trained. frozen is ()
    if nothing is frozen, else {'network': ...} in the type of `network.parameters`.

    Raises UserError for an expression that matches no parameter or, with adapters, no adapter or
    all parameters.
    """
    pattern = _pattern(network, trainable)
    if not pattern:
        return dict(whole), ()
    paths = [path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(whole["network"])]
    _check(pattern, paths, network.adapters)
    trained, frozen = (matching(whole["network"], pattern, matches=m) for m in (True, False))
    if not frozen:
        return dict(whole), ()
    kept = stored(frozen, network.parameters)
    return {**whole, "network": trained}, {"network": kept}


def matching(params: Params, pattern: str, *, matches: bool = True, within: str = "") -> Params:
    """Returns the parameters with matching paths, or the others, as nested dicts.

    within: path of params, '' or with a slash at its end.
    """
    found = {}
    for name, x in params.items():
        path = f"{within}{name}"
        if isinstance(x, dict):
            part = matching(x, pattern, matches=matches, within=f"{path}/")
            if part:
                found[name] = part
        elif bool(re.search(pattern, path)) == matches:
            found[name] = x
    return found


def stored(params: Params, dtype: str) -> Params:
    """Converts parameters (arrays or their shapes) to the type in which they are stored."""

    def one(x):
        if isinstance(x, jax.ShapeDtypeStruct):
            return x.update(dtype=jnp.dtype(dtype))
        return x.astype(dtype)

    return jax.tree.map(one, params)


def joined(trained: Params, frozen: Params) -> Params:
    """Merges the two results of `divided`."""
    if not (isinstance(trained, dict) and isinstance(frozen, dict)):
        return trained
    parts = {name: joined(trained[name], x) for name, x in frozen.items() if name in trained}
    return {**trained, **frozen, **parts}


def trained_beside(network: Network, params: Params, trainable: str) -> str:
    """Returns the path of a trained parameter that is not part of an adapter, "" for none.

    params: parameters of the network; trainable: the key train.trainable.
    """
    asked = _pattern(network, trainable)
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    found = (x for x in names if re.search(asked, x) and not is_adapter(network, x))
    return next(found, "")


def is_adapter(network: Network, path: str) -> bool:
    """Returns whether a parameter of the network belongs to an adapter."""
    return bool(network.adapters and re.search(network.adapters, path))


def is_new(network: Network, path: str) -> bool:
    """Returns whether a model without this parameter can be given it."""
    return bool(new_parts(network) and re.search(new_parts(network), path))


def _pattern(network: Network, trainable: str) -> str:
    """Returns the expression of the trained parameters; '' for all."""
    return trainable or (network.adapters and new_parts(network))


def new_parts(network: Network) -> str:
    """Returns the expression of the parameters that a model without them can be given."""
    return "|".join(part for part in (network.adapters, network.added) if part)


def _check(pattern: str, paths: list[str], adapters: str) -> None:
    """Raises UserError for an expression that trains nothing, or freezes nothing."""
    found = [path for path in paths if re.search(pattern, path)]
    asked = f"train.trainable={pattern!r}"
    if not found:
        raise UserError(
            f"{asked} matches none of the network's {len(paths)} parameters, so nothing would be "
            f"trained. Their paths are {', '.join(paths[:3])}, ..., {paths[-1]}"
        )
    if adapters and not any(re.search(adapters, path) for path in found):
        raise UserError(
            f"{asked} matches none of the adapters of network.lora_rank, which would remain zero: "
            "set it to a pattern that matches them, such as 'lora', or set network.lora_rank=0"
        )
    if adapters and len(found) == len(paths):
        raise UserError(
            f"{asked} matches all {len(paths)} parameters, but adapters are only useful together "
            "with frozen parameters: set it to a pattern that matches fewer, such as 'lora', or "
            "set network.lora_rank=0"
        )
