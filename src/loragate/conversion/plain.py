"""A base in one GGUF file as a plain model folder: config.json, safetensors, tokenizer. vLLM and merging tools need that form."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from loragate.errors import ConfigError
from loragate.files import file_sha256, new_folder, require_new, write_json
from loragate.models import Loading, gguf, open_model, resolve

ORIGIN = "converted_from.json"


def write_plain_base(
    base: str, folder: str | Path, dtype: Literal["float32", "bfloat16", "float16"] = "float32"
) -> Path:
    """Unpack a GGUF file into a folder that `from_pretrained` of transformers reads.

    The weights are those that every command computes with when it is given the file itself, so that gates and adapters fit both.

    Args:
        base: the file, or owner/name/FILE.gguf on the hub.
        folder: new or empty.
        dtype: float32, which loses nothing, bfloat16 or float16.

    Returns:
        The folder. `converted_from.json` in it names the file, its size and its sha256.

    Raises:
        ConfigError: for a base that is no GGUF file, or a folder that is not empty.
        LoragateError: for a file that cannot be read.
    """
    folder = Path(folder)
    require_new(folder)
    place = resolve(base, expect="base")
    if not place.base.gguf:
        raise ConfigError(f"{base} is no GGUF file; a model folder is plain already")
    loaded = open_model(place, Loading(dtype=dtype, device="cpu"))
    file = gguf.local_file(place.base)
    with new_folder(folder) as partial:
        loaded.model.save_pretrained(str(partial))
        loaded.tokenizer.save_pretrained(str(partial))
        origin = {"base": str(place.base), "file": file.name, "bytes": file.stat().st_size, "sha256": file_sha256(file)}
        write_json(partial / ORIGIN, origin)
    return folder
