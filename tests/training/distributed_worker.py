"""One process of a distributed test run: trains on the tiny model as the launcher says, and writes what came out.

The argument is a JSON list of jobs, done one after the other: {"stage", "out", ...settings}, with "resume", "drop" (a
checkpoint removed first), "base" (settings of the tiny base), "granularity", "dora" and "kill" ({"rank", "step"}).
"""

# ruff: noqa: E402  (the path and the offline switch come before what needs them)

import json
import os
import shutil
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

torch.set_num_threads(1)

import loragate as lg
from loragate.errors import LoragateError
from loragate.training import FineTuningSettings, GateTrainingSettings, train_adapter
from tiny import tiny_adapter, tiny_base, tiny_rows, tiny_tokenizer

COMMON = {"batch_size": 8, "per_device_train_batch_size": 4, "logging_steps": 1, "max_length": 64}


def sft(out, resume, base, **settings):
    settings = FineTuningSettings(**{**COMMON, "learning_rate": 5e-3, "rank": 4, **settings})
    base = tiny_base(**base)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    result = train_adapter(base, tiny_tokenizer(), tiny_rows(20), settings, run_folder=out / "run", resume=resume)
    for name, value in result.model.get_base_model().state_dict().items():
        name = name.replace(".base_layer", "")
        assert name not in before or torch.equal(value, before[name]), f"{name} of the base changed"
    return result, {name: p for name, p in result.model.named_parameters() if p.requires_grad}


def gates(out, resume, base, granularity="token", **settings):
    settings = GateTrainingSettings(**{**COMMON, "learning_rate": 1e-2, "k": 20, **settings})
    model = tiny_adapter(base=tiny_base(**base))
    config = lg.GateConfig(-3, 2, granularity=granularity)
    result = lg.train_gates(
        model, tiny_tokenizer(), tiny_rows(20), config, settings, run_folder=out / "run", resume=resume
    )
    return result, dict(lg.gate_parameters(model))


def run(stage, out, resume=False, base=None, **settings):
    """(record, trained values) of a run of `stage`; the values are whole and on the CPU, whatever the launch."""
    out = Path(out)
    result, trained = {"sft": sft, "gates": gates}[stage](out, resume, base or {}, **settings)
    assert not any(hasattr(value, "full_tensor") for value in trained.values())
    record = {"history": result.history, "steps": result.steps}
    if stage == "gates":
        record |= {"before": result.entropy_before, "after": result.entropy_after, "mean": result.gates_total["mean"]}
    return record, {name: value.detach().clone() for name, value in trained.items()}


def die_at(rank, step):
    if int(os.environ["RANK"]) != rank:
        return
    from loragate.training.trainer import StatisticsTrainer

    original = StatisticsTrainer.compute_loss

    def dying(self, *args, **kwargs):
        if self.state.global_step >= step:
            os.kill(os.getpid(), 9)
        return original(self, *args, **kwargs)

    StatisticsTrainer.compute_loss = dying


def main(jobs):
    from loragate.training.strategy import process_state

    state = process_state()
    assert state.num_processes == int(os.environ["WORLD_SIZE"])
    for job in jobs:
        if "kill" in job:
            die_at(**job.pop("kill"))
        out, drop = Path(job["out"]), job.pop("drop", None)
        if state.is_main_process:
            out.mkdir(parents=True, exist_ok=True)
            if drop is not None:
                shutil.rmtree(out / "run" / drop)
        state.wait_for_everyone()
        record, trained = run(**job)
        if state.is_main_process:
            torch.save(trained, out / "trained.pt")
            (out / "record.json").write_text(json.dumps(record, default=float))


def finish(jobs):
    """Do the jobs and return the exit status, as the command line does."""
    try:
        main(jobs)
    except LoragateError as error:
        print(f"loragate: error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def forked(jobs, environment, errors):
    """The life of a process forked from one that has everything imported; errors go to a file."""
    from accelerate.state import AcceleratorState, PartialState

    os.environ.update(environment)
    descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 2)
    sys.stderr = os.fdopen(descriptor, "w", buffering=1)
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    try:
        status = finish(jobs)
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        status = 70
    sys.stderr.flush()
    os._exit(status)  # nothing of the parent's is torn down


if __name__ == "__main__":
    sys.exit(finish(json.loads(sys.argv[1])))
