"""The collector is left as it was found, whatever happens within."""

import gc

import pytest

from ridgeline.core.collector import collector_paused, long_lived_imports


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("context", [collector_paused, long_lived_imports])
def test_paused_within_and_as_before_after(enabled, context):
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with context():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
        with pytest.raises(KeyError), context():
            raise KeyError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
        gc.unfreeze()


def test_imports_are_never_looked_at_again():
    gc.unfreeze()
    held = [[]]
    with long_lived_imports():
        assert gc.is_tracked(held)
    assert gc.get_freeze_count() > 0
    assert not any(each is held for each in gc.get_objects())
    gc.unfreeze()
