"""The configs in configs/, found by listing the folder, so that none can be forgotten."""

import importlib
import inspect
from pathlib import Path

from md4_jax.runtime.commit import PACKAGE_ROOT

CONFIGS = PACKAGE_ROOT / "configs"


def spelled() -> list[str]:
    """Each as --config takes it from the root: configs/FILE.py, or configs/FILE.py:NAME."""
    return [name for path in sorted(CONFIGS.glob("*.py")) for name in _names(path)]


def _names(path: Path) -> list[str]:
    module = importlib.import_module(f"configs.{path.stem}")
    if not hasattr(module, "get_config"):
        return []
    is_named = bool(inspect.signature(module.get_config).parameters)
    names = [f":{name}" for name in module.FAMILIES] if is_named else [""]
    return [f"configs/{path.name}{name}" for name in names]
