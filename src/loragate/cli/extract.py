"""`loragate extract`: a LoRA adapter of chosen rank from a fine-tuned model and its base."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Le

from loragate.cli.arguments import Command, require_given
from loragate.display import Display, console
from loragate.files import require_new
from loragate.validate import Size

if TYPE_CHECKING:
    from rich.console import Console

    from loragate.conversion.extract import Extraction

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
    rank: Size = 0
    out: str = ""
    energy: Annotated[float, Gt(0), Le(1)] = 0.95
    revision: str = ""
    base_revision: str = ""
    device: str = "auto"
    seed: int = 0
    ignore_resized_vocabulary: bool = False
    trust_remote_code: bool = False


def run(options: ExtractOptions) -> int:
    """Read in pairs, decompose, report, write."""
    require_given(COMMAND, options)
    folder = Path(options.out)
    require_new(folder)
    from loragate.conversion.extract import extract_adapter, write_adapter_folder

    out = console()
    with Display().job("comparing the weights") as job:
        extraction = extract_adapter(
            options.model,
            options.base,
            options.rank,
            revision=options.revision,
            base_revision=options.base_revision,
            device=options.device,
            seed=options.seed,
            ignore_resized_vocabulary=options.ignore_resized_vocabulary,
            trust_remote_code=options.trust_remote_code,
            on_module=lambda done, total, name: job.advance_to(done, total, name),
        )
    report(out, extraction, options.energy)
    write_adapter_folder(extraction, folder, trust_remote_code=options.trust_remote_code)
    out.print(f"written to {folder}", markup=False)
    out.print(
        f"next: loragate calibrate --adapter {folder} --data FILE --probe FILE --out {folder}-gated", markup=False
    )
    return 0


def report(out: Console, extraction: Extraction, energy: float) -> None:
    """What was kept, what was left out, and what another rank would do."""
    # energies are squared norms, so a ratio of norms is the root of theirs
    size = 100 * (extraction.energy / extraction.base_energy) ** 0.5 if extraction.base_energy else float("nan")
    out.print(
        f"{len(extraction.modules)} linear layers changed"
        + (f" ({extraction.unchanged} did not)" if extraction.unchanged else "")
        + f"; their difference is {size:.2g} % of their weights' norm"
    )
    out.print(f"rank {extraction.rank} keeps {100 * extraction.kept:.1f} % of the difference's energy")
    wanted = extraction.rank_for(energy)
    longest = max(len(factors.singular_K) for factors in extraction.modules.values())
    advice = f"rank {wanted}" if wanted is not None else f"more than rank {longest}, as far as was looked"
    out.print(f"{100 * energy:g} % would take {advice}")
    worst = sorted(extraction.modules.items(), key=lambda item: -item[1].lost)[:WORST]
    if worst[0][1].kept < 0.9995:  # else it prints as 100.0 %, and nothing is worth a table
        width = max(len(path) for path, _ in worst)
        out.print(f"{'most is lost in':{width}}  {'shape':>13}   kept  of the whole difference")
        for path, factors in worst:
            shape = f"{factors.lora_b_OR.shape[0]} × {factors.lora_a_RD.shape[1]}"
            share = 100 * factors.energy / extraction.energy
            out.print(f"{path:{width}}  {shape:>13}  {100 * factors.kept:4.1f} %  {share:.1f} %", markup=False)
    if extraction.left_out:
        # the whole difference's energy: that of the linear layers over the share which is not left out
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


COMMAND = Command(
    name="extract",
    options=ExtractOptions,
    run=run,
    needs=("model", "base", "rank", "out"),
    examples=(
        "loragate extract --model path/to/finetuned --base path/to/base --rank 64 --out adapter",
        "loragate extract --model owner/model-instruct --base owner/model --rank 128 --energy 0.9 --device cuda --out adapter",
    ),
)
