"""`kill -9` at random moments of a training run, a hundred times: is a finished checkpoint lost, does the end differ?

    python benchmarks/crash_safety.py [--kills 100] [--seed 0] [--out FILE]

A tiny adapter (Stage I, with dropout) and its gates (Stage II) are trained with a checkpoint after every step. Each run is a
process of its own, forked after the imports, and is killed with SIGKILL: before its first step, within a step, while a
checkpoint is being written, or between the two, as it falls out. Then the same training is resumed in a new process, which
may be killed again, until one reaches the end. Every end is compared with that of a run nobody touched: trained parameters,
AdamW's moments and the logged losses, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # which holds the tiny models

STEPS = 6
STAGES = ("sft", "calibrate")


@dataclass
class Outcome:
    """What happened in the trials of one stage.

    Attributes:
        kills: runs killed.
        moments: where the kills fell: before the first step of that process, in a step, in a half-written checkpoint.
        ends: resumed runs that reached the end.
        lost: kills after which a checkpoint known to be finished was not the one (or older than the one) to go on from.
        differing: ends that differ from the undisturbed run in any bit.
        failed: messages of processes that ended with an error.
        most_kills_in_one_run: the longest chain of kills before an end.
    """

    kills: int = 0
    moments: dict[str, int] = field(default_factory=dict)
    ends: int = 0
    lost: int = 0
    differing: int = 0
    failed: list[str] = field(default_factory=list)
    most_kills_in_one_run: int = 0


def train(stage: str, folder: Path, resume: bool, report: Any) -> str:
    """The training under test; returns the digest of its end."""
    import loragate as lg
    from loragate.training import FineTuningSettings, GateTrainingSettings, train_adapter
    from tiny import tiny_adapter, tiny_base, tiny_rows, tiny_tokenizer

    tokenizer, rows = tiny_tokenizer(), tiny_rows(2 * STEPS)
    shared: dict[str, Any] = {
        "batch_size": 2,
        "per_device_train_batch_size": 1,
        "max_length": 32,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 1,
    }

    def on_step(progress: Any) -> None:
        if not progress.values:
            report(progress.step)

    if stage == "sft":
        settings = FineTuningSettings(rank=2, dropout=0.2, **shared)
        result: Any = train_adapter(
            tiny_base(), tokenizer, rows, settings, run_folder=folder, resume=resume, on_step=on_step
        )
        trained = {name: value for name, value in result.model.named_parameters() if "lora_" in name}
    else:
        model = tiny_adapter()
        result = lg.train_gates(
            model,
            tokenizer,
            rows,
            lg.GateConfig(-3, 2),
            GateTrainingSettings(k=20, **shared),
            run_folder=folder,
            resume=resume,
            on_step=on_step,
        )
        trained = dict(lg.gate_parameters(model))
    return digest(trained, folder)


def digest(trained: dict[str, Any], folder: Path) -> str:
    """sha256 over trained parameters, the optimiser's state in the last checkpoint, and the losses of all steps."""
    import torch

    total = hashlib.sha256()
    for name in sorted(trained):
        total.update(name.encode() + trained[name].detach().numpy().tobytes())
    state = torch.load(folder / f"checkpoint-{STEPS}" / "optimizer.pt", weights_only=True)["state"]
    for index in sorted(state):
        for key in sorted(state[index]):
            total.update(f"{index} {key}".encode() + state[index][key].numpy().tobytes())
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "loss" in record:
            total.update(json.dumps([record["step"], record["loss"], record["grad_norm"]]).encode())
    return total.hexdigest()


class Run:
    """One process that trains; its steps, its digest or its error arrive through a pipe."""

    def __init__(self, stage: str, folder: Path, resume: bool) -> None:
        self.began = time.monotonic()
        reading, writing = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            os.close(reading)
            _child(stage, folder, resume, writing)
        os.close(writing)
        os.set_blocking(reading, False)
        self.pipe, self.text = reading, ""
        self.over = False
        self.times: dict[int, float] = {}

    def look(self) -> None:
        """Read what has arrived."""
        try:
            while chunk := os.read(self.pipe, 4096):
                self.text += chunk.decode()
            self.over = True
        except BlockingIOError:
            pass
        for line in self.text.splitlines():
            if line.startswith("step ") and int(line[5:]) not in self.times:
                self.times[int(line[5:])] = time.monotonic() - self.began

    def wait_for(self, step: int) -> bool:
        """Wait until a step was reported; False if the process ended before."""
        while step not in self.times and not self.over:
            self.look()
            time.sleep(0.0005)
        return step in self.times

    def kill(self) -> bool:
        """SIGKILL; False if the process had already ended."""
        self.look()
        alive = not self.over
        if alive:
            os.kill(self.process, signal.SIGKILL)
        self.close()
        return alive

    def close(self) -> None:
        os.waitpid(self.process, 0)
        self.look()
        os.close(self.pipe)

    def line(self, start: str) -> str:
        return next((line[len(start) :] for line in self.text.splitlines() if line.startswith(start)), "")


def _child(stage: str, folder: Path, resume: bool, pipe: int) -> None:
    def say(text: str) -> None:
        os.write(pipe, f"{text}\n".encode())

    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        say(f"digest {train(stage, folder, resume, lambda step: say(f'step {step}'))}")
    except BaseException as error:
        say(f"error {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    finally:
        os._exit(0)


def undisturbed(stage: str, folder: Path) -> tuple[str, float, float]:
    """(digest, seconds to the first step, seconds between steps) of a run that nobody kills."""
    run = Run(stage, folder, resume=False)
    run.wait_for(STEPS + 1)
    run.close()
    if not run.line("digest "):
        raise SystemExit(f"the undisturbed run failed: {run.line('error ')}")
    moments = [run.times[step] for step in sorted(run.times)]
    return run.line("digest "), moments[0], statistics.median(b - a for a, b in itertools.pairwise(moments))


def trials(stage: str, kills: int, draw: random.Random, place: Path) -> Outcome:
    """Kill and resume until `kills` runs were killed and the last of them was brought to its end."""
    from loragate.training.checkpoints import find_checkpoint_fault, last_checkpoint

    expected, startup, gap = undisturbed(stage, place / "undisturbed")
    outcome = Outcome()
    number = 0
    while outcome.kills < kills or number == 0:
        number += 1
        folder, finished, chain = place / f"run-{number}", 0, 0
        while True:
            run = Run(stage, folder, resume=(folder / "run.json").is_file())
            if outcome.kills < kills:
                # a moment of this process: within its start, or within or after one of the steps it has still to do
                step = draw.randrange(finished, STEPS + 1)
                waited = step == finished or run.wait_for(step)
                time.sleep(draw.uniform(0, startup if step == finished else gap) if waited else 0)
                if run.kill():
                    outcome.kills += 1
                    chain += 1
                    if run.times:
                        # a step is reported before its checkpoint is written, so the one before is finished
                        finished = max(finished, max(run.times) - 1)
                    last = last_checkpoint(folder)
                    reached = int(last.name.rpartition("-")[2]) if last else 0
                    outcome.lost += reached < finished
                    torn = [path for path in folder.glob("checkpoint-*") if find_checkpoint_fault(path)]
                    moment = (
                        "in a half-written checkpoint"
                        if torn
                        else "in a step"
                        if run.times
                        else "before the first step"
                    )
                    outcome.moments[moment] = outcome.moments.get(moment, 0) + 1
                    finished = max(finished, reached)
                    continue
            else:
                run.wait_for(STEPS + 1)
                run.close()
            break
        if error := run.line("error "):
            outcome.failed.append(error)
        elif chain:
            outcome.ends += 1
            outcome.differing += run.line("digest ") != expected
            if run.times and min(run.times) - 1 < finished:
                outcome.lost += 1
        outcome.most_kills_in_one_run = max(outcome.most_kills_in_one_run, chain)
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="over both stages together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "crash_safety.json")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import datasets
    import torch
    import transformers
    import trl

    import loragate.training.fine_tuning
    import loragate.training.gate_training  # noqa: F401
    import tiny  # noqa: F401

    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    draw = random.Random(options.seed)
    began = time.monotonic()
    result: dict[str, Any] = {
        "versions": {module.__name__: module.__version__ for module in (torch, transformers, trl)},
        "seed": options.seed,
        "steps": STEPS,
        "save_steps": 1,
    }
    sound = True
    for index, stage in enumerate(STAGES):
        share = options.kills // 2 + (options.kills % 2 if index == 0 else 0)
        with tempfile.TemporaryDirectory(prefix="loragate-crash-") as name:
            outcome = trials(stage, share, draw, Path(name))
        result[stage] = vars(outcome)
        sound = sound and not (outcome.lost or outcome.differing or outcome.failed)
        print(f"{stage}: {json.dumps(vars(outcome))}", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"{'sound' if sound else 'NOT SOUND'} after {time.monotonic() - began:.0f} s; written to {options.out}")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
