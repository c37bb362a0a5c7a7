"""docs/howto/add-a-family.md works as written: its code, put into a family file, passes the family contract."""

import re
import sys
from pathlib import Path

import pytest
from family_contract import check_family, check_unknown_keys

from ridgeline.core.errors import ConfigError
from ridgeline.spec import families

HOWTO = Path(__file__).resolve().parents[2] / "docs" / "howto" / "add-a-family.md"
NAME = "starcoder2"


@pytest.fixture
def example_family(tmp_path, monkeypatch):
    """The example's file in a folder of its own that the registry scans too."""
    blocks = re.findall(r"^```python\n(.*?)^```$", HOWTO.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    folder = tmp_path / "families"
    folder.mkdir()
    (folder / f"{NAME}.py").write_text("\n\n".join(blocks), encoding="utf-8")
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(folder)])
    yield
    sys.modules.pop(f"{families.__name__}.{NAME}", None)
    vars(families).pop(NAME, None)


@pytest.mark.usefixtures("example_family")
def test_example_passes_the_contract(tmp_path):
    assert NAME in families.names()
    for seed in range(15):
        check_family(NAME, seed, tmp_path / str(seed))
    check_unknown_keys(NAME)


def test_example_is_not_among_the_families_already():
    """If it is, the page needs another example."""
    with pytest.raises(ConfigError, match=f"{NAME!r} is not supported"):
        families.family(NAME)
