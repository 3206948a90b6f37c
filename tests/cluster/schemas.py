"""Kubernetes objects against the schemas of their kinds, as strictly as an API server does."""

import functools
import gzip
import json
from pathlib import Path

import cel
import jsonschema

_KUBERAY = ("RayCluster", "RayJob", "RayService")


def strict(schema):
    """Return a schema that refuses all fields that it doesn't name, as a strict API server does."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    is_object = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if is_object and not schema.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    return closed


@functools.cache
def validator(kind):
    folder, name = ("kuberay", f"{kind.lower()}s") if kind in _KUBERAY else ("kubernetes_schemas", kind.lower())
    file = Path(__file__).parent / folder / f"{name}.json.gz"
    assert file.exists(), f"{file.parent} has no schema of a {kind}"
    return jsonschema.Draft202012Validator(strict(json.loads(gzip.decompress(file.read_bytes()))))


def check(manifest):
    """Raise `jsonschema.ValidationError` if an object isn't what its kind's schema and the rules in it allow."""
    schema = validator(manifest["kind"])
    schema.validate(manifest)
    for path, rule, value in rules_of(schema.schema, with_defaults(schema.schema, manifest)):
        if cel.evaluate(rule["rule"], {"self": value}) is not True:
            raise jsonschema.ValidationError(f"{path}: {rule.get('message', rule['rule'])}")


def with_defaults(schema, value):
    """Return a value with the defaults that an API server fills in before it evaluates rules."""
    if isinstance(value, list):
        return [with_defaults(schema.get("items", {}), item) for item in value]
    if not isinstance(value, dict):
        return value
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    filled = {name: part["default"] for name, part in properties.items() if "default" in part} | value
    others = others if isinstance(others, dict) else {}
    return {name: with_defaults(properties.get(name, others), item) for name, item in filled.items()}


def rules_of(schema, value, path=""):
    """Yield the rules in CEL that concern a value, each with what it is about; not those that compare with before."""
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" not in rule["rule"]:
            yield path, rule, value
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from rules_of(schema.get("items", {}), item, f"{path}[{number}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from rules_of(schema.get("properties", {}).get(name, {}), item, f"{path}.{name}")
