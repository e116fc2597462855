"""From a name, or a file of the user's, to a recipe: layers over one another, the later one wins.

The order is common, domain, backbone, the backbone in this domain, method (after what it extends), the method in this
domain/backbone, variant, and last the user's file.

A stage may say `like: other`, and has that stage's values but those it drops; or `take: {other: [options]}`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loragate.errors import ConfigError, nearest
from loragate.recipes.library import HERE, WORDS, Library, read_file
from loragate.recipes.recipe import REFERENCE, SOURCES, Recipe, Stage, filled

SUFFIXES = (".yaml", ".yml")
Layer = dict[str, Any]


def every_name(library: Library, *, variants: bool = True) -> Iterator[str]:
    """The names of all recipes that can be composed."""
    for domain in library.names("domain"):
        for backbone in library.names("backbone"):
            for method in library.names("method"):
                name = f"{domain}/{backbone}/{method}"
                yield name
                for variant in _variants(library) if variants else ():
                    if method in _variant_layer(library, variant).get("only", [method]):
                        yield f"{name}/{variant}"


def read_recipe(name: str, library: Library) -> Recipe:
    """A recipe by name, or by the path of a YAML file.

    Raises:
        ConfigError: for an unknown name, or a file with a mistake.
    """
    if name.endswith(SUFFIXES):
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"there is no recipe file {path}")
        return _own(path, library)
    parts = name.strip("/").split("/")
    if len(parts) not in (3, 4):
        raise ConfigError(
            f"'{name}' is no recipe: expected domain/backbone/method such as math/qwen2.5-math-1.5b/scale, or the path of a "
            "YAML file (loragate recipes list shows all names)"
        )
    return compose(library, *parts)


def compose(library: Library, domain: str, backbone: str, method: str, variant: str = "") -> Recipe:
    """The recipe of these files.

    Raises:
        ConfigError: naming what there is not.
    """
    layers, named = _layers(library, domain, backbone, method)
    name = f"{domain}/{backbone}/{method}"
    title = ", ".join(layer["title"] for layer in named)
    if not variant:
        tables = _tables(named[2], f"{domain}/{backbone}", bool(named[1].get("paper")))
        return dataclasses.replace(_build(name, layers), title=title, tables=tables)
    layer = _variant_layer(library, variant)
    if method not in layer.get("only", [method]):
        raise ConfigError(f"the variant '{variant}' is for {', '.join(layer['only'])}, not for '{method}'")
    recipe = _build(f"{name}/{variant}", [*layers, layer])
    tables = str(layer.get("tables", {}).get(f"{domain}/{backbone}", ""))
    return dataclasses.replace(recipe, title=f"{title}, {layer['title']}", tables=tables)


def _own(path: Path, library: Library) -> Recipe:
    """A recipe of the user's: composed by name and changed, or written out."""
    own = read_file(path)
    named = [own[kind] for kind in ("domain", "backbone", "method") if kind in own]
    if named and len(named) < 3:
        raise ConfigError(f"{path}: give domain, backbone and method together, or none of them and stages instead")
    if not named and "stages" not in own:
        raise ConfigError(f"{path}: expected domain, backbone and method, or stages (see loragate recipes show NAME)")
    layers: list[Layer] = []
    if named:
        layers, _ = _layers(library, *named)
        if "variant" in own:
            layers.append(_variant_layer(library, own["variant"]))
    recipe = _build(str(path), [*layers, {"source": {}, **own}], unmarked=f"yours: {path.name}")
    return dataclasses.replace(recipe, title=own.get("title", path.stem))


def _layers(
    library: Library, domain: str, backbone: str, method: str
) -> tuple[list[Layer], tuple[Layer, Layer, Layer]]:
    """(all layers in their order, the files that were named)."""
    ones, twos, methods = (
        list(_extended(library, kind, name))
        for kind, name in (("domain", domain), ("backbone", backbone), ("method", method))
    )
    own = []
    for layer in twos:
        for place, block in layer.get("in", {}).items():
            if place not in library.names("domain"):
                raise ConfigError(f"backbone '{backbone}': in.{place} names no domain{nearest(place, [domain])}")
            own += [block] if place == domain else []
    here = f"{domain}/{backbone}"
    last = [block for layer in methods for place, block in layer.get("in", {}).items() if place == here]
    return [library.common(), *ones, *twos, *own, *methods, *last], (ones[-1], twos[-1], methods[-1])


def _extended(library: Library, kind: str, name: str, above: tuple[str, ...] = ()) -> Iterator[Layer]:
    if name in above:
        raise ConfigError(f"{kind} '{name}' extends itself ({' → '.join((*above, name))})")
    layer = library.read(kind, name)
    for other in layer.get("extends", []):
        yield from _extended(library, kind, other, (*above, name))
    yield layer


def _build(name: str, layers: list[Layer], unmarked: str = "") -> Recipe:
    """Merge the layers and resolve everything but references to stages."""
    merged: dict[str, Any] = {}
    blocks: dict[str, dict[str, Any]] = {}
    marks: dict[str, str] = {}
    for layer in layers:
        for key, value in layer.items():
            if key not in WORDS:
                blocks.setdefault(key, {}).update(value)
            elif isinstance(value, dict) and key != "in":
                merged[key] = {**merged.get(key, {}), **value}
            else:
                merged[key] = value
        # what a layer sets anew has no longer the source that an earlier layer gave
        set_here = [f"{stage}.{option}" for stage, block in layer.items() if stage not in WORDS for option in block]
        for key in set_here:
            marks.pop(key, None)
        if unmarked and layer is layers[-1]:
            marks |= dict.fromkeys(set_here, unmarked)
        for key, text in layer.get("source", {}).items():
            if not isinstance(text, str) or not text.startswith(SOURCES):
                raise ConfigError(f"{name}: source of '{key}' is {text!r}; it begins with {', '.join(SOURCES)}")
            marks[key] = text
    known = {"templates": str(HERE / "templates"), "accelerate": str(HERE.parent / "training" / "accelerate")}
    values = known | {
        key: filled(str(value), lambda name: known.get(name, f"{{{name}}}"))
        for key, value in merged.get("values", {}).items()
    }
    plan = _plan(name, merged)
    stages = tuple(
        _stage(stage, command, _inherited(name, stage, blocks, marks), values, merged, marks)
        for stage, command in plan.items()
    )
    return Recipe(
        name=name,
        title=str(merged.get("title", "")),
        about=str(merged.get("about", "")),
        stages=stages,
        needs={key: text for key, text in merged.get("needs", {}).items() if key.partition(".")[0] in plan},
        launcher=filled(str(merged.get("launcher", "")), lambda key: values.get(key, f"{{{key}}}")),
        machine=str(merged.get("machine", "")),
        architecture=merged.get("architecture", {}),
    )


def _plan(name: str, merged: Layer) -> dict[str, str]:
    """{stage: command} in order, the domain's evaluations put in where the method asks for them."""
    plan: dict[str, str] = {}
    for entry in merged.get("stages", []):
        for part in merged.get("evaluations", []) if entry == "evaluations" else [entry]:
            found = {part: part} if isinstance(part, str) else part
            if not isinstance(found, dict) or len(found) != 1:
                raise ConfigError(f"{name}: a stage is a command, or one 'name: command', found {part!r}")
            ((stage, command),) = found.items()
            if not REFERENCE.fullmatch(f"{{{stage}}}"):
                raise ConfigError(
                    f"{name}: a stage is called {stage!r}; folders are called by it: a letter, then letters, digits, '_', '-', '.'"
                )
            if stage in plan:
                raise ConfigError(f"{name}: the stage '{stage}' stands there twice; give one of them a name of its own")
            plan[stage] = command
    if not plan:
        raise ConfigError(f"{name}: there are no stages")
    return plan


def _inherited(
    name: str, stage: str, blocks: dict[str, dict[str, Any]], marks: dict[str, str], seen: tuple[str, ...] = ()
) -> dict[str, tuple[Any, str]]:
    """{option: (value, mark)} of a stage, after what it is like."""
    block = blocks.get(stage, {})
    found: dict[str, tuple[Any, str]] = {}
    if "like" in block:
        other = block["like"]
        if other not in blocks or other in (*seen, stage):
            raise ConfigError(f"{name}: stage '{stage}' is like '{other}', which it cannot be{nearest(other, blocks)}")
        found = _inherited(name, other, blocks, marks, (*seen, stage))
        for option in block.get("drop", []):
            found.pop(option, None)
    for other, options in block.get("take", {}).items():
        there = _inherited(name, other, blocks, marks, (*seen, stage))
        found |= {option: there[option] for option in options if option in there}
    for option, value in block.items():
        if option not in ("like", "drop", "take"):
            found[option] = (value, marks.get(f"{stage}.{option}", ""))
    return found


def _stage(
    stage: str,
    command: str,
    found: dict[str, tuple[Any, str]],
    values: dict[str, str],
    merged: Layer,
    marks: dict[str, str],
) -> Stage:
    """The stage with the recipe's own values filled in; a value of `every` goes into each stage that has the option."""

    def resolve(name: str) -> str:
        if name in values:
            return values[name]
        return f"{{{name}}}"  # of a stage, for later

    for option, value in merged.get("every", {}).items():
        if option in found:
            found[option] = (value, marks.get(f"every.{option}", found[option][1]))
    taken, noted = {}, {}
    for option, (value, mark) in found.items():
        taken[option] = filled(value, resolve)
        whole = REFERENCE.fullmatch(value) if isinstance(value, str) else None
        noted[option] = marks.get(f"values.{whole.group(1)}", mark) if whole and whole.group(1) in values else mark
    return Stage(stage, command, {key: value for key, value in taken.items() if value != ""}, noted)


def _variants(library: Library) -> list[str]:
    """Names of variants; a file with `each` stands for several."""
    names = []
    for file in library.names("variant"):
        each = library.read("variant", file).get("each", {})
        names += [f"{file}-{value}" for values in each.values() for value in values] or [file]
    return names


def _variant_layer(library: Library, variant: str) -> Layer:
    """The layer of a variant; `each: {seed: [1, 2]}` in seed.yaml makes seed-1 and seed-2."""
    if variant in library.names("variant"):
        return library.read("variant", variant)
    for file in library.names("variant"):
        layer = library.read("variant", file)
        for option, values in layer.get("each", {}).items():
            for value in values:
                if variant == f"{file}-{value}":
                    kept = {key: content for key, content in layer.items() if key != "each"}
                    return {**kept, "title": f"{option} {value}", "every": {option: value}}
    known = _variants(library)
    raise ConfigError(f"there is no variant '{variant}'{nearest(variant, known) or '.'} Known: {', '.join(known)}")


def _tables(method: Layer, place: str, in_paper: bool) -> str:
    """Tables and figures of the paper: the method's own for this place, or for every backbone of the paper."""
    own = method.get("tables", {})
    return str(own.get(place) or (own.get(place.partition("/")[0], "") if in_paper else ""))
