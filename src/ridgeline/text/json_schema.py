"""JSON schemas as llguidance can follow them: bounded in size, and some keywords in other words that mean the same.

A keyword without such words is left for llguidance to refuse by its name. What it would follow wrongly is refused here:
an output that ends by itself is always valid.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from decimal import Decimal
from math import lcm
from typing import Any, cast

from ridgeline.core.errors import RequestError

MAX_SCHEMA_CHARS = 64 * 2**10
MAX_SCHEMA_DEPTH = 64
MAX_PROPERTIES = 2000  # the time to compile grows with their square: 0.5 s here
MAX_EXACT = 2**53  # llguidance reads numbers as doubles
MAX_MULTIPLE = 2**32 - 1  # it multiplies what numbers must be multiples of in 32 bits
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_DATA = ("const", "enum", "default", "examples", "required", "type")
_NUMBERS = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_BESIDE = (("then", "if"), ("else", "if"), ("minContains", "contains"), ("maxContains", "contains"))
_IN_PLACE = {
    "$ref",
    "$dynamicRef",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "dependentSchemas",
    "dependencies",
    "contains",
}


def followed_schema(given: str | Mapping[str, Any] | bool) -> Mapping[str, Any]:
    """Return a schema in words that llguidance knows. Raises RequestError for one that it would not follow."""
    try:
        text = given if isinstance(given, str) else json.dumps(given)
        schema = json.loads(text) if len(text) <= MAX_SCHEMA_CHARS else {}
        json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the schema is not valid JSON: {str(error)[:200]}") from error
    if len(text) > MAX_SCHEMA_CHARS:
        raise RequestError(f"it has {len(text)} characters, and may have {MAX_SCHEMA_CHARS}")
    if not isinstance(schema, (dict, bool)):
        raise RequestError("a schema is a JSON object, as {'type': 'object'}")
    if isinstance(schema, bool):
        return {} if schema else {"anyOf": []}
    root = cast("dict[str, Any]", schema)
    if "x-guidance" in root:
        raise RequestError("the keyword x-guidance is not taken")
    _require_followed_exactly(root)
    objects = [
        f"#/{section}/{name}"
        for section in ("$defs", "definitions")
        if isinstance(root.get(section), dict)
        for name, each in root[section].items()
        if isinstance(each, dict) and each.get("type") == "object"
    ]
    return _said(root, frozenset(objects))


def _objects(value: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield all objects in a JSON value. Raises RequestError where it is nested too deeply."""
    if depth > 2 * MAX_SCHEMA_DEPTH:  # an object in an object takes two levels
        raise RequestError(f"the schema is nested more than {MAX_SCHEMA_DEPTH} deep")
    if isinstance(value, dict):
        yield cast("dict[str, Any]", value)
    if isinstance(value, (dict, list)):
        for item in cast("dict[str, Any]", value).values() if isinstance(value, dict) else cast("list[Any]", value):
            yield from _objects(item, depth + 1)


def _require_followed_exactly(root: dict[str, Any]) -> None:
    """Raise RequestError for what llguidance reads as something else: numbers overflow, repeated keys are counted."""
    num_properties, coef, exp = 0, 1, 0
    for schema in _objects(root):
        declared, required, least = (schema.get(name) for name in ("properties", "required", "minProperties"))
        num_properties += len(cast("dict[str, Any]", declared)) if isinstance(declared, dict) else 0
        for name in _NUMBERS:
            if _beyond(schema.get(name)):
                raise RequestError(f"{name} holds a number beyond 2**53, which is not followed exactly")
        num_required = len(set(map(str, cast("list[Any]", required)))) if isinstance(required, list) else 0
        if isinstance(least, (int, float)) and max(1, num_required) < least:
            raise RequestError(f"minProperties {least} needs as many names in required: others may be repeated")
        if isinstance(step := schema.get("multipleOf"), (int, float)) and step:
            exact = abs(Decimal(str(step))).normalize()
            finer = max(exp, -int(exact.as_tuple().exponent))
            new, old = int(exact.scaleb(finer)), coef * 10 ** (finer - exp)
            coef, exp = lcm(new, old), finer
            if new * old > MAX_MULTIPLE:
                raise RequestError(f"multipleOf {step} is too large or too fine, alone or with the schema's others")
    if num_properties > MAX_PROPERTIES:
        raise RequestError(f"the schema has {num_properties} properties, and may have {MAX_PROPERTIES}")


def _beyond(value: Any) -> bool:
    """Tell whether a JSON value holds a number that a double may not be."""
    if isinstance(value, (dict, list)):
        return any(map(_beyond, cast("dict[str, Any]", value).values() if isinstance(value, dict) else value))
    return isinstance(value, (int, float)) and abs(value) > MAX_EXACT


def _said(value: Any, objects: Collection[str]) -> Any:
    """Return a schema, or a list of them, in words that llguidance knows; `objects` refer to schemas of objects."""
    if isinstance(value, list):
        return [_said(item, objects) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    schema: dict[str, Any] = {}
    for name, item in cast("dict[str, Any]", value).items():
        if name in _MAPS and isinstance(item, dict):
            schema[name] = {key: _said(each, objects) for key, each in cast("dict[str, Any]", item).items()}
        else:
            schema[name] = item if name in _DATA else _said(item, objects)
    if isinstance(
        options := schema.get("oneOf"), list
    ):  # beside a type llguidance looks at what a reference stands for
        typed = {"type": "object"}
        schema["oneOf"] = [each | typed if _reference(each) in objects else each for each in cast("list[Any]", options)]
    for name, known in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if name in schema and (schema[name] is True or not _IN_PLACE & schema.keys()):
            schema.setdefault(known, schema.pop(name))
    if schema.get("propertyNames") in (True, {}, {"type": "string"}):
        del schema["propertyNames"]
    for name, beside in _BESIDE:  # what says nothing alone
        if beside not in schema:
            schema.pop(name, None)
    if schema.get("uniqueItems") is False or schema.get("maxItems", 2) in (0, 1):
        schema.pop("uniqueItems", None)
    needs: list[dict[str, Any]] = []
    for name in ("dependentRequired", "dependentSchemas", "dependencies"):
        if isinstance(schema.get(name), dict):
            needs += [_if_present(key, needed) for key, needed in schema.pop(name).items()]
    return {**schema, "allOf": [*schema.get("allOf", []), *needs]} if needs else schema


def _reference(schema: Any) -> str | None:
    """Return what a schema refers to, if it says no more."""
    return schema.get("$ref") if isinstance(schema, dict) and len(cast("dict[str, Any]", schema)) == 1 else None


def _if_present(key: str, needed: Any) -> dict[str, Any]:
    """Return the schema of what lacks a key, or has what it needs: other keys, or a schema to follow."""
    more: list[Any] = [{"required": needed}] if isinstance(needed, list) else [needed]
    present = {"allOf": [{"type": "object", "required": [key]}, *more]}
    others = {"type": ["null", "boolean", "number", "string", "array"]}
    return {"anyOf": [others, {"type": "object", "properties": {key: False}}, present]}
