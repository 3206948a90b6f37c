"""YAML texts as values of dataclasses; what is wrong is said with what to write instead."""

from collections.abc import Mapping
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


def parsed(text: str) -> Any:
    """Return what a YAML text says; raises `ValueError` for no YAML, and for a key that is there twice."""
    try:
        return yaml.load(text, _UniqueKeys)
    except yaml.YAMLError as error:
        raise ValueError(f"no YAML: {' '.join(str(error).split())}") from None


def validated(kind: type[T], content: Any, remedies: Mapping[Any, str]) -> T:
    """Return content as a value of a (data)class; raises `ValueError` naming the first thing that is wrong.

    remedies  what to write instead: for the class itself, and by the last key on the way to what is wrong
    """
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        wrong = error.errors()[0]
    keys, problem = [str(key) for key in wrong["loc"] if key != "[key]"], f"is {wrong['input']!r}"
    if wrong["type"] == "value_error":  # a validator's own, which names the remedy
        raise ValueError(f"{': '.join(keys)}: {wrong['ctx']['error']}")
    if wrong["type"].startswith("missing"):
        problem = "is missing"
    elif wrong["type"].startswith("unexpected"):
        problem = f"has the unknown key {keys.pop()!r}"
    remedy = next((remedies[key] for key in reversed(keys) if key in remedies), remedies[kind])
    raise ValueError(f"{': '.join(keys) or 'it'} {problem}; {remedy}")


class _UniqueKeys(yaml.SafeLoader):
    """YAML lets the last of two equal keys win, silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: list[Any] = []
        for key, _ in node.value:
            if (name := self.construct_object(key, deep=True)) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{name!r} is there twice", key.start_mark)
            seen.append(name)
        return super().construct_mapping(node, deep)
