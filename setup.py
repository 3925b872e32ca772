"""Packages of the wheel: those in md4_jax/, and configs/ as md4_jax.configs."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["md4_jax*"]), "md4_jax.configs"],
    package_dir={"md4_jax.configs": "configs"},
)
