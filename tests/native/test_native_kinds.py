"""What `ridgeline inspect` says of the native backend without importing it is what the backend has."""

import pytest

from ridgeline.backends.native.kinds import NATIVE_KINDS
from ridgeline.program.opset import OPSET
from ridgeline.program.passes.fuse import GROUP_KINDS

pytest.importorskip("ridgeline._native", reason="the native code is not built")


def test_kinds_are_those_of_the_emitters():
    from ridgeline.backends.native.emit import EMITTERS

    assert EMITTERS.keys() == NATIVE_KINDS
    assert {*GROUP_KINDS, *OPSET} >= NATIVE_KINDS
