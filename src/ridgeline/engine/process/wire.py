"""Define what a server and its engine process say to each other: typed messages, in frames of u32 length and msgpack.

The frames go over an inherited socketpair: nothing listens, nothing has a name, and the end of one side is the end of
the stream at the other. The structures are those of the engine itself. Must not import what loads a model.
"""

import struct
from typing import Any

import msgspec
import numpy as np

from ridgeline.core.config import EngineConfig
from ridgeline.core.log import LogFormat
from ridgeline.decoding.request import Request
from ridgeline.engine.client import EngineInfo, EngineStats
from ridgeline.engine.outputs import OutputDelta
from ridgeline.engine.recording import EngineSetup

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 2**30  # of one step's outputs with all their log-probabilities; what claims more is no frame


class Message(msgspec.Struct, tag=True, array_like=True):
    """Is the base of all messages."""


class Begin(Message):
    """Load a model; the first frame."""

    config: EngineConfig
    log_format: LogFormat
    log_level: int


class Submit(Message):
    """Take these requests. They come without grammars, which are compiled here."""

    requests: list[Request]


class Abort(Message):
    """The caller of a request has gone away."""

    request_id: str


class Hold(Message):
    """Compute no more of a request, whose reader is behind; not `held`: go on with it."""

    request_id: str
    held: bool


class LoadAdapter(Message):
    """Load the LoRA adapter of a folder to a number's place."""

    number: int
    name: str
    folder: str


class Ready(Message):
    """The model is loaded."""

    info: EngineInfo
    stats: EngineStats
    setup: EngineSetup


class Failed(Message):
    """Tells why the model cannot be loaded: an error of `core/errors.py`, by its class."""

    kind: str
    message: str


class AdapterLoaded(Message):
    """Tells how a LoadAdapter went."""

    number: int
    failed: Failed | None


class Outputs(Message):
    """Holds all deltas of a step."""

    deltas: list[OutputDelta]


class Beat(Message):
    """Tells that the process lives; the step under way has taken `busy_s` so far."""

    stats: EngineStats
    busy_s: float
    records: dict[str, tuple[int, bytes]]  # new ones of the journal, by ring, with the number of the first
    cache_reasons: list[str]


ToEngine = Begin | Submit | Abort | Hold | LoadAdapter
FromEngine = Ready | Failed | AdapterLoaded | Outputs | Beat


def _plain(value: Any) -> object:
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value, np.float32).tobytes()  # the only arrays are vectors
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} does not go to another process")


def _vector(kind: type, value: bytes) -> object:
    return np.frombuffer(value, np.float32)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine, dec_hook=_vector).decode


def encode(message: ToEngine | FromEngine) -> bytes:
    """Return the frame of a message."""
    data = _encoder.encode(message)
    return HEADER.pack(len(data)) + data


class Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytearray]:
        """Return the frames that are whole with `data`. Raises ValueError for what cannot be one."""
        self._data += data
        begin, frames = 0, list[bytearray]()
        while (end := begin + HEADER.size) <= len(self._data):
            (length,) = HEADER.unpack_from(self._data, begin)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            if end + length > len(self._data):
                break
            frames.append(self._data[end : end + length])
            begin = end + length
        del self._data[:begin]
        return frames
