"""The pack file: what is written is read back, and nothing that was touched since is ever used."""

import errno
import logging
import mmap
import multiprocessing
import struct
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline.backends.native.memory import checksums
from ridgeline.backends.native.packs import file as pack_file
from ridgeline.backends.native.packs.file import crc32s, open_pack, write_pack

KEY = "key"
PARTS = {
    "layers.0.attn.q+layers.0.attn.k.int4": bytes(range(256)) * 20,
    "empty": b"",
    "größe": b"\x00",
    "page": b"p" * 4096,
}


def write(path, parts=PARTS, key=KEY, checksums=crc32s):
    write_pack(path, key, ((name, memoryview(data)) for name, data in parts.items()), checksums)
    return path


def contents(pack):
    return None if pack is None else {name: bytes(data) for name, data in pack.items()}


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "packs" / "model.pack")


def test_what_is_written_is_read_back(path):
    pack = open_pack(path, KEY)
    assert contents(pack) == PARTS
    for data in pack.values():
        assert data.readonly
        assert np.frombuffer(data, dtype=np.uint8).ctypes.data % 4096 == 0 or not data.nbytes
    assert [item.name for item in path.parent.iterdir()] == [path.name]


@given(parts=st.dictionaries(st.text(max_size=12), st.binary(max_size=9000), max_size=5))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_parts(tmp_path, parts):
    assert contents(open_pack(write(tmp_path / "any.pack", parts), KEY)) == parts


@pytest.mark.parametrize("size", [1, 100, 4096, 5000, 1 << 20])
def test_the_file_is_written_in_pieces_of_one_size(tmp_path, monkeypatch, size):
    """Whatever the parts are: what is written at once may lie in one huge page."""
    monkeypatch.setattr(pack_file, "PIECE_BYTES", size)
    pieces = list(pack_file._pieces(PARTS.values()))
    assert b"".join(pieces) == b"".join(PARTS.values())
    assert {len(piece) for piece in pieces[:-1]} <= {size} and len(pieces[-1]) <= size
    assert contents(open_pack(write(tmp_path / "any.pack"), KEY)) == PARTS


def test_native_checksums_do_not_depend_on_threads_and_find_one_bit(tmp_path):
    by_three, alone = (partial(checksums, num_threads=num_threads) for num_threads in (3, 1))
    path = write(tmp_path / "native.pack", checksums=by_three)
    assert contents(open_pack(path, KEY, alone)) == PARTS
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(b"p" * 4096) + 4095] ^= 1
    path.write_bytes(damaged)
    assert open_pack(path, KEY, by_three) is None


def test_a_missing_file_is_no_event(tmp_path, caplog):
    assert open_pack(tmp_path / "none.pack", KEY) is None
    assert not caplog.records


def refused(path, caplog, key=KEY, **options):
    """The reason in the log."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "ridgeline.packcache"):
        assert open_pack(path, key, **options) is None
    (record,) = caplog.records
    message = record.getMessage()
    assert str(path) in message and "will be built again" in message
    return message


def test_other_key_version_checksum_or_file(path, caplog):
    assert "other files or settings" in refused(path, caplog, key="another")
    assert "is damaged" in refused(path, caplog, checksums=lambda parts: [1] * len(parts))
    raw = path.read_bytes()
    path.write_bytes(raw[:8] + struct.pack("<I", pack_file.VERSION + 1) + raw[12:])
    assert f"version {pack_file.VERSION + 1}" in refused(path, caplog)
    path.write_bytes(b"GGUF" + raw[4:])
    assert "no pack of weights" in refused(path, caplog)
    path.unlink()
    path.mkdir()
    refused(path, caplog)


def interesting_lengths(raw):
    """Every section's start and end, a byte to either side of it, and some in between."""
    _, _, _, index_offset, _, _ = pack_file._HEADER.unpack(raw[: pack_file._HEADER.size])
    edges = {0, 8, 12, 16, 24, 32, 60, 64, 4096, index_offset, len(raw)}
    edges |= set(range(4096, index_offset, 4096))
    return sorted({near for edge in edges for near in (edge - 1, edge, edge + 1) if 0 <= near < len(raw)})


def test_a_file_cut_off_anywhere_is_refused(path, caplog):
    raw = path.read_bytes()
    for length in interesting_lengths(raw):
        path.write_bytes(raw[:length])
        refused(path, caplog)


def test_a_file_that_grew_is_refused(path, caplog):
    path.write_bytes(path.read_bytes() + b"\x00")
    assert "bytes instead of" in refused(path, caplog)


def test_a_flipped_bit_is_refused_or_changes_nothing(path, caplog):
    """In the padding between parts nothing is read; everywhere else a change is found."""
    raw = path.read_bytes()
    header, index_offset = pack_file._HEADER.size, pack_file._HEADER.unpack(raw[: pack_file._HEADER.size])[3]
    pack = open_pack(path, KEY)
    used = bytearray(len(raw))
    used[:header] = b"\x01" * header
    used[index_offset:] = b"\x01" * (len(raw) - index_offset)
    for data in pack.values():
        start = raw.find(bytes(data), header) if data.nbytes else 0
        used[start : start + data.nbytes] = b"\x01" * data.nbytes
    rng = np.random.default_rng(0)
    places = {*range(header), *range(index_offset, len(raw)), *rng.integers(header, index_offset, 150).tolist()}
    for place in sorted(places):
        damaged = bytearray(raw)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        if used[place]:
            refused(path, caplog)
        else:
            assert contents(open_pack(path, KEY)) == PARTS


@pytest.mark.parametrize(
    "index",
    [
        b"{}",
        b"[]",
        b"\xff",
        b'{"key":"key","parts":[{"name":"a","offset":4096,"num_bytes":99999999,"checksum":0}]}',
        b'{"key":"key","parts":[{"name":"a","offset":-4096,"num_bytes":1,"checksum":0}]}',
        b'{"key":"key","parts":[{"name":"a","offset":4096,"num_bytes":-4096,"checksum":0}]}',
        b'{"key":"key","parts":[{"name":"a","offset":100,"num_bytes":1,"checksum":0}]}',
        b'{"key":"key","parts":[{"name":"a","offset":0,"num_bytes":1,"checksum":0}]}',
    ],
)
def test_an_index_that_lies_is_refused(tmp_path, caplog, index):
    """With right checksums of its own: nothing outside the parts is ever mapped as one."""
    body = bytes(8192)
    header = pack_file._HEADER.pack(
        pack_file.MAGIC, pack_file.VERSION, zlib.crc32(index), 64 + len(body), len(index), 0
    )[:-4]
    path = tmp_path / "forged.pack"
    path.write_bytes(header + struct.pack("<I", zlib.crc32(header)) + body + index)
    refused(path, caplog)


class FullDisk:
    """Takes `room` bytes and then fails as a full disk does."""

    def __init__(self, file, room):
        self._file, self._room = file, room

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def write(self, data):
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._file.write(data)

    def close(self):
        self._file.close()
        if self._room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    def __getattr__(self, name):
        return getattr(self._file, name)


@pytest.mark.parametrize("room", [0, 64, 4096, 6000, 9500])
def test_a_full_disk_leaves_no_file_behind(tmp_path, monkeypatch, room):
    real = pack_file.os.fdopen
    monkeypatch.setattr(pack_file.os, "fdopen", lambda *arguments: FullDisk(real(*arguments), room))
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "model.pack")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_rewrite_leaves_the_old_file(path, monkeypatch):
    real = pack_file.os.fdopen
    monkeypatch.setattr(pack_file.os, "fdopen", lambda *arguments: FullDisk(real(*arguments), 5000))
    with pytest.raises(OSError, match="No space left"):
        write(path, {"other": b"x" * 6000})
    assert contents(open_pack(path, KEY)) == PARTS


def test_a_mapped_file_may_be_replaced_and_removed(path):
    before = open_pack(path, KEY)
    write(path, {"new": b"n" * 10_000})
    assert contents(before) == PARTS
    path.unlink()
    assert contents(before) == PARTS


def test_views_outlive_the_pack(path):
    view = open_pack(path, KEY)["page"]
    assert isinstance(view.obj, mmap.mmap)
    assert bytes(view) == b"p" * 4096


def _write_often(path, which):
    data = bytes([which]) * 50_000
    for _ in range(20):
        write(Path(path), {str(part): data for part in range(3)})


def test_two_processes_write_at_once(tmp_path, caplog):
    """Whenever it is looked at, the file is all of one writer's."""
    path = tmp_path / "model.pack"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_often, args=(str(path), which)) for which in (1, 2)]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers) or not seen:
        pack = open_pack(path, KEY)
        if pack is not None:
            seen += 1
            assert len({bytes(data) for data in pack.values()}) == 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert not caplog.records
    assert [item.name for item in tmp_path.iterdir()] == [path.name]
