"""Read YAML texts as values of dataclasses. Errors say what is wrong and what to write instead."""

from collections.abc import Mapping
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


def parse_yaml(text: str) -> Any:
    """Return the content of a YAML text.

    Raises:
        ValueError: The text isn't YAML, or a mapping has the same key twice.
    """
    try:
        return yaml.load(text, _UniqueKeys)
    except yaml.YAMLError as error:
        raise ValueError(f"it isn't valid YAML: {' '.join(str(error).split())}") from None


def validate(kind: type[T], content: Any, remedies: Mapping[Any, str]) -> T:
    """Return content as a value of a class, usually a dataclass.

    Args:
        remedies: What to write instead of what is wrong, by the last key on the way to it that has a remedy; the class
            itself is the key for all else.

    Raises:
        ValueError: The content doesn't fit; the message names the first problem and its remedy.
    """
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        wrong = error.errors()[0]
    keys, problem = [str(key) for key in wrong["loc"] if key != "[key]"], f"is {wrong['input']!r}"
    if wrong["type"] == "value_error":  # It comes from a validator of ours, and names the remedy.
        raise ValueError(f"{': '.join(keys)}: {wrong['ctx']['error']}")
    if wrong["type"].startswith("missing"):
        problem = "is missing"
    elif wrong["type"].startswith("unexpected"):
        problem = f"has the unknown key {keys.pop()!r}"
    remedy = next((remedies[key] for key in reversed(keys) if key in remedies), remedies[kind])
    raise ValueError(f"{': '.join(keys) or 'it'} {problem}; {remedy}")


class _UniqueKeys(yaml.SafeLoader):
    """Refuses equal keys in a mapping; YAML would silently let the last one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: list[Any] = []
        for key, _ in node.value:
            if (name := self.construct_object(key, deep=True)) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{name!r} appears twice; remove one", key.start_mark
                )
            seen.append(name)
        return super().construct_mapping(node, deep)
