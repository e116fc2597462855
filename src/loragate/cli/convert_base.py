"""`loragate convert-base`: a base in one GGUF file as a plain model folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loragate.cli.arguments import Command
from loragate.display import Display


@dataclass(frozen=True)
class ConvertBaseOptions:
    """Settings of `loragate convert-base`.

    Attributes:
        base: the GGUF file, or owner/name/FILE.gguf on the hub.
        out: folder for the model; must be new or empty.
        dtype: float32, which loses nothing, or bfloat16 or float16 for half the size.
    """

    base: str
    out: str
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


def run(options: ConvertBaseOptions) -> int:
    """Unpack, write, and say what for."""
    from loragate.conversion.plain import write_plain_base

    with Display().job("unpacking the weights"):
        folder = write_plain_base(options.base, options.out, options.dtype)
    size = sum(path.stat().st_size for path in Path(folder).iterdir())
    print(f"{folder}: a plain model folder, {size / 1e6:,.0f} MB")
    print(f"next: loragate serve GATED --base {folder}")
    return 0


COMMAND = Command(
    name="convert-base",
    options=ConvertBaseOptions,
    run=run,
    positional="base",
    examples=("loragate convert-base model.Q4_K_M.gguf --out base",),
)
