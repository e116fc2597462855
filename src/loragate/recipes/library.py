"""Where recipe files are, and how one is read: strict YAML whose mistakes are named with file and key."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from loragate import strict_yaml
from loragate.errors import ConfigError, nearest

HERE = Path(__file__).parent
KINDS = ("domain", "backbone", "method", "variant")
WORDS = {
    "title": str,
    "about": str,
    "values": dict,
    "source": dict,
    "in": dict,
    "evaluations": list,
    "stages": list,
    "extends": list,
    "needs": dict,
    "tables": dict,
    "paper": bool,
    "launcher": str,
    "machine": str,
    "architecture": dict,
    "every": dict,
    "each": dict,
    "domain": str,
    "backbone": str,
    "method": str,
    "variant": str,
    "only": list,
}


@dataclass(frozen=True)
class Library:
    """The shipped files, and folders of the user's beside them.

    Attributes:
        folders: each may hold domain/, backbone/, method/ and variant/.
    """

    folders: tuple[Path, ...] = ()

    def names(self, kind: str) -> list[str]:
        """The names of one kind, shipped ones first; a file whose name begins with _ is only there to be extended."""
        return [name for name in self._files(kind) if not name.startswith("_")]

    def read(self, kind: str, name: str) -> dict[str, Any]:
        """One file.

        Raises:
            ConfigError: for an unknown name, or a file with a mistake.
        """
        files = self._files(kind)
        if name not in files:
            shown = self.names(kind)
            raise ConfigError(f"there is no {kind} '{name}'{nearest(name, shown) or '.'} Known: {', '.join(shown)}")
        return read_file(files[name])

    def common(self) -> dict[str, Any]:
        """What every recipe shares."""
        return read_file(HERE / "common.yaml")

    def _files(self, kind: str) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for folder in (HERE, *self.folders):
            for path in sorted((folder / kind).glob("*.yaml")):
                if path.stem in found:
                    raise ConfigError(
                        f"{path}: there is a {kind} called '{path.stem}' already ({found[path.stem]}); rename one of them"
                    )
                found[path.stem] = path
        return found


def library(folders: str | None) -> Library:
    """The library with the folders of `--recipes-dir`, separated by commas.

    Raises:
        ConfigError: for a folder that is not there or holds no recipe files.
    """
    paths = tuple(Path(part.strip()).expanduser() for part in (folders or "").split(",") if part.strip())
    for path in paths:
        if not any((path / kind).is_dir() for kind in KINDS):
            raise ConfigError(f"--recipes-dir {path}: expected a folder that holds {', '.join(f'{k}/' for k in KINDS)}")
    return Library(paths)


def read_file(path: Path) -> dict[str, Any]:
    """The content of a recipe file; its top-level keys are the known words and stage names.

    Raises:
        ConfigError: for a file that cannot be read, or a value of the wrong kind; names file and key.
    """
    return _read(path, path.stat().st_mtime_ns if path.is_file() else 0)


@lru_cache(maxsize=256)
def _read(path: Path, changed: int) -> dict[str, Any]:
    try:
        content = strict_yaml.load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected keys and values, found {type(content).__name__}")
    for key, value in content.items():
        kind = WORDS.get(key, dict)
        if not isinstance(value, kind):
            raise ConfigError(
                f"{path}: '{key}' is {value!r}, expected {_kind(kind)}"
                + (nearest(str(key), WORDS) if key not in WORDS else "")
            )
    return content


def _kind(kind: type) -> str:
    return {str: "text", dict: "keys and values", list: "a list", bool: "true or false"}[kind]
