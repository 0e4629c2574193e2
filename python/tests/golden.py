"""Reads safetensors files: 8 bytes with the length of a JSON header, the header, the data."""

import json
import struct

import torch

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64, "I32": torch.int32}


def read(path):
    """(tensors by name, metadata by case)"""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = bytearray(file.read())
    metadata = {case: json.loads(text) for case, text in header.pop("__metadata__").items()}
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        tensors[name] = torch.frombuffer(data[start:end], dtype=_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors, metadata
