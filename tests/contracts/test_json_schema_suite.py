"""The JSON-Schema test suite, in part: what compiles takes no invalid data, the rest is refused by name."""

from pathlib import Path

import pytest
from benchmarks import json_schema_suite

EVERY = 5  # groups; all of them: python -m benchmarks.json_schema_suite FOLDER


def test_schemas_of_the_suite_are_followed_or_refused(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shared_data / "api" / "json_schema_2020_12"
    if not folder.is_dir():
        pytest.skip("THE JSON-SCHEMA TEST SUITE IS NOT HERE: schemas of structured output are not tested against it")
    groups = json_schema_suite.groups
    monkeypatch.setattr(json_schema_suite, "groups", lambda folder: list(groups(folder))[::EVERY])
    found = json_schema_suite.run(folder)
    assert not found.wrong
    assert found.counts["compiled"] > 20 and found.counts["refused"] > 20 and found.counts["valid data taken"] > 40
