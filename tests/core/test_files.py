"""Files appear whole or not at all."""

import os
from pathlib import Path

import pytest

from ridgeline.core.files import write_whole


def test_a_file_and_its_folder_appear(tmp_path):
    path = tmp_path / "new" / "folder" / "file"
    write_whole(path, b"all of it")
    assert path.read_bytes() == b"all of it"
    assert list(path.parent.iterdir()) == [path]


def test_what_cannot_be_written_leaves_what_was_there_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def cut_off(partial, content):
        descriptor = os.open(partial, os.O_CREAT | os.O_WRONLY)
        os.write(descriptor, content[:3])
        os.close(descriptor)
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_bytes", cut_off)
    with pytest.raises(OSError, match="full"):
        write_whole(path, b"new content")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
