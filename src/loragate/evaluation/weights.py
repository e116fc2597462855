"""Whether the folders of an evaluation's models still hold the weights that its first answers came from.

A folder keeps its name when it is trained into again; what it holds is told by the settings and tensors in it. Of a large
file only samples are read, as training changes a weight file everywhere. Loads nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

SETTINGS = ("config.json", "adapter_config.json", "gate_config.json")
SUFFIXES = (".safetensors", ".bin")
PIECE, PIECES = 1 << 20, 16


def weights_of(models: Mapping[str, str]) -> dict[str, str]:
    """{kind: SHA-256 (hex) over settings and weight files} of the models that are folders here; hub ids are left out."""
    return {kind: _folder_sha256(Path(place)) for kind, place in models.items() if Path(place).is_dir()}


def _folder_sha256(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and (path.name in SETTINGS or path.suffix in SUFFIXES):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for place in range(0, size, max(PIECE, size // PIECES)):
                    file.seek(place)
                    digest.update(file.read(PIECE))
    return digest.hexdigest()
