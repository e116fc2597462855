"""What a vLLM's source says of every place that the plugin holds on to, without importing it.

    python scripts/vllm_contract.py FOLDER     # an unpacked wheel, or site-packages; prints {place: parameters} as JSON

Builds for a GPU cannot be installed everywhere; their Python source can be read anywhere:
`pip download --no-deps vllm==VERSION && unzip vllm-VERSION-*.whl '*.py' '*/METADATA'`. Exit status 1 where a place is gone or
lacks a parameter that the plugin relies upon. The answers for the supported versions are in tests/contract/vllm_hooks.json.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import re
import sys
from pathlib import Path

from loragate.serving.plugin import HOOKS

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Sources:
    """The modules of an unpacked wheel, parsed when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree = functools.lru_cache(maxsize=None)(self._tree)

    def _path(self, module: str) -> Path:
        path = self.folder.joinpath(*module.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def _tree(self, module: str) -> ast.Module:
        return ast.parse(self._path(module).read_text(encoding="utf-8"))

    def version(self) -> str:
        """By the wheel's own metadata."""
        metadata = min(self.folder.glob("vllm[-_]*.dist-info/METADATA"))
        return re.findall(r"^Version: (\S+)", metadata.read_text(encoding="utf-8"), re.MULTILINE)[0]

    def find(self, module: str, name: str) -> tuple[str, Definition]:
        """(module, definition) of a name, through imports from other modules of vLLM. Raises KeyError where there is none."""
        for node in ast.walk(self.tree(module)):
            if isinstance(node, Definition) and node.name == name and node in self.tree(module).body:
                return module, node
        for node in ast.walk(self.tree(module)):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(self._absolute(module, node), alias.name)
                    if alias.name == "*":
                        with contextlib.suppress(KeyError):
                            return self.find(self._absolute(module, node), name)
        raise KeyError(f"{module}:{name}")

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = module.split(".") if self._path(module).name == "__init__.py" else module.split(".")[:-1]
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *filter(None, [node.module])])

    def method(self, module: str, owner: str, name: str) -> Definition:
        """A method of a class or of one of its bases, in their order."""
        module, cls = self.find(module, owner)
        assert isinstance(cls, ast.ClassDef)
        for node in cls.body:
            if isinstance(node, Definition) and node.name == name:
                return node
        for base in cls.bases:
            if isinstance(base, ast.Name):
                try:
                    return self.method(module, base.id, name)
                except (KeyError, FileNotFoundError):
                    continue
        raise KeyError(f"{module}:{owner}.{name}")

    def parameters(self, place: str) -> list[str]:
        """Names of the parameters of `module:name` or `module:Class.name`, as `inspect.signature` has them."""
        module, _, path = place.partition(":")
        owner, _, name = path.rpartition(".")
        found = self.method(module, owner, name) if owner else self.find(module, name)[1]
        assert not isinstance(found, ast.ClassDef)
        given = found.args
        named = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
        return [one.arg for one in named if one is not None]


def contract(folder: Path) -> dict[str, list[str] | None]:
    """{place: its parameters}, None where it is gone."""
    sources = Sources(folder)
    found: dict[str, list[str] | None] = {}
    for place in HOOKS:
        try:
            found[place] = sources.parameters(place)
        except (KeyError, FileNotFoundError):
            found[place] = None
    return found


def main() -> int:
    folder = Path(sys.argv[1])
    found = contract(folder)
    written = {place: None if names is None else " ".join(names) for place, names in found.items()}
    print(json.dumps({Sources(folder).version(): written}, indent=2))
    lost = [place for place, needed in HOOKS.items() if not set(needed.split()) <= set(found[place] or ())]
    for place in lost:
        print(f"{place}: found {found[place]}, the plugin relies upon {HOOKS[place]!r}", file=sys.stderr)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
