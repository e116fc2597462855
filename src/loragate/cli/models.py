"""Loading what a user names (base, adapter, gated folder, tokenizer), with errors a person can act on."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loragate.cli.arguments import comma_list
from loragate.cli.places import beside, inside, is_gated
from loragate.cli.quantization import base_arguments, dtype_for
from loragate.errors import ConfigError, LoragateError

DTYPES = ("auto", "float32", "bfloat16", "float16")


def require_free_out(folder: Path, resume: bool | None) -> None:
    """Refuse an output folder that holds anything but an unfinished run of ours; nothing is ever overwritten.

    Args:
        folder: --out.
        resume: --resume; None for a command that has no such flag.

    Raises:
        ConfigError: naming the folder, what is in it, and what to do.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder} is a file; give a folder")
    present = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if "gate_config.json" in present:
        raise ConfigError(f"--out {folder} already holds a gated adapter; choose another folder or remove it first")
    foreign = [name for name in present if name != "run"]
    if foreign:
        raise ConfigError(f"--out {folder} is not empty (it holds {', '.join(foreign[:3])}); choose another folder")
    if not resume and present and (work := _work_in(folder / "run")):
        on = "" if resume is None else "continue it with --resume, or "
        raise ConfigError(f"--out {folder} holds {work}; {on}choose another folder")
    if resume and not any((folder / "run" / name).is_file() for name in ("run.json", "config.yaml")):
        raise ConfigError(f"--resume: there is no unfinished run in {folder}; run the command without --resume")


def _work_in(run: Path) -> str:
    """What a run folder holds that another run must not be mixed with, in words; empty where no step was kept yet."""
    if any((run / "candidates").glob("*.json")):
        return "candidates of an earlier run"
    from loragate.training.run_folder import is_finished, last_checkpoint

    last = last_checkpoint(run)
    if is_finished(run, last):
        return "the log of a finished run"
    return f"an unfinished run ({Path(last).name})" if last is not None else ""


def require_not_an_adapter(name: str) -> None:
    """Refuse an adapter folder, or an unfinished run, where a base model is expected."""
    folder = Path(name)
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(f"{name} is an adapter, not a base model; give the base, or use it as --adapter")
    if (folder / "run" / "run.json").is_file() and not (folder / "config.json").is_file():
        raise ConfigError(f"{name} holds an unfinished run; finish it by repeating its command with --resume")


def require_reporters(names: str) -> None:
    """Refuse a logging integration that is not installed, before anything is loaded."""
    for name in comma_list(names):
        if name not in ("none", "all") and importlib.util.find_spec(name) is None:
            raise ConfigError(f"--report-to {name}: the package is not installed; pip install {name}")


def pick_device(wanted: str) -> str:
    """The device for "auto": CUDA, then MPS, then the CPU."""
    import torch

    if wanted != "auto":
        try:
            torch.empty(0, device=wanted)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(
                f"--device {wanted}: not usable here ({str(error).splitlines()[0]}); try --device cpu"
            ) from error
        return wanted
    if torch.cuda.is_available():
        from loragate.cli.launching import own_device

        return own_device()
    return "mps" if torch.backends.mps.is_available() else "cpu"


def dtype_argument(name: str, device: str, quantization: str = "none") -> Any:
    """The torch dtype of `--dtype`; "auto" is the checkpoint's own on a GPU and float32 on the CPU, or as
    `quantization.dtype_for` has it."""
    import torch

    if name not in DTYPES:
        raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, found {name!r}")
    if name == "auto" and quantization != "none":
        return dtype_for(quantization, device)
    if name == "auto":
        return torch.float32 if device == "cpu" else "auto"
    return getattr(torch, name)


@contextmanager
def explained(what: str, name: str) -> Iterator[None]:
    """Turns the loading errors of transformers and PEFT into one sentence about `what`."""
    try:
        yield
    except LoragateError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise LoragateError(_sentence(what, name, error)) from error


def require_place(what: str, name: str) -> None:
    """Refuse a name that is neither a folder here nor a hub id, before anything is asked of the network.

    Raises:
        ConfigError: naming what was looked for.
    """
    from loragate.gates.hub import hub_name

    if Path(name).is_file():
        raise ConfigError(f"{what} {name} is a file, expected the folder that holds it ({Path(name).parent})")
    plausible = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if Path(name).is_dir() or plausible or hub_name(name) is not None:
        return
    raise ConfigError(f"{what} {name} does not exist (a hub id is written owner/name){beside(name)}")


def base_named(given: str, record: Any, adapter: str) -> str:
    """The base model to load: the one given with --base, or the one that the adapter's record names.

    Raises:
        ConfigError: if there is neither, or the record names a folder that is not here.
    """
    base = str(given or record.base_model_name_or_path or "")
    if not base:
        raise ConfigError(f"{adapter} does not name its base model; say which with --base")
    if not given:
        try:
            require_place("base model", base)
        except ConfigError as error:
            raise ConfigError(
                f"the adapter {adapter} names as its base model {base}, which does not exist here; say where it is with --base"
            ) from error
    return base


def load_base(
    name: str,
    *,
    revision: str = "",
    dtype: Any = "auto",
    device: str = "cpu",
    trust: bool = False,
    quantization: str = "none",
) -> Any:
    """A causal LM by folder or hub id, on its device, in eval mode; in 8 or 4 bits where that is asked for.

    A revision behind the hub id (owner/name@revision) comes before `revision`, which is the one of a record.
    """
    from transformers import AutoModelForCausalLM

    from loragate.gates.hub import split_base
    from loragate.gates.quantised import keep_unpacked

    require_place("base model", name)
    require_not_an_adapter(name)
    with explained("base model", name):
        name, asked = split_base(name)
        revision = asked or revision
        arguments = base_arguments(
            name, dtype=dtype, device=device, quantization=quantization, revision=revision, trust=trust
        )
        model = AutoModelForCausalLM.from_pretrained(name, revision=revision or None, **arguments)
    keep_unpacked(model)
    return model.eval() if "device_map" in arguments else model.to(device).eval()


def adapter_record(name: str) -> Any:
    """The PEFT configuration of an adapter; refuses what is not a LoRA adapter."""
    from peft import PeftConfig

    from loragate.gates.hub import adapter_place
    from loragate.gates.peft_saving import lost_gates

    if not Path(name).is_dir():
        require_place("adapter", name)
    folder = Path(adapter_place(name))
    if folder.is_dir() and not (folder / "adapter_config.json").is_file():
        if is_gated(folder):
            raise ConfigError(f"{name} is already a gated adapter; its plain adapter is {folder / 'adapter'}")
        raise ConfigError(f"{name} holds no adapter_config.json, so it is not a PEFT adapter folder{inside(folder)}")
    with explained("adapter", name):
        record = PeftConfig.from_pretrained(str(folder))
    kind = getattr(record.peft_type, "value", str(record.peft_type))
    if kind != "LORA":
        raise ConfigError(f"{name} is a {kind} adapter; gates need a LoRA adapter")
    if lost_gates(folder):
        logging.getLogger("loragate").warning(
            "%s holds gates that were lost when PEFT saved it (loragate.save_gates keeps them); it is read as the plain "
            "adapter",
            name,
        )
    return record


def revision_of_base(record: Any, base: str) -> str:
    """The revision behind `base` (owner/name@revision), else the commit that an adapter's record pins, where it names this base;
    empty for a folder or another base."""
    from loragate.gates.hub import split_base

    if asked := split_base(base)[1]:
        return asked
    named = base == record.base_model_name_or_path and not Path(base).is_dir()
    return str(record.revision or "") if named else ""


def revision_for(name: str, base: str = "") -> str:
    """The revision of the base that a gated folder, an adapter or a base is loaded with; empty for a folder or the newest.

    Args:
        name: folder, or owner/name[@revision] of a base.
        base: of --base, owner/name[@revision] or a folder; empty where the recorded one is taken.
    """
    from loragate.gates.hub import split_base
    from loragate.gates.schema import read_gate_config

    folder = Path(name)
    if is_gated(folder):
        return str(split_base(base)[1] or "") if base else str(read_gate_config(folder)["base"].get("revision") or "")
    if (folder / "adapter_config.json").is_file():
        record = adapter_record(name)
        return revision_of_base(record, base or str(record.base_model_name_or_path or ""))
    return str(split_base(base or name)[1] or "")


def load_adapter(base: Any, name: str) -> Any:
    """The adapter on its base, as a PeftModel with every parameter frozen."""
    from peft import PeftModel

    from loragate.gates.hub import adapter_place

    with explained("adapter", name):
        return PeftModel.from_pretrained(base, adapter_place(name)).eval()


def hub_adapter(name: str) -> str | None:
    """The hub id of an adapter, with its revision, for records and the card; None for a folder, whose path means nothing to
    others."""
    from loragate.gates.hub import hub_name

    return name if hub_name(name) is not None else None


def load_tokenizer(names: list[str], *, revision: str = "", chat_template: str = "", trust: bool = False) -> Any:
    """The tokenizer of the first place that has one (an adapter's own copy comes before its base's); the last is the base's,
    which may be on the hub, and `revision` is then as in `load_base`."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    from loragate.gates.hub import split_base

    chosen = next((name for name in names if _has_tokenizer(name)), names[-1])
    require_place("base model", chosen)
    with explained("tokenizer", chosen):
        if _declares_plain_tokenizer(chosen):
            # AutoTokenizer would put the model family's own class in place of the one the folder names
            tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(chosen)
            tokenizer.init_kwargs.pop("auto_map", None)
        else:
            place, asked = split_base(chosen)
            revision = asked or ("" if Path(chosen).is_dir() else revision)
            tokenizer = AutoTokenizer.from_pretrained(place, revision=revision or None, trust_remote_code=trust)
    if chat_template:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--chat-template {chat_template}: cannot be read ({error.strerror})") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def quiet_logging() -> None:
    """Our own warnings to stderr, one line each; other libraries' only from error upwards."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    from loragate.cli.display import printable

    class Plain(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return printable(super().format(record))

    own = logging.getLogger("loragate")
    if not own.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(Plain("loragate: %(message)s"))
        own.addHandler(handler)
        own.propagate = False


def _declares_plain_tokenizer(name: str) -> bool:
    """Whether a local folder says that its tokenizer.json is all there is to its tokenizer."""
    try:
        record = json.loads((Path(name) / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    plain = record.get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")
    return plain and (Path(name) / "tokenizer.json").is_file()


def _has_tokenizer(name: str) -> bool:
    folder = Path(name)
    return folder.is_dir() and any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))


def _sentence(what: str, name: str, error: Exception) -> str:
    text = str(error).strip()
    first = text.splitlines()[0] if text else type(error).__name__
    if "size mismatch" in text or "Target modules" in text:
        detail = next((line.strip() for line in text.splitlines() if "size mismatch" in line), first)
        return (
            f"{what} {name} does not fit this base model: it was made for another one, or --base is wrong, or tokens were added "
            f"to the base before it was trained (save that base once and name it with --base) ({detail[:300]})"
        )
    if isinstance(error, OSError) and not Path(name).exists():
        return (
            f"{what} {name}: no such folder, and it could not be fetched from the hub. Check the spelling, the network "
            f"(HF_HUB_OFFLINE) and access rights ({first[:200]})"
        )
    return f"{what} {name} cannot be loaded: {type(error).__name__}: {first[:400]}"
