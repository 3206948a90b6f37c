"""YAML that people read: texts of several lines are written as lines."""

from typing import Any

import yaml


def dump_yaml(content: Any, *, aliases: bool = False) -> str:
    """Return content as YAML, its keys in their order; with `aliases`, an object that occurs again is a reference."""
    dumper = _Dumper if aliases else _WithoutAliases
    text: str = yaml.dump(content, Dumper=dumper, sort_keys=False, width=120)
    return text


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such."""


class _WithoutAliases(_Dumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Write equal parts out."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)
_WithoutAliases.add_representer(str, _represent_text)
