"""A name for a set of weights that is quick to work out: what is derived from weights is kept by it."""

from __future__ import annotations

import hashlib

from headrace.checkpoint.records import Checkpoint

# Bytes that are read at the start, in the middle and at the end of every tensor's parts: other weights
# of the same shapes differ in practically every byte, so samples tell them apart without reading all.
_SAMPLE = 4096
_LENGTH = 32  # hexadecimal digits


def weights_hash(checkpoint: Checkpoint) -> str:
    """SHA-256, cut to 32 digits, of every tensor's name, format, shape and sampled bytes.

    It does not depend on where the files lie or how tensors are spread over them.
    """
    found = hashlib.sha256()
    for name in sorted(checkpoint.tensors):
        raw = checkpoint.tensors[name]
        found.update(f"{name} {raw.format} {list(raw.shape)}\n".encode())
        for key in sorted(raw.parts):
            part = raw.parts[key].reshape(-1)
            step = max(1, _SAMPLE // part.itemsize)
            middle = max(0, part.size // 2 - step // 2)
            for start in (0, middle, max(0, part.size - step)):
                found.update(part[start : start + step].tobytes())
    return found.hexdigest()[:_LENGTH]
