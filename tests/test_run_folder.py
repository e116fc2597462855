"""One run folder under every resumable job: begun once, resumed only as the same job, held by one process."""

import json
import multiprocessing

import pytest

from loragate.errors import ConfigError, LoragateError, TrainingError
from loragate.files import RunFolder

IDENTITY = {"settings": {"seed": 1, "range": (0, 1)}}


def test_a_resumed_job_must_be_the_same(tmp_path):
    run = RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError, match="no run to resume"):
        run.begin(IDENTITY, resume=True)
    run.begin(IDENTITY, notes={"for": "readers"})
    run.begin(IDENTITY, resume=True, notes={"for": "others"})
    with pytest.raises(ConfigError, match=r"run.json was begun with settings.seed = 1, now it is 2"):
        run.begin({"settings": {"seed": 2, "range": (0, 1)}}, resume=True)
    assert run.read()["notes"] == {"for": "readers"}


def test_work_is_not_overwritten(tmp_path):
    run = RunFolder(tmp_path, TrainingError)
    run.begin(IDENTITY)
    with pytest.raises(TrainingError, match="holds an earlier run, which is not overwritten"):
        run.begin(IDENTITY)
    with pytest.raises(TrainingError, match="holds checkpoint-3, which"):
        RunFolder(tmp_path / "other", TrainingError).begin(IDENTITY, existing_work="checkpoint-3")


def test_another_version_and_a_torn_record_are_refused(tmp_path):
    run = RunFolder(tmp_path)
    run.begin(IDENTITY)
    run.record_path.write_text(json.dumps({**run.read(), "loragate": "0.0.1"}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"begun with loragate 0\.0\.1"):
        run.begin(IDENTITY, resume=True)
    run.record_path.write_text('{"settings"', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.json is not JSON"):
        run.begin(IDENTITY, resume=True)


def hold(path, ready, done):
    with RunFolder(path).locked():
        ready.set()
        done.wait(30)


def test_one_process_at_a_time(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path, ready, done))
    other.start()
    assert ready.wait(30)
    with pytest.raises(LoragateError, match="another run is writing"), RunFolder(tmp_path).locked():
        pass
    done.set()
    other.join(30)
    with RunFolder(tmp_path).locked():
        pass
