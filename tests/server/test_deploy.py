"""The files of deploy/ fit the server: options, paths, timeouts and metrics that they name are there."""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml
from live_server import LiveServer

from ridgeline.server.boundary import PUBLIC_PATHS
from ridgeline.server.settings import ServerSettings

REPO = Path(__file__).resolve().parents[2]
DEPLOY = REPO / "deploy"
GUIDE = (REPO / "docs/howto/deploy.md").read_text(encoding="utf-8")
CACHES = ("XDG_CACHE_HOME", "HF_HOME")


@pytest.fixture(scope="module")
def options() -> set[str]:
    """Every option of `ridgeline serve --help`."""
    command = [sys.executable, "-m", "ridgeline", "serve", "--help"]
    wide = {**os.environ, "COLUMNS": "250", "NO_COLOR": "1", "TERM": "dumb"}
    shown = subprocess.run(command, env=wide, capture_output=True, text=True, check=True).stdout
    found = set(re.findall(r"--[a-z][\w-]*", shown))
    assert {"--model", "--port", "--insecure-no-auth", "--no-engine-process"} <= found
    return found


@pytest.fixture(scope="module")
def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # names are as they are written
    parser.read_string((DEPLOY / "ridgeline.service").read_text())
    return parser


@pytest.fixture(scope="module")
def objects() -> dict[str, dict]:
    found = {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}
    assert set(found) == {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"}
    return found


def directives() -> dict[str, list[str]]:
    """The instructions of the Dockerfile: what follows each word, by word."""
    text = re.sub(r"\\\n\s*", " ", (DEPLOY / "Dockerfile").read_text())
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            found.setdefault(word, []).append(rest)
    return found


def require_options(words: list[str], options: set[str]) -> None:
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert given and given <= options, f"no options of serve: {given - options}"


def test_the_image_runs_without_rights_and_knows_its_options(options: set[str]):
    found = directives()
    known = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK"}
    assert set(found) == known | {"ENTRYPOINT", "CMD"}
    assert found["USER"] == ["10001:10001"] and found["STOPSIGNAL"] == ["SIGTERM"]
    entry, command = json.loads(found["ENTRYPOINT"][0]), json.loads(found["CMD"][0])  # no shell: signals arrive
    assert entry[:2] == ["ridgeline", "serve"] and command == ["python-9m"]
    require_options(entry, options)
    assert f"http://127.0.0.1:{entry[entry.index('--port') + 1]}/health" in found["HEALTHCHECK"][0]
    (environment,) = found["ENV"]
    for name in CACHES:
        assert re.search(rf"\b{name}=/cache", environment), "what is written lies on the volume"
    assert json.loads(found["VOLUME"][0]) == ["/cache"]
    assert any(each.endswith('-c "import ridgeline._native"') for each in found["RUN"]), "no image without kernels"
    for copied in found["COPY"]:
        for path in copied.split()[:-1]:
            assert path.startswith(("--from=", "/usr/local/lib/")) or (REPO / path).exists(), path


def test_the_unit_drains_and_knows_its_options(unit: configparser.ConfigParser, options: set[str]):
    service = unit["Service"]
    words = service["ExecStart"].split()
    assert words[1] == "serve"
    require_options(words, options)
    timeout_s = float(words[words.index("--shutdown-timeout") + 1])
    assert timeout_s == ServerSettings().shutdown_timeout_s
    assert float(service["TimeoutStopSec"]) >= timeout_s + 10
    assert service["KillMode"] == "mixed" and "HUP" in service["ExecReload"]
    assert service["DynamicUser"] == service["NoNewPrivileges"] == "yes" and service["ProtectSystem"] == "strict"
    for name in CACHES:
        assert f"{name}=/var/cache/{service['CacheDirectory']}" in service["Environment"]
    assert unit["Install"]["WantedBy"] == "multi-user.target"


def test_systemd_can_read_the_unit(tmp_path: Path):
    command = shutil.which("systemd-analyze")
    if command is None:
        pytest.skip("NOT TESTED: deploy/ridgeline.service by systemd-analyze, for lack of it")
    text = (DEPLOY / "ridgeline.service").read_text().replace("/usr/local/lib/ridgeline/bin/ridgeline", "/bin/true")
    (tmp_path / "ridgeline.service").write_text(text)
    done = subprocess.run([command, "verify", str(tmp_path / "ridgeline.service")], capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if "ridgeline" in line]
    assert not ours, done.stderr


def test_the_manifest_probes_what_is_there(objects: dict[str, dict], options: set[str], live: LiveServer):
    spec = objects["Deployment"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    require_options(container["args"], options)
    assert {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")} == {
        "startup": "/ready",  # nothing is restarted while it loads
        "liveness": "/health",
        "readiness": "/ready",
    }
    for name in ("startup", "liveness", "readiness"):
        path = container[f"{name}Probe"]["httpGet"]["path"]
        assert path in PUBLIC_PATHS and live.client.get(path).status_code == 200
    pause_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    timeout_s = float(container["args"][container["args"].index("--shutdown-timeout") + 1])
    assert spec["terminationGracePeriodSeconds"] >= pause_s + timeout_s + 10
    assert container["securityContext"]["readOnlyRootFilesystem"] and spec["securityContext"]["runAsNonRoot"]
    user = int(directives()["USER"][0].partition(":")[0])
    assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == user
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    assert {"/cache", "/tmp"} <= {mount["mountPath"] for mount in container["volumeMounts"]}
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert labels == objects["Service"]["spec"]["selector"]
    assert labels == objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    assert labels == objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]


def test_the_manifest_is_of_the_schema_of_kubernetes():
    command = shutil.which("kubernetes-validate", path=sysconfig.get_path("scripts")) or shutil.which(
        "kubernetes-validate"
    )
    if command is None:
        pytest.skip(
            "NOT TESTED: deploy/kubernetes.yaml by its schema: pip install 'kubernetes-validate>=1.33' (108 MB)"
        )
    done = subprocess.run([command, "--strict", str(DEPLOY / "kubernetes.yaml")], capture_output=True, text=True)
    assert done.returncode == 0 and (done.stdout + done.stderr).count(" passed ") == 4, done.stdout + done.stderr


def test_the_board_is_of_the_schema_of_grafana():
    """What the schema does not know is lost on the way through its classes."""
    dashboard = pytest.importorskip(
        "grafana_foundation_sdk.models.dashboard",
        reason="NOT TESTED: deploy/grafana.json by its schema: pip install 'grafana-foundation-sdk==1769699379!11.6.0'",
    )
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins

    register_default_plugins()
    board = json.loads((DEPLOY / "grafana.json").read_text())
    kept = json.loads(JSONEncoder().encode(dashboard.Dashboard.from_json(board)))
    assert lost(board, kept) == []
    misspelt = json.loads(json.dumps(board).replace("legendFormat", "legendFromat"))
    again = json.loads(JSONEncoder().encode(dashboard.Dashboard.from_json(misspelt)))
    assert len(lost(misspelt, again)) == json.dumps(board).count("legendFormat")


def lost(before: object, after: object, where: str = "") -> list[str]:
    """Where `after` has less than `before`, or something else."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [each for key, value in before.items() for each in lost(value, after.get(key), f"{where}.{key}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [each for i, (one, other) in enumerate(zip(before, after)) for each in lost(one, other, f"{where}[{i}]")]
    return [] if before == after else [where]


def test_every_reason_of_an_alert_is_a_code_of_an_error():
    errors = (REPO / "src/ridgeline/server/errors.py").read_text()
    rules = (DEPLOY / "alerts.yaml").read_text()
    reasons = {one for several in re.findall(r'reason=~?"([^"]+)"', rules) for one in several.split("|")}
    assert reasons == {one for one in reasons if f'"{one}"' in errors} and len(reasons) >= 4


def test_every_alert_says_what_to_do():
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    described = set(re.findall(r"^\| `(Ridgeline\w+)` \|", GUIDE, re.M))
    assert {rule["alert"] for rule in group["rules"]} == described
    for rule in group["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"} and rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("page", "ticket")
