"""YAML of the safe kind in which a repeated key is an error: the second value would silently win."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from loragate.errors import ConfigError


def read_mapping(path: Path, where: str = "") -> dict[Any, Any]:
    """The keys and values of a file; none where it is empty. ConfigError names the line of what is not YAML.

    `where` is what the file is called in errors, such as "--config FILE"; by default its path.
    """
    where = where or str(path)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{where}{line}: not valid YAML ({getattr(error, 'problem', error)})") from None
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{where}: expected keys and values, found {type(content).__name__}")
    return content or {}


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses a repeated key, of which plain YAML keeps the last."""

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
