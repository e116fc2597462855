"""Ray: the same numbers as without it, lost workers are replaced, a lost driver leaves no process and no gap.

The tests that start Ray are slow; a local Ray needs half a minute on a busy machine.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from places import COMMAND_LINE, arguments, numbers, stamps, sweep, work

from loragate.errors import ConfigError, LoragateError
from loragate.signals import sigterm_as_ctrl_c

psutil = pytest.importorskip("psutil", reason="psutil is not installed")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")

EPOCHS = ("--num-train-epochs", "6")
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
ON_RAY = ("--runner", "ray", "--workers", "2", *EPOCHS)


@pytest.fixture(scope="module")
def undisturbed(place, tmp_path_factory):
    """The sweep of the slow tests, without Ray."""
    out = tmp_path_factory.mktemp("undisturbed") / "sweep"
    assert sweep(arguments(place, out, "--runner", "sequential", *EPOCHS)) == 0
    return out


def start(place, out, *more):
    """A driver in its own process, its lines in a file beside `out`."""
    log = (out.parent / "log.txt").open("a")
    command = [sys.executable, "-c", COMMAND_LINE, *arguments(place, out, *ON_RAY, *more)]
    return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})


def wait_for(what, driver, seconds=480.0):
    """Wait until `what()` is true."""
    until = time.monotonic() + seconds
    while not what():
        assert driver.poll() is None, "the driver ended early"
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.02)


def alive(processes):
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end between the two questions
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def at_work(driver, out):
    """{process: folders of the trials that it holds}, of a driver's workers."""
    held = {}
    try:
        for child in psutil.Process(driver.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                places = {Path(file.path).parent for file in child.open_files() if file.path.endswith("/lock")}
                if places := {place for place in places if place.parent == out / "trials"}:
                    held[child.pid] = places
    except psutil.NoSuchProcess:  # the driver has just ended
        pass
    return held


def test_as_many_trials_run_as_fit_and_none_that_never_could(monkeypatch):
    from loragate.selection.on_ray import Resources, count_parallel_trials

    nodes = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0}}, {"Alive": False, "Resources": {"CPU": 64.0}}]
    nodes.append({"Alive": True, "Resources": {"CPU": 3.0}})
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    assert count_parallel_trials(Resources(0, 2.0, 0.0)) == 4 + 1
    assert count_parallel_trials(Resources(0, 1.0, 0.5)) == 2
    with pytest.raises(ConfigError, match=r"asks for 1 CPUs and 2 GPUs, and Ray has 8 CPUs, 1 GPUs; 3 CPUs, 0 GPUs"):
        count_parallel_trials(Resources(0, 1.0, 2.0))


def test_resources_follow_from_flags_and_machine(monkeypatch):
    from loragate.selection.on_ray import Resources

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert Resources.detect(0, 1, None, "auto").workers == 2
    shared = Resources.detect(0, 4, 0.5, "auto")
    assert (shared.workers, shared.cpus, shared.gpus) == (4, 4.0, 0.5)
    assert Resources.detect(3, 1, None, "cpu").gpus == 0
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert Resources.detect(0, 1, None, "auto") == Resources(4, 1.0, 0.0)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert Resources.detect(0, 1, None, "auto") == Resources(0, 1.0, 1.0)


def test_a_cluster_that_does_not_answer_is_named(place, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS=127\.0\.0\.1:1"):
        sweep(arguments(place, tmp_path / "out", "--runner", "ray", "--gpus-per-trial", "0"))


def test_a_node_that_is_not_up_in_time_is_started_once_more(monkeypatch):
    from loragate.selection.on_ray import Resources, ray_session

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    calls = []

    def init(address, **kept):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))  # as Ray's own does, without a word
        calls.append(address)
        if len(calls) < up:
            raise Exception("The current node timed out during startup.\nMore.")

    monkeypatch.setattr("ray.init", init)
    up = 2
    with sigterm_as_ctrl_c():
        ours = signal.getsignal(signal.SIGTERM)
        with ray_session(Resources(workers=2)):
            assert calls == ["local", "local"]
            assert signal.getsignal(signal.SIGTERM) is ours, "SIGTERM says how to go on, as Ctrl-C does"
    calls.clear()
    up = 3
    with pytest.raises(
        ConfigError, match=r"not be started \(The current node timed out during startup\.\); --runner seq"
    ):
        ray_session(Resources(workers=2)).__enter__()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert len(calls) == 2


@pytest.mark.parametrize("error", [ConfigError("base model /data/base: no such folder"), OSError("no room left")])
def test_what_goes_wrong_where_a_worker_opens_the_run_is_told(place, tmp_path, monkeypatch, capsys, error):
    """The driver's own opening goes well: a worker elsewhere lacks the base, or its GPU is full."""
    from loragate.selection import on_ray
    from loragate.selection.sweep import Sweep

    models, emptied, real = [], [], Sweep.open

    def fail(*_):
        raise error

    def opened(self, *args):
        run = real(self, *args)
        models.append(weakref.ref(run.context.model))
        return run

    def without_ray(open_run, pending, on_trial, *, resources):
        assert models[0]() is None, "the driver holds the base no longer"
        assert emptied == [True], "nor does its allocator on a GPU"
        worker = on_ray.Worker(open_run)
        with monkeypatch.context() as patched:
            patched.setattr(Sweep, "open", fail)
            patched.setattr(os, "_exit", sys.exit)
            for trial in pending:
                with contextlib.suppress(SystemExit):
                    assert worker.run(trial) == (trial, False)

    monkeypatch.setattr("torch.cuda.empty_cache", lambda: emptied.append(models[0]() is None))
    monkeypatch.setattr(Sweep, "open", opened)
    monkeypatch.setattr(on_ray, "run_on_ray", without_ray)
    with pytest.raises(LoragateError, match="4 of 4 trials are not finished"):
        sweep(arguments(place, tmp_path / "out", "--runner", "ray", "--workers", "1"))
    said = " ".join(capsys.readouterr().out.split())
    assert str(error) in said
    assert "its worker was lost" not in said


@pytest.mark.slow("kills")
def test_a_killed_worker_is_replaced_and_the_numbers_are_the_same(place, undisturbed, tmp_path):
    out = tmp_path / "out"
    driver = start(place, out)
    files = [out / "trials" / f"entropy_{bounds}_seed0" / "run" / "metrics.jsonl" for bounds in ("-3_2", "0_1")]
    wait_for(lambda: any(path.is_file() and path.read_text().count("\n") >= 4 for path in files), driver)
    running = next(path.parent.parent for path in files if path.is_file() and path.read_text().count("\n") >= 4)
    held = at_work(driver, out)
    (killed,) = (process for process, places in held.items() if running in places)
    os.kill(killed, signal.SIGKILL)
    while driver.poll() is None:
        for process, places in at_work(driver, out).items():
            held.setdefault(process, set()).update(places)
        time.sleep(0.02)
    assert driver.returncode == 0, (tmp_path / "log.txt").read_text()
    assert numbers(out) == numbers(undisturbed)
    assert sum(running in places for places in held.values()) == 2, "the trial was started again, once"
    assert len(held) <= 3, "workers are kept from trial to trial"


@pytest.mark.slow("kills")
def test_a_killed_driver_leaves_no_process_and_goes_on(place, undisturbed, tmp_path):
    draw = np.random.default_rng(11)
    out = tmp_path / "out"
    known: dict = {}
    agents: list = []
    for kill in range(2):
        driver = start(place, out, *(["--resume"] if kill else []))
        began = work(out)
        wait_for(lambda began=began: work(out) != began, driver)
        time.sleep(float(draw.uniform(0.0, 1.0)))
        if kill and not at_work(driver, out):  # all trials had been finished within that second
            driver.wait(timeout=300)
            known = stamps(out)
            break
        children = psutil.Process(driver.pid).children(recursive=True)
        assert len(children) >= 4, "Ray's own processes and the workers"
        # two helpers of the raylet take a minute or two to see that they are alone, and then end by themselves
        agents += [child for child in children if child.name() in AGENTS]
        children = [child for child in children if child not in agents]
        driver.kill()
        driver.wait()
        until = time.monotonic() + 60
        while alive(children) and time.monotonic() < until:
            time.sleep(0.2)
        assert alive(children) == []
        now = stamps(out)
        assert known.items() <= now.items(), "a finished trial was touched"
        known = now
        if len(known) == 4:
            break
    driver = start(place, out, "--resume")
    assert driver.wait(timeout=300) == 0, (tmp_path / "log.txt").read_text()
    assert known.items() <= stamps(out).items()
    assert numbers(out) == numbers(undisturbed)
    until = time.monotonic() + 240
    while alive(agents) and time.monotonic() < until:
        time.sleep(1)
    assert alive(agents) == []
