"""What a folder is, and what to say of a name that leads nowhere: the folder that was probably meant, from what lies around it.

Verdicts and tails of error messages; looks at names of files only and never reads one.
"""

from __future__ import annotations

import difflib
from pathlib import Path


def is_gated(folder: Path) -> bool:
    """Whether a folder is a gated adapter."""
    return (folder / "gate_config.json").is_file()


def is_adapter(folder: Path) -> bool:
    """Whether a folder is an adapter, gated or plain."""
    return is_gated(folder) or (folder / "adapter_config.json").is_file()


def beside(name: str) -> str:
    """The folder next to `name` whose name is most like it, or that their common folder is not there; empty if neither is so."""
    path = Path(name)
    try:
        folders = [item.name for item in path.parent.iterdir() if item.is_dir()]
    except OSError:
        return f"; its folder {path.parent} does not exist either"
    like = difflib.get_close_matches(path.name, folders, n=1, cutoff=0.6)
    return f"; did you mean '{path.parent / like[0]}'?" if like else ""


def inside(folder: Path) -> str:
    """What a folder without an adapter holds in its place: adapters one level below (checkpoints), or a whole model."""
    below = sorted(file.parent for file in folder.glob("*/adapter_config.json"))
    if below:
        newest = max(below, key=lambda place: (place / "adapter_config.json").stat().st_mtime)
        more = f" (the newest of {len(below)} there)" if len(below) > 1 else ""
        return f"; give the adapter in it, {newest}{more}"
    if (folder / "config.json").is_file():
        return "; it holds a whole model: loragate extract makes an adapter of a fine-tune"
    return ""
