"""Prints the layers of the package: each room (folder or top-level module) is above its imports.

    python tools/floors.py

Prints one line per floor (layer), the highest first, and under each room the rooms that it imports.
The exit code is 1 if imports are circular, or if there are more than nine floors.
"""

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "md4_jax"
MOST = 9


def rooms() -> dict[str, set[str]]:
    """Returns {room: rooms that its files import}, including imports inside functions."""
    doors = (PACKAGE / "__init__.py", PACKAGE / "__main__.py")  # of one line
    files = [path for path in PACKAGE.rglob("*.py") if path not in doors]
    known = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in files}
    found: dict[str, set[str]] = {name: set() for name in known}
    for path in files:
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        names = {name for node in ast.walk(ast.parse(path.read_text())) for name in imported(node)}
        found[own] |= {part for part in names if part in known and part != own}
    return found


def imported(node: ast.AST) -> set[str]:
    """Returns the rooms of this package in an import statement."""
    if isinstance(node, ast.ImportFrom) and node.module == "md4_jax":
        return {alias.name for alias in node.names}
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    return {name.split(".")[1] for name in names if name.startswith("md4_jax.")}


def floors(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns the rooms of each floor, the lowest first; SystemExit for circular imports."""
    stacked: list[list[str]] = []
    left = dict(graph)
    while left:
        ready = sorted(name for name, needs in left.items() if not needs & left.keys())
        if not ready:
            raise SystemExit(f"a circle among {', '.join(sorted(left))}")
        stacked.append(ready)
        for name in ready:
            del left[name]
    return stacked


def main() -> int:
    """Prints the floors and returns the exit code."""
    graph = rooms()
    stacked = floors(graph)
    for number in range(len(stacked), 0, -1):
        print(f"floor {number}")
        for name in stacked[number - 1]:
            print(f"  {name:<12} -> {', '.join(sorted(graph[name])) or 'nothing'}")
    print(f"{len(stacked)} floors of {len(graph)} rooms, no circle")
    return int(len(stacked) > MOST)


if __name__ == "__main__":
    sys.exit(main())
