"""What the documents say exists: packages, paths, names, links, families. Nothing in them is about one machine."""

import ast
import inspect
import re
import runpy
from pathlib import Path

import pytest
from markdown_docs import DOCUMENTS, PACKAGE, REPO, anchors, links, name, prose, spans, table

from ridgeline import cli
from ridgeline.cli.serve import serve
from ridgeline.explain import explorers
from ridgeline.server import app
from ridgeline.server.openai.chat import CHAT_BODY
from ridgeline.server.openai.fields import with_parameters
from ridgeline.server.openai.items import RESPONSES_BODY
from ridgeline.server.openai.protocol import ChatRequest, CompletionRequest

ARCHITECTURE = REPO / "docs" / "architecture.md"
SERVE = REPO / "docs" / "howto" / "serve.md"
PERFORMANCE = REPO / "docs" / "performance.md"
EXPLAIN = REPO / "docs" / "howto" / "explain.md"
PITFALLS = REPO / "docs" / "drafting-pitfalls.md"
PATH = re.compile(r"[\w.<>*-]+(/[\w.<>*-]+)+/?|[\w-]+/")
PLACEHOLDER = re.compile(r"<\w+>")
NODE_ID = re.compile(r"(tests/[\w/]+\.py)::(\w+)(?:\[([^\]]+)\])?")
PATH_AND_NAME = re.compile(r"([\w./-]+\.py):([\w.]+)")
MODULE = re.compile(r"ridgeline(\.\w+)+")
MACHINE = re.compile(r"(?<![\w.])/(work|tmp|root|home|opt|mnt|Users)/")

every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=name)


def found(path: str, document: Path) -> list[Path]:
    """What a path may mean: from the checkout, from the package, or from the document that names it."""
    pattern = PLACEHOLDER.sub("*", path)
    return [hit for root in (REPO, PACKAGE, document.parent) for hit in root.glob(pattern)]


def is_path(span: str) -> bool:
    """Something with a slash that has a suffix, a trailing slash, or starts in a folder of ours."""
    if not PATH.fullmatch(span):
        return False
    first = span.split("/")[0]
    return span.endswith("/") or bool(Path(span).suffix) or (REPO / first).exists() or (PACKAGE / first).exists()


def defined_names(path: Path) -> set[str]:
    """Functions, classes, their methods, and constants of a module, without importing it."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.ClassDef():
                names.add(node.name)
                members = (member for member in node.body if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef))
                names.update(f"{node.name}.{member.name}" for member in members)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                names.add(node.name)
            case ast.Assign(targets=[ast.Name(id=target)]) | ast.AnnAssign(target=ast.Name(id=target)):
                names.add(target)
            case _:
                pass
    return names


@every_document
def test_paths_exist(document):
    missing = [span for span in spans(document) if is_path(span) and not found(span, document)]
    assert not missing


@every_document
def test_names_exist(document):
    missing = []
    for span in spans(document):
        if match := PATH_AND_NAME.fullmatch(span):
            hits = found(match[1], document)
            if not hits or match[2] not in defined_names(hits[0]):
                missing.append(span)
        elif MODULE.fullmatch(span):
            module = REPO / "src" / span.replace(".", "/")
            if not module.is_dir() and not module.with_suffix(".py").is_file():
                missing.append(span)
    assert not missing


@every_document
def test_links_resolve(document):
    broken = []
    for link in links(document):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@every_document
def test_no_machine_is_named(document):
    assert not MACHINE.search(document.read_text(encoding="utf-8"))


def test_every_package_has_its_line():
    packages = {f"`{init.parent.name}/`" for init in PACKAGE.glob("*/__init__.py")}
    described = [row[0] for row in table(ARCHITECTURE, "Packages")]
    assert sorted(described) == sorted(packages)


def test_the_architecture_has_one_diagram():
    assert ARCHITECTURE.read_text(encoding="utf-8").count("```mermaid") == 1


@pytest.mark.parametrize(
    ("tool", "page"),
    [
        ("families_table", "models.md"),
        ("performance_tables", "performance.md"),
        ("speculation_tables", "performance.md"),
        ("quality_tables", "performance.md"),
    ],
)
def test_generated_tables_are_as_generated(tool, page, monkeypatch):
    monkeypatch.syspath_prepend(REPO / "tools")
    updated = runpy.run_path(str(REPO / "tools" / f"{tool}.py"))["updated"]
    text = (REPO / "docs" / page).read_text(encoding="utf-8")
    assert updated(text) == text, f"run: python tools/{tool}.py --write"


def test_the_figure_of_quality_is_as_drawn(monkeypatch):
    monkeypatch.syspath_prepend(REPO / "tools")
    tool = runpy.run_path(str(REPO / "tools" / "quality_tables.py"))
    assert tool["figure"]() == tool["FIGURE"].read_text(encoding="utf-8"), "run: python tools/quality_tables.py --write"


def test_every_figure_has_its_result():
    """Each row of a table of the performance page links to the JSON that it was taken from."""
    text = PERFORMANCE.read_text(encoding="utf-8")
    rows = [row for row in re.findall(r"^\|.*\|$(?!\n\|---)", text, flags=re.M) if not row.startswith("|---")]
    assert len(rows) > 30
    assert [row for row in rows if not re.search(r"\(\.\./benchmarks/results/[^)]+\.json\)", row)] == []


def test_the_readme_is_one_page():
    assert len((REPO / "README.md").read_text(encoding="utf-8").splitlines()) <= 100


def test_the_server_page_lists_its_endpoints():
    routes = re.findall(r'"(/[^"]+)"', inspect.getsource(app._routes))
    described = [row[0].strip("`").split()[1] for row in table(SERVE, "Endpoints")]
    assert described == [route.replace(":path}", "}") for route in routes]


def test_the_server_page_lists_its_options():
    options = set()
    for field, parameter in inspect.signature(serve).parameters.items():
        if field == "context":  # of the command line itself
            continue
        stated = parameter.annotation.__metadata__[0].default  # typer keeps an annotation's first name there
        flag = stated if isinstance(stated, str) else "--" + field.replace("_", "-")
        options.add(flag.split("/")[-1])
    described = [option for row in table(SERVE, "Options") for option in re.findall(r"`(--[\w-]+)`", row[0])]
    assert sorted(described) == sorted(options)


def test_the_readme_lists_the_commands():
    described = [row[0] for row in table(REPO / "README.md", "On the command line")]
    assert sorted(described) == [f"`ridgeline {command}`" for command in cli.names()]


def test_the_server_page_lists_its_parameters():
    """All but those that are refused unless they ask for nothing."""
    requests = [with_parameters(request) for request in (CompletionRequest, ChatRequest)]
    fields = {field for request in requests for field in request.__struct_fields__} - set(ChatRequest.NEUTRAL)
    described = [field for row in table(SERVE, "Parameters") for field in re.findall(r"`(\w+)`", row[0])]
    assert sorted(described) == sorted(fields)


def test_the_server_page_lists_the_fields_of_responses():
    """Those of its own, each once; the rest are chat's."""
    own = set(RESPONSES_BODY.__struct_fields__) - set(CHAT_BODY.__struct_fields__)
    described = [field for row in table(SERVE, "The Responses API") for field in re.findall(r"`(\w+)`", row[0])]
    assert len(described) == len(set(described)) and own <= set(described)


def test_every_decision_record_is_in_the_index_and_short():
    folder = REPO / "docs" / "adr"
    records = sorted(folder.glob("[0-9]*.md"))
    assert links(folder / "README.md") == [record.name for record in records]
    for record in records:
        text = record.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 60
        assert [
            part for part in ("Context", "Decision", "Consequences", "Evidence") if f"\n## {part}\n" not in text
        ] == []


def test_the_glossary_is_in_order():
    terms = re.findall(r"^- \*\*(.+?)\*\*", prose(ARCHITECTURE), flags=re.M)
    assert terms == sorted(terms, key=str.casefold)


def test_the_explain_page_lists_its_explorers():
    described = [name for row in table(EXPLAIN, "Explore one idea") for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(described) == explorers.names()


def collected(path: Path) -> set[str]:
    """Names of a module's tests; of its pitfalls, as `planting.Pitfalls` collects them, with their parameters."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            names.add(node.name)
        for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            match mark:
                case ast.Call(func=ast.Attribute(attr="check"), args=[ast.Constant(value=number)]):
                    names.add(f"test_pitfall[{number}-{node.name}]")
                case ast.Call(
                    func=ast.Attribute(attr="bug"), args=[ast.Constant(value=number), ast.Constant(value=what)]
                ):
                    names.add(f"test_a_planted_bug_is_caught[{number}-{what}]")
                case _:
                    pass
    return names


def test_every_pitfall_has_a_test_and_a_planted_bug():
    """Each of the 26 names tests that exist, among them the check of its number."""
    rows = table(PITFALLS, "The pitfalls")
    assert [row[0] for row in rows] == [str(number) for number in range(1, 27)]
    for number, _, cell in rows:
        bugs = []
        for node_id in re.findall(r"`([^`]+)`", cell):
            match = NODE_ID.fullmatch(node_id)
            assert match, f"{node_id} is no node id"
            names = collected(REPO / match[1])
            assert node_id.partition("::")[2] in names, f"{node_id} does not exist"
            if match[2] == "test_pitfall" and match[3].startswith(f"{number}-"):
                bugs += [name for name in names if name.startswith(f"test_a_planted_bug_is_caught[{number}-")]
        assert bugs, f"no check of pitfall {number} with a planted bug"
