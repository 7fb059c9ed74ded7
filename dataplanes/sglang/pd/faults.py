"""Damage on purpose: how a test on the real pair shows that damage is found.

`CONTROLD_PD_FAULT` is read once, at the start, and may name several faults, separated by commas. In the receiver
`flip_byte:N` flips one byte of the N-th frame in its staging slot, and `zero_decode:N` makes what is decoded from the
N-th frame on zero, behind all checks. In the sender `coarse_codec:N` codes from the N-th time on with half the levels,
still under the arm's name: frames that pass every check and are worse than what was profiled.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor

from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from dataplanes.kvcodec import KVCodec

FAULT_VARIABLE: Final = "CONTROLD_PD_FAULT"
_log = logging.getLogger(__name__)


class Faults:
    """What to damage; nothing by default.

    Args:
        flip_byte_in_frame: number of the frame to flip a byte in, from 1; 0 for none.
        zero_decode_from_frame: number of the first frame whose planes become zero; 0 for none.
        coarse_codec_from: number of the first batch of pieces that is coded more coarsely; 0 for none.
    """

    def __init__(
        self, *, flip_byte_in_frame: int = 0, zero_decode_from_frame: int = 0, coarse_codec_from: int = 0
    ) -> None:
        self._flip_byte_in_frame = flip_byte_in_frame
        self._zero_decode_from_frame = zero_decode_from_frame
        self._coarse_codec_from = coarse_codec_from
        self._frames = 0
        self._batches = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Faults:
        """Read `CONTROLD_PD_FAULT`.

        Raises:
            FieldError: it names no known fault.
        """
        text = environment.get(FAULT_VARIABLE, "")
        if not text:
            return cls()
        numbers = {"flip_byte": 0, "zero_decode": 0, "coarse_codec": 0}
        for fault in text.split(","):
            name, _, number = fault.partition(":")
            if name not in numbers or not number.isdigit():
                raise FieldError(
                    FAULT_VARIABLE, f"{fault!r} is no fault", hint="flip_byte:N, zero_decode:N, coarse_codec:N"
                )
            numbers[name] = int(number)
        _log.warning("%s=%s: this server damages KV on purpose", FAULT_VARIABLE, text)
        return cls(
            flip_byte_in_frame=numbers["flip_byte"],
            zero_decode_from_frame=numbers["zero_decode"],
            coarse_codec_from=numbers["coarse_codec"],
        )

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

    def spoil_codec(self, codec: KVCodec) -> KVCodec:
        """Called once for each batch of pieces; only integer levels can be spoilt, any other codec stays as it is."""
        self._batches += 1
        levels = {name: codec.configuration.get(name) for name in ("key_levels", "value_levels")}
        if not 0 < self._coarse_codec_from <= self._batches or codec.configuration.get("quantise") != "levels":
            return codec
        halved = {name: max(2, value // 2) for name, value in levels.items() if isinstance(value, int)}
        return KVCodec(Configuration({**codec.configuration, **halved}), codec.layout)
