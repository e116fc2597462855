"""Dealt out to several engines, the samples are those of one."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_decoders import CONFIG, PROMPTS, identities
from transformers import Qwen2ForCausalLM

from loragate.errors import ConfigError, DataError, LoragateError
from loragate.generation import Sample, SamplingConfig, TransformersEngine
from loragate.generation.sharded import Replica, ShardedEngine, samples_of


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica in this process in place of Ray's."""

    def draw(engine: ShardedEngine, prompts: Any, config: SamplingConfig, parts: Any) -> Iterator[list[Sample]]:
        replica = Replica(engine.make_engine, prompts, config)
        return (samples_of(replica({"rows": [json.dumps(rows)]})["drawn"][0]) for rows in parts)

    monkeypatch.setattr(ShardedEngine, "_drawn", draw)


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


def test_one_shard_here_is_the_engine_itself(here: None, qwen2: Any, tokenizer: Any) -> None:
    made: list[TransformersEngine] = []

    def make_engine() -> TransformersEngine:
        made.append(TransformersEngine(qwen2, tokenizer))
        return made[-1]

    expected = TransformersEngine(qwen2, tokenizer).generate(PROMPTS, CONFIG)
    engine = ShardedEngine(make_engine, 1, batch_size=2)
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


def test_every_replica_gets_a_part_and_a_lost_sample_is_an_error(
    here: None, monkeypatch: pytest.MonkeyPatch, qwen2: Any, tokenizer: Any
) -> None:
    sizes: list[int] = []
    draw = ShardedEngine._drawn

    def losing(engine: ShardedEngine, prompts: Any, config: SamplingConfig, parts: Any) -> Iterator[list[Sample]]:
        sizes.extend(len(part) for part in parts)
        return draw(engine, prompts, config, parts[1:])

    monkeypatch.setattr(ShardedEngine, "_drawn", losing)
    engine = ShardedEngine(lambda: TransformersEngine(qwen2, tokenizer), 4)
    with pytest.raises(LoragateError, match="27 samples were to be drawn, but the 4 replicas returned 18"):
        engine.generate(PROMPTS, CONFIG)
    assert sizes == [9, 9, 9]


def test_settings_that_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_engine() -> Any:
        raise AssertionError("no engine is needed")

    with pytest.raises(DataError, match="question 9"):
        ShardedEngine(no_engine, 1).generate(PROMPTS, CONFIG, pending=[(9, 0)])
    small = SimpleNamespace(is_initialized=lambda: True, cluster_resources=lambda: {"CPU": 8.0, "GPU": 1.0})
    monkeypatch.setattr("loragate.generation.sharded.require_ray", lambda: small)
    with pytest.raises(ConfigError, match="2 shards with 1 GPU each do not fit into a Ray cluster of 1 GPU"):
        ShardedEngine(no_engine, 2).generate(PROMPTS, CONFIG)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install .\.\[sweep\]"):
        ShardedEngine(no_engine, 2).generate(PROMPTS, CONFIG)


def test_a_replica_returns_errors_as_values(qwen2: Any, tokenizer: Any) -> None:
    def broken() -> Any:
        raise ConfigError("no such model")

    for make_engine, prompts, kind, message in (
        (broken, PROMPTS, ConfigError, "no such model"),
        (lambda: TransformersEngine(qwen2, tokenizer), ["w4 " * 64], DataError, "Prompt 0 has 64 tokens"),
    ):
        returned = Replica(make_engine, tuple(prompts), CONFIG)({"rows": ["[[0, 0], [0, 1]]"]})
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
    engine = ShardedEngine(make_engine, 2, gpus=0, batch_size=2)
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
        ShardedEngine(TransformersEngine, 1).generate(["w4"], CONFIG)  # type: ignore[arg-type]
    assert seen[0]["address"] == joined
