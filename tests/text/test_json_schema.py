"""JSON schemas in words that llguidance knows: each keyword is followed exactly, or refused by its name."""

import json
import random
from pathlib import Path

import jsonschema
import pytest
from benchmarks.json_schema_suite import Checker, Found, check, groups
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import RequestError
from ridgeline.text.json_schema import MAX_MULTIPLE, followed_schema

FOLLOWED: dict[str, tuple[object, list[object], list[object]]] = {  # schema, valid values, invalid ones
    "true": (True, [1, "a", [{}]], []),
    "type": ({"type": ["integer", "null"]}, [1, 2.0, None], ["1", 1.5, True]),
    "enum": ({"enum": ["a", 1, None, [True], {"b": 2}]}, ["a", 1, [True], {"b": 2}], ["b", 2, [], {}]),
    "const": ({"const": {"a": [1]}}, [{"a": [1]}], [{"a": []}, 1]),
    "const of a float": ({"const": 2.0}, [2, 2.0], [3, "2"]),
    "minimum": ({"type": "integer", "minimum": 2, "exclusiveMaximum": 5}, [2, 4], [1, 5]),
    "multipleOf": ({"type": "number", "multipleOf": 0.25}, [0.25, 1.5, -3], [0.1]),
    "strings": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü"], ["a", "abcd"]),
    "pattern": ({"type": "string", "pattern": "b+c"}, ["abbcd", "bc"], ["ac"]),
    "format": ({"type": "string", "format": "date"}, ["2026-11-24"], ["yesterday"]),
    "items": (
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        [[1], [1, 2]],
        [[], ["a"]],
    ),
    "prefixItems": ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, [[1], []], [[2], [1, 1]]),
    "properties": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        [{"a": 1, "b": "c"}, {}],
        [{"a": "b"}, {"b": 1}],
    ),
    "required": ({"type": "object", "required": ["a", "b"]}, [{"a": 1, "b": 2}], [{"a": 1}]),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^n": {"type": "integer"}}, "additionalProperties": False},
        [{"n1": 2}, {}],
        [{"n1": "x"}, {"m": 1}],
    ),
    "minProperties": ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    "maxProperties": ({"type": "object", "maxProperties": 1}, [{"a": 1}, {}], [{"a": 1, "b": 2}]),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, [3], [2, "a"]),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, [3, "a"], ["ab", None]),
    "oneOf of references": (
        {
            "$defs": {
                "cat": {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
                "dog": {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]},
            },
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            "discriminator": {"propertyName": "kind"},
        },
        [{"kind": "cat"}, {"kind": "dog"}],
        [{"kind": "cow"}, {}],
    ),
    "$ref": (
        {"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}, "type": "object"}}, "$ref": "#/$defs/n"},
        [{}, {"next": {"next": {}}}],
        [1, {"next": 1}],
    ),
    "dependentRequired": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        [{}, {"b": 1}, {"a": 1, "b": 1}],
        [{"a": 1}],
    ),
    "dependentSchemas": (
        {"type": "object", "dependentSchemas": {"a": {"properties": {"b": {"type": "integer"}}}}},
        [{}, {"b": "x"}, {"a": 1, "b": 1}],
        [{"a": 1, "b": "x"}],
    ),
    "propertyNames": ({"type": "object", "propertyNames": {"type": "string"}}, [{"a": 1}, {}], [1]),
    "unevaluatedProperties": (
        {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
        [{"a": 1}, {}],
        [{"b": 1}],
    ),
    "unevaluatedItems": ({"type": "array", "prefixItems": [{}], "unevaluatedItems": False}, [[1], []], [[1, 2]]),
    "uniqueItems of one": ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 2]]),
    "what says nothing alone": ({"type": "null", "then": False, "else": False, "maxContains": 0}, [None], [1]),
    "dependencies": (
        {"type": "object", "dependencies": {"a": ["b"], "c": {"required": ["d"]}}},
        [{}, {"a": 1, "b": 1}, {"c": 1, "d": 1}],
        [{"a": 1}, {"c": 1}],
    ),
    "keywords of others": ({"type": "integer", "minLength": 3, "x-of-mine": 1, "title": "n"}, [1], ["abc"]),
}
REFUSED: dict[str, tuple[object, str]] = {
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "contains": ({"type": "array", "contains": {"const": 1}}, "contains"),
    "unevaluatedProperties": (
        {"anyOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
        "unevaluatedProp",
    ),
    "if": ({"if": {"const": 1}, "then": {"type": "string"}}, "if"),
    "not": ({"not": {"const": "a"}}, "not"),
    "propertyNames": ({"propertyNames": {"pattern": "^a"}}, "propertyNames"),
    "oneOf": ({"oneOf": [{"minimum": 1}, {"maximum": 5}]}, "oneOf"),
    "$dynamicRef": ({"$dynamicRef": "#a"}, "dynamicRef"),
    "a remote reference": ({"$ref": "https://example.com/schema"}, "example.com"),
    "format": ({"type": "string", "format": "iri"}, "iri"),
    "false": (False, "Unsatisfiable"),
    "look-around": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    "keys that may be repeated": ({"type": "object", "minProperties": 2}, "minProperties 2"),
    "numbers that are no doubles": ({"const": 2**53 + 1}, "const holds a number beyond"),
    "multiples together": ({"allOf": [{"multipleOf": 100_003}, {"multipleOf": 100_019}]}, "multipleOf 100019"),
    "a fine multiple": ({"multipleOf": 1e-11}, "multipleOf"),
    "no JSON": ({"const": float("nan")}, "not JSON compliant"),
    "a circle": ({"$ref": "#"}, "json"),
    "options": ({"x-guidance": {"lenient": True}}, "x-guidance"),
}


@pytest.fixture(scope="module")
def checker() -> Checker:
    return Checker(timeout_s=30.0)  # a busy machine is not a slow schema


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_a_keyword_says_is_followed(checker: Checker, name: str) -> None:
    schema, valid, invalid = FOLLOWED[name]
    tests = [
        {"description": str(data), "data": data, "valid": at < len(valid)} for at, data in enumerate([*valid, *invalid])
    ]
    found = Found()
    check(checker, found, name, schema, tests, num_outputs=4)
    assert found.counts["compiled"] == 1, found.refusals
    assert not found.wrong and not found.narrow
    if not isinstance(schema, bool):
        dialect = jsonschema.Draft7Validator if name == "dependencies" else jsonschema.Draft202012Validator
        says = dialect(schema).is_valid
        assert all(says(data) for data in valid)
        assert "format" in schema or not any(says(data) for data in invalid)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_named(checker: Checker, name: str) -> None:
    schema, words = REFUSED[name]
    with pytest.raises(RequestError) as refused:
        checker.compiled(schema)
    assert words in str(refused.value) and refused.value.code == "unsupported_schema", refused.value


def test_multiples_are_as_exact_as_they_are_read(checker: Checker) -> None:
    for step in (3, 0.01, 100, 7.5, 1000):
        grammar = checker.compiled({"type": "number", "multipleOf": step})
        for number in (0, 3, -3, 1.25, 0.07, 15, 100, 3000, 22.5):
            exact = jsonschema.Draft202012Validator({"multipleOf": step}).is_valid(number)
            assert checker.takes(grammar, number) == (exact or (number == 0.07 and step == 0.01)), (step, number)
    with pytest.raises(RequestError):
        followed_schema({"multipleOf": MAX_MULTIPLE + 1})


NAMES = st.sampled_from(["a", "b", "cd"])
SCALARS = st.none() | st.booleans() | st.integers(-99, 99) | st.sampled_from(["", "a", "xy", 'q"', "ü"])
LEAVES = st.one_of(
    st.booleans(),
    st.builds(dict, type=st.sampled_from(["null", "boolean", "integer", "number", "string"])),
    st.builds(dict, enum=st.lists(SCALARS, min_size=1, max_size=4, unique_by=repr)),
    st.builds(dict, const=SCALARS),
    st.builds(dict, type=st.just("integer"), minimum=st.integers(-50, 50)),
    st.builds(dict, exclusiveMaximum=st.integers(-50, 50)),
    st.builds(dict, type=st.just("number"), multipleOf=st.sampled_from([2, 5, 0.5, 0.01])),
    st.builds(dict, type=st.just("string"), minLength=st.integers(0, 3), maxLength=st.integers(2, 6)),
    st.builds(dict, pattern=st.sampled_from(["^a", "b$", "[0-9]+", "^(x|yz)*$"])),
    st.builds(dict, required=st.lists(NAMES, max_size=2, unique=True)),
)


def _of(schemas: st.SearchStrategy) -> st.SearchStrategy:
    several = st.lists(schemas, min_size=1, max_size=3)
    by_name = st.dictionaries(NAMES, schemas, max_size=3)
    return st.one_of(
        st.builds(dict, type=st.just("array"), items=schemas, minItems=st.integers(0, 2), maxItems=st.integers(2, 3)),
        st.builds(dict, prefixItems=several, items=schemas),
        st.builds(dict, type=st.just("object"), properties=by_name, additionalProperties=schemas),
        st.builds(dict, properties=by_name, required=st.lists(NAMES, max_size=2, unique=True)),
        st.builds(dict, type=st.just("object"), propertyNames=schemas),
        st.builds(dict, type=st.just("object"), dependentRequired=st.dictionaries(NAMES, st.lists(NAMES, max_size=2))),
        st.builds(dict, dependentSchemas=st.dictionaries(NAMES, schemas, max_size=2)),
        st.builds(dict, properties=by_name, unevaluatedProperties=schemas),
        st.builds(dict, contains=schemas, minContains=st.integers(0, 2)),
        *(st.builds(lambda options, name=name: {name: options}, several) for name in ("allOf", "anyOf", "oneOf")),
        st.builds(lambda schema: {"not": schema}, schemas),
        st.builds(lambda *parts: dict(zip(("if", "then", "else"), parts, strict=True)), schemas, schemas, schemas),
    )


SCHEMAS = st.recursive(LEAVES, _of, max_leaves=8).filter(lambda schema: isinstance(schema, dict))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_any_schema_is_followed_or_refused(checker: Checker, data: st.DataObject, schema: dict, seed: int) -> None:
    """What it takes is valid: values of all kinds, and outputs at random. Most valid ones are taken."""
    found = Found()
    valid = jsonschema.Draft202012Validator(schema).is_valid
    values = data.draw(
        st.lists(
            st.recursive(
                SCALARS,
                lambda each: st.lists(each, max_size=2) | st.dictionaries(NAMES, each, max_size=3),
                max_leaves=4,
            ),
            max_size=8,
        )
    )
    tests = [{"description": json.dumps(value), "data": value, "valid": valid(value)} for value in values]
    check(checker, found, "drawn", schema, tests, num_outputs=2)
    assert not found.wrong, found.wrong


def test_schemas_by_name_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "corpus.json").write_text(json.dumps({"one": {"type": "null"}, "two": False}))
    assert [(name, schema) for name, schema, _ in groups(tmp_path)] == [
        ("corpus.json: one", {"type": "null"}),
        ("corpus.json: two", False),
    ]
    (tmp_path / "corpus.json").write_text(json.dumps([{"one": {"type": "null"}}, {"two": False}]))
    assert [name for name, _, _ in groups(tmp_path)] == ["corpus.json: one", "corpus.json: two"]


def test_an_output_at_random_is_judged(checker: Checker) -> None:
    """The judge finds what is wrong, if the grammar is another one than it is told."""
    grammar = checker.compiled({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 1})
    checker_of = Found()
    texts = {checker.output(grammar, random.Random(seed)) for seed in range(20)} - {None}
    assert texts and all(isinstance(json.loads(text)[0], int) for text in texts)
    assert not checker_of.wrong
