"""`loragate export`: an adapter, with gates of one λ per module folded into it, in the files of the runtime that serves it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loragate.cli.arguments import Command
from loragate.files import read_json
from loragate.gates.recommended import SAMPLING, exported_sampling
from loragate.models.settings import Loading


@dataclass(frozen=True)
class ExportOptions:
    """Settings of `loragate export`.

    Attributes:
        model: gated folder, or FOLDER@OVERRIDE such as gated@unit; with a constant (adapter@lower=0.5) also a plain adapter, and
            without one for another form than peft. On the hub: owner/name or owner/name@revision, then @OVERRIDE.
        out: folder to write.
        to: peft is a plain PEFT adapter, merged the base with the adapter in it, gguf an adapter of llama.cpp, mlx one of MLX.
        constant: one λ for all gated modules in place of the gates; gates that read the token can be exported only so.
        uniform: one rank and one scale for all modules, for runtimes that read r and lora_alpha alone (SGLang).
        base: where the base is, if it is not where the folder says.
        skip_comparison: load no model to compare what was written with the model that it stands for.
        dtype: of a merged model; auto is the base's own. A base stored in 8 or 4 bits needs one.
        quantization: of the base that the adapter was trained on; says how far a merged model is from the adapter on such a base.
    """

    model: str
    out: str
    to: Literal["peft", "merged", "gguf", "mlx"] = "peft"
    constant: float | None = None
    uniform: bool = False
    base: str = ""
    skip_comparison: bool = False
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["none", "8bit", "4bit"] = "none"


def run(options: ExportOptions) -> int:
    """Fold, write the adapter and its card, and say what was written."""
    from loragate.models.export import describe_folded, export_adapter, find_non_uniform_keys

    done = export_adapter(
        options.model,
        options.out,
        to=options.to,
        constant=options.constant,
        uniform=options.uniform,
        base=options.base,
        compare_outputs=not options.skip_comparison,
        loading=Loading(dtype=options.dtype, quantization=options.quantization),
    )
    print(f"{options.out}: {done.title}, {describe_folded(done.coefficients)}")
    if done.left:
        print(f"left out: {', '.join(done.left)}")
    if done.unreached:
        print(done.unreached)
    if done.agreement is not None:
        print(f"loaded again and compared with the model that it stands for: {done.agreement}")
    elif not options.skip_comparison:
        print(f"its outputs were not compared: the base {done.base or '(unnamed)'} is not here; name it with --base")
    if exported_sampling(read_json(Path(options.out) / SAMPLING)):
        print(f"{SAMPLING} holds the recommended sampling")
    more = [] if done.config.get("target_parameters") else find_non_uniform_keys(done.config)
    if options.to == "peft" and more:
        print(f"its adapter_config.json has {', '.join(more)}, which SGLang does not read: add --uniform for it")
    print(f"next: {done.usage}")
    return 0


COMMAND = Command(
    name="export",
    options=ExportOptions,
    run=run,
    positional="model",
    examples=(
        "loragate export gated-by-module --out plain",
        "loragate export gated --constant 0.5 --out plain",
        "loragate export gated-by-module --base models/base --out plain",
        "loragate export adapter@lower=0.5 --to merged --dtype bfloat16 --out merged",
        "loragate export adapter --to gguf --out for-llama-cpp",
    ),
)
