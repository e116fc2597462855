"""What is asked of a model's loading: settings alone, which need no torch. `bases.py` acts on them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal, get_args

from loragate.errors import ConfigError, nearest

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "8bit", "4bit"]


@dataclass(frozen=True)
class Loading:
    """How a model is loaded.

    Attributes:
        dtype: of the base; auto takes the checkpoint's.
        device: auto, cpu, cuda, cuda:1 or mps.
        quantization: storage of the base (bitsandbytes, with the engine transformers); trained parameters stay fp32.
        trust_remote_code: run model code from the hub.
        chat_template: jinja file to use instead of the tokenizer's template.
    """

    dtype: Dtype = "auto"
    device: str = "auto"
    quantization: Quantization = "none"
    trust_remote_code: bool = False
    chat_template: str = ""

    def check(self) -> None:
        """Refuse what is unknown, not installed or contradictory, before anything is loaded.

        Raises:
            ConfigError: naming the setting, and what to change.
        """
        for name, known in (("dtype", get_args(Dtype)), ("quantization", get_args(Quantization))):
            if (found := getattr(self, name)) not in known:
                raise ConfigError(f"--{name} {found}: expected {', '.join(known)}{nearest(found, known)}")
        if self.quantization == "8bit" and self.dtype == "float32":
            raise ConfigError(
                "--quantization 8bit with --dtype float32: 8-bit layers multiply in float16, so float32 would be a false "
                "promise; leave --dtype out, or use --quantization 4bit"
            )
        if self.quantization != "none" and importlib.util.find_spec("bitsandbytes") is None:
            raise ConfigError(
                f"--quantization {self.quantization} needs bitsandbytes, which is not installed; pip install bitsandbytes"
            )
