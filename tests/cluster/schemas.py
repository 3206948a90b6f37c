"""Kubernetes objects against the schemas of their kinds, as strictly as an API server does."""

import functools
import gzip
import json
from pathlib import Path

import jsonschema

_KUBERAY = ("RayCluster", "RayJob", "RayService")


def strict(schema):
    """Return a schema that refuses all fields that it doesn't name, as a strict API server does."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    named = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if named and not schema.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    return closed


@functools.cache
def validator(kind):
    folder, name = ("kuberay", f"{kind.lower()}s") if kind in _KUBERAY else ("kubernetes_schemas", kind.lower())
    file = Path(__file__).parent / folder / f"{name}.json.gz"
    assert file.exists(), f"{file.parent} has no schema of a {kind}"
    return jsonschema.Draft202012Validator(strict(json.loads(gzip.decompress(file.read_bytes()))))


def check(manifest):
    """Raise `jsonschema.ValidationError` if an object isn't what its kind's schema allows."""
    validator(manifest["kind"]).validate(manifest)
