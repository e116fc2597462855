"""How a run was launched, and what is refused at the start, with which advice."""

import pytest

import loragate as lg
from loragate.errors import ConfigError
from loragate.training import GateTrainingSettings, trainer
from loragate.training.strategy import INCOMPATIBILITIES, Launch, Plan, check_plan, detect_launch
from tiny import tiny_adapter, tiny_rows

FSDP2, DDP = Launch("fsdp2", 2), Launch("ddp", 2)
# (rule, a plan it forbids, words of its sentence)
FORBIDDEN = [
    ("other sharding", Plan(launch=Launch("fsdp1", 2)), "fsdp_version: 2"),
    ("other sharding", Plan(launch=Launch("deepspeed", 2)), "deepspeed is not supported"),
    ("sharding needs processes", Plan(launch=Launch("fsdp2")), "--num_processes"),
    ("FSDP offload", Plan(launch=Launch("fsdp2", 2, offload=True)), "fsdp_offload_params"),
    ("sharding × quantised base", Plan(launch=FSDP2, quantization="4bit"), "a 4bit base cannot be sharded with fsdp2"),
    ("sharding × selection", Plan(launch=FSDP2, sampling=True), "--skip-selection"),
    ("sharding × reference", Plan(launch=FSDP2, reference=True), "launch with ddp"),
    ("sharding × DoRA", Plan(launch=FSDP2, dora=True), "train LoRA"),
    ("sharding × fp16", Plan(launch=FSDP2, precision="fp16"), "use precision bf16"),
    ("fp16 needs CUDA", Plan(device="cpu", precision="fp16"), "this run is on cpu"),
    ("several processes × mps", Plan(launch=DDP, device="mps"), "run in one process"),
    ("packing × grouping", Plan(packing=True, group_by_length=True), "leave one of them out"),
    ("quantised base × mps", Plan(device="mps", quantization="8bit"), "use cuda or cpu"),
]


@pytest.mark.parametrize(
    ("name", "plan", "words"), FORBIDDEN, ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(FORBIDDEN)]
)
def test_a_rule_refuses_with_its_advice(name, plan, words):
    forbids, _ = INCOMPATIBILITIES[name]
    assert forbids(plan)
    assert not forbids(Plan()), "nothing known, nothing forbidden"
    with pytest.raises(ConfigError) as caught:
        check_plan(plan)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(launch=DDP, quantization="4bit", device="cuda", precision="bf16", packing=True),
        Plan(launch=FSDP2, device="cuda", precision="bf16", group_by_length=True),
        Plan(launch=DDP, device="cpu", dora=True, reference=True),
        Plan(device="cuda", precision="fp16"),
    ],
)
def test_what_works_is_let_through(plan):
    check_plan(plan)


def test_the_trainer_reads_how_the_base_is_stored(tokenizer, monkeypatch):
    settings = GateTrainingSettings(batch_size=4, per_device_train_batch_size=2, max_steps=1, max_length=64)
    model = tiny_adapter()
    monkeypatch.setattr(model.config, "quantization_config", {"load_in_4bit": True}, raising=False)
    monkeypatch.setattr(trainer, "detect_launch", lambda: Launch("fsdp2", 2))
    with pytest.raises(ConfigError, match="4bit base cannot be sharded with fsdp2"):
        lg.train_gates(model, tokenizer, tiny_rows(4), lg.GateConfig(-3, 2), settings)


def test_the_launch_is_read_from_the_environment():
    fsdp2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    assert detect_launch({}) == Launch()
    assert detect_launch({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}) == Launch("ddp", 4, 3, 1)
    assert detect_launch({"WORLD_SIZE": "2", **fsdp2}).strategy == "fsdp2"
    assert detect_launch({"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true"}).strategy == "fsdp1"
    assert detect_launch({"ACCELERATE_USE_DEEPSPEED": "true"}).strategy == "deepspeed"
    assert detect_launch({**fsdp2, "FSDP_OFFLOAD_PARAMS": "true"}).offload
    assert detect_launch({"LORAGATE_STRATEGY": "fsdp2"}).is_sharded
    assert not detect_launch({"WORLD_SIZE": "2"}).is_sharded
