"""File operations that file_faults.c recorded, and the disk that some of them leave."""

import collections
import os
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Faults after which some of the operations before are lost.
POWER = ("ordered", "strict", "reordered")
# Kinds of operations, as in file_faults.c.
CREATE, RESIZE, WRITE, RENAME, UNLINK, MKDIR, RMDIR, SYNC = range(1, 9)


class Operation(NamedTuple):
    """Record of a file operation; paths are relative to the directory that is watched."""

    kind: int
    path: str
    other: str = ""
    offset: int = 0
    data: bytes = b""


def read_log(log: Path, root: Path) -> list[Operation]:
    """Returns the operations of a log in their order."""
    raw, at, found = log.read_bytes(), 0, []
    while at < len(raw):
        kind, offset, *sizes = struct.unpack_from("5q", raw, at)
        at += 40
        parts = []
        for size in sizes:
            parts.append(raw[at : at + size])
            at += size
        paths = [os.path.relpath(p, root) if p else "" for p in map(bytes.decode, parts[:2])]
        found.append(Operation(kind, *paths, offset, parts[2]))
    return found


class Node:
    """File (data) or directory (names)."""

    def __init__(self, is_directory: bool):
        self.names: dict[str, Node] | None = {} if is_directory else None
        self.data = bytearray()


class Disk:
    """Tree of files to which operations are applied; one that cannot be is left out."""

    def __init__(self):
        self.root = Node(True)

    def at(self, path: str) -> Node | None:
        node = self.root
        for name in path.split("/") if path not in ("", ".") else ():
            if node is None or node.names is None:
                return None
            node = node.names.get(name)
        return node

    def place(self, path: str) -> tuple[Node | None, str]:
        folder, _, name = path.rpartition("/")
        node = self.at(folder)
        return (node, name) if node is not None and node.names is not None else (None, name)

    def apply(self, op: Operation) -> list[Node]:
        """Performs an operation; returns the nodes that must be fsynced for it to last."""
        folder, name = self.place(op.path)
        if op.kind in (WRITE, RESIZE, SYNC):
            node = self.at(op.path)
            if node is None:
                return []
            if op.kind == WRITE:
                node.data.extend(bytes(max(0, op.offset - len(node.data))))
                node.data[op.offset : op.offset + len(op.data)] = op.data
            if op.kind == RESIZE:
                del node.data[op.offset :]
                node.data.extend(bytes(op.offset - len(node.data)))
            return [node]
        if folder is None:
            return []
        if op.kind in (CREATE, MKDIR):
            folder.names[name] = Node(op.kind == MKDIR)
            return [folder]
        if op.kind == RENAME:
            target, new = self.place(op.other)
            if target is None or name not in folder.names:
                return []
            target.names[new] = folder.names.pop(name)
            return [target]
        node = folder.names.get(name)
        if node is not None and not (op.kind == RMDIR and node.names):
            del folder.names[name]
        return [folder]

    def files(self, node: Node | None = None, path: str = "") -> Iterator[tuple[str, bytes | None]]:
        """Yields (path, content, None of a directory)."""
        for name, child in sorted((node or self.root).names.items()):
            where = f"{path}/{name}" if path else name
            yield where, None if child.names is not None else bytes(child.data)
            if child.names is not None:
                yield from self.files(child, where)

    def write(self, root: Path) -> None:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        for path, content in self.files():
            (root / path).mkdir() if content is None else (root / path).write_bytes(content)


def needed(operations: list[Operation]) -> list[float]:
    """Returns the number of the operation with which each one lasts; infinity: none."""
    disk, at = Disk(), []
    found = [float("inf")] * len(operations)
    waiting: dict[int, list[int]] = collections.defaultdict(list)
    for number, op in enumerate(operations):
        nodes = disk.apply(op)
        at.append(nodes)  # keeps them, so that no id is used twice
        for node in nodes:
            if op.kind == SYNC:
                for earlier in waiting.pop(id(node), ()):
                    found[earlier] = number
            else:
                waiting[id(node)].append(number)
    return found


def state(fault: str, operations: list[Operation], lasts: list[float], n: int) -> Disk:
    """Returns the disk after a fault at operation n."""
    disk, coin = Disk(), random.Random(n)
    for number, op in enumerate(operations[:n]):
        is_lost = (
            fault in POWER
            and lasts[number] >= n
            and (
                fault == "strict"
                or (fault == "ordered" and op.kind in (WRITE, RESIZE))
                or (fault == "reordered" and coin.random() < 0.5)
            )
        )
        if not is_lost:
            disk.apply(op)
    op = operations[n] if n < len(operations) else None
    if fault == "torn" and op is not None:
        disk.apply(op._replace(data=op.data[: len(op.data) // 2]))
    return disk
