"""Gated folders in vLLM itself, against transformers: needs vLLM (scripts/vllm_cpu_env.sh)."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm_offline import PROMPTS, SETTINGS, greedy, lora, start

import loragate as lg
from loragate.evaluation.agreement import ServedAnswer, compare_logprobs
from loragate.gates.attach import gate_modules
from loragate.gates.override import parse_override
from loragate.gates.strength import overrides_by_module
from tiny import shake, tiny_adapter, tiny_base, write_adapter, write_base

pytestmark = [
    pytest.mark.slow("vLLM"),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed (scripts/vllm_cpu_env.sh)"
    ),
]

# vLLM's attention on a CPU starts at heads of 32
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
# a gated folder each: seed of its adapter, gate settings
GATES: dict[str, tuple[int, dict[str, Any]]] = {
    "wide": (1, {"lower": -6, "upper": 3}),
    "narrow": (2, {"lower": -1, "upper": 2, "tau": 0.5}),
    "module": (3, {"lower": -3, "upper": 2, "granularity": "module"}),
    "global": (4, {"lower": -3, "upper": 2, "granularity": "global"}),
    "some": (5, {"lower": -3, "upper": 2, "target_modules": ["k_proj", "up_proj", "o_proj"]}),
}
VIRTUAL = ["wide@unit", "wide@off", "wide@noreverse", "narrow@clip=-0.5:", "narrow@constant=-0.5", "plain@constant=0.5"]
TOLERANCE = 1e-4


def lora_model(name: str) -> Any:
    seed = GATES[name][0] if name in GATES else 0
    # a random adapter of full strength under L = -6 multiplies rounding errors by a hundred
    patterns = {"rank_pattern": {"q_proj": 6}, "alpha_pattern": {"v_proj": 3}}
    return tiny_adapter(seed=seed, base=tiny_base(**SHAPE), lora_alpha=2, **patterns)


def gated_model(name: str) -> Any:
    model = lg.attach_gates(lora_model(name), lg.GateConfig(**GATES[name][1]))
    return scattered(model, GATES[name][0] + 10)


def scattered(model: Any, seed: int) -> Any:
    """Gates whose biases lie further apart than their weights."""
    torch.manual_seed(seed)
    for key, parameter in lg.gate_parameters(model).items():
        parameter.data.normal_(0, 0.15 if key.endswith("weight") else 0.7)
    return model


def reference(name: str) -> Any:
    if "@" in name:
        return overridden(*name.split("@"))
    if name == "base":
        return tiny_base(**SHAPE)
    return lora_model(name) if name == "plain" else gated_model(name)


def overridden(name: str, text: str) -> Any:
    """The model of a name with an override laid over λ for good."""
    model = reference(name)
    if name == "plain":
        lg.attach_gates(model, lg.GateConfig(lower=-1, upper=2))
    gates = gate_modules(model)
    for path, override in overrides_by_module(parse_override(text), gates).items():
        gates[path].override = override
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("served")
    write_base(place / "base", **SHAPE)
    lora_model("plain").save_pretrained(place / "plain")
    for name in GATES:
        lg.save_gates(gated_model(name), place / name, base_id=str(place / "base"))
    return place


@pytest.fixture(scope="module")
def settings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            if name not in os.environ:
                patch.setenv(name, value)
        yield


def llama(name: str) -> Any:
    """A Llama of a real model's vocabulary: vLLM wraps its head, which "head" adapts beside its linear layers."""
    torch.manual_seed(7)
    shape = {**SHAPE, "vocab_size": 49_152, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(**shape, bos_token_id=None, eos_token_id=1, pad_token_id=0)).eval()
    if name == "base":
        return base
    modules = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", *(["lm_head"] if name == "head" else [])]
    model = tiny_adapter(seed=3 if name == "head" else 1, base=base, lora_alpha=2, target_modules=modules)
    return scattered(lg.attach_gates(model, lg.GateConfig(lower=-6, upper=3)), 2) if name == "gated" else model


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llamas")
    for name in ("base", "plain", "head"):
        llama(name).save_pretrained(place / name)
    lg.save_gates(llama("gated"), place / "gated", base_id=str(place / "base"))
    return place


@pytest.mark.parametrize("chunk", [2048, 48], ids=["whole", "chunked"])
def test_prompts_are_scored_with_the_head_of_their_own_adapter(settings: None, llamas: Path, chunk: int) -> None:
    """All slots are filled, the last one by the adapter with a head, which base requests must not be given."""
    names = ["base", "plain", "gated", "head"]
    adapters = [lora(name, place, llamas / name) if place else None for place, name in enumerate(names)]
    engine = start(llamas / "base", max_loras=3, max_num_batched_tokens=chunk, max_num_seqs=16, max_model_len=128)
    # once more without prompt log-probs, so that no request is alone in knowing its rows
    for options in ({}, {"prompt_logprobs": False}):
        served = greedy(engine, PROMPTS, adapters, 12, **options)
        for name, answers in zip(names, served):
            found = compare_logprobs(llama(name), answers)
            assert all(
                len(answer.prompt_logprobs) == (0 if options else len(answer.prompt_ids) - 1) for answer in answers
            )
            assert max(found.prompt, found.generated) <= TOLERANCE, (name, found)
    (alone,) = greedy(engine, PROMPTS[:1], [adapters[0]], 12)
    assert compare_logprobs(llama("head"), alone).prompt > 100 * TOLERANCE, (
        "the head's adapter changes what is compared"
    )


def request(folders: Path, name: str, number: int | None = None) -> Any:
    if name == "base":
        return None
    known = ["plain", *GATES, *VIRTUAL]
    return lora(name, number or 1 + known.index(name), folders / name)


@pytest.fixture(scope="module")
def llm(settings: None, folders: Path) -> Any:
    """All slots are filled by a batch of three adapters; prefix caching is on."""
    return start(folders / "base", max_loras=3, enable_prefix_caching=True, block_size=32)


@pytest.fixture(scope="module")
def small(settings: None, folders: Path) -> Any:
    """One slot, prompts cut into pieces, no prefix cache."""
    return start(
        folders / "base",
        max_loras=1,
        enable_prefix_caching=False,
        max_num_batched_tokens=24,
        max_num_seqs=4,
        max_model_len=128,
    )


def check(folders: Path, engine: Any, names: list[str], **options: Any) -> None:
    served = greedy(engine, PROMPTS, [request(folders, name) for name in names], 24, **options)
    for name, answers in zip(names, served):
        found = compare_logprobs(reference(name), answers)
        print(name, found)
        assert found.tokens == 24 * len(PROMPTS)
        assert found.prompt <= TOLERANCE, name
        assert found.generated <= TOLERANCE, name


# what is cached under one λ is not taken for another, and a plain adapter may get a slot that was gated
BATCHES = {
    "base, plain and two gated": [["base", "plain", "wide", "narrow"]],
    "module, global and some": [["module", "global", "some", "base"]],
    "plain after gated": [["wide", "narrow", "module"], ["plain", "base"]],
    "virtual": [["base", *VIRTUAL[:3], "wide"], [*VIRTUAL[:3], "wide", "plain"]],
    "virtual constants": [["base", *VIRTUAL[3:], "wide"], [*VIRTUAL[3:], "wide", "plain"]],
}


@pytest.mark.parametrize("name", BATCHES)
def test_adapters_in_one_batch(folders: Path, llm: Any, name: str) -> None:
    for turn, names in enumerate(BATCHES[name]):
        check(folders, llm, names, prompt_logprobs=turn == 0)


def test_one_slot_chunked_prefill_without_prefix_cache(folders: Path, small: Any) -> None:
    check(folders, small, ["wide", "base", "plain", "narrow"])


def test_a_seed_draws_the_same_from_a_prompt_read_in_parts(folders: Path, small: Any, llm: Any) -> None:
    """vLLM 0.32 alone ends its engine there: "CPU Generator does not use offset"."""
    import vllm

    sampling = [
        vllm.SamplingParams(temperature=1.0, seed=7 + row, max_tokens=12, ignore_eos=True, detokenize=False)
        for row in range(len(PROMPTS))
    ]

    def drawn(engine: Any) -> list[tuple[int, ...]]:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        outputs = engine.generate(
            prompts, sampling, lora_request=[request(folders, "wide")] * len(PROMPTS), use_tqdm=False
        )
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    parts, whole = drawn(small), drawn(llm)
    assert parts == whole == drawn(small)
    assert len(set(parts)) == len(PROMPTS)


def test_an_override_that_cannot_be_is_this_request_s_error(folders: Path, llm: Any) -> None:
    for place, message in (("wide@unti", "did you mean 'unit'"), ("plain@unit", "takes @constant=C alone")):
        with pytest.raises(ValueError, match=message):
            greedy(llm, PROMPTS[:1], [lora(place, 91, folders / place)], 4)
    check(folders, llm, ["wide"])


def test_gates_of_zero_change_no_bit_of_a_plain_adapter(folders: Path, llm: Any, tmp_path: Path) -> None:
    model = lora_model("plain")
    shake(lg.attach_gates(model, lg.GateConfig(lower=-6, upper=3)), 0)
    lg.save_gates(model, tmp_path / "zero", base_id=str(folders / "base"))
    plain, zero = greedy(llm, PROMPTS, [request(folders, "plain"), lora("z", 77, tmp_path / "zero")], 24)
    assert plain == zero


@pytest.fixture
def copied(folders: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folders / "wide", tmp_path / "copy")


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "gate_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_malformed_folder_is_this_request_s_error(folders: Path, llm: Any, copied: Path) -> None:
    (copied / "gates.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"gates\.safetensors: its sha256"):
        greedy(llm, PROMPTS[:1], [lora("bad", 50, copied)], 4)
    with pytest.raises(ValueError, match=r"gates\.safetensors: its sha256"):
        llm.llm_engine.add_lora(lora("bad", 50, copied))
    assert 50 not in llm.llm_engine.list_loras()
    check(folders, llm, ["base", "wide"])


def test_gates_for_another_base_are_refused_when_loaded(folders: Path, llm: Any, copied: Path) -> None:
    base = json.loads((copied / "gate_config.json").read_text())["base"]
    edit(copied, base={**base, "config_sha256": "0"})
    with pytest.raises(ValueError, match="another architecture"):
        llm.llm_engine.add_lora(lora("bad", 51, copied))
    norm = next(name for name in base["weights"]["values"] if "norm" in name)
    values = {**base["weights"]["values"], norm: [0.5, 0.5, 0.5, 0.5]}
    edit(copied, base={**base, "weights": {**base["weights"], "values": values}})
    with pytest.raises(ValueError, match="another base"):
        llm.llm_engine.add_lora(lora("bad", 51, copied))
    check(folders, llm, ["wide"])


def test_a_failed_activation_leaves_nothing_half_loaded(
    folders: Path, llm: Any, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loragate.serving.placing import PlacedGates

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(PlacedGates, "fill", fail)
        with pytest.raises(RuntimeError, match="no memory left"):
            llm.llm_engine.add_lora(lora("half", 52, copied))
    assert 52 not in llm.llm_engine.list_loras()
    (answers,) = greedy(llm, PROMPTS, [lora("half", 52, copied)], 24)
    assert compare_logprobs(gated_model("wide"), answers).generated <= TOLERANCE


def test_a_folder_written_anew_is_refused_under_its_old_name(folders: Path, llm: Any, copied: Path) -> None:
    """vLLM's prefix cache knows name and path only: the old gates' blocks would be taken for the new ones'."""
    greedy(llm, PROMPTS, [lora("mine", 60, copied)], 4)
    shutil.rmtree(copied)
    shutil.copytree(folders / "narrow", copied)
    with pytest.raises(ValueError, match="changed since it was served as 'mine'"):
        greedy(llm, PROMPTS, [lora("mine", 60, copied)], 4)
    (answers,) = greedy(llm, PROMPTS, [lora("other", 61, copied)], 24)
    assert compare_logprobs(gated_model("narrow"), answers).generated <= TOLERANCE


def test_an_id_that_moves_to_another_folder_gets_its_gates(folders: Path, llm: Any) -> None:
    for name in ("wide", "narrow", "plain", "wide"):
        (answers,) = greedy(llm, PROMPTS, [request(folders, name, 70)], 24)
        assert compare_logprobs(reference(name), answers).generated <= TOLERANCE, name


def test_the_compile_cache_knows_the_plugin(llm: Any) -> None:
    from vllm.config import VllmConfig

    config = llm.llm_engine.vllm_config
    assert config.compute_hash() != VllmConfig.compute_hash.__wrapped__(config)


TASK = """
name: words
version: 1
suite: math
dataset: {file: words.jsonl, schema: {question: text, answer: text}}
columns: {question: question, gold: answer}
prompt: "{{ question }}"
generation: {samples: 1, temperature: 0, max_new_tokens: 12}
grader: exact
"""


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that vLLM loads, in their order."""
    import vllm

    found: list[str] = []
    start = vllm.LLM

    def load(**options: Any) -> Any:
        found.append(options["model"])
        return start(**options)

    monkeypatch.setattr(vllm, "LLM", load)
    return found


def answers_of(tmp_path: Path, command: list[str], rows: list[str]) -> dict[str, Any]:
    """{row: its answers} of a command on six questions, the same from both engines."""
    from loragate.cli.main import main

    asked = [{"question": f"w{index} w{2 * index}", "answer": "w3"} for index in range(6)]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    (tmp_path / "words.yaml").write_text(TASK)
    answers = []
    for engine in ("transformers", "vllm"):
        out = tmp_path / engine
        task = ["--tasks", str(tmp_path / "words.yaml"), "--out", str(out), "--engine", engine]
        assert main([*command, *task, "--dtype", "float32", "--device", "cpu"]) == 0
        found = {}
        for row in rows:
            lines = (out / "samples" / row / "words.jsonl").read_text().splitlines()
            found[row] = [(one["question"], one["token_ids"]) for one in map(json.loads, lines) if "token_ids" in one]
        answers.append(found)
    assert answers[0] == answers[1]
    assert all(len(row) == 6 for row in answers[0].values())
    assert len({json.dumps(row) for row in answers[0].values()}) == len(rows)
    return answers[0]


def test_eval_scores_base_adapter_gated_and_constant_rows(
    settings: None, folders: Path, tmp_path: Path, loads: list[str]
) -> None:
    """The answers of all three rows, and of one λ for all modules, are those of the transformers engine."""
    rows = ["base", "adapter", "gated", "adapter-lambda-0.5"]
    answers_of(tmp_path, ["eval", "--model", str(folders / "wide"), "--constants=-0.5"], rows)
    assert len(loads) == 1, "all rows share one base"


def test_a_dora_adapter_is_served_merged_into_its_base(
    settings: None, folders: Path, tmp_path: Path, loads: list[str], capsys: pytest.CaptureFixture[str]
) -> None:

    write_adapter(
        tmp_path / "dora", folders / "base", tiny_adapter(base=tiny_base(**SHAPE), use_dora=True, lora_alpha=2)
    )
    command = ["eval", "--model", str(tmp_path / "dora")]
    answers_of(tmp_path, command, ["base", "adapter"])
    out = tmp_path / "vllm"
    assert sorted(loads) == sorted([str(folders / "base"), str(out / "merged")])
    assert not (out / "merged").exists(), "a finished evaluation needs it no more"
    record = json.loads((out / "results.json").read_text())
    assert record["left_out"] == {"adapter λ=0.5": "DoRA"}
    assert (out / "samples" / "adapter-T0.3").is_dir()


def test_retention_suites_give_the_same_answers_and_likelihoods_on_both_engines(
    settings: None, folders: Path, tmp_path: Path
) -> None:
    """For all three rows: MMLU-Pro and BBH generate, OpenBookQA compares options; long prompts are cut alike."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed beside vllm (scripts/vllm_cpu_env.sh)")
    from loragate.cli.main import main
    from loragate.evaluation.evaluate import open_evaluation
    from loragate.evaluation.results import read_record
    from loragate.evaluation.variants import ModelVariant
    from loragate.recipes import QUESTIONS

    suites = ("mmlu_pro", "bbh", "openbookqa")
    found: dict[str, Any] = {}
    for engine in ("transformers", "vllm"):
        out = tmp_path / engine
        command = ["eval", "--model", str(folders / "wide"), "--suite", "retention", "--data", str(QUESTIONS)]
        command += ["--out", str(out), "--engine", engine, "--controls", "none", "--max-new-tokens", "12"]
        assert main([*command, "--limit", "2", "--dtype", "float32", "--device", "cpu"]) == 0
        evaluation = open_evaluation(out)
        found[engine] = {
            (row, suite): evaluation.answers(ModelVariant(row), suite, "lm-eval")
            for row in ("base", "adapter", "gated")
            for suite in suites
        }
        found[engine]["told"] = ([one.prompts for one in evaluation.tasks], evaluation.warnings), None
    for key, (ours, verdicts) in found["transformers"].items():
        theirs, others = found["vllm"][key]
        if key == "told":
            assert theirs == ours
            continue
        if key[1] != "openbookqa":
            assert (theirs, others) == ([replace(one, entropy=None) for one in ours], verdicts)
            continue
        for one, other in zip(ours, theirs, strict=True):
            figures = [[value for value, _ in json.loads(sample.text)] for sample in (one, other)]
            assert figures[0] == pytest.approx(figures[1], abs=1e-3)
    for suite in suites:
        distinct = {
            str([one.text for one in found["transformers"][row, suite][0]]) for row in ("base", "adapter", "gated")
        }
        # a weak adapter may leave twelve greedy tokens as they are; likelihoods tell all three apart
        assert len(distinct) == 3 if suite == "openbookqa" else len(distinct) > 1
    records = [read_record(tmp_path / engine / "results.json") for engine in found]
    assert [(row.suite, row.average.tasks) for row in records[0].suites][::3] == [("bbh/subsets", 4), ("retention", 3)]
    assert records[0].suites == records[1].suites


TWO_RANKS = """
import json, pathlib, sys
from vllm_offline import PROMPTS, greedy, lora, start

if __name__ == "__main__":
    place = pathlib.Path(sys.argv[1])
    requests = [lora(name, at, place / name) for at, name in enumerate(["plain", "wide", "narrow", "module"], 1)]
    llm = start(place / "base", max_loras=4, tensor_parallel_size=2, fully_sharded_loras=sys.argv[2] == "sharded")
    answers = greedy(llm, PROMPTS, [None, *requests], 24)
    pathlib.Path(sys.argv[3]).write_text(json.dumps([[vars(one) for one in row] for row in answers]))
"""


@pytest.mark.parametrize("adapters", ["whole", "sharded"])
def test_two_ranks_share_the_model(folders: Path, tmp_path: Path, adapters: str) -> None:
    """Row-parallel layers (o_proj, down_proj) see half of the input each; w·h is summed before the map."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor: two ranks need one each")
    first, second = sorted(os.sched_getaffinity(0))[:2]
    script, out = tmp_path / "ranks.py", tmp_path / "answers.json"
    script.write_text(TWO_RANKS)
    environment = {**os.environ, **SETTINGS, "VLLM_CPU_OMP_THREADS_BIND": f"{first}|{second}"}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(script), str(folders), adapters, str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, answers in zip(["base", "plain", "wide", "narrow", "module"], json.loads(out.read_text()), strict=True):
        served = [ServedAnswer(**{key: tuple(value) for key, value in one.items()}) for one in answers]
        found = compare_logprobs(reference(name), served)
        assert max(found.prompt, found.generated) <= TOLERANCE, (name, found)


WITHOUT = """
import sys, vllm
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from loragate.serving import plugin
if sys.argv[2]:
    plugin.TESTED_VERSIONS, plugin._BELOW = ("0.1",), (0, 1)
llm = vllm.LLM(model=sys.argv[1] + "/base", skip_tokenizer_init=True, dtype="float32", enable_lora=True, max_lora_rank=8)
sampling = vllm.SamplingParams(temperature=0, max_tokens=4, detokenize=False)
ids = {"prompt_token_ids": [5, 6, 7]}
print("plain", llm.generate(ids, sampling, lora_request=LoRARequest("p", 1, sys.argv[1] + "/plain"))[0].outputs[0].token_ids)
print("mark", getattr(WorkerLoRAManager, "loragate_gates", "absent"))
try:
    llm.llm_engine.add_lora(LoRARequest("g", 2, sys.argv[1] + "/wide"))
    print("SERVED")
except Exception as error:
    print("refused", type(error).__name__, error)
"""


@pytest.mark.parametrize("plugin", ["absent", "unsupported"])
def test_vllm_without_the_plugin_refuses_a_gated_folder(settings: None, folders: Path, plugin: str) -> None:
    environment = {**os.environ, **({"VLLM_PLUGINS": ""} if plugin == "absent" else {})}
    arguments = [sys.executable, "-c", WITHOUT, str(folders), "x" if plugin == "unsupported" else ""]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert "SERVED" not in done.stdout
    assert "plain [" in done.stdout, done.stderr[-2000:]
    if plugin == "absent":
        assert "mark absent" in done.stdout
        assert "refused LoRAAdapterNotFoundError" in done.stdout
    else:
        assert "refused ValueError vLLM 0.32" in done.stdout
        assert "supports vllm>=0.32,<0.34" in done.stdout
