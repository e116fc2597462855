"""The vLLM engine: first against a stand-in for vLLM, then, where it is installed, against vLLM itself.

The second part runs in the environment that `scripts/vllm_cpu_env.sh` makes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tiny_decoders import identities

from loragate.cli.options import EvaluationInputs
from loragate.errors import ArtifactError, ConfigError, DataError, LoragateError
from loragate.generation import Sample, SamplingConfig, TransformersEngine
from loragate.generation.sampling import request_seed
from loragate.generation.vllm_engine import VllmEngine, lora_rank
from tiny import tiny_adapter, tiny_base, tiny_rows, tiny_tokenizer, write_base

# vLLM's attention on a CPU starts at heads of 32
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "max_position_embeddings": 128}
PATTERNS = {"rank_pattern": {"q_proj": 6}, "alpha_pattern": {"q_proj": 3}}
PROMPTS = [row["messages"][0]["content"] for row in tiny_rows(24)]
GREEDY = SamplingConfig(temperature=0, max_new_tokens=30)
CONFIG = SamplingConfig(temperature=1.0, max_new_tokens=30, samples=4, seed=7)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A base with its tokenizer and an adapter for it, whose ranks and scales differ between modules."""
    place = tmp_path_factory.mktemp("models")
    write_base(place / "base", **SHAPE)
    tiny_adapter(base=tiny_base(**SHAPE), **PATTERNS).save_pretrained(place / "adapter")
    return str(place / "base"), str(place / "adapter")


class FakeLLM:
    """Answers with three tokens that name the request, and ends every second one with a stop token."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.calls: list[tuple[list[Any], list[Any], Any]] = []
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=40))
        self.reasons = ("stop", "length")

    def generate(self, prompts: Any, params: Any, *, use_tqdm: bool, lora_request: Any) -> list[Any]:
        assert not use_tqdm
        self.calls.append((prompts, params, lora_request))
        outputs = []
        for index, prompt in enumerate(prompts):
            reason = self.reasons[index % 2]
            ids = [5 + prompt["prompt_token_ids"][0] % 100, 1 if reason == "stop" else 9]
            completion = SimpleNamespace(token_ids=ids, finish_reason=reason, text="")
            outputs.append(SimpleNamespace(outputs=[completion]))
        return outputs


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    names = ("vllm", "vllm.lora", "vllm.lora.request", "vllm.lora.worker_manager", "vllm.platforms", "vllm.plugins")
    modules = {name: ModuleType(name) for name in names}
    vllm: Any = modules["vllm"]
    vllm.LLM = FakeLLM
    vllm.SamplingParams = lambda **settings: settings
    vllm.lora, vllm.platforms = modules["vllm.lora"], modules["vllm.platforms"]
    vllm.lora.request = modules["vllm.lora.request"]
    vllm.lora.request.LoRARequest = lambda *fields: fields
    vllm.platforms.current_platform = SimpleNamespace(is_cpu=lambda: True)
    modules["vllm.lora.worker_manager"].WorkerLoRAManager = type("Manager", (), {})  # type: ignore[attr-defined]
    modules["vllm.plugins"].load_general_plugins = lambda: None  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return vllm


def test_every_sample_is_a_request_with_its_own_seed(fake_vllm: Any, folders: tuple[str, str]) -> None:
    engine = VllmEngine(folders[0], dtype="float32", stop_token_ids=[3], batch_size=10)
    batches: list[list[Sample]] = []
    progress: list[tuple[int, int]] = []
    samples = engine.generate(
        PROMPTS, CONFIG, lambda *step: progress.append(step), on_samples=lambda batch: batches.append(list(batch))
    )
    assert [(s.question, s.sample) for s in samples] == [(q, k) for q in range(24) for k in range(4)]
    assert [len(batch) for batch in batches] == [40, 40, 16]
    assert [s for batch in batches for s in batch] == samples
    assert progress == [(40, 96), (80, 96), (96, 96)]
    prompts, params, lora = engine._llm.calls[1]
    assert lora is None
    tokenizer = tiny_tokenizer()
    assert [prompt["prompt_token_ids"] for prompt in prompts[::4]] == [
        tokenizer(p)["input_ids"] for p in PROMPTS[10:20]
    ]
    assert params[5] == {
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": 30,
        "seed": request_seed(7, 11, 1),
        "stop_token_ids": [1, 3],
        "ignore_eos": True,
        "detokenize": False,
    }
    seeds = [one["seed"] for _, called, _ in engine._llm.calls for one in called]
    assert len(set(seeds)) == 96
    engine.generate(PROMPTS, CONFIG, pending=[(7, 2), (3, 1)])
    assert [one["seed"] for one in engine._llm.calls[-1][1]] == [request_seed(7, 3, 1), request_seed(7, 7, 2)]
    assert engine.generate(PROMPTS, CONFIG, pending=[]) == []
    with pytest.raises(DataError, match="question 24, sample 0"):
        engine.generate(PROMPTS, CONFIG, pending=[(24, 0)])


def test_answers_end_and_read_as_the_other_engine_has_it(fake_vllm: Any, folders: tuple[str, str]) -> None:
    engine = VllmEngine(folders[0])
    first, second = engine.generate(PROMPTS[:2], GREEDY)
    assert first.finish_reason == "stop"
    assert first.token_ids[1:] == (1,)
    assert first.text == tiny_tokenizer().decode(first.token_ids[:1])
    assert second.finish_reason == "length"
    assert second.text == tiny_tokenizer().decode(second.token_ids)
    assert first.entropy is None
    assert engine._llm.calls[0][1][0]["seed"] is None
    tokens = engine.tokenizer.convert_ids_to_tokens([0, 1])
    engine.generate(PROMPTS[:2], SamplingConfig(temperature=0, stop=(*tokens, "w5")))
    assert engine._llm.calls[-1][1][0]["stop_token_ids"] == [0, 1], "special tokens, which no decoded answer holds"
    engine.endings = dataclasses.replace(engine.endings, token_ids=frozenset([2]))
    assert (
        engine.generate(PROMPTS[:1], SamplingConfig(temperature=0, stop=(tokens[1],)))[0].finish_reason == "stop_text"
    )
    engine._llm.reasons = ("stop", "abort")
    with pytest.raises(LoragateError, match="ended sample 0 of question 1 with 'abort'"):
        engine.generate(PROMPTS[:2], GREEDY)


def test_every_token_of_a_continuation_is_a_request_that_may_draw_it_alone(
    fake_vllm: Any, folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt log-probabilities, with which vLLM 0.32 dies on a CPU with LoRA, are not asked for."""
    engine = VllmEngine(*folders, batch_size=2)

    def answers(prompts: Any, params: Any, *, use_tqdm: bool, lora_request: Any) -> list[Any]:
        engine._llm.calls.append((prompts, params, lora_request))
        steps = [
            SimpleNamespace(logprob=-float(one["allowed_token_ids"][0]), rank=1 + (one["allowed_token_ids"][0] == 9))
            for one in params
        ]
        return [SimpleNamespace(outputs=[SimpleNamespace(logprobs=[{7: step}])]) for step in steps]

    monkeypatch.setattr(engine._llm, "generate", answers)
    pairs = [([3, 4], [5, 6]), ([3], [9]), ([3, 4, 5], [7])]
    seen: list[tuple[int, int]] = []
    assert engine.log_likelihoods(pairs, lambda *step: seen.append(step)) == [
        (-11.0, True),
        (-9.0, False),
        (-7.0, True),
    ]
    assert seen == [(2, 3), (3, 3)]
    prompts, params, lora = engine._llm.calls[0]
    assert [prompt["prompt_token_ids"] for prompt in prompts] == [[3, 4], [3, 4, 5], [3]]
    assert [one["allowed_token_ids"] for one in params] == [[5], [6], [9]]
    assert all(one["max_tokens"] == 1 and one["logprobs"] == 0 and "prompt_logprobs" not in one for one in params)
    assert lora == ("adapter-1", 1, folders[1])


@pytest.mark.parametrize(("on_cpu", "slots"), [(True, 2), (False, 1)])
def test_an_adapter_goes_with_every_request(fake_vllm: Any, folders: tuple[str, str], on_cpu: bool, slots: int) -> None:
    fake_vllm.platforms.current_platform = SimpleNamespace(is_cpu=lambda: on_cpu)
    engine = VllmEngine(*folders, dtype="bfloat16", max_model_len=40, tensor_parallel=2, gpu_memory_utilization=0.5)
    engine.generate(PROMPTS[:2], GREEDY)
    assert engine._llm.calls[0][2] == ("adapter-1", 1, folders[1])
    told = {"dtype": "bfloat16", "max_model_len": 40, "tensor_parallel_size": 2, "gpu_memory_utilization": 0.5}
    told |= {"enable_lora": True, "max_lora_rank": 8, "max_loras": slots}
    assert engine._llm.settings.items() >= told.items()
    assert "enable_lora" not in VllmEngine(folders[0])._llm.settings


def test_on_a_cpu_vllm_is_given_half_of_what_is_free(
    fake_vllm: Any, folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own 0.9 of the whole memory fills with the prefix cache as it answers, until the machine has none left."""
    memory = SimpleNamespace(available_memory=12, total_memory=16)
    where = SimpleNamespace(get_memory_node_info=lambda: memory)
    monkeypatch.setitem(sys.modules, "vllm.utils.cpu_resource_utils", where)
    for version, share in (("0.32.0+cpu", 0.37), ("0.32.0", 0.9)):
        monkeypatch.setattr(
            "loragate.generation.vllm_engine.package_versions", lambda names, own=version: {"vllm": own}
        )
        assert VllmEngine(folders[0])._llm.settings["gpu_memory_utilization"] == share


def test_code_of_the_base_is_run_where_it_is_trusted(fake_vllm: Any, folders: tuple[str, str], tmp_path: Path) -> None:
    code = "from transformers import LlamaConfig\n\n\nclass Mine(LlamaConfig):\n    model_type = 'mine'\n"
    (tmp_path / "mine.py").write_text(code)
    record = json.loads((Path(folders[0]) / "config.json").read_text())
    record |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}, "eos_token_id": 5}
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="custom code"):
        VllmEngine(str(tmp_path), tokenizer=tiny_tokenizer())
    engine = VllmEngine(str(tmp_path), tokenizer=tiny_tokenizer(), trust_remote_code=True)
    assert engine._llm.settings["trust_remote_code"]
    assert 5 in engine.endings.token_ids


def test_one_engine_answers_as_several_adapters(fake_vllm: Any, folders: tuple[str, str], tmp_path: Path) -> None:
    sys.modules["vllm.lora.worker_manager"].WorkerLoRAManager.loragate_gates = ""  # type: ignore[attr-defined]
    engine = VllmEngine(*folders)
    half = engine.with_adapter(folders[1], "constant=0.5")
    rows = [
        engine,
        half,
        engine.with_adapter(None),
        engine.with_adapter(folders[1]),
        half.with_adapter(folders[1], "unit"),
    ]
    rows.append(half.with_adapter(folders[1], "lower=0"))  # λ differs from layer to layer: a slot of its own
    for row in rows:
        row.generate(PROMPTS[:1], GREEDY)
    assert [call[2] for call in engine._llm.calls] == [
        ("adapter-1", 1, folders[1]),
        ("adapter-1", 1, f"{folders[1]}@constant=0.5"),
        None,
        ("adapter-1", 1, folders[1]),
        ("adapter-1", 1, f"{folders[1]}@unit"),
        ("adapter-2", 2, f"{folders[1]}@lower=0"),
    ]
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 16}')
    with pytest.raises(ConfigError, match="was made for 8; make one"):
        engine.with_adapter(str(tmp_path))


def test_requests_that_cannot_be_drawn(fake_vllm: Any, folders: tuple[str, str]) -> None:
    engine = VllmEngine(folders[0])
    with pytest.raises(DataError, match=r"Prompt 0 has 40 tokens.*40 positions"):
        engine.generate(["w4 " * 40], CONFIG)
    with pytest.raises(ConfigError, match=r"temperature is 0\.001, but vLLM"):
        engine.generate(PROMPTS, SamplingConfig(0.001))


def test_a_gated_folder_needs_the_plugin(fake_vllm: Any, folders: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "gate_config.json").write_text("{}")
    shutil.copytree(folders[1], tmp_path / "adapter")
    with pytest.raises(ConfigError, match="not a base model"):
        VllmEngine(str(tmp_path))
    with pytest.raises(ConfigError, match="has not loaded loragate's plugin"):
        VllmEngine(folders[0], str(tmp_path))
    manager = sys.modules["vllm.lora.worker_manager"].WorkerLoRAManager
    manager.loragate_gates = "vLLM 9 cannot serve gates"
    with pytest.raises(ConfigError, match=r"needs λ\. vLLM 9 cannot serve gates\."):
        VllmEngine(folders[0], str(tmp_path))
    manager.loragate_gates = ""
    engine = VllmEngine(folders[0], str(tmp_path))
    engine.generate(PROMPTS[:2], GREEDY)
    assert engine._llm.calls[0][2] == ("adapter-1", 1, str(tmp_path))
    assert engine._llm.settings["max_lora_rank"] == 8
    engine = VllmEngine(folders[0], str(tmp_path), override="constant=0.5", revision="abc", tokenizer=tiny_tokenizer())
    engine.generate(PROMPTS[:2], GREEDY)
    assert engine._llm.calls[0][2] == ("adapter-1", 1, f"{tmp_path}@constant=0.5")
    assert engine._llm.settings["revision"] == "abc"
    with pytest.raises(ConfigError, match="no effect on a base model"):
        VllmEngine(folders[0], override="unit")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "not a readable configuration"),
        ('{"peft_type": "LORA"}', "not the configuration of a LoRA adapter"),
        ('{"peft_type": "IA3", "r": 8}', "type 'IA3'"),
        ('{"peft_type": "LORA", "r": 8, "use_dora": true}', "DoRA"),
        ('{"peft_type": "LORA", "r": 8, "rank_pattern": {"q_proj": 600}}', "rank 600 is above 512"),
    ],
)
def test_an_adapter_that_vllm_cannot_serve(tmp_path: Path, record: str | None, message: str) -> None:
    if record is not None:
        (tmp_path / "adapter_config.json").write_text(record)
    with pytest.raises(ConfigError if record and len(record) > 1 else ArtifactError, match=message):
        lora_rank(tmp_path)


def test_the_rank_is_rounded_up_to_one_that_vllm_takes(tmp_path: Path) -> None:
    for ranks, expected in (((1, {}), 1), ((4, {}), 8), ((8, {"q_proj": 33}), 64), ((512, None), 512)):
        record = {"peft_type": "LORA", "r": ranks[0], "rank_pattern": ranks[1]}
        (tmp_path / "adapter_config.json").write_text(json.dumps(record))
        assert lora_rank(tmp_path) == expected


def test_without_vllm_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, folders: tuple[str, str]) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[vllm\]"):
        VllmEngine(folders[0])


real = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed (scripts/vllm_cpu_env.sh)"
)
VLLM_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, which starts in seconds
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def reference(folders: tuple[str, str], adapted: bool) -> TransformersEngine:
    base = tiny_base(**SHAPE)
    return TransformersEngine(tiny_adapter(base=base, **PATTERNS) if adapted else base, tiny_tokenizer())


@pytest.fixture(scope="module")
def vllm_settings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VLLM_SETTINGS.items():
            if name not in os.environ:
                patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def base_engine(vllm_settings: None, folders: tuple[str, str]) -> VllmEngine:
    return VllmEngine(folders[0], dtype="float32")


@pytest.fixture(scope="module")
def lora_engine(vllm_settings: None, folders: tuple[str, str]) -> VllmEngine:
    return VllmEngine(*folders, dtype="float32")


@real
@pytest.mark.slow("vLLM")
def test_greedy_equals_the_transformers_engine_for_an_adapter(
    lora_engine: VllmEngine, folders: tuple[str, str]
) -> None:
    expected = reference(folders, adapted=True).generate(PROMPTS, GREEDY)
    assert identities(lora_engine.generate(PROMPTS, GREEDY)) == identities(expected)
    unadapted = reference(folders, adapted=False).generate(PROMPTS, GREEDY)
    assert sum(a.token_ids != b.token_ids for a, b in zip(expected, unadapted)) > len(PROMPTS) / 2
    assert {s.finish_reason for s in expected} == {"stop", "length"}


@real
@pytest.mark.slow("vLLM")
@pytest.mark.parametrize("config", [CONFIG, SamplingConfig(0.7, 0.8, 30, 4, 1)])
def test_samples_do_not_depend_on_the_chunk_or_on_what_is_pending(
    lora_engine: VllmEngine, config: SamplingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = lora_engine.generate(PROMPTS, config)
    assert identities(lora_engine.generate(PROMPTS, config)) == identities(whole)
    pending = [(s.question, s.sample) for s in whole[10:41]]
    assert identities(lora_engine.generate(PROMPTS, config, pending=pending)) == identities(whole[10:41])
    monkeypatch.setattr(lora_engine, "batch_size", 1)
    assert identities(lora_engine.generate(PROMPTS, config)) == identities(whole)
    assert len({s.token_ids for s in whole if s.question == 0}) > 1
    other = lora_engine.generate(PROMPTS, SamplingConfig(config.temperature, config.top_p, 30, 4, seed=99))
    assert sum(a.token_ids != b.token_ids for a, b in zip(whole, other)) > len(whole) / 2


@real
@pytest.mark.slow("vLLM")
def test_the_last_position_can_be_used_and_no_further(base_engine: VllmEngine, folders: tuple[str, str]) -> None:
    prompt = " ".join(["w4"] * 100)
    config = SamplingConfig(0, max_new_tokens=28)
    expected = reference(folders, adapted=False).generate([prompt], config)
    assert identities(base_engine.generate([prompt], config)) == identities(expected)
    longer = [prompt, "w5 w9"]
    expected = reference(folders, adapted=False).generate(longer, SamplingConfig(0, max_new_tokens=40))
    assert identities(base_engine.generate(longer, SamplingConfig(0, max_new_tokens=40))) == identities(expected)


@real
@pytest.mark.slow("vLLM")
def test_likelihoods_are_the_transformers_engine_s_for_a_real_vocabulary(vllm_settings: None, tmp_path: Path) -> None:
    """With 50,000 tokens vLLM 0.32 on a CPU wraps the head for LoRA, and its own prompt log-probabilities fail.

    Last in this file: closing its engine ends those that the other tests share.
    """
    shape = {**SHAPE, "vocab_size": 50_000}
    write_base(tmp_path / "base", **shape)
    adapted = tiny_adapter(base=tiny_base(**shape), **PATTERNS)
    adapted.save_pretrained(tmp_path / "adapter")
    here = TransformersEngine(adapted, tiny_tokenizer(), batch_size=2)
    likeliest = here.generate([[5, 6, 7]], SamplingConfig(temperature=0, max_new_tokens=3))[0].token_ids
    pairs = [([5, 6, 7], [80, 49_999, 12]), ([5, 6, 7], likeliest), ([9], [20]), ([9, 10, 11, 12], [20, 21])]
    expected = here.log_likelihoods(pairs)
    assert [greedy for _, greedy in expected] == [False, True, False, False]
    engine = VllmEngine(str(tmp_path / "base"), str(tmp_path / "adapter"), dtype="float32")
    try:
        found = engine.log_likelihoods(pairs)
    finally:
        engine.close()
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)


def test_what_a_start_without_room_can_be_given(
    fake_vllm: Any, folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every flag of the advice is one of `loragate eval`, and every argument one of the engine."""

    def start(**settings: Any) -> None:
        raise ValueError("No available memory for the cache blocks")

    monkeypatch.setattr(fake_vllm, "LLM", start)
    with pytest.raises(LoragateError, match="No available memory") as raised:
        VllmEngine(folders[0], gpu_memory_utilization=0.5)
    said = str(raised.value)
    assert "given 0.5 of the memory: less where others hold some (--vllm-memory 0.25)" in said
    flags = set(re.findall(r"--([a-z-]+)", said))
    assert flags == {"vllm-memory", "tensor-parallel", "engine"}
    names = {field.name for field in dataclasses.fields(EvaluationInputs)}
    assert {flag.replace("-", "_") for flag in flags} <= names
    own = {"gpu_memory_utilization", "tensor_parallel", "max_model_len"}
    assert own <= set(inspect.signature(VllmEngine).parameters)
    assert all(name in said for name in own)
