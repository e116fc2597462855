import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from loragate.errors import ConfigError, LoragateError
from loragate.evaluation.grading import MATH_GRADERS, Grade, GradingPool, Job, MathGrader

HERE = Path(__file__).parent
BAD = MathGrader("bad", lambda response, gold, tolerance: Job(gold, response), "badgrader:judge")


@pytest.fixture(autouse=True)
def _findable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]))


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


def test_each_bad_answer_costs_one_grade():
    bad = ["hang", "hang in native code", "die", "segfault", "memory"]
    answers = ["1", *bad[:2], "print", "2", *bad[2:], "3", "recurse", "4"]
    seen = []
    with GradingPool(BAD, workers=2, timeout_s=1.5, memory_mb=300) as pool:
        grades = pool.grade([(answer, answer) for answer in answers], lambda done, total: seen.append((done, total)))
    reasons = dict(zip(answers, (grade.reason for grade in grades)))
    assert {answer: reasons.pop(answer) for answer in bad} == {
        "hang": "timeout",
        "hang in native code": "timeout",
        "die": "crashed",
        "segfault": "crashed",
        "memory": "crashed",
    }
    assert reasons.pop("recurse") == "unparsed"
    assert set(reasons.values()) == {"ok"}
    assert [grade.correct for grade in grades] == [grade.reason == "ok" for grade in grades]
    assert seen[-1] == (len(answers), len(answers))
    assert seen == sorted(seen)


def test_no_process_outlives_the_pool():
    with GradingPool(BAD, workers=2) as pool:
        pool.grade([("1", "1"), ("2", "3")])
        pids = [worker.process.pid for worker in pool._idle]
        assert pids
        assert all(is_alive(pid) for pid in pids)
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_no_process_outlives_its_caller(end):
    code = (
        "import signal, threading, time; from test_pool import BAD, GradingPool\n"
        # whoever runs the tests in the background may have left SIGINT ignored
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"with GradingPool(BAD, workers=2, timeout_s={60 if end == signal.SIGINT else 2}) as pool:\n"
        "    pool.grade([('1', '1')])\n"
        "    def tell():\n"
        "        while len(pool._alive) < 2: time.sleep(0.02)\n"
        "        print(*[w.process.pid for w in pool._alive], flush=True)\n"
        "    threading.Thread(target=tell, daemon=True).start()\n"
        "    pool.grade([('hang', '1'), ('hang in native code', '2')])\n"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    pids = [int(word) for word in caller.stdout.readline().split()]
    assert len(pids) == 2
    caller.send_signal(end)
    assert caller.wait(30) != 0
    caller.stdout.close()
    limit = time.monotonic() + 12
    while any(is_alive(pid) for pid in pids) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in pids)


def test_equal_answers_are_graded_once():
    seen = []
    with GradingPool(BAD, workers=1) as pool:
        assert pool.grade([("1", "1")] * 50, lambda done, _: seen.append(done)) == [Grade(True, "1", "ok")] * 50
        assert pool.grade([("1", "1")], lambda done, _: seen.append(done)) == [Grade(True, "1", "ok")]
    assert seen == [0, 50, 1]


def test_a_fresh_worker_decides_when_a_used_one_dies():
    with GradingPool(BAD, workers=1) as pool:
        pool.grade([("1", "1")])
        used = pool._idle[0].process.pid
        os.kill(used, signal.SIGKILL)
        assert pool.grade([("2", "2")]) == [Grade(True, "2", "ok")]
        assert pool._idle[0].process.pid != used


def test_workers_load_no_torch():
    names = "torch transformers numpy loragate.generation loragate.evaluation.results"
    spy = replace(
        MATH_GRADERS["default"], judge="badgrader:modules", begin=lambda response, gold, _: Job(gold, response)
    )
    with GradingPool(spy, workers=1) as pool:
        assert pool.grade([(names, "")])[0].reason == ""
    code = (
        "import sys, loragate.evaluation.grading.default, loragate.evaluation.grading.math_verify_grader as other\n"
        "other.judge('x', 'y', None)\n"
        f"print([name for name in {names.split()} if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_most_answers_need_no_worker():
    with GradingPool() as pool:
        grades = pool.grade([("\\boxed{1/2}", "0.5"), ("no box", "1"), ("\\boxed{2,1}", "1,2"), ("\\boxed{7}", "8")])
        assert not pool._alive
    assert [grade.reason for grade in grades] == ["ok", "no_box", "ok", "wrong"]


def test_settings_and_broken_graders_are_explained():
    with pytest.raises(ConfigError, match="did you mean 'default'"):
        GradingPool("defualt")
    missing = replace(BAD, judge="no_such_module:judge")
    with pytest.raises(LoragateError, match=r"cannot run.*no_such_module"), GradingPool(missing, workers=1) as pool:
        pool.grade([("1", "1")])
