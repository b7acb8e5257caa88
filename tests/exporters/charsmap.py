"""Tables of replaced characters in the format of SentencePiece: a double array of UTF-8 bytes, and the replacements."""

import struct
from collections import deque
from collections.abc import Mapping

LEAF, FREE = 1 << 8, -1  # a node whose string has a replacement; an unused position


def build_charsmap(replacements: Mapping[str, str]) -> bytes:
    """Return the table of some replacements, as SentencePiece stores it in `precompiled_charsmap`.

    A node at position p with offset o has its child for byte c at (p XOR o) XOR c. The child for byte 0 holds the position of
    the replacement in the list of strings.
    """
    strings, starts = b"", {}
    for key, value in replacements.items():
        starts[key.encode()] = len(strings)
        strings += value.encode() + b"\0"
    units, prefixes = {0: 0}, deque([(0, b"")])
    while prefixes:
        position, prefix = prefixes.popleft()
        labels = sorted({key[len(prefix)] for key in starts if key.startswith(prefix) and len(key) > len(prefix)})
        labels = [0, *labels] if prefix in starts else labels
        base = next(base for base in range(256, 1 << 20, 256) if all(base ^ label not in units for label in labels))
        units[position] |= (position ^ base) << 10 | (LEAF if prefix in starts else 0)
        for label in labels:
            units[base ^ label] = label if label else 1 << 31 | starts[prefix]
        prefixes += [(base ^ label, prefix + bytes([label])) for label in labels if label]
    size = (max(units) // 256 + 1) * 256
    array = b"".join(struct.pack("<I", units.get(i, 0xFF)) for i in range(size))
    return struct.pack("<I", len(array)) + array + strings
