"""The address of a queue from what one has of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from os import PathLike

from transfer_queue.errors import Invalid
from transfer_queue.net.addresses import ADDRESS_VARIABLE, DIRECTORY_VARIABLE, check_address, parse_address
from transfer_queue.service.queue_service import read_address


def address_of(queue: Mapping[str, str] | str | PathLike[str] | None) -> dict[str, str]:
    """`queue` is an address, the directory of a service, or None: what TQ_ADDRESS or TQ_DIRECTORY of the environment
    names. Raises Invalid for what names no queue, Disconnected for a directory that holds none."""
    if isinstance(queue, Mapping):
        return check_address(queue, "address")
    if isinstance(queue, str | PathLike):
        return read_address(os.fspath(queue))
    if queue is not None:
        raise Invalid(f"a queue is named by its address (a dict) or its directory, got {type(queue).__qualname__}")
    if text := os.environ.get(ADDRESS_VARIABLE):
        return parse_address(text)
    if directory := os.environ.get(DIRECTORY_VARIABLE):
        return read_address(directory)
    raise Invalid(
        f"which queue? give its address or directory, or set {DIRECTORY_VARIABLE} or {ADDRESS_VARIABLE} (children of "
        "the process that called transfer_queue.init() have it)"
    )
