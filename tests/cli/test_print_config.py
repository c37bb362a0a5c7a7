"""`serve --print-config`: every option, with where it was set, as a file that `serve --config` takes."""

import tomllib

from away_from_default import away, typed
from ridgeline.core.config import EngineConfig
from ridgeline.core.options import table
from ridgeline.server.settings import ServerSettings

ROWS = [row for owner in (ServerSettings, EngineConfig) for row in table(owner)]
OTHERS = {"quantize": "int4", "speculate": "ngram"}  # what a model has one of


def lines_of(text):
    """By option, whether it is set, its value as it is written, and where it was set."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.removeprefix("# ").partition(" = ")
        value, _, source = rest.rpartition("  # ")
        found[name] = (not line.startswith("# "), value, source)
    return found


def test_what_is_printed_can_be_given_back(ridgeline, tmp_path):
    rows = [row for row in ROWS if row.name != "speculative_config"]  # it stands in place of other options
    words = [word for row in rows for word in typed(row, OTHERS.get(row.name, away(row)))]
    ran = ridgeline("serve", "some-model", "--port", 0, *words, "--print-config")
    assert ran.code == 0, ran.err
    first = ran.out
    (tmp_path / "all.toml").write_text(first)
    again = ridgeline("serve", "--config", tmp_path / "all.toml", "--print-config").out
    before, after = lines_of(first), lines_of(again)
    names = {row.flag.removeprefix("--") for row in rows}
    assert names | {"model", "host", "port", "uds", "log-level", "log-format"} <= before.keys()
    assert {name: line[:2] for name, line in after.items()} == {name: line[:2] for name, line in before.items()}
    assert {line[2] for name, line in before.items() if line[0]} <= {"flag", "default"}
    assert {line[2] for line in after.values() if line[0]} == {"file"}
    assert tomllib.loads(first) == tomllib.loads(again)


def test_every_value_says_where_it_was_set(ridgeline, tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_API_KEY", "secret-key")
    (tmp_path / "some.toml").write_text('max-num-seqs = 3\nprefix-caching = false\nallowed-host = ["a", "b"]\n')
    said = ridgeline("serve", "m", "--config", tmp_path / "some.toml", "--port", 1, "--print-config").out
    found = lines_of(said)
    assert found["model"] == (True, '"m"', "flag") and found["port"] == (True, "1", "flag")
    assert found["max-num-seqs"] == (True, "3", "file")
    assert found["allowed-host"] == (True, '["a", "b"]', "file")
    assert found["max-connections"] == (True, "4096", "default")
    assert found["api-key"] == (False, "...", "environment") and "secret-key" not in said
    assert found["uds"][0] is False, "what is not set is told in a comment"
    assert found[next(name for name in found if name.endswith("prefix-caching"))][1] == "false"


def test_without_options_every_default_is_there(ridgeline):
    printed = lines_of(ridgeline("serve", "--print-config").out)
    for row in ROWS:
        is_set, value, source = printed[row.flag.removeprefix("--")]
        assert source == "default" and is_set == (row.default is not None), row.flag
        if isinstance(row.default, (int, str, float)):
            assert tomllib.loads(f"x = {value}")["x"] == row.default
