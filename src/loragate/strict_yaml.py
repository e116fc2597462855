"""YAML of the safe kind in which a repeated key is an error: the second value would silently win."""

from __future__ import annotations

from typing import Any

import yaml


def load(text: str) -> Any:
    """The content of a YAML text.

    Raises:
        yaml.YAMLError: for anything that is not valid, a repeated key among it.
    """
    return yaml.load(text, Loader=_Loader)


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # no name of anything; refused below as a key that cannot be one
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key.value}' appears twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)
