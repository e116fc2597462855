"""`loragate doctor`: is an adapter right, what does it do to its model, how strongly should it act? `lg.examine` is the call."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loragate import doctor
from loragate.cli.arguments import Command
from loragate.cli.options import ModelOptions, extract_settings
from loragate.display import Display, console, duration, format_temperature
from loragate.errors import DONE, FAILED, INTERRUPTED
from loragate.models.settings import Loading
from loragate.printable import escape_for_terminal
from loragate.validate import PositiveInt

if TYPE_CHECKING:
    from loragate.analysis.rows import Interval
    from loragate.doctor.record import Examination, Measures, Static

PAGE = "doctor.html"


@dataclass(frozen=True)
class DoctorOptions(ModelOptions):
    """Settings of `loragate doctor`.

    Attributes:
        adapter: PEFT LoRA adapter or gated folder, or owner/name[@revision] of one on the hub.
        base: base model in place of the one that the adapter names.
        data: examples that it was trained on, in any known format: is it the right base, did it learn.
        dev_data: questions with answers of its task: how strong it should be.
        dev_task: task (name or file) whose prompt, columns and grader the dev set has.
        dev_grader: grader of the dev set without a task, as calibrate takes it.
        dev_pattern: regular expression of the grader regex; its one group is the answer.
        retention_data: questions with answers of abilities to keep.
        quick: only what takes seconds and needs no weights of the base.
        json: print doctor.json alone to standard output.
        out: folder for doctor.json, doctor.html and the parts; doctor-NAME here by default, none with --quick.
        resume: go on with an interrupted examination.
        max_rows: examples that are read.
        max_length: tokens of an example, cut on the right; those whose prompt alone is as long are not read.
    """

    adapter: str = ""
    base: str = ""
    data: str = ""
    dev_data: str = ""
    dev_task: str = ""
    dev_grader: str = "default"
    dev_pattern: str = ""
    retention_data: str = ""
    quick: bool = False
    json: bool = False
    out: str = ""
    resume: bool = False
    max_rows: PositiveInt = 64
    max_length: PositiveInt = 512


def run(options: DoctorOptions) -> int:
    """Examine, print what was found, leave the record and its page; status 1 with a finding of severity error."""
    loading = extract_settings(options, Loading)
    folder = _folder(options)
    out = console()
    stopped = False
    try:
        if options.quick:
            with _without_torch_compile():
                found = doctor.examine_files(options.adapter, options.base, folder, loading, options.system)
        else:
            found = doctor.examine(
                options.adapter,
                options.base,
                data=options.data or None,
                dev_data=options.dev_data or None,
                retention_data=options.retention_data or None,
                out=folder,
                resume=options.resume,
                settings=doctor.ExamSettings(
                    max_rows=options.max_rows,
                    max_length=options.max_length,
                    system=options.system,
                    dev_task=options.dev_task,
                    dev_grader=options.dev_grader,
                    dev_pattern=options.dev_pattern,
                ),
                loading=loading,
                on_job=Display().job,
            )
    except KeyboardInterrupt:
        if folder is None or not (folder / doctor.FILE).is_file():
            raise
        found, stopped = doctor.read_examination(folder / doctor.FILE), True
    if folder is not None:
        from loragate.report.examination import write_page

        write_page(found.to_json(), folder / PAGE)
    if options.json:
        print(json.dumps(found.to_json(), indent=2))
        for line in _left_out(found):
            print(escape_for_terminal(line), file=sys.stderr)
    else:
        for line in _lines(found, options, folder, stopped):
            out.print(line)
    return INTERRUPTED if stopped else FAILED if found.verdict == "broken" else DONE


def _folder(options: DoctorOptions) -> Path | None:
    """Where the record goes; None for nowhere."""
    if options.out or options.quick:
        return Path(options.out) if options.out else None
    # owner/name@revision is called name
    name = Path(options.adapter.partition("@")[0]).resolve().name
    return Path(f"doctor-{name}")


@contextmanager
def _without_torch_compile() -> Iterator[None]:
    """For imports: bitsandbytes hands functions to torch.compile at its own, which takes longer than a look at files."""
    key, before = "TORCHDYNAMO_DISABLE", os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ[key] = "1"
    try:
        yield
    finally:
        os.environ.pop(key)
        os.environ.update({} if before is None else {key: before})


def _lines(found: Examination, options: DoctorOptions, folder: Path | None, stopped: bool) -> Iterator[str]:
    yield from _static(found.measures.static)
    yield from _measured(found.measures)
    for finding in found.findings:
        yield f"{finding.severity}: {finding} [{finding.code}]"
    yield from _left_out(found)
    if found.unfinished:
        why = "; the same command with --resume goes on" if stopped else ", as the adapter cannot be loaded as it is"
        yield f"not examined: {', '.join(found.unfinished)}{why}"
    yield f"verdict: {found.summary}"
    if folder is not None:
        yield f"written: {folder / PAGE} (page), {folder / 'doctor.json'} (record), in {duration(sum(found.seconds.values()))}"
    yield f"next: {_next(found, options, stopped)}"


def _left_out(found: Examination) -> list[str]:
    return [f"left out: {sentence}" for sentence in found.left_out]


def _static(static: Static) -> Iterator[str]:
    size = ""
    if static.rank and static.alpha is not None:
        scales, plain = {one.scale for one in static.modules}, static.alpha / static.rank
        # rsLoRA: not α/r
        other = f", scale {min(scales):.3g}" if len(scales) == 1 and abs(min(scales) - plain) > 1e-9 else ""
        size = f" (r {static.rank}, α {static.alpha:g}{other})"
    yield f"adapter {static.adapter}{size} on {static.base or 'a base that is not named'}"
    if gates := static.gates:
        off = "; they are off: the folder answers as its plain adapter" if gates["off"] else ""
        span = f"λ in [{gates['lower']:g}, {gates['upper']:g}]"
        yield f"gates: {gates['modules']} modules, {span}, one for each {gates['granularity']}{off}"
        if gates["temperature"] is not None:
            yield f"recommended sampling: {format_temperature(gates['temperature'])}"
    if static.modules:
        listed = ", ".join(f"{kind} ×{count}" for kind, count in Counter(one.kind for one in static.modules).items())
        shares: dict[str, float] = defaultdict(float)
        for one in static.modules:
            shares[one.kind] += one.share
        kind, share = max(shares.items(), key=lambda pair: pair[1])
        effective = sorted(one.effective_rank for one in static.modules)[len(static.modules) // 2]
        yield f"  {len(static.modules)} modules: {listed}"
        yield (
            f"  delta: {100 * share:.0f} % of its squared norm in {kind}; effective rank {effective:.1f} in the median, of "
            f"{max(one.rank for one in static.modules)}; {static.parameters:,} parameters in its file"
        )
    words = {"gate": "can have gates", "leave": "keep full strength", "refuse": "cannot have gates"}
    if static.gateable:
        yield "  " + ", ".join(f"{count} {words[status]}" for status, count in static.gateable.items())
        for reason in static.reasons:
            yield f"       because {reason}"
    if cost := static.cost:
        yield (
            f"gates: {cost['gate_parameters']:,.0f} parameters, {100 * cost['gate_share']:.3f} % of the base; a step of training "
            f"takes {cost['tflop_per_million_tokens']:,.1f} TFLOP per million tokens, {cost['ratio_to_lora_step']:.2f} of a LoRA "
            f"step; one row of 2,048 tokens takes {static.training}"
        )
    if static.stops is not None:
        ends = " ".join(static.endings) or "nothing"
        yield f"endings: a turn ends with {ends}; generation {'stops' if static.stops else 'does NOT stop'} there"


def _measured(measures: Measures) -> Iterator[str]:
    """A line or two of each part that was measured; the page has the rest."""
    if part := measures.answers:
        for name, one in (("base", part.base), ("adapter", part.adapter)):
            if one is not None:
                yield (
                    f"answers of the {name} to {len(part.pairs)} prompts: {one.tokens:.0f} tokens, {100 * one.cut:.0f} % cut at "
                    f"{part.max_new_tokens}, {100 * one.repeats:.0f} % in a loop"
                )
        if whole := part.forgetting.get("1"):
            yield f"forgetting: the base's own answers lose {_format_interval(whole)} nats per token"
    if effect := measures.effect:
        every = effect.classes[0]
        yield (
            f"effect: KL {_format_interval(every.kl)} nats per token, entropy {_format_interval(every.base)} to "
            f"{_format_interval(every.adapter)}, the likeliest token "
            f"is the same at {100 * effect.agree:.0f} % ({effect.source})"
        )
    if learned := measures.learned:
        base = "" if learned.base is None else f", base {_format_interval(learned.base)}"
        yield f"loss on {learned.rows} examples: adapter {_format_interval(learned.adapter)}{base} nats per token"
    if measures.strength:
        yield from (f"strength: {sentence}" for sentence in measures.strength.sentences[:3])


def _format_interval(interval: Interval) -> str:
    return f"{interval.mean:.3g}{interval.ends('.3g')}"


def _next(found: Examination, options: DoctorOptions, stopped: bool) -> str:
    """The command that follows, or what to do."""
    codes = {one.code for one in found.findings}
    # what the measurement says, where it speaks against the flag
    otherwise = any(one.code == "system-message" and one.severity == "warning" for one in found.findings)
    base = ["--base", options.base] if options.base else []
    spoken = ["--system", "keep"] if (options.system == "keep") != otherwise else []
    data = ["--data", options.data or "FILE"]
    if stopped:
        return "the same command with --resume"
    if "base-unreachable" in codes:
        return _command("doctor", options.adapter, "--base", "FOLDER", *spoken, *["--quick"] * options.quick)
    if found.verdict == "broken":
        return "mend what is named above, then examine it again"
    if options.quick:
        return _command("doctor", options.adapter, *base, *spoken, *data) + " shows what it does to its model"
    if found.measures.static.gates:
        return _command("serve", options.adapter, *base, *spoken)
    if found.measures.static.gateable.get("refuse") or "not-gateable" in codes:
        return _command("generate", "--model", options.adapter, *base, *spoken, "--prompt", "TEXT")
    dev = ["--dev-data", options.dev_data or "FILE"]
    dev += ["--dev-task", options.dev_task] if options.dev_task else []
    dev += ["--dev-grader", options.dev_grader] if options.dev_grader != "default" else []
    dev += ["--dev-pattern", options.dev_pattern] if options.dev_pattern else []
    return _command("calibrate", "--adapter", options.adapter, *base, *spoken, *data, *dev, "--out", "gated")


def _command(*words: str) -> str:
    return shlex.join(["loragate", *words])


COMMAND = Command(
    name="doctor",
    options=DoctorOptions,
    run=run,
    examples=(
        "loragate doctor path/to/adapter --quick",
        "loragate doctor path/to/adapter --data train.jsonl --dev-data dev.jsonl",
        "loragate doctor owner/adapter --json",
    ),
    positional="adapter",
    required_at_run=("adapter",),
    common="base data dev_data dev_task dev_grader retention_data quick json out resume max_rows max_length",
)
