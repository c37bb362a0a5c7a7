"""What the machine tells of itself, read from files as Linux writes them; NaN for what it does not tell."""

import math

import pytest

from ridgeline.core.host import PAGE_BYTES, TICK_S, HostReader

FILES = {
    "proc/stat": "cpu  398767 76934 43133 115978 2354 0 477 2628 0 0\ncpu0 210693 12826 20600\n",
    "proc/thread-self/schedstat": "66419 2500000000 17\n",
    "proc/pressure/cpu": "some avg10=0.12 avg60=0.30 avg300=0.10 total=1500000\nfull avg10=0.00 total=7\n",
    "proc/pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=250000\n",
    "proc/self/stat": "77 (a (name) b) S 1 -1 77 0 -1 4194560 5 0 42 0 1 2 3 4 20 0\n",
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
