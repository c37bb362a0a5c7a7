"""What the machine tells of itself, read from files as Linux writes them; NaN for what it does not tell."""

import math

import pytest

from ridgeline.core.host import PAGE_BYTES, TICK_S, HostReader, remote_share

FILES = {
    "proc/stat": "cpu  398767 76934 43133 115978 2354 0 477 2628 0 0\ncpu0 210693 12826 20600\n",
    "proc/thread-self/schedstat": "66419 2500000000 17\n",
    "proc/pressure/cpu": "some avg10=0.12 avg60=0.30 avg300=0.10 total=1500000\nfull avg10=0.00 total=7\n",
    "proc/pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=250000\n",
    "proc/self/stat": "77 (a (name) b) S 1 -1 77 0 -1 4194560 5 0 42 0 1 2 3 4 20 0\n",
    "proc/self/status": "Name:\ta\nVmRSS:\t     900 kB\nVmSwap:\t      12 kB\nThreads:\t1\n",
    "proc/self/statm": "9000 300 200 1 0 700 0\n",
    "sys/fs/cgroup/cpu.stat": "usage_usec 9\nnr_periods 2\nthrottled_usec 750000\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "2400000\n",
}


def test_numbers_are_those_of_the_files(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    reader = HostReader(tmp_path)
    sample = reader.read()
    assert sample.steal_s == pytest.approx(2628 * TICK_S)
    assert sample.run_delay_s == 2.5
    assert (sample.cpu_stall_s, sample.memory_stall_s) == (1.5, 0.25)
    assert sample.major_faults == 42
    assert sample.rss_bytes == 300 * PAGE_BYTES
    assert sample.swap_bytes == 12 * 1024
    assert sample.throttled_s == 0.75
    assert sample.frequency_hz == 2.4e9
    assert all(math.isnan(value) for value in (sample.io_stall_s, sample.thermal_events, sample.energy_j))
    (tmp_path / "proc/self/statm").write_text("9000 301 200 1 0 700 0\n")
    assert reader.read().rss_bytes == 301 * PAGE_BYTES
    (tmp_path / "proc/self/statm").unlink()
    assert math.isnan(reader.read().rss_bytes)


def test_this_machine_can_be_asked():
    sample = HostReader().read()
    assert sample.rss_bytes > 2**20
    assert sample.major_faults >= 0


def test_the_quota_of_an_old_cgroup_is_counted_too(tmp_path):
    path = tmp_path / "sys/fs/cgroup/cpu/cpu.stat"
    path.parent.mkdir(parents=True)
    path.write_text("nr_periods 9\nnr_throttled 4\nthrottled_time 2500000000\n")
    assert HostReader(tmp_path).read().throttled_s == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("cores", "pages", "share"),
    [
        ("0-3", "N0=10 N1=30", 0.75),
        ("0-7", "N0=10 N1=30", 0.5),  # every core reads all, and half of it is always far
        ("4,6-7", "N1=30", 0.0),
        ("0-3", "", None),
    ],
)
def test_memory_of_another_node_is_remote(tmp_path, cores, pages, share):
    assert remote_share(7, tmp_path) is None
    files = {
        "proc/7/status": f"Name:\ta\nCpus_allowed_list:\t{cores}\n",
        "proc/7/numa_maps": f"7f00 default anon=40 {pages} kernelpagesize_kB=4\n7f10 default file=/a\n",
        "sys/devices/system/node/node0/cpulist": "0-3\n",
        "sys/devices/system/node/node1/cpulist": "4-7\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = remote_share(7, tmp_path)
    assert found == share if share is None else found == pytest.approx(share)
