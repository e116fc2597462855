"""The tiny base model that ships with the package, and how such a base is kept and loaded.

157,504 parameters in the shape of Qwen2. `scripts/build_tiny_base.py` made the shipped one, and its folder says by which
recipe, seed and selection rule.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from loragate.errors import DataError


def save_base(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: str | Path) -> None:
    """Write the model (safetensors), its configurations and the tokenizer into a folder, which is made if needed."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def shipped_base_folder() -> Path:
    """The folder of the base that ships with the package; `recipe.json` in it tells how it was made and chosen."""
    return Path(__file__).parent / "assets" / "tiny-base"


def load_base(folder: str | Path | None = None) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """Load a base that `save_base` wrote, or the shipped one; fp32, in eval mode, without a network.

    Raises:
        DataError: the folder lacks the weights, the configuration or the tokenizer.
    """
    path = shipped_base_folder() if folder is None else Path(folder)
    missing = [name for name in ("config.json", "model.safetensors", "tokenizer.json") if not (path / name).is_file()]
    if missing:
        raise DataError(
            f"found no {', '.join(missing)} in '{path}'; expected the folder of a tiny base: "
            "scripts/build_tiny_base.py makes one; leave the folder out to load the shipped base"
        )
    model = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    return model.eval(), tokenizer
