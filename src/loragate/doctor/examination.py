"""`examine`: the parts of a check-up in their order, each kept as soon as it is done, so that a killed one can be resumed.

<out>/doctor.json     the examination
<out>/doctor.html     its page
<out>/run/            run.json, one file per finished part, and the answers
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loragate import records
from loragate.data import detect_format, load_rows
from loragate.data.rows import RowsGiven
from loragate.doctor import answers, effect, learned, static, strength
from loragate.doctor.exam_context import ExamContext, ExamSettings, OnJob, Part, is_text_only_row, silent_job
from loragate.doctor.record import FILE, OUTPUT_NAMES, Examination, Measures, build_examination
from loragate.errors import DataError
from loragate.files import RunFolder, require_empty_folder, write_json
from loragate.gates.adapter_rules import Finding
from loragate.models import Loading, resolve
from loragate.models.loading import DEFAULT_LOADING
from loragate.selection.dev import read_dev
from loragate.selection.settings import DevSettings

PARTS: dict[str, Part] = {
    "answers": answers.examine_answers,
    "effect": effect.examine_effect,
    "learned": learned.examine_learned,
    "strength": strength.examine_strength,
}
"""What needs the model, in this order; each is a field of `Measures`."""


def examine(
    adapter: str | Path,
    base: str = "",
    *,
    data: RowsGiven | None = None,
    dev_data: RowsGiven | None = None,
    retention_data: RowsGiven | None = None,
    quick: bool = False,
    out: str | Path | None = None,
    resume: bool = False,
    settings: ExamSettings | None = None,
    loading: Loading = DEFAULT_LOADING,
    on_job: OnJob = silent_job,
) -> Examination:
    """Check up a finished adapter: is it whole, is it on the right base, what does it do, how strongly should it act?

    The command `loragate doctor` is this call. No adapter folder, however broken, is an error: what is wrong with it is a finding.

    Args:
        adapter: PEFT LoRA adapter or gated folder, or owner/name[@revision] of one on the hub.
        base: base model in place of the one that the adapter names.
        data: examples it was trained on, in any known format.
        dev_data: questions with answers of its task.
        retention_data: questions with answers of abilities to keep.
        quick: only what takes seconds and needs no weights of the base.
        out: folder for doctor.json, and for what a resumed examination goes on from; None keeps nothing.
        resume: go on with what an interrupted call left in `out`.
        settings: how much is read.
        loading: device, dtype, quantisation of the base.
        on_job: progress.

    Returns:
        The examination. On Ctrl-C what is known is written to `out` before KeyboardInterrupt goes on.

    Raises:
        ConfigError: for a place that holds no adapter, or a folder with another examination.
        DataError: for examples or questions that cannot be read.
    """
    settings = settings or ExamSettings()
    if quick:
        return static.examine_files(str(adapter), base, out, loading, settings.system)
    if out is not None:
        require_empty_folder(Path(out), *OUTPUT_NAMES)
    began = time.monotonic()
    measured, found = static.examine_static(str(adapter), base, loading, settings.system)
    done = FinishedParts(Measures(measured), tuple(found), {"static": round(time.monotonic() - began, 3)})
    if static.prevents_loading(found):
        return _write_examination(done, tuple(PARTS), out)
    given = {"data": data, "dev_data": dev_data, "retention_data": retention_data}
    rows = {name: None if one is None else load_rows(one) for name, one in given.items()}
    for name in ("dev", "retention"):  # what cannot be asked is refused before the model is loaded
        if (questions := rows[f"{name}_data"]) is not None:
            read_dev(questions, settings.dev if name == "dev" else DevSettings(), name)
    if (examples := rows["data"]) is not None and not is_text_only_row(examples[0]):
        first = examples.earliest()
        try:
            detect_format(examples[first])
        except DataError as error:
            raise DataError(f"{examples.where(first)}: {error}") from None
    place = resolve(str(adapter), base)
    identity = {
        "adapter": place.fingerprint,
        "base": place.base.absolute_name,
        **{name: None if one is None else one.fingerprint for name, one in rows.items()},
        "settings": records.to_json(settings),
        "loading": records.to_json(loading),
    }
    with _folder(out, identity, resume) as folder:
        file = folder / "done.json"
        if file.exists():
            done = records.read(FinishedParts, file, "remove the folder, or choose another --out")
        notes = dict.fromkeys(done.left_out)  # an ordered set
        exam = ExamContext(place, folder, done.measures, settings, loading, say=notes.setdefault)
        exam.data, exam.dev_data, exam.retention_data = rows.values()
        for number, (name, part) in enumerate(PARTS.items(), 1):
            if name in done.seconds:
                continue
            exam.job = _numbered(on_job, f"[{number}/{len(PARTS)}]")
            began = time.monotonic()
            try:
                measured, more = part(exam)
            except KeyboardInterrupt:
                _write_examination(done, tuple(one for one in PARTS if one not in done.seconds), out)
                raise
            exam.measures = replace(exam.measures, **{name: measured})
            seconds = {**done.seconds, name: round(time.monotonic() - began, 3)}
            done = FinishedParts(exam.measures, (*done.findings, *more), seconds, tuple(notes))
            write_json(file, records.to_json(done))
    return _write_examination(done, (), out)


def _numbered(on_job: OnJob, number: str) -> OnJob:
    """Jobs that say which part of the check-up they are of."""
    return lambda name, total=0, unit="": on_job(f"{number} {name}", total, unit)


@dataclass(frozen=True)
class FinishedParts:
    """The parts that are finished, with the seconds that each took, and what they left out."""

    measures: Measures
    findings: tuple[Finding, ...]
    seconds: dict[str, float]
    left_out: tuple[str, ...] = ()


def _write_examination(done: FinishedParts, unfinished: tuple[str, ...], out: str | Path | None) -> Examination:
    found = build_examination(
        done.findings, done.measures, unfinished=unfinished, seconds=done.seconds, left_out=done.left_out
    )
    if out is not None:
        write_json(Path(out) / FILE, found.to_json())
    return found


@contextmanager
def _folder(out: str | Path | None, identity: dict[str, Any], resume: bool) -> Iterator[Path]:
    """The folder of the parts, locked; one for the moment where nothing is kept."""
    if out is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    run = RunFolder(Path(out) / "run")
    with run.locked():
        run.begin(identity, resume=resume)
        yield run.path
