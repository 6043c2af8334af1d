"""Frames: one message is one msgpack frame, decoded by type and only within a size limit.

`Malformed` is what a receiver gets for anything else; servers count it and go on.
"""

from __future__ import annotations

import msgspec

from transfer_queue.errors import BY_CODE, Invalid, QueueError, QueueFull
from transfer_queue.net.argument_errors import refused_by_decoder, refused_by_encoder
from transfer_queue.net.bounds import check_request
from transfer_queue.net.messages import Failed, Mutation, Query, Request, Response

MAX_FRAME = 64 << 20
"""Largest control frame in bytes: about 500,000 keys. The sockets know it too, and refuse before they allocate."""

SAY_HELLO = "say Hello first"
"""Message of Failed(disconnected) to a client that the controller does not know: after a restart, say."""

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_envelope_decoder = msgspec.msgpack.Decoder(tuple[int, dict[str, msgspec.Raw]])
_response_decoder = msgspec.msgpack.Decoder(Response)


class Malformed(ValueError):
    """A frame that is no message of this version."""


class BadArgument(Malformed):
    """A request of which the id can be read, and what is wrong with the rest: `refusal` is the answer to it."""

    def __init__(self, request: int, refusal: Invalid) -> None:
        super().__init__(str(refusal))
        self.request, self.refusal = request, refusal


def encode(message: msgspec.Struct) -> bytes:
    """`message` as one frame. Raises TypeError for a value (in a tag, say) that msgpack has no form for."""
    return _encoder.encode(message)


def encode_request(request: int, body: Mutation | Query) -> bytes:
    """One frame. Raises TypeError or Invalid, naming the argument that no message can hold."""
    check_request(body)
    try:
        return _encoder.encode(Request(request, body))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise refused_by_encoder(error, body) from None


def decode_request(frame: bytes | memoryview) -> Request:
    """Raises Malformed; BadArgument for one that can be answered."""
    try:
        return _decode(_request_decoder, frame)
    except Malformed as error:
        if isinstance(error.__cause__, msgspec.ValidationError):
            raise _bad_argument(frame, error.__cause__) or error from None
        raise


def _bad_argument(frame: bytes | memoryview, error: msgspec.ValidationError) -> BadArgument | None:
    try:
        request, body = _envelope_decoder.decode(frame)
        verb = msgspec.msgpack.decode(body["type"], type=str)
    except (msgspec.MsgspecError, RecursionError, ValueError, KeyError):
        return None
    return BadArgument(request, refused_by_decoder(error, verb[:60]))


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
