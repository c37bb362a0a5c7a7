"""Fixtures shared by the whole suite."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory) -> Iterator[None]:
    """What tests, and the commands that they start, keep for a next start is not in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real models, tokenizers and traces beside the checkout; a test that needs them skips where they are absent."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no shared test data: {folder.parent.name}/{folder.name} is not beside the checkout")
    return folder


@pytest.fixture(scope="session", params=["native", "reference"])
def backend(request) -> str:
    """Every backend of this machine in turn."""
    if request.param == "native":
        pytest.importorskip("ridgeline._native", reason="the native module is not built")
    return request.param
