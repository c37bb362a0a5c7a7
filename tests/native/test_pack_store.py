"""The cache folder of packs: found, rebuilt when the model changes, bounded, and never why a start fails."""

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from packs_written import wait_for_packs
from ridgeline.backends.native.packs import store as pack_store
from ridgeline.backends.native.packs.file import crc32s
from ridgeline.backends.native.packs.store import PackName, PackStore

SETTINGS = {"layout": 1, "quantize": "int4"}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(b"a" * 100)
    (folder / "b.safetensors").write_bytes(b"b" * 100)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def packs(tmp_path):
    return tmp_path / "cache" / "packs"


def part(value, size=5000):
    return np.full(size, value, dtype=np.uint8)


def named(model, settings):
    return PackName.of(model, sorted(model.glob("*.safetensors")), settings)


def store(packs, model, settings=SETTINGS, **options):
    return PackStore(packs, named(model, settings), 5000, **options)


def fill(packs, model, settings=SETTINGS, value=1, **options):
    """One start: whether it found its parts. It adds them where it did not."""
    opened = store(packs, model, settings, **options)
    found = opened.find("part")
    if found is None:
        opened.add("part", part(value))
        opened.add("empty", part(0, 0))
        opened.commit()
        wait_for_packs()
        return False
    assert (found == value).all() and opened.find("empty").size == 0
    return True


def test_the_second_start_finds_what_the_first_kept(packs, model):
    assert [fill(packs, model) for _ in range(3)] == [False, True, True]
    opened = store(packs, model)
    assert opened.find("nothing") is None
    assert not opened.find("part").flags.writeable


@pytest.mark.parametrize("change", ["size", "time", "more", "fewer"])
def test_changed_weight_files_are_packed_again_and_the_old_pack_goes(packs, model, change):
    fill(packs, model)
    weights = model / "b.safetensors"
    match change:
        case "size":
            weights.write_bytes(b"b" * 101)
        case "time":
            os.utime(weights, ns=(0, 1))
        case "more":
            (model / "c.safetensors").write_bytes(b"")
        case "fewer":
            weights.unlink()
    assert [fill(packs, model, value=2) for _ in range(2)] == [False, True]
    assert len(list(packs.iterdir())) == 1


def test_settings_and_models_have_packs_of_their_own(packs, model, tmp_path):
    other = shutil.copytree(model, tmp_path / "other")
    starts = [(model, SETTINGS), (model, {"layout": 2, "quantize": "int4"}), (other, SETTINGS)]
    assert [fill(packs, folder, settings, value) for value, (folder, settings) in enumerate(starts)] == [False] * 3
    assert [fill(packs, folder, settings, value) for value, (folder, settings) in enumerate(starts)] == [True] * 3


def test_files_beside_the_weights_do_not_matter(packs, model):
    fill(packs, model)
    (model / "config.json").write_text('{"changed": 1}')
    assert fill(packs, model)


def test_a_damaged_pack_is_named_and_built_again(packs, model, caplog):
    fill(packs, model)
    (file,) = packs.iterdir()
    raw = bytearray(file.read_bytes())
    raw[4096 + 17] ^= 4
    file.write_bytes(raw)
    with caplog.at_level(logging.WARNING):
        assert not fill(packs, model)
    assert str(file) in caplog.text and "'part' is damaged" in caplog.text
    assert fill(packs, model)


def test_a_part_that_is_new_joins_the_others(packs, model):
    fill(packs, model)
    opened = store(packs, model)
    opened.add("new", part(9))
    opened.commit()
    wait_for_packs()
    again = store(packs, model)
    assert (again.find("part") == 1).all() and (again.find("new") == 9).all()
    assert (opened.find("part") == 1).all(), "what was found is still mapped"


def test_all_packs_together_stay_within_bounds(packs, model):
    """The ones used longest ago go first; the newest stays."""
    settings = [{"layout": number} for number in range(4)]
    for chosen in settings[:3]:
        fill(packs, model, chosen, max_bytes=40_000)
    names = {number: packs / named(model, chosen).file_name for number, chosen in enumerate(settings)}
    for age_s, number in ((300, 0), (200, 1), (100, 2)):
        os.utime(names[number], (time.time() - age_s,) * 2)
    assert fill(packs, model, settings[0])  # used just now
    fill(packs, model, settings[3], max_bytes=40_000)
    assert {number for number, path in names.items() if path.exists()} == {0, 2, 3}


def test_too_large_or_no_room_costs_a_warning(packs, model, caplog, monkeypatch):
    with caplog.at_level(logging.WARNING):
        assert not fill(packs, model, max_bytes=4999)
        assert "no room for 5,000 bytes" in caplog.text
        caplog.clear()
        usage = shutil.disk_usage(model)._replace(free=pack_store.FREE_BYTES + 4999)
        monkeypatch.setattr(pack_store.shutil, "disk_usage", lambda path: usage)
        assert not fill(packs, model)
        assert "no room" in caplog.text
    assert list(packs.iterdir()) == []


def test_what_is_not_committed_leaves_nothing(packs, model):
    """As where the weights behind the first part cannot be read."""
    opened = store(packs, model)
    opened.add("part", part(1))
    wait_for_packs()
    assert not packs.exists()
    assert not fill(packs, model)


def test_a_folder_that_cannot_be_made_costs_a_warning(tmp_path, model, caplog):
    """A file stands where the folder should be: what every user, root too, cannot write to."""
    (tmp_path / "cache").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        assert not fill(tmp_path / "cache" / "packs", model)
        assert not fill(tmp_path / "cache" / "packs", model)
    assert "could not be cached" in caplog.text


def test_a_disk_that_fails_costs_a_warning(packs, model, caplog, monkeypatch):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pack_store, "write_pack", fail)
    with caplog.at_level(logging.WARNING):
        assert not fill(packs, model)
    assert "No space left" in caplog.text


def test_unfinished_files_are_removed_once_nobody_writes_them(packs, model):
    packs.mkdir(parents=True)
    abandoned, written = packs / "x.abc.partial", packs / "y.abc.partial"
    abandoned.write_bytes(b"1")
    with written.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fill(packs, model)
    assert not abandoned.exists() and written.exists()


def test_a_start_does_not_wait_for_its_pack(packs, model):
    """What is written is what was added, and no longer held then."""
    waits, data = threading.Event(), part(7)
    opened = store(packs, model, checksums=lambda parts: (waits.wait(60), crc32s(parts))[1])
    opened.add("part", data)
    opened.add("empty", part(0, 0))
    opened.commit()
    held = weakref.ref(data)
    del data
    other = store(packs, model)
    assert other.find("part") is None
    other.add("part", part(6))
    other.add("empty", part(0, 0))
    other.commit()
    assert [each.name for each in threading.enumerate()].count("pack-file") >= 1, "the first is being written still"
    waits.set()
    wait_for_packs()
    found = store(packs, model).find("part")
    assert held() is None and len(set(found.tolist())) == 1 and found[0] in (6, 7), "what one of both added, whole"


WRITER = """
import sys, time
from pathlib import Path
import numpy as np
from ridgeline.backends.native.packs.file import crc32s
from ridgeline.backends.native.packs.file import crc32s
from ridgeline.backends.native.packs.store import PackName, PackStore
def slowly(parts):
    print("begun", flush=True)
    time.sleep(float(sys.argv[3]))
    return crc32s(parts)
files = sorted(Path(sys.argv[2]).glob("*.safetensors"))
name = PackName.of(Path(sys.argv[2]), files, {"layout": 1, "quantize": "int4"})
opened = PackStore(Path(sys.argv[1]), name, 5000, slowly)
opened.add("part", np.full(5000, 3, np.uint8))
opened.add("empty", np.full(0, 0, np.uint8))
opened.commit()
"""


def writing(packs, model, delay_s):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, packs, model, str(delay_s)], stdout=subprocess.PIPE, text=True
    )


def test_a_program_that_ends_finishes_its_pack(packs, model):
    with writing(packs, model, 0.2) as process:
        assert process.wait(60) == 0
    assert fill(packs, model, value=3)


def test_a_program_that_is_killed_leaves_no_pack_and_the_next_removes_what_there_is(packs, model):
    with writing(packs, model, 60) as process:
        assert process.stdout.readline() == "begun\n"
        process.kill()
    (left,) = packs.iterdir()
    assert left.name.endswith(".partial")
    assert [fill(packs, model) for _ in range(2)] == [False, True]
    assert not left.exists()
