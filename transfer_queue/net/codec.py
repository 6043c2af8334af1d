"""Frames: one message is one msgpack frame, decoded by type and only within a size limit.

`Malformed` is what a receiver gets for anything else; servers count it and go on.
"""

from __future__ import annotations

import msgspec

from transfer_queue.errors import BY_CODE, QueueError, QueueFull
from transfer_queue.net.messages import Failed, Request, Response

MAX_FRAME = 64 << 20
"""Largest control frame in bytes: about 500,000 keys. The sockets know it too, and refuse before they allocate."""

SAY_HELLO = "say Hello first"
"""Message of Failed(disconnected) to a client that the controller does not know: after a restart, say."""

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_response_decoder = msgspec.msgpack.Decoder(Response)


class Malformed(ValueError):
    """A frame that is no message of this version."""


def encode(message: msgspec.Struct) -> bytes:
    """`message` as one frame. Raises TypeError for a value (in a tag, say) that msgpack has no form for."""
    return _encoder.encode(message)


def decode_request(frame: bytes | memoryview) -> Request:
    """Raises Malformed."""
    return _decode(_request_decoder, frame)


def decode_response(frame: bytes | memoryview) -> Response:
    """Raises Malformed."""
    return _decode(_response_decoder, frame)


def _decode(decoder: msgspec.msgpack.Decoder, frame: bytes | memoryview):
    if len(frame) > MAX_FRAME:
        raise Malformed(f"frame of {len(frame)} bytes; the limit is {MAX_FRAME}")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise Malformed(f"frame of {len(frame)} bytes: {error}") from error


def error_of(failed: Failed) -> QueueError:
    """The exception that a Failed stands for."""
    kind = BY_CODE.get(failed.code, QueueError)
    return QueueFull(failed.message, failed.retry_after) if kind is QueueFull else kind(failed.message)


def failed_of(error: QueueError) -> Failed:
    """The wire form of an exception."""
    return Failed(error.code, str(error), getattr(error, "retry_after", 0.0))
