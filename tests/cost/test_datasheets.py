"""Datasheets: every file is read, has a source, and gives the roofline its ceilings."""

import pytest

from ridgeline.core.errors import ConfigError
from ridgeline.cost.datasheets import datasheet, names
from ridgeline.cost.roofline import Roofline
from ridgeline.program.pricing import OpCost


@pytest.mark.parametrize("name", names())
def test_every_datasheet_is_whole(name):
    sheet = datasheet(name)
    assert sheet.source
    assert 50e9 < sheet.bytes_per_s < 20e12
    assert (sheet.memory_bytes is None) == (sheet.kind == "cpu")
    assert bool(sheet.ops_per_s) == (sheet.kind == "gpu")  # a CPU's depend on clocks that no datasheet names
    if sheet.kind == "gpu":
        assert sheet.ops_per_s["f32"] < sheet.ops_per_s["bf16"] < sheet.ops_per_s["int8"]


def test_a_cpu_is_its_memory_channels():
    assert datasheet("epyc-9654").bytes_per_s == 12 * 4800e6 * 8
    assert datasheet("epyc-9654").peak("bf16", 1) is None


def test_several_devices_add_up():
    one, four = datasheet("h100-sxm"), datasheet("h100-sxm:4")
    assert (four.bytes_per_s, four.memory_bytes) == (4 * 3.35e12, 4 * 80e9)
    assert four.peak("bf16", 1) == 4 * 989e12
    assert one.count == 1


def test_the_roofline_takes_a_datasheet():
    roofline = Roofline(datasheet("a100-80"), 1, 1e9)
    memory = roofline.predict(OpCost(weight_bytes=2.039e9, activation_bytes=2.039e9), "bf16")
    assert (memory.seconds, memory.bound) == (pytest.approx(2e-3), "memory")
    assert roofline.predict(OpCost(flops=312e12, weight_bytes=1), "bf16").seconds == pytest.approx(1)


@pytest.mark.parametrize("wrong", ["h1000", "", "h100-sxm:", "h100-sxm:0", "h100-sxm:two", "h100-sxm:99999999", "../x"])
def test_an_unknown_device_is_one_line(wrong):
    with pytest.raises(ConfigError) as error:
        datasheet(wrong)
    assert "\n" not in str(error.value)
