"""What is asked of a model's loading: settings alone, which need no torch. `loading.py` acts on them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

from loragate.errors import ConfigError
from loragate.validate import check_fields


@dataclass(frozen=True)
class Loading:
    """How a model is loaded.

    Attributes:
        dtype: of the base; auto takes the checkpoint's, on a CPU float32 unless --precision is in 16 bits.
        device: auto, cpu, cuda, cuda:1 or mps.
        quantization: storage of the base (bitsandbytes, with the engine transformers); trained parameters stay fp32.
        trust_remote_code: run model code from the hub.
        chat_template: jinja file to use instead of the tokenizer's template.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    quantization: Literal["none", "8bit", "4bit"] = "none"
    trust_remote_code: bool = False
    chat_template: str = ""

    def __post_init__(self) -> None:
        check_fields(self)

    def check_supported(self) -> None:
        """Refuse what is not installed or contradictory, before anything is loaded.

        Raises:
            ConfigError: naming the setting, and what to change.
        """
        if self.quantization == "8bit" and self.dtype == "float32":
            raise ConfigError(
                "--quantization 8bit with --dtype float32: 8-bit layers multiply in float16, so float32 would be a false "
                "promise; leave --dtype out, or use --quantization 4bit"
            )
        if self.quantization != "none" and importlib.util.find_spec("bitsandbytes") is None:
            raise ConfigError(
                f"--quantization {self.quantization} needs bitsandbytes, which is not installed; pip install bitsandbytes"
            )
