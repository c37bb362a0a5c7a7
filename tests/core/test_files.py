"""Files appear whole or not at all."""

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from children import Child
from ridgeline.core.files import AHEAD_BYTES, read_ahead, remove_cut_off, write_whole


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


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path, monkeypatch):
    kept = [tmp_path / name for name in ("a.json", ".hidden", ".gitattributes.old", "b.7")]
    for path in kept:
        path.touch()
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: None)  # killed before that
    monkeypatch.setattr(Path, "replace", lambda path, target: None)
    write_whole(tmp_path / "c.json", b"all of it")
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 1 + len(kept)
    remove_cut_off(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_a_file_of_safetensors_that_was_cut_off_is_removed(tmp_path):
    code = "import sys, numpy as np\nfrom safetensors.numpy import save_file\nzeros = {'a': np.zeros(2**24)}\n"
    code += "while True: save_file(zeros, sys.argv[1])"
    with Child([sys.executable, "-c", code, str(tmp_path / "model.safetensors")]) as process:
        deadline = time.monotonic() + 60
        while not any(tmp_path.glob(".*")) and process.poll() is None and time.monotonic() < deadline:
            pass
        process.kill()
    assert any(tmp_path.glob(".*"))
    remove_cut_off(tmp_path)
    assert not any(tmp_path.glob(".*"))


def test_the_system_is_asked_for_every_byte_of_files_in_order(tmp_path, monkeypatch):
    sizes, asked = {"b": 2 * AHEAD_BYTES + 5, "a": 3, "empty": 0}, []
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    monkeypatch.setattr(os, "posix_fadvise", lambda file, begin, size, advice: asked.append((begin, size, advice)))
    read_ahead([tmp_path / name for name in (*sizes, "missing")])
    for thread in threading.enumerate():
        if thread.name == "read-ahead":
            thread.join()
    begins = [0, AHEAD_BYTES, 2 * AHEAD_BYTES, 0]
    assert asked == [(begin, AHEAD_BYTES, os.POSIX_FADV_WILLNEED) for begin in begins]
