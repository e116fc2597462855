"""Where the weights of a base come from, and how they are held: dtype, device, 8 and 4 bits.

`base_weights`, `base_config` and `generation_config` are the only readers of a base; another form of base belongs into them.
Quantised storage is bitsandbytes' (NF4 with double quantisation for 4 bits). Gates and LoRA factors stay fp32 whatever the
base is.
"""

from __future__ import annotations

import copy
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig, GgufConfig

from loragate.errors import ConfigError, LoragateError
from loragate.gates.quantised import EIGHT_BIT, FOUR_BIT, NONE, describe_storage, keep_unpacked, quantization_of_config
from loragate.models import gguf
from loragate.models.place import ModelRef, resolve
from loragate.models.settings import Loading


def torch_device(how: Loading) -> str:
    """The device; "auto" is CUDA, then MPS, then the CPU. Each of several processes on a machine has its own GPU.

    Raises:
        ConfigError: for a device that is not usable here.
    """
    if how.device != "auto":
        try:
            torch.empty(0, device=how.device)
        except (RuntimeError, AssertionError) as error:  # a torch without CUDA asserts
            raise ConfigError(
                f"--device {how.device}: not usable here ({str(error).splitlines()[0]}); try --device cpu"
            ) from error
        return how.device
    if torch.cuda.is_available():
        # as torchrun and accelerate tell a process which of the machine's GPUs is its own
        several = int(os.environ.get("WORLD_SIZE") or 1) > 1
        return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if several else "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def torch_dtype(how: Loading) -> Any:
    """The dtype of the base, or of what stays unquantised, which is also what 4-bit layers compute in.

    "auto" is the checkpoint's own on a GPU and float32 on the CPU. With quantised weights it is bfloat16, or float16 on
    GPUs without it; float32 for 4 bits on a CPU.
    """
    how.require_possible()
    if how.dtype != "auto":
        return getattr(torch, how.dtype)
    device = torch_device(how)
    if how.quantization == NONE:
        return torch.float32 if device == "cpu" else "auto"
    if device == "cpu":  # where 4 bits are unpacked for a product in any dtype, and 8 bits are not multiplied in fp32
        return torch.float32 if how.quantization == FOUR_BIT else torch.bfloat16
    return torch.bfloat16 if not device.startswith("cuda") or torch.cuda.is_bf16_supported() else torch.float16


def pretrained(base: ModelRef) -> tuple[str, dict[str, Any]]:
    """What `from_pretrained` of transformers is given for a base: its name, and what stands beside it.

    Raises:
        LoragateError: for a GGUF file that cannot be read.
    """
    if not base.gguf:
        return base.name, {"revision": base.revision} if base.revision else {}
    path = gguf.local_file(base)
    gguf.require_readable(path)
    return str(gguf.folder_of(path)), {"gguf_file": path.name}


def base_config(base: ModelRef, trust: bool = False) -> Any:
    """The transformers configuration of a base."""
    name, beside = pretrained(base)
    if base.gguf:
        changed = Path(name, beside["gguf_file"]).stat().st_mtime_ns
        # a copy: loading a model writes into its configuration
        return copy.deepcopy(_gguf_config(name, beside["gguf_file"], trust, changed))
    return AutoConfig.from_pretrained(name, trust_remote_code=trust, **beside)


@cache
def _gguf_config(name: str, file: str, trust: bool, _changed: int) -> Any:
    """Kept, as transformers reads all of a GGUF file's header for it, which takes seconds."""
    return AutoConfig.from_pretrained(name, trust_remote_code=trust, gguf_file=file)


def read_config(name: str, *, trust: bool = False) -> Any:
    """The transformers configuration behind a hub id (owner/name[@revision]), a model folder or a config.json.

    Raises:
        ConfigError: for a name that leads nowhere, and a file that cannot be read; LoragateError where the hub gives none.
    """
    path = Path(name)
    try:
        if path.suffix == ".json" and path.is_file():
            return AutoConfig.from_pretrained(name, trust_remote_code=trust)
        return base_config(resolve(name, expect="base", what="model").base, trust)
    except (OSError, ValueError, KeyError, TypeError) as error:
        refusal = ConfigError if path.exists() else LoragateError
        raise refusal(f"the configuration of {name} cannot be read: {str(error).splitlines()[0]}") from error


def generation_config(base: ModelRef, trust: bool = False) -> Any:
    """The base's generation settings or, where it has no such file, what transformers derives from its configuration."""
    try:
        if not base.gguf:  # whose folder may hold other models
            name, beside = pretrained(base)
            return GenerationConfig.from_pretrained(name, **beside)
    except OSError:  # how transformers says that there is no such file
        pass
    return GenerationConfig.from_model_config(base_config(base, trust))


def base_weights(base: ModelRef, **arguments: Any) -> Any:
    """A causal LM with its weights; `arguments` are those of `AutoModelForCausalLM.from_pretrained`.

    Raises:
        ConfigError: for a GGUF file that is to be quantised anew.
    """
    name, beside = pretrained(base)
    if base.gguf:
        if arguments.get("quantization_config") is not None:
            gguf.refuse(base, "another quantisation")
        # weights that stayed in GGUF's blocks could not be fingerprinted as those of another file of the same model
        arguments["quantization_config"] = GgufConfig(dequantize=True)
        arguments.setdefault("config", base_config(base, bool(arguments.get("trust_remote_code"))))
    model = AutoModelForCausalLM.from_pretrained(name, **beside, **arguments)
    if base.gguf:  # transformers would record the folder of the file, or a temporary one
        model.name_or_path = model.config._name_or_path = base.lasting
    return model


def open_base(base: ModelRef, how: Loading, host_memory: bool = False) -> Any:
    """A causal LM on its device, in eval mode, its errors those of transformers; in 8 or 4 bits where that is asked for.

    Quantised weights are put on their device while they are loaded and are not moved afterwards.

    Args:
        host_memory: load the base into host memory instead of the device, from where its shards go to the devices.

    Raises:
        ConfigError: if a quantisation is asked for and the checkpoint is quantised already.
    """
    arguments: dict[str, Any] = {"dtype": torch_dtype(how), "trust_remote_code": how.trust_remote_code}
    device = "cpu" if host_memory else torch_device(how)
    if base.gguf and arguments["dtype"] == "auto":
        arguments["dtype"] = torch.bfloat16  # the file names none, and transformers would take fp32
    stored = quantization_of_config(base_config(base, how.trust_remote_code))
    if stored != NONE and how.quantization != NONE:
        raise ConfigError(f"{base.name} is {describe_storage(stored)} already; leave --quantization out")
    if how.quantization != NONE:
        arguments["quantization_config"] = _bitsandbytes(how)
    placed = stored != NONE or how.quantization != NONE  # packed weights cannot be moved once they are loaded
    if placed:
        # "cuda" means the process's own GPU, as it does elsewhere in torch; a device map would read it as the first
        arguments["device_map"] = {"": torch.cuda.current_device() if device == "cuda" else device}
    model = base_weights(base, **arguments)
    keep_unpacked(model)
    return model.eval() if placed else model.to(device).eval()


def _bitsandbytes(how: Loading) -> Any:
    if how.quantization == EIGHT_BIT:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch_dtype(how),
    )
