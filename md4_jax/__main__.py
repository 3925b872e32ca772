"""`python -m md4_jax` is `python -m md4_jax.main`."""

from md4_jax.main import main

main()
