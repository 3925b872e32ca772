"""Events for TensorBoard, written at once: a thread that dies would let the run hang."""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter, directory_check


class Events:
    """Writer of TensorBoard events; OSError if one cannot be written, which closes the file.

    purge_step: events from this step on that lie in the directory are hidden; None: none
    """

    def __init__(self, directory: str, purge_step: int | None):
        self._directory = directory
        self._file: RecordWriter | None = None
        self._attempt(self._open)
        self._write(Event(file_version="brain.Event:2"))
        if purge_step is not None:
            restart = SessionLog(status=SessionLog.START)
            self._write(Event(step=purge_step, session_log=restart))

    def _open(self) -> None:
        directory_check(self._directory)
        # Without its number, a process started within the same second would take the same name.
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = RecordWriter(os.path.join(self._directory, name))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self._write(Event(summary=summary.scalar(name, value), step=step))

    def add_image(self, name: str, picture: Any, step: int) -> None:
        """Adds an RGB picture [H, W, 3]."""
        self._write(Event(summary=summary.image(name, picture, dataformats="HWC"), step=step))

    def flush(self) -> None:
        self._attempt(lambda: self._file and self._file.flush())

    def close(self) -> None:
        self._attempt(lambda: self._file and self._file.close())
        self._file = None

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._attempt(lambda: self._file and self._file.write(event.SerializeToString()))

    def _attempt(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except OSError:
            with contextlib.suppress(OSError):
                self._file and self._file.close()
            self._file = None
            raise
