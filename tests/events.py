"""Events that a run has written for TensorBoard."""

import struct

from tensorboardX.proto import event_pb2


def events_of(file) -> list[event_pb2.Event]:
    """Reads the events of a file, a TFRecord file."""
    raw, at, found = file.read_bytes(), 0, []
    while at < len(raw):
        (size,) = struct.unpack_from("<Q", raw, at)
        payload = raw[at + 12 : at + 12 + size]
        assert len(payload) == size
        found.append(event_pb2.Event.FromString(payload))
        at += 16 + size
    return found
