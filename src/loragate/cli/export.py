"""`loragate export`: gates that are one λ per module, folded into a plain LoRA adapter for any runtime."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loragate.cli.arguments import Command
from loragate.files import read_json
from loragate.gates.recommended import SAMPLING, exported_sampling


@dataclass(frozen=True)
class ExportOptions:
    """Settings of `loragate export`.

    Attributes:
        model: gated folder, or FOLDER@OVERRIDE such as gated@unit; with --constant also a plain adapter. On the hub:
            owner/name or owner/name@revision, then @OVERRIDE.
        out: folder for the plain adapter.
        constant: one λ for all gated modules in place of the gates; gates that read the token can be exported only so.
        uniform: one rank and one scale for all modules, for runtimes that read r and lora_alpha alone (llama.cpp, SGLang).
        base: where the base is, if it is not where the folder says.
        skip_comparison: load no model to compare what was written with the model that it stands for.
    """

    model: str
    out: str
    constant: float | None = None
    uniform: bool = False
    base: str = ""
    skip_comparison: bool = False


def run(options: ExportOptions) -> int:
    """Fold, write the adapter and its card, and say what was written."""
    from loragate.models.export import export_adapter, folded_in_words, needs_uniform

    done = export_adapter(
        options.model,
        options.out,
        constant=options.constant,
        uniform=options.uniform,
        base=options.base,
        compare_outputs=not options.skip_comparison,
    )
    print(f"{options.out}: a plain LoRA adapter, {folded_in_words(done.coefficients)}")
    if done.agreement is not None:
        print(f"loaded again and compared with {options.model}: {done.agreement}")
    elif not options.skip_comparison:
        print(f"its outputs were not compared: the base {done.base or '(unnamed)'} is not here; name it with --base")
    if exported_sampling(read_json(Path(options.out) / SAMPLING)):
        print(f"{SAMPLING} holds the recommended sampling")
    if more := needs_uniform(done.config):
        print(f"its adapter_config.json has {', '.join(more)}, which llama.cpp does not read: add --uniform for it")
    print(f"next: loragate generate --model {options.out} --prompt TEXT")
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
        "loragate export gated-by-module --uniform --out for-llama-cpp",
    ),
)
