"""tools/cpp_functions.py finds the functions of C++ sources and counts their lines, whatever stands between."""

import runpy
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
function_lines = runpy.run_path(str(REPO / "tools" / "cpp_functions.py"))["function_lines"]

CASES = {
    "a signature of several lines, its template line included": (
        "template <class Kind, int Rows = (2 < 3)>\nstatic void score(\n    int a,\n    int b) {\n  go();\n}\n",
        [("score", 6)],
    ),
    "in namespaces and types": (
        "namespace a::b {\nstruct alignas(64) S final : T<int> {\n  int x = 1;\n  int f() const { return x; }\n};\n}\n",
        [("f", 1)],
    ),
    "methods, operators, destructors": (
        "int S::f() const {\n  return 1;\n}\nvoid S::operator()(int x) {\n}\nS::~S() {}\n",
        [("S::f", 3), ("S::operator()", 2), ("S::~S", 1)],
    ),
    "a constructor with braces among its initializers": (
        "struct S {\n  S(int a)\n      : a_{a},\n        b_(a) {\n    go();\n  }\n  int a_, b_;\n};\n",
        [("S", 5)],
    ),
    "a constructor whose last initializer has braces": ("S::S(int a) : a_{a} {\n}\n", [("S::S", 2)]),
    "lambdas and blocks count towards the function around them": (
        "int f() {\n  const auto g = [&](int x) {\n    return x;\n  };\n  if (g(1)) {\n    h();\n  }\n  return 2;\n}\n",
        [("f", 9)],
    ),
    "what looks like braces and is none": (
        'char f() {\n  // }\n  /* } */\n  g("}\\"}", R"x(})"})x");\n  return \'}\';\n}\nint n = 1\'000;\nint g() {}\n',
        [("f", 6), ("g", 1)],
    ),
    "values and tables are no functions": (
        "constexpr int kTable[] = {1, (2), 3};\nint x{4};\nenum Kind { a, b };\nint f() { return 1; }\n",
        [("f", 1)],
    ),
    "declarations have no body": ("int f(int);\nint g();\n", []),
    "one function with a signature for each branch": (
        "#if A\nint f(int a) {\n#else\nint f() {\n#endif\n  return 1;\n}\n",
        [("f", 4)],
    ),
    "macros of several lines": ("#define A(x) \\\n  int f() { \\\n    if (x) {\nint g() {\n}\n", [("g", 2)]),
    "attributes": (
        "static __attribute__((noinline)) void f() {\n}\n[[nodiscard]] int g() noexcept(true) {\n}\n",
        [("f", 2), ("g", 2)],
    ),
    "bindings": ("NB_MODULE(_native, m) {\n  bind(m);\n}\n", [("NB_MODULE", 3)]),
    'extern "C"': ('extern "C" {\nint f() {\n}\n}\nextern "C" int g() { return 1; }\n', [("f", 2), ("g", 1)]),
}


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES)
def test_functions_and_their_lengths(text, expected):
    assert list(function_lines(text)) == expected


@pytest.mark.parametrize("text", ["int f() {\n", "int f() {\n}\n}\n", "namespace a {\nint f() {}\n"])
def test_braces_that_do_not_balance_are_an_error(text):
    with pytest.raises(ValueError, match=r"closed"):
        list(function_lines(text))


def test_every_source_of_the_native_backend_is_measured():
    found = {
        path.relative_to(REPO / "native").as_posix(): [name for name, _ in function_lines(path.read_text())]
        for path in (REPO / "native").rglob("*")
        if path.suffix in (".h", ".cpp")
    }
    assert {"Tape::run", "Tape::work", "Tape::prepare"} <= set(found["runtime/tape.cpp"])
    assert {"attend", "merge", "run_tile"} <= set(found["kernels/attention/attention.h"])
    assert all(found[name] for name in found if name.endswith(".cpp"))
