"""Events for TensorBoard, written synchronously, so that calls raise the errors of a disk."""

import os
import socket
import time
from typing import Any

from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter, directory_check


class Events:
    """Writer of TensorBoard events.

    purge_step: hides existing events in the directory from this step on; None: none
    """

    def __init__(self, directory: str, purge_step: int | None):
        directory_check(directory)
        # Without the process id, a process started within the same second would use the same name.
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = RecordWriter(os.path.join(directory, name))
        self._write(Event(file_version="brain.Event:2"))
        if purge_step is not None:
            restart = SessionLog(status=SessionLog.START)
            self._write(Event(step=purge_step, session_log=restart))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self._write(Event(summary=summary.scalar(name, value), step=step))

    def add_image(self, name: str, picture: Any, step: int) -> None:
        """Adds an RGB picture [H, W, 3]."""
        self._write(Event(summary=summary.image(name, picture, dataformats="HWC"), step=step))

    def add_text(self, name: str, text: str, step: int) -> None:
        """Adds a text verbatim, as a Markdown code block."""
        block = "".join(f"    {line}\n" for line in text.splitlines())
        self._write(Event(summary=summary.text(name, block), step=step))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._file.write(event.SerializeToString())
