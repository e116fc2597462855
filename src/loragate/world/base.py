"""The tiny base model that ships with the package.

157,504 parameters in the shape of Qwen2. `scripts/build_tiny_base.py` made the shipped one, and its folder says by which
recipe, seed and selection rule.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

SHIPPED_BASE = Path(__file__).parent / "assets" / "tiny-base"
"""The folder of the base that ships with the package; `recipe.json` in it tells how it was made and chosen."""


def load_base() -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """Load the shipped base; fp32, in eval mode, without a network."""
    model = Qwen2ForCausalLM.from_pretrained(SHIPPED_BASE, dtype=torch.float32, local_files_only=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(SHIPPED_BASE, local_files_only=True)
    return model.eval(), tokenizer
