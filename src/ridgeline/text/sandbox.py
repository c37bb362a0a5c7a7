"""The jinja2 environment that chat templates run in: sandboxed, immutable, without files, bounded in time and memory.

Used by `chat` only. A template comes with a model, so it is untrusted code. jinja2's sandbox keeps it from reaching
Python; this module keeps it from using the machine up. Every operation that makes a value is charged to the budget of
the render it belongs to:

    loops, comparisons, list displays, `~`, slices      rewritten in the syntax tree to pass through a charging filter
    + - * / // % **, calls, filters, tests, printing    jinja2's own hooks

and what can make much from little is measured before it runs. Filters, methods and globals not known to be harmless are
not there at all. Must not import anything of ridgeline but `template_limits`.
"""

import json
import types
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, cast

import jinja2
import jinja2.ext
from jinja2 import nodes, pass_context
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ridgeline.text import template_limits as limits
from ridgeline.text.template_limits import RefusedError, limit, size_bytes

MAX_NODES = 50_000
MAX_LOOP_DEPTH = 16  # Python compiles at most 20 nested loops
BUDGET_KEY = "render budget"  # the variable that holds the Budget; no identifier, so no template can name it
_CHARGE = "charge value"
_COMPILER_ARGUMENTS = ("_loop_vars", "_block_vars")  # compiled templates add these to calls; jinja2 takes them off

_FILTERS = """
    abs capitalize count d default dictsort e escape first float groupby indent int items join last length list lower
    map max min reject rejectattr replace reverse round safe select selectattr sort string sum title trim truncate
    unique upper urlencode wordcount
"""


class RaisedError(jinja2.TemplateError):
    """Raised when the template calls raise_exception; the message is meant for the caller."""


class ChatSandbox(ImmutableSandboxedEnvironment):
    """Environment of Hugging Face chat templates, within `template_limits`; a render must pass a Budget, BUDGET_KEY."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        extensions = [jinja2.ext.loopcontrols, _Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_finalize)
        plain = ImmutableSandboxedEnvironment()
        self.filters: dict[str, Any] = {name: _guarded_filter(plain, name) for name in _FILTERS.split()}
        self.filters |= {"tojson": _tojson, _CHARGE: _charge}
        self.tests: dict[str, Any] = {name: _guarded_test(plain, name) for name in plain.tests}
        self.globals = {
            "range": plain.globals["range"],  # jinja2's own, at most MAX_RANGE items
            "dict": _dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def compile_template(self, source: str) -> jinja2.Template:
        """Raises jinja2.TemplateError, or what Python's own parser and compiler raise, for a source that is no good."""
        tree = cast("nodes.Template", _Guard().visit(self.parse(source)))
        tree.set_environment(self)
        return self.from_string(tree)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        limits.measure_operator(operator, left, right)
        return _charge(context, super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore
        named = {name: value for name, value in kwargs.items() if name not in _COMPILER_ARGUMENTS}
        _charge(__context, [args, named])
        is_method = isinstance(__obj, (types.BuiltinMethodType, types.MethodType))
        if is_method and not isinstance(__obj.__self__, LoopContext):
            args = limits.measure_method(__obj, args, named)
        return _charge(__context, super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            limits.measure_format(value.__self__, "{", [args, kwargs])
            return wrapped(*args, **kwargs)

        return checked

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Joins the output of a macro or of a block assignment; the compiled template calls it."""
        parts = list(pieces)
        limit(sum(map(len, parts)))
        return "".join(parts)


class _Guard(NodeTransformer):
    """Rewrites a template so that what jinja2 has no hook for is charged too; refuses what reaches other templates."""

    def __init__(self) -> None:
        self._num_nodes = 0
        self._loop_depth = 0

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise RefusedError(f"has more than {MAX_NODES} syntax nodes")
        return super().visit(node, *args, **kwargs)

    def _refuse(self, node: nodes.Node) -> nodes.Node:
        raise RefusedError(f"uses {type(node).__name__.lower()} in line {node.lineno}, which chat templates cannot")

    visit_Extends = visit_Include = visit_Import = visit_FromImport = visit_Block = _refuse

    def _charged(self, node: nodes.Node) -> nodes.Node:
        return _charge_node(self.generic_visit(node))

    visit_List = visit_Dict = visit_Compare = _charged

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._charged(node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        return self._charged(node) if isinstance(node.arg, nodes.Slice) else self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        items = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(items, "join", [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._loop_depth += 1
        if self._loop_depth > MAX_LOOP_DEPTH:
            raise RefusedError(f"nests loops more than {MAX_LOOP_DEPTH} deep")
        self.generic_visit(node)
        self._loop_depth -= 1
        tick = _charge_node(nodes.Const(None, lineno=node.lineno))
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        node.test = None if node.test is None else _charge_node(node.test)
        return node


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model wrote, for training; rendering just shows the body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """jinja2's namespace without underscore names, which Python itself might read (`__html__`)."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportSelfClsParameterName]
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"  # not what it holds: namespaces can hold each other, and a text of that has no bound


def _check_attribute(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise RefusedError("sets a namespace attribute whose name starts with an underscore")


def _charge_node(node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(cast("nodes.Expr", node), _CHARGE, [], [], None, None, lineno=node.lineno)


@pass_context
def _charge(context: Context, value: Any) -> Any:
    context.parent[BUDGET_KEY].spend(value)
    return value


@pass_context
def _finalize(context: Context, value: Any) -> str:
    """Return the text of a printed value; part of every `{{ }}`."""
    if isinstance(value, str):
        return _charge(context, value)
    size_bytes(value, printable=True)
    return _charge(context, str(value))


def _guarded_filter(plain: ImmutableSandboxedEnvironment, name: str) -> Callable[..., Any]:
    """Return jinja2's own filter between a look at its operands and a charge for its result."""

    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        value = limits.measure_filter(name, value, [*args, *kwargs.values()])
        result = plain.call_filter(name, value, args, kwargs, context=context, eval_ctx=context.eval_ctx)
        return _charge(context, result)

    return run


def _guarded_test(plain: ImmutableSandboxedEnvironment, name: str) -> Callable[..., Any]:
    @pass_context
    def run(context: Context, value: Any, *args: Any) -> Any:
        if name == "divisibleby":
            limits.measure_operator("%", value, *args)
        return _charge(context, plain.call_test(name, value, args, context=context, eval_ctx=context.eval_ctx))

    return run


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as transformers writes it: no HTML escapes, characters outside ASCII as they are."""
    if indent is not None and not 0 <= indent <= 16:
        raise RefusedError("gives tojson an indent above 16 characters")
    size_bytes(value, printable=True)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    parts: list[str] = []
    num_chars = 0
    for part in encoder.iterencode(value):
        num_chars += len(part)
        limit(num_chars)
        parts.append(part)
    return _charge(context, "".join(parts))


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: object) -> None:
    raise RaisedError(str(message)[:1000])


def _strftime_now(template: str) -> str:
    if len(template) > 100:
        raise RefusedError("gives strftime_now a format above 100 characters")
    return datetime.now().strftime(template)
