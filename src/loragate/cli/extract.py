"""`loragate extract`: a LoRA adapter of chosen rank from a fine-tuned model and its base."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loragate.cli.arguments import Command, require_given
from loragate.cli.display import Display, console
from loragate.cli.preflight import quiet_logging
from loragate.errors import ConfigError, LoragateError

WORST = 5
MUCH_LEFT_OUT = 0.05


@dataclass(frozen=True)
class ExtractOptions:
    """Settings of `loragate extract`.

    Attributes:
        model: fine-tuned model, folder or hub id, in safetensors.
        base: the model it was fine-tuned from.
        rank: rank of the adapter; every linear layer gets the same.
        out: folder of the adapter; must be new or empty.
        energy: share of the difference's energy for which a rank is suggested.
        revision: branch, tag or commit of the fine-tuned model on the hub.
        base_revision: branch, tag or commit of the base on the hub; recorded in the adapter.
        device: where the arithmetic runs: auto, cpu, cuda, cuda:1.
        seed: seed of the randomised decompositions of large matrices.
        ignore_resized_vocabulary: continue although the two vocabularies differ in size; embeddings and head are left
            out.
        trust_remote_code: run model code from the hub.
    """

    model: str = ""
    base: str = ""
    rank: int = 0
    out: str = ""
    energy: float = 0.95
    revision: str = ""
    base_revision: str = ""
    device: str = "auto"
    seed: int = 0
    ignore_resized_vocabulary: bool = False
    trust_remote_code: bool = False


def run(options: ExtractOptions) -> int:
    """Read in pairs, decompose, report, write."""
    require_given(COMMAND, options)
    if options.rank < 1:
        raise ConfigError(f"--rank {options.rank}: give at least 1")
    if not 0 < options.energy <= 1:
        raise ConfigError(f"--energy {options.energy:g}: expected a share above 0 and at most 1")
    from loragate.models import Loading, resolve

    device = Loading(device=options.device).torch_device
    if device == "mps":
        if options.device == "mps":
            raise ConfigError("--device mps: it has no double precision, which decompositions need; use --device cpu")
        device = "cpu"
    tuned = resolve(options.model, expect="base", what="model", revision=options.revision or None)
    start = resolve(options.base, expect="base", revision=options.base_revision or None)
    folder = Path(options.out)
    from loragate.conversion.extract import extract_adapter
    from loragate.conversion.extract_writing import require_new, write_adapter_folder

    require_new(folder)
    quiet_logging()

    out, display = console(), Display()
    with display.job("comparing the weights") as job:
        extraction = extract_adapter(
            str(tuned.ref),
            str(start.ref),
            options.rank,
            device=device,
            seed=options.seed,
            ignore_resized_vocabulary=options.ignore_resized_vocabulary,
            trust_remote_code=options.trust_remote_code,
            on_module=lambda done, total, name: job.advance_to(done, total, name),
        )
    report(out, extraction, options)
    write_adapter_folder(
        extraction,
        folder,
        model=tuned.ref.lasting,
        base=start.ref.lasting,
        base_revision=start.ref.revision,
        also=lambda partial: _keep_tokenizer(tuned, options.trust_remote_code, partial, out),
    )
    out.print(f"written to {folder}", markup=False)
    out.print(
        f"next: loragate calibrate --adapter {folder} --data FILE --probe FILE --out {folder}-gated", markup=False
    )
    return 0


def report(out: Any, extraction: Any, options: ExtractOptions) -> None:
    """What was kept, what was left out, and what another rank would do."""
    size = 100 * (extraction.energy / extraction.base_energy) ** 0.5 if extraction.base_energy else float("nan")
    out.print(
        f"{len(extraction.modules)} linear layers changed"
        + (f" ({extraction.unchanged} did not)" if extraction.unchanged else "")
        + f"; their difference is {size:.2g} % of their weights' norm"
    )
    out.print(f"rank {extraction.rank} keeps {100 * extraction.kept:.1f} % of the difference's energy")
    wanted = extraction.rank_for(options.energy)
    longest = max(len(module.singular) for module in extraction.modules)
    advice = f"rank {wanted}" if wanted is not None else f"more than rank {longest}, as far as was looked"
    out.print(f"{100 * options.energy:g} % would take {advice}")
    worst = sorted(extraction.modules, key=lambda module: -module.lost)[:WORST]
    if worst[0].kept < 0.9995:
        width = max(len(module.path) for module in worst)
        out.print(f"{'most is lost in':{width}}  {'shape':>13}   kept  of the whole difference")
        for module in worst:
            shape = f"{module.d_out} × {module.d_in}"
            share = 100 * module.energy / extraction.energy
            out.print(f"{module.path:{width}}  {shape:>13}  {100 * module.kept:4.1f} %  {share:.1f} %", markup=False)
    if extraction.left_out:
        parts = ", ".join(
            f"{kind} {100 * part.energy / (extraction.energy / (1 - extraction.left_share)):.2g} %"
            for kind, part in extraction.left_out.items()
        )
        out.print(f"left out: {100 * extraction.left_share:.2g} % of the whole difference's energy ({parts})")
    if extraction.left_share > MUCH_LEFT_OUT:
        out.print(
            "warning: much of the fine-tune lies where a LoRA cannot hold it; compare base + adapter with the fine-tuned model "
            "before you rely on it (loragate eval)"
        )
    for note in extraction.notes:
        out.print(f"note: {note}", markup=False)


def _keep_tokenizer(tuned: Any, trust: bool, folder: Path, out: Any) -> None:
    """The fine-tuned model's own tokenizer and chat template, which often differ from the base's."""
    from loragate.models import Loading, open_tokenizer

    try:
        tokenizer = open_tokenizer(tuned, Loading(trust=trust))
    except LoragateError as error:
        out.print(f"note: no tokenizer was copied, the base's will be used: {error}", markup=False)
        return
    tokenizer.save_pretrained(str(folder))


COMMAND = Command(
    name="extract",
    summary="Make a LoRA adapter from a fine-tuned checkpoint and its base, by a truncated SVD per linear layer.",
    options=ExtractOptions,
    run=run,
    needs=("model", "base", "rank", "out"),
    examples=(
        "loragate extract --model path/to/finetuned --base path/to/base --rank 64 --out adapter",
        "loragate extract --model owner/model-instruct --base owner/model --rank 128 --energy 0.9 --device cuda --out adapter",
    ),
)
