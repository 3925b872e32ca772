"""Networks by their name in a config; each option class has `build() -> Network`."""

from md4_jax.networks.transformer import Transformer

NETWORKS = {
    "transformer": Transformer,
}
