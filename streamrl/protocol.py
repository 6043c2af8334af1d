"""verl's place for `DataProto` and its padding; they live in `single_controller/data_proto.py`."""

from __future__ import annotations

from streamrl.single_controller.data_proto import DataProto, DataProtoItem, pad_dataproto_to_divisor, unpad_dataproto

__all__ = ["DataProto", "DataProtoItem", "pad_dataproto_to_divisor", "unpad_dataproto"]
