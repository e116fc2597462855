"""Dealt out to several engines, the samples are those of one."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_decoders import identities
from transformers import Qwen2ForCausalLM

from loragate.errors import ConfigError, DataError, LoragateError
from loragate.generation import Sample, SamplingConfig, TransformersEngine
from loragate.generation.requests import split_by_question
from loragate.generation.sharded import (
    Job,
    RayData,
    ShardedEngine,
    _Replica,
    samples_of,
)

PROMPTS = [" ".join(f"w{(5 * i + 3 * j) % 20 + 4}" for j in range(1 + i % 6)) for i in range(9)]
CONFIG = SamplingConfig(temperature=1.0, max_new_tokens=20, samples=3, seed=5)
SAMPLE = Sample(0, 1, "zwei\n\u2028Zeilen é \x0b\x85", (6, 1), "stop", 1.0 / 3.0)


def run_here(job: Job, parts: Any, replicas: int = 1) -> Iterator[list[Sample]]:
    """An executor without other processes."""
    engine = job.make_engine() if parts else None
    for rows in parts:
        yield job.draw(engine, rows)


def load_engine(folder: str, tokenizer: Any, together: int = 1) -> TransformersEngine:
    """An engine on the model of this folder, which leaves the number of its process behind.

    It is ready when `together` processes have come so far, or else the first one could do all the work alone.
    """
    torch.set_num_threads(1)
    used = Path(folder) / "processes"
    used.mkdir(exist_ok=True)
    (used / str(os.getpid())).touch()
    late = time.monotonic() + 120
    while len(list(used.iterdir())) < together and time.monotonic() < late:
        time.sleep(0.1)
    return TransformersEngine(Qwen2ForCausalLM.from_pretrained(folder).eval(), tokenizer)


def test_rows_are_cut_between_questions() -> None:
    rows = [(0, 0), (0, 1), (2, 1), (3, 0), (3, 1)]
    assert split_by_question(rows, 1) == [[(0, 0), (0, 1)], [(2, 1)], [(3, 0), (3, 1)]]
    assert split_by_question(rows, 2) == [[(0, 0), (0, 1), (2, 1)], [(3, 0), (3, 1)]]
    assert split_by_question(rows, 9) == [rows]
    assert split_by_question([], 2) == []


def test_one_shard_here_is_the_engine_itself(qwen2: Any, tokenizer: Any) -> None:
    made: list[TransformersEngine] = []

    def make_engine() -> TransformersEngine:
        made.append(TransformersEngine(qwen2, tokenizer))
        return made[-1]

    expected = TransformersEngine(qwen2, tokenizer).generate(PROMPTS, CONFIG)
    engine = ShardedEngine(make_engine, 1, run_here, batch_size=2)
    batches: list[list[Sample]] = []
    progress: list[tuple[int, int]] = []
    got = engine.generate(
        PROMPTS, CONFIG, lambda *step: progress.append(step), on_samples=lambda batch: batches.append(list(batch))
    )
    assert identities(got) == identities(expected)
    assert len(made) == 1
    assert [len(batch) for batch in batches] == [6, 6, 6, 6, 3]
    assert progress == [(6, 27), (12, 27), (18, 27), (24, 27), (27, 27)]
    pending = [(s.question, s.sample) for s in expected[5:11]]
    assert identities(engine.generate(PROMPTS, CONFIG, pending=pending)) == identities(expected[5:11])
    assert engine.generate(PROMPTS, CONFIG, pending=[]) == []
    assert len(made) == 2


def test_every_replica_gets_a_part_and_a_lost_sample_is_an_error(qwen2: Any, tokenizer: Any) -> None:
    sizes: list[int] = []

    def losing(job: Job, parts: Any, replicas: int) -> Iterator[list[Sample]]:
        sizes.extend(len(part) for part in parts)
        yield from run_here(job, parts[1:])

    engine = ShardedEngine(lambda: TransformersEngine(qwen2, tokenizer), 4, losing)
    with pytest.raises(LoragateError, match="27 samples were to be drawn, but the 4 replicas returned 18"):
        engine.generate(PROMPTS, CONFIG)
    assert sizes == [9, 9, 9]


def test_settings_that_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_engine() -> Any:
        raise AssertionError("no engine is needed")

    with pytest.raises(ConfigError, match="shards is 0"):
        ShardedEngine(no_engine, 0, run_here)
    with pytest.raises(DataError, match="question 9"):
        ShardedEngine(no_engine, 1, run_here).generate(PROMPTS, CONFIG, pending=[(9, 0)])
    with pytest.raises(ConfigError, match="2 shards with 1 GPU each do not fit into a Ray cluster of 1 GPU"):
        RayData()._require_room({"CPU": 8.0, "GPU": 1.0}, 2)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install loragate\[sweep\]"):
        ShardedEngine(no_engine, 2, RayData()).generate(PROMPTS, CONFIG)


def test_samples_survive_the_way_back() -> None:
    samples = [SAMPLE, replace(SAMPLE, entropy=None, text="")]
    engine = SimpleNamespace(generate=lambda *_, **__: samples)
    (drawn,) = _Replica(Job(lambda: engine, ("w4",), CONFIG))({"rows": ["[[0, 0]]"]})["drawn"]
    assert samples_of(drawn) == samples


def test_a_replica_returns_errors_as_values(qwen2: Any, tokenizer: Any) -> None:
    def broken() -> Any:
        raise ConfigError("no such model")

    for make_engine, prompts, kind, message in (
        (broken, PROMPTS, ConfigError, "no such model"),
        (lambda: TransformersEngine(qwen2, tokenizer), ["w4 " * 64], DataError, "Prompt 0 has 64 tokens"),
    ):
        returned = _Replica(Job(make_engine, tuple(prompts), CONFIG))({"rows": ["[[0, 0], [0, 1]]"]})
        with pytest.raises(kind, match=message):
            samples_of(returned["drawn"][0])


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="ray is not installed (pip install loragate[sweep])")
    pytest.importorskip("ray.data", reason="ray has no data library (pip install loragate[sweep])")
    tests = str(Path(__file__).parent)
    if ray.is_initialized():  # another file of the same test process may have left it running
        ray.shutdown()
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([tests, *filter(None, sys.path)])}},
    )
    yield ray
    ray.shutdown()


@pytest.mark.slow("processes")
def test_two_ray_actors_draw_what_one_process_draws(
    ray_cluster: Any, qwen2: Any, tokenizer: Any, tmp_path: Path
) -> None:
    qwen2.save_pretrained(tmp_path)
    expected = load_engine(str(tmp_path), tokenizer).generate(PROMPTS, CONFIG)
    used = tmp_path / "processes"
    (used / str(os.getpid())).unlink()
    make_engine = partial(load_engine, str(tmp_path), tokenizer, together=2)
    engine = ShardedEngine(make_engine, 2, RayData(gpus=0), batch_size=2)
    batches: list[int] = []
    got = engine.generate(PROMPTS, CONFIG, on_samples=lambda batch: batches.append(len(batch)))
    assert identities(got) == identities(expected)
    assert [s.entropy for s in got] == pytest.approx([s.entropy for s in expected], abs=1e-5)
    assert sorted(batches) == [3, 6, 6, 6, 6]
    assert len(list(used.iterdir())) == 2
    assert not (used / str(os.getpid())).exists()
    with pytest.raises(DataError, match=r"^Prompt 0 has 64 tokens"):
        engine.generate(["w4 " * 64], CONFIG)


@pytest.mark.parametrize(("named", "joined"), [("", "local"), ("10.0.0.1:6379", "10.0.0.1:6379")])
def test_no_cluster_is_joined_that_nobody_named(monkeypatch: pytest.MonkeyPatch, named: str, joined: str) -> None:
    """Left alone, Ray joins what a file in /tmp/ray names, and any user of the machine can write there."""
    ray = pytest.importorskip("ray", reason="ray is not installed (pip install loragate[sweep])")
    seen: list[dict[str, Any]] = []

    def init(**how: Any) -> None:
        seen.append(how)
        raise LoragateError("enough")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_ADDRESS", named)
    with pytest.raises(LoragateError, match="enough"):
        list(RayData()(Job(lambda: None, ("w4",), CONFIG), [[(0, 0)]], 1))  # type: ignore[arg-type,return-value]
    assert seen[0]["address"] == joined
