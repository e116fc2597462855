"""Two processes over gloo on the CPU against one: DDP and FSDP2, both stages.

The losses of every step agree to 1e-5 (relative), trained values to 1e-3 (relative) or 2e-6.
"""

import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers

from loragate.training.checkpoints import last_checkpoint
from loragate.training.sharding import average_gradients, fsdp_copy
from loragate.training.strategy import launch_file
from tiny import load_script, tiny_adapter

WORKER = Path(__file__).with_name("distributed_worker.py")
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
shards = pytest.mark.skipif(
    not hasattr(transformers.Trainer, "_defer_fsdp_gradient_reduction"),
    reason="FSDP2 is refused with this transformers, which is older than 5.23",
)
PATIENCE = 1200  # seconds; two processes need a few, and ten times that on a busy machine
UNTIED = {"tie_word_embeddings": False}
JOBS = {
    "gates": {"stage": "gates"},
    "one gate": {"stage": "gates", "granularity": "global", "per_device_train_batch_size": 2, "base": UNTIED},
    "gates, checkpointing": {"stage": "gates", "gradient_checkpointing": True, "per_device_train_batch_size": 2},
    "gates, packed": {"stage": "gates", "packing": True, "per_device_train_batch_size": 2},
    "adapter": {"stage": "sft"},
    "adapter, accumulated": {"stage": "sft", "per_device_train_batch_size": 1, "objective": "dft", "base": UNTIED},
    "adapter, median of the batch": {"stage": "sft", "per_device_train_batch_size": 1, "objective": "talr"},
    "adapter, sets of the batch": {"stage": "sft", "per_device_train_batch_size": 2, "objective": "eksft"},
}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Run:
    """Two processes, forked from this one, so that nothing is imported again."""

    def __init__(self, folder, jobs, environment):
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": "2",
            "ACCELERATE_USE_CPU": "true",
            **environment,
        }
        folder.mkdir(parents=True, exist_ok=True)
        self.errors = [folder / f"errors.{rank}" for rank in range(2)]
        fork = multiprocessing.get_context("fork")
        self.processes = [
            fork.Process(
                target=load_script(WORKER).forked,
                args=(jobs, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, self.errors[rank]),
            )
            for rank in range(2)
        ]
        for process in self.processes:
            process.start()

    def wait(self, rank):
        """(exit status, what was written to stderr) of one process."""
        process = self.processes[rank]
        process.join(PATIENCE)
        if process.exitcode is None:
            process.kill()
        return process.exitcode, self.errors[rank].read_text()


def do(folder, jobs, environment):
    """Do jobs on two processes that must end well."""
    run = Run(folder, jobs, environment)
    for rank in range(2):
        status, errors = run.wait(rank)
        assert status == 0, errors[-4000:]


def run_all(folder, names, environment):
    """{name: (record, trained values)} of several jobs done by one pair of processes."""
    do(folder, [{**JOBS[name], "out": str(folder / name)} for name in names], environment)
    return {name: read(folder / name) for name in names}


def read(folder):
    return json.loads((folder / "record.json").read_text()), torch.load(folder / "trained.pt", weights_only=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """(record, trained values) of a job done by this process, each computed once."""
    module, done = load_script(WORKER), {}

    def of(name):
        if name not in done:
            done[name] = module.run(**JOBS[name], out=tmp_path_factory.mktemp("alone"))
        return done[name]

    return of


def assert_same(found, expected):
    for key, limit in (("loss", 1e-5), ("grad_norm", 1e-3)):
        values, wanted = (
            [entry[key] for entry in record["history"] if "loss" in entry] for record, _ in (found, expected)
        )
        assert len(wanted) == 3
        assert values == pytest.approx(wanted, rel=limit)
    for key in ("before", "after", "mean"):
        assert found[0].get(key, 0) == pytest.approx(expected[0].get(key, 0), rel=1e-4), key
    assert set(found[1]) == set(expected[1])
    for name, values in expected[1].items():
        torch.testing.assert_close(found[1][name], values, rtol=1e-3, atol=2e-6)


def test_ddp_follows_one_process(tmp_path, alone):
    names = ("one gate", "adapter", "gates, packed", "adapter, median of the batch", "adapter, sets of the batch")
    for name, found in run_all(tmp_path, names, {}).items():
        assert_same(found, alone(name))


@pytest.mark.slow("processes")
@shards
def test_fsdp2_follows_one_process(tmp_path, alone):
    names = [name for name in JOBS if name != "adapter, sets of the batch"]  # a reference is not sharded
    for name, found in run_all(tmp_path, names, FSDP2).items():
        assert_same(found, alone(name))


@pytest.mark.slow("processes")
@shards
def test_fsdp2_resumes_bit_for_bit_and_its_checkpoint_serves_one_process(tmp_path, alone):
    jobs = []
    for name in ("gates", "adapter"):
        whole = {**JOBS[name], "save_steps": 2, "out": str(tmp_path / name)}
        jobs += [whole, {**whole, "resume": True, "drop": "checkpoint-3", "out": str(tmp_path / f"{name} resumed")}]
    do(tmp_path, jobs[::2], FSDP2)
    for name in ("gates", "adapter"):
        shutil.copytree(tmp_path / name, tmp_path / f"{name} resumed")
        shutil.copytree(tmp_path / name, tmp_path / f"{name} alone")
        checkpoint = tmp_path / name / "run" / "checkpoint-2"
        size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
        assert size < 300_000, "only what trains, its moments and random states"
        names = {path.name for path in checkpoint.iterdir()}
        assert {"trained.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"} <= names
    do(tmp_path, jobs[1::2], FSDP2)
    for name in ("gates", "adapter"):
        before, after = read(tmp_path / name), read(tmp_path / f"{name} resumed")
        logs = [
            (tmp_path / each / "run" / "metrics.jsonl").read_text().splitlines() for each in (name, f"{name} resumed")
        ]
        # each line has its time: those of steps 1 and 2 are the first run's own
        assert logs[0][:2] == logs[1][:2]
        assert logs[0][2] != logs[1][2]
        assert [entry["step"] for entry in after[0]["history"]] == [1, 2, 3, 3]
        for key, values in before[1].items():
            assert torch.equal(after[1][key], values), key
        shutil.rmtree(tmp_path / f"{name} alone" / "run" / "checkpoint-3")
        record, trained = load_script(WORKER).run(
            **JOBS[name], save_steps=2, resume=True, out=tmp_path / f"{name} alone"
        )
        assert record["steps"] == 3
        for key, values in before[1].items():
            torch.testing.assert_close(trained[key], values, rtol=1e-3, atol=2e-6)


@pytest.mark.slow("kills")
@pytest.mark.parametrize("environment", [{}, pytest.param(FSDP2, marks=shards)], ids=["ddp", "fsdp2"])
def test_a_killed_process_ends_the_others(tmp_path, environment):
    job = {**JOBS["gates"], "out": str(tmp_path), "save_steps": 1, "kill": {"rank": 1, "step": 2}}
    run = Run(tmp_path, [job], environment)
    assert run.wait(1)[0] == -9
    began = time.monotonic()
    status, errors = run.wait(0)
    assert status != 0, errors[-3000:]
    assert time.monotonic() - began < 120, "at once; the limit is for a busy machine"
    assert last_checkpoint(tmp_path / "run").name == "checkpoint-2"


@pytest.mark.slow("processes")
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=shards)])
def test_accelerate_launch_with_the_shipped_configuration(tmp_path, alone, strategy):
    job = {**JOBS["gates"], "out": str(tmp_path)}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(launch_file(strategy))]
    command += ["--num_processes", "2", "--main_process_port", str(free_port()), str(WORKER), json.dumps([job])]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same(read(tmp_path), alone("gates"))


def test_a_twin_shares_memory_and_gates_but_no_parameter():
    import loragate as lg

    model = lg.attach_gates(tiny_adapter(), lg.GateConfig(-3, 2))
    twin = fsdp_copy(model)
    own, copied = dict(model.named_parameters()), dict(twin.named_parameters())
    assert list(own) == list(copied)
    for name, parameter in own.items():
        assert copied[name].data_ptr() == parameter.data_ptr(), name
        assert (copied[name] is parameter) == ("lora_gate" in name), name
        assert copied[name].requires_grad == parameter.requires_grad
    head = twin.get_base_model().get_output_embeddings()
    assert head.weight is twin.get_base_model().get_input_embeddings().weight, "tied weights stay tied"
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, twin(input_ids=ids).logits)


def test_gradients_of_gates_are_averaged_in_one_exchange(monkeypatch):
    calls = []

    def all_reduce(flat):
        calls.append(flat.numel())
        flat += torch.arange(flat.numel(), dtype=flat.dtype)  # the other process's share

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    first, second = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(3))
    first.grad = torch.ones(2, 2)
    average_gradients({"first": first, "second": second})
    assert calls == [7]
    assert first.grad.tolist() == [[0.5, 1.0], [1.5, 2.0]]
    assert second.grad.tolist() == [2.0, 2.5, 3.0]
