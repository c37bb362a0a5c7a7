"""docs/howto/add-a-family.md works as written: its code, put into two files, passes the family contract."""

import re
import sys
from pathlib import Path

import pytest
from family_contract import NUM_CONFIGS, check_family, check_unknown_keys

import families as small_configs
from ridgeline.core.errors import ConfigError
from ridgeline.spec import families

HOWTO = Path(__file__).resolve().parents[2] / "docs" / "howto" / "add-a-family.md"
NAME = "starcoder2"


@pytest.fixture
def example_family(tmp_path, monkeypatch):
    """The example's two files in folders of their own, where the family and its small configs are looked for too."""
    blocks = re.findall(r"^```python\n(.*?)^```$", HOWTO.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    *family, tiny = blocks
    for package, code in ((families, family), (small_configs, [tiny])):
        folder = tmp_path / package.__name__
        folder.mkdir()
        (folder / f"{NAME}.py").write_text("\n\n".join(code), encoding="utf-8")
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    yield
    for package in (families, small_configs):
        sys.modules.pop(f"{package.__name__}.{NAME}", None)
        vars(package).pop(NAME, None)


@pytest.mark.usefixtures("example_family")
def test_example_passes_the_contract(tmp_path):
    assert NAME in families.names()
    for seed in range(15):
        check_family(NAME, seed, tmp_path / str(seed))
    check_unknown_keys(NAME)


def test_the_page_says_how_many_configs_are_computed():
    (said,) = re.findall(r"For (\d+) random configs", HOWTO.read_text(encoding="utf-8"))
    assert int(said) == NUM_CONFIGS


def test_example_is_not_among_the_families_already():
    """If it is, the page needs another example."""
    with pytest.raises(ConfigError, match=f"{NAME!r} is not supported"):
        families.family(NAME)
