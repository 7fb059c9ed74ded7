"""Damage on purpose: how a test on the real pair shows that damage is found.

`CONTROLD_PD_FAULT` is read once, in the receiver, and may name several faults, separated by commas: `flip_byte:N` flips
one byte of the N-th frame in its staging slot, `zero_decode:N` makes what is decoded from the N-th frame on zero,
behind all checks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor

from controld.contract.errors import FieldError

FAULT_VARIABLE: Final = "CONTROLD_PD_FAULT"
_log = logging.getLogger(__name__)


class Faults:
    """What to damage; nothing by default.

    Args:
        flip_byte_in_frame: number of the frame to flip a byte in, from 1; 0 for none.
        zero_decode_from_frame: number of the first frame whose planes become zero; 0 for none.
    """

    def __init__(self, *, flip_byte_in_frame: int = 0, zero_decode_from_frame: int = 0) -> None:
        self._flip_byte_in_frame = flip_byte_in_frame
        self._zero_decode_from_frame = zero_decode_from_frame
        self._frames = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Faults:
        """Read `CONTROLD_PD_FAULT`.

        Raises:
            FieldError: it names no known fault.
        """
        text = environment.get(FAULT_VARIABLE, "")
        if not text:
            return cls()
        numbers = {"flip_byte": 0, "zero_decode": 0}
        for fault in text.split(","):
            name, _, number = fault.partition(":")
            if name not in numbers or not number.isdigit():
                raise FieldError(FAULT_VARIABLE, f"{fault!r} is no fault", hint="flip_byte:N or zero_decode:N")
            numbers[name] = int(number)
        _log.warning("%s=%s: this server damages KV on purpose", FAULT_VARIABLE, text)
        return cls(flip_byte_in_frame=numbers["flip_byte"], zero_decode_from_frame=numbers["zero_decode"])

    def spoil_staging(self, frame: Tensor) -> None:
        """Called once for each frame that has arrived."""
        self._frames += 1
        if self._frames == self._flip_byte_in_frame:
            frame[frame.numel() // 2] ^= 0xFF

    def spoil_decoded(self, planes: Sequence[Tensor], rows: Tensor) -> None:
        """Called once for each decoded frame."""
        if 0 < self._zero_decode_from_frame <= self._frames:
            for plane in planes:
                plane[rows] = 0
