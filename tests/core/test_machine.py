"""What the process may use, from made-up /proc and /sys files."""

import os

import pytest

from ridgeline.backends import host
from ridgeline.core import machine
from ridgeline.core.errors import ConfigError


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """Lays out a process's cgroups and the files in them, on a machine of eight cores."""
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "fs")
    monkeypatch.setattr(machine, "_PROC_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))

    def lay_out(membership, files):
        (tmp_path / "cgroup").write_text(membership)
        for name, content in files.items():
            path = tmp_path / "fs" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    return lay_out


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/\n", {}, 8),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "350000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "9900000 100000\n"}, 8),
        ("0::/a/b\n", {"cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n", "a/b/cpu.max": "max 100000"}, 2),
        ("0::/\n", {"cpu.max": "nonsense\n"}, 8),
        ("4:memory:/x\n1:cpu:/y\n", {"cpu/y/cpu.cfs_quota_us": "250000\n", "cpu/y/cpu.cfs_period_us": "50000\n"}, 5),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)
def test_usable_cores_are_whole_cores_of_the_quota(cgroups, membership, files, cores):
    cgroups(membership, files)
    assert machine.usable_cores() == cores


@pytest.mark.parametrize(
    ("membership", "files", "num_bytes"),
    [
        ("0::/\n", {"memory.max": "max\n", "memory.current": "400\n"}, 4096),
        ("0::/\n", {"memory.max": "1000\n", "memory.current": "400\n"}, 600),
        ("0::/\n", {"memory.max": "1000\n", "memory.current": "1004\n"}, 0),
        (
            "0::/a/b\n",
            {
                "a/memory.max": "1000\n",
                "a/memory.current": "950\n",
                "a/memory.stat": "anon 150\nactive_file 200\ninactive_file 500\n",
                "a/b/memory.max": "9000\n",
                "a/b/memory.current": "900\n",
            },
            750,
        ),
        ("4:memory:/x\n", {"memory/x/memory.limit_in_bytes": "900\n", "memory/x/memory.usage_in_bytes": "400\n"}, 500),
    ],
)
def test_memory_that_may_be_taken_has_what_files_hold(cgroups, monkeypatch, tmp_path, membership, files, num_bytes):
    """Else a model that was read once leaves no room for its own cache in a container."""
    cgroups(membership, files)
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 4 kB\n")
    monkeypatch.setattr(host, "_MEMINFO", tmp_path / "meminfo")
    assert host.available_bytes() == num_bytes


def test_usable_cores_without_cgroups(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_PROC_CGROUP", tmp_path / "absent")
    assert machine.usable_cores() == len(os.sched_getaffinity(0))


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, expected in (
        (str(tmp_path / "x"), tmp_path / "x" / "ridgeline"),
        ("relative", tmp_path / ".cache" / "ridgeline"),
        ("", tmp_path / ".cache" / "ridgeline"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert machine.cache_folder() == expected


def test_no_home(monkeypatch):
    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(machine.Path, "home", nobody)
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        machine.cache_folder()


def test_processor_and_caches(monkeypatch, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz \n")
    monkeypatch.setattr(machine, "_CPUINFO", cpuinfo)
    assert machine.cpu_model() == "Some CPU @ 2 GHz" and machine.microcode() == ""
    cpuinfo.write_text("microcode\t: 0xa101148\nprocessor\t: 1\nmicrocode\t: 0xa101148\n")
    assert machine.microcode() == "0xa101148"
    for index, size in enumerate(("32K\n", "1024K\n", "32768K\n")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size)
        (tmp_path / f"index{index}" / "level").write_text(f"{index + 1}\n")
    monkeypatch.setattr(machine, "_CACHES", tmp_path)
    assert machine.last_level_cache_bytes() == 32 << 20 and machine.level_2_cache_bytes() == 1 << 20
    monkeypatch.setattr(machine, "_CACHES", tmp_path / "absent")
    assert machine.last_level_cache_bytes() is None and machine.level_2_cache_bytes() is None


def test_tests_keep_nothing_in_the_cache_of_the_user(tmp_path_factory):
    assert tmp_path_factory.getbasetemp() in machine.cache_folder().parents
