"""Hostile chat templates: every one is refused, soon, in little memory and without touching a file."""

import sys
import time
import tracemalloc

import pytest

from ridgeline.core.errors import ModelLoadError, RequestError
from ridgeline.text import template_limits
from ridgeline.text.chat import ChatTemplate
from ridgeline.text.template_limits import MAX_RENDER_BYTES, MAX_RENDER_S, MAX_VALUE_BYTES

DOUBLE = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = BODY %}{% endfor %}{{ ns.x }}"
BIG = "{% set big = 'ab' * 2000000 %}"
DAG = "{% set ns = namespace(x=['ab'], y=['ab']) %}{% for i in range(60) %}BODY{% endfor %}"
NEST = "{% for a in range(90000) %}{% for b in range(90000) %}BODY{% endfor %}{% endfor %}"
KNOT = (
    "{% set ns = namespace(x=namespace()) %}{% for i in range(60) %}"
    "{% set n = namespace(a=ns.x, b=ns.x) %}{% set ns.x = n %}{% endfor %}"
)

HOSTILE = {
    # out of the sandbox
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class_by_item": "{{ ''['__class__'] }}x{{ ''['__class__']['__base__'] }}",
    "attr_filter": "{{ ''|attr('__class__') }}",
    "map_attr": "{{ (['']|map(attribute='__class__')|list)[0].x }}",
    "globals": "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['x'] }}",
    "builtins": "{{ namespace.__init__.__globals__['os'].system('true') }}",
    "code": "{% macro m() %}{% endmacro %}{{ m._func.__code__.co_consts[0] }}",
    "frame": "{% set g = [1]|map('string') %}{{ g.gi_frame.f_globals.x }}",
    "format_attribute": "{{ '{0.__class__.__init__.__globals__}'.format(1) }}",
    "format_map": "{{ '{a.__class__.x}'.format_map({'a': 1}) }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
    "self": "{{ self.__init__.__globals__ }}{{ self._TemplateReference__context.x }}",
    "mutate_list": "{{ messages.append(1) }}",
    "mutate_dict": "{{ messages[0].update({'role': 'x'}) }}",
    "html_hook": "{% set ns = namespace() %}{% set ns.__html__ = 1 %}",
    "encode": "{{ 'a'.encode('utf-16') }}",
    "int_method": "{{ (5).to_bytes(2000000000, 'big') }}",
    # files
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import '/etc/passwd' as p %}",
    "from_import": "{% from '/etc/passwd' import p %}",
    "extends": "{% extends '/etc/passwd' %}",
    "block_recursion": "{% block a %}{{ self.a() }}{% endblock %}",
    # too much from one operation
    "multiply": "{{ 'a' * 10**9 }}",
    "multiply_left": "{{ 10**9 * 'a' }}",
    "multiply_constant": "{% if 'a' * 1000000000 == 'b' %}{% endif %}",
    "multiply_list": "{{ ([0] * 10**9)|length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "power_big": "{{ (2 ** 4000) ** 4000 }}",
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "center": "{{ 'a'.center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ '1'.zfill(10**9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "center_filter": "{{ 'a'|center(1000000000) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent_star": "{{ '%*d' % (1000000000, 1) }}",
    "percent_named": "{{ '%((a)b)1000000000d' % {'(a)b': 1} }}",
    "percent_divisible": "{{ '%1000000000d' is divisibleby(3) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format_nested": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "format_filter": "{{ '%1000000000d'|format(1) }}",
    "markup_center": "{{ ('a'|safe).center(10**9) }}",
    "replace": BIG + "{{ big.replace('a', big) }}",
    "replace_filter": BIG + "{{ big|replace('a', big) }}",
    "join": BIG + "{{ big.join(range(90000)|map('string')) }}",
    "join_filter": BIG + "{{ range(90000)|join(big) }}",
    "map_replace": BIG + "{{ range(90000)|map('replace', '1', big)|list }}",
    "split": BIG + "{{ big.split('a') }}",
    "list_of_text": BIG + "{{ big|list|length }}",
    "sort_text": BIG + "{{ big|sort|length }}",
    "indent": "{{ ('a\n' * 100000)|indent(4000) }}",
    "tojson_indent": "{{ [[1]]|tojson(indent=1000000000) }}",
    "tojson_separator": BIG + "{{ range(1000)|list|tojson(separators=(big, ':')) }}",
    "round": "{{ 1.5|round(1000000000, 'ceil') }}",
    "batch": "{{ [1]|batch(1000000000, 0)|list }}",
    "slice": "{{ [1]|slice(1000000000)|list }}",
    "wordwrap": BIG + "{{ big|wordwrap(1) }}",
    "lipsum": "{{ lipsum(n=1000000) }}",
    # too much by growing
    "double_add": DOUBLE.replace("BODY", "ns.x + ns.x"),
    "double_concat": DOUBLE.replace("BODY", "ns.x ~ ns.x"),
    "double_list": DOUBLE.replace("BODY", "[ns.x, ns.x]"),
    "double_tuple": DOUBLE.replace("BODY", "(ns.x, ns.x)"),
    "double_dict": DOUBLE.replace("BODY", "dict(a=ns.x, b=ns.x)"),
    "double_format": DOUBLE.replace("BODY", "'%s%s' % (ns.x, ns.x)"),
    "double_capture": DOUBLE.replace("{% set ns.x = BODY %}", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "double_macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + DOUBLE.replace("BODY", "m(ns.x)"),
    "double_filter": DOUBLE.replace("BODY", "ns.x|replace('ab', 'abab')"),
    "dag_equal": DAG.replace("BODY", "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}")
    + "{{ ns.x == ns.y }}",
    "dag_key": DAG.replace("['ab']", "'ab'").replace("BODY", "{% set ns.x = (ns.x, ns.x) %}") + "{{ {ns.x: 1} }}",
    "dag_varargs": "{% macro m(n) %}{{ m(n, varargs, varargs) }}{% endmacro %}{{ m(1) }}",
    "knot_print": KNOT + "{{ ns.x }}",
    "knot_upper": KNOT + "{{ [ns.x]|string }}",
    "ten_megabytes": "{% for i in range(10) %}{{ 'a' * 1000000 }}{% endfor %}",
    "endless_text": NEST.replace("BODY", "0123456789" * 100),
    "capture": "{% set x %}{% for i in range(90000) %}" + "0123456789" * 200 + "{% endfor %}{% endset %}{{ 1 }}",
    # too long
    "loops": NEST.replace("BODY", ""),
    "loops_else": NEST.replace("BODY", "{% if b > a %}{% continue %}{% endif %}"),
    "loops_filtered": "{% for a in range(90000) %}{% for b in range(90000) if false %}{% endfor %}{% endfor %}",
    "loops_literal": "{% set l = [1,2,3,4,5,6,7,8,9] * 9 %}" + "{% for i in l %}" * 8 + "{% endfor %}" * 8,
    "compare": BIG + "{% set other = 'ab' * 2000000 %}" + NEST.replace("BODY", "{% if big == other %}{% endif %}"),
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursion_twice": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(50) }}",
    "recursive_loop": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    # not a template that can be compiled
    "syntax": "{% if %}",
    "unclosed": "{% for m in messages %}",
    "unknown_filter": "{{ 1|nonsense }}",
    "deep": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "deep_brackets": "{{ " + "[" * 20000 + "]" * 20000 + " }}",
    "long_sum": "{{ 1" + "+1" * 60000 + " }}",
    "many_elif": "{% if a %}" + "{% elif a %}" * 15000 + "{% endif %}",
    "deep_for": "{% for i in [1] %}" * 200 + "{% endfor %}" * 200,
    "many_nodes": "{{a}}" * 50000,
    "too_large": "a" * (256 * 1024 + 1),
    "huge_number": "{{ " + "9" * 100000 + " }}",
}

opened: list[str] = []
watching = False


def _tripwire(event: str, args: tuple[object, ...]) -> None:
    if watching and event in {"open", "os.system", "subprocess.Popen", "socket.connect", "import"}:
        opened.append(f"{event} {args[:1]}")


@pytest.fixture(scope="module", autouse=True)
def tripwire():
    with pytest.raises(RequestError):
        ChatTemplate({"default": "{{ 1/0 }}"}, {}).render([])  # what jinja2 imports late, it has imported now
    sys.addaudithook(_tripwire)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_is_refused(name):
    global watching
    opened.clear()
    watching = True
    start_s = time.thread_time()
    try:
        with pytest.raises((ModelLoadError, RequestError)) as caught:
            template = ChatTemplate({"default": HOSTILE[name]}, {})
            tracemalloc.start()
            template.render([{"role": "user", "content": "hi"}])
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        watching = False
        tracemalloc.stop()
    spent_s = time.thread_time() - start_s
    assert not opened
    assert " at 0x" not in str(caught.value) and len(str(caught.value)) < 500
    # compiling comes on top of the render's own limit; the margin is for slow machines, unbounded ones run for hours
    assert spent_s < 5 * MAX_RENDER_S
    # refused before it is made: not once it is there, and not because the machine had no memory left
    assert peak_bytes < MAX_RENDER_BYTES + MAX_VALUE_BYTES
    assert caught.type is ModelLoadError or "MemoryError" not in str(caught.value)


CHARGED = [
    *("{% if a == b %}{% endif %}", "{% set x = [a] %}", "{% set x = (a, b) %}", "{% set x = {'a': a} %}"),
    *("{% set x = a ~ b %}", "{% set x = text[1:] %}", "{% set x = 1 + 1 %}", "{% set x = a|upper %}"),
    *("{% set x = a is string %}", "{% set x = range(1) %}", "{{ text }}", "{% for c in 'a' %}{% endfor %}"),
    "{% for c in 'a' if a %}{% endfor %}",
]


@pytest.mark.parametrize("source", CHARGED)
def test_every_kind_of_operation_is_charged(source, monkeypatch):
    template = ChatTemplate({"default": source}, {})
    template.render([], variables={"text": "ab"})
    monkeypatch.setattr(template_limits, "MAX_RENDER_S", -1.0)
    with pytest.raises(RequestError, match="takes more than"):
        template.render([], variables={"text": "ab"})
