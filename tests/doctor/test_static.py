"""What a check-up tells of an adapter's files and its base's configuration: every fault is a finding, none is an exception."""

import ast
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import loragate as lg
from loragate.doctor.static import delta_norm_and_effective_rank, examine_static, prevents_loading
from loragate.errors import ConfigError
from tiny import shake, tiny_adapter, tiny_base, tiny_tokenizer, write_adapter, write_base

SOURCE = Path(lg.__file__).parent
_TABLE = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8").partition("<!-- codes -->")[2]
CODES = dict(re.findall(r"^\| `([a-z-]+)` \| ([a-z ]+) \|", _TABLE.partition("<!-- /codes -->")[0], re.M))
"""{code: severities that it can have}, of the table in the documentation"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "base"
    write_base(folder, tokenizer=tiny_tokenizer())
    return folder


@pytest.fixture(scope="module")
def whole(base):
    write_adapter(base.parent / "adapter", base)
    return base.parent / "adapter"


@pytest.fixture
def folder(tmp_path, whole):
    """A copy that a test may spoil."""
    return shutil.copytree(whole, tmp_path / "adapter")


def config(folder, **more):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))


def tensors(folder, change):
    file = folder / "adapter_model.safetensors"
    save_file(dict(change(dict(load_file(file)))), file)


def codes(folder, base=""):
    return {one.code: one.severity for one in examine_static(str(folder), str(base))[1]}


def test_a_whole_adapter_has_no_finding_and_its_deltas_are_measured(folder):
    static, found = examine_static(str(folder))
    assert found == []
    assert (static.rank, static.alpha, static.gateable) == (4, 8, {"gate": 14})
    assert (static.stops, static.endings) == (True, ("<eos>",))
    state = load_file(folder / "adapter_model.safetensors")
    assert static.parameters == sum(value.numel() for value in state.values())
    assert len(static.modules) == 14
    assert sum(one.share for one in static.modules) == pytest.approx(1)
    module = next(one for one in static.modules if one.path == "model.layers.1.mlp.up_proj")
    a, b = (state[f"base_model.model.{module.path}.lora_{one}.weight"] for one in "AB")
    values = torch.linalg.svdvals(2.0 * b.double() @ a.double())
    shares = values**2 / (values**2).sum()
    assert (module.kind, module.layer, module.rank, module.scale) == ("up_proj", 1, 4, 2.0)
    assert module.norm == pytest.approx(float(torch.linalg.norm(values)), rel=1e-5)
    entropy = torch.special.entr(shares[shares > 0]).sum()
    assert module.effective_rank == pytest.approx(float(entropy.exp()), rel=1e-4)


def test_deltas_of_fused_experts_are_not_measured(tmp_path):
    sizes = {"vocab_size": 160, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    moe = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2)).eval()
    write_base(tmp_path / "base", moe)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    model = tiny_adapter(base=moe, target_modules=["q_proj"], target_parameters=names)
    write_adapter(tmp_path / "adapter", tmp_path / "base", model)
    static, _ = examine_static(str(tmp_path / "adapter"))
    assert [one.path for one in static.modules] == ["model.layers.0.self_attn.q_proj"]
    assert static.gateable == {"gate": 1, "leave": 3}


def test_the_spectrum_of_known_deltas():
    a, b = torch.eye(3, 8), torch.zeros(6, 3)
    assert delta_norm_and_effective_rank(a, b) == (0.0, 0.0)
    b[0, 0] = b[1, 1] = 2.0
    assert delta_norm_and_effective_rank(a, b) == pytest.approx((8**0.5, 2.0))
    assert delta_norm_and_effective_rank(1e30 * a, b)[0] == pytest.approx(1e30 * 8**0.5)
    b[2, 2] = float("nan")
    assert delta_norm_and_effective_rank(a, b)[0] != delta_norm_and_effective_rank(a, b)[0]


SPOILT = {
    "weights-absent": lambda f: (f / "adapter_model.safetensors").unlink(),
    "weights-not-finite": lambda f: tensors(f, lambda s: {k: v.fill_(float("nan")) for k, v in s.items()}),
    "weights-partly-zero": lambda f: tensors(
        f, lambda s: {k: v * (not k.endswith("0.mlp.up_proj.lora_B.weight")) for k, v in s.items()}
    ),
    "keys-unknown": lambda f: tensors(
        f, lambda s: {k.replace("model.layers.1", "model.blocks.1"): v for k, v in s.items()}
    ),
    "keys-missing": lambda f: tensors(f, lambda s: {k: v for k, v in s.items() if "layers.1" not in k}),
    "config-invalid": lambda f: config(f, r="four"),
    "config-unreadable": lambda f: (f / "adapter_config.json").write_text("{"),
    "other-format": lambda f: config(f, peft_type="IA3"),
    "not-gateable": lambda f: config(f, use_dora=True),
    "base-unreachable": lambda f: config(f, base_model_name_or_path="/no/such/base"),
    "scale-unusual": lambda f: config(f, lora_alpha=-8),
    "base-changing-init": lambda f: config(f, init_lora_weights="pissa"),
}


@pytest.mark.parametrize("code", SPOILT)
def test_each_fault_is_found_by_its_code(folder, code):
    SPOILT[code](folder)
    found = examine_static(str(folder))[1]
    assert code in {one.code for one in found}
    assert all(one.remedy for one in found if one.severity != "note"), "what to do is said"
    assert {one.code: one.severity for one in found}[code] in CODES[code].split(" or ")
    assert prevents_loading(found) == (code in ("base-unreachable",) or any(one.severity == "error" for one in found))


def test_a_factor_of_zero_may_come_from_an_export(folder):
    SPOILT["weights-partly-zero"](folder)
    (found,) = (one for one in examine_static(str(folder))[1] if one.code == "weights-partly-zero")
    assert "never trained, or exported at λ = 0" in found.message


ODD = {
    "nothing but weights": lambda f: (f / "adapter_config.json").unlink(),
    "a list for a configuration": lambda f: (f / "adapter_config.json").write_text("[1]"),
    "no number where numbers are": lambda f: config(f, r=None, lora_alpha=[], target_modules=7),
    "a nest of lists": lambda f: (f / "adapter_config.json").write_text("[" * 10000),
    "half a file": lambda f: (f / "adapter_model.safetensors").write_bytes(
        (f / "adapter_model.safetensors").read_bytes()[:900]
    ),
    "scalars": lambda f: tensors(f, lambda s: {k: v.flatten()[0] for k, v in s.items()}),
    "one shape for all": lambda f: tensors(f, lambda s: {k: torch.ones(3, 3) for k in s}),
    "a key of the future": lambda f: config(f, a_key_of_the_future={"x": 1}),
    "unknown kinds": lambda f: config(f, target_modules=["nowhere"]),
    "a tokenizer that is none": lambda f: (f / "tokenizer.json").write_text("{}"),
    "a tokenizer of nonsense": lambda f: [
        (f / name).write_text("[3]") for name in ("tokenizer.json", "tokenizer_config.json")
    ],
    "a tokenizer that fails at a text": lambda f: (f / "tokenizer_config.json").write_text(
        '{"model_max_length": "many"}'
    ),
    "patterns that are none": lambda f: config(f, rank_pattern=True, alpha_pattern=1.5),
    "a base that is a number": lambda f: config(f, base_model_name_or_path=3),
    "no base": lambda f: config(f, base_model_name_or_path=None),
    "a base that is the adapter": lambda f: config(f, base_model_name_or_path=str(f)),
}


@pytest.mark.parametrize("name", ODD)
def test_no_folder_is_an_exception(folder, name):
    ODD[name](folder)
    static, found = examine_static(str(folder))
    assert found
    assert {one.code for one in found} <= CODES.keys()
    assert static.adapter == str(folder)


def test_what_is_no_adapter_is_a_wrong_call(tmp_path, base, folder):
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "none", tmp_path / "empty", base):
        with pytest.raises(ConfigError):
            examine_static(str(place))
    for wrong in (tmp_path / "none", tmp_path / "empty"):
        with pytest.raises(ConfigError):
            examine_static(str(folder), str(wrong))


def test_bases_of_other_shapes(folder, tmp_path):
    wide = tiny_base(intermediate_size=96)
    write_base(tmp_path / "wide", wide)
    _, (found,) = examine_static(str(folder), str(tmp_path / "wide"))
    assert (found.code, found.severity) == ("shape-mismatch", "error")
    assert "was not trained on" in found.message
    assert "--base" in found.remedy
    write_base(tmp_path / "deep", tiny_base(num_hidden_layers=3))
    config(folder, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    assert codes(folder, tmp_path / "deep") == {"keys-missing": "error"}
    write_base(tmp_path / "flat", tiny_base(num_hidden_layers=1))
    _, (found,) = examine_static(str(folder), str(tmp_path / "flat"))
    assert found.code == "keys-unknown"
    assert "deeper base" in found.remedy


@pytest.mark.parametrize(
    ("method", "gateable", "also"),
    [
        ("awq", {"refuse": 14}, {"base-storage", "not-gateable"}),
        ("hqq", {"refuse": 14}, {"base-storage", "not-gateable"}),
        ("fp8", {"gate": 14}, {"base-storage"}),
        ("gptq", {"gate": 14}, set()),
    ],
)
def test_a_base_that_another_method_quantised(folder, base, tmp_path, method, gateable, also):
    """What is known of its LoRA layers is said before it is loaded, which may take a package that is not here."""
    other = shutil.copytree(base, tmp_path / "packed")
    record = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(
        json.dumps({**record, "quantization_config": {"quant_method": method, "bits": 4}})
    )
    static, findings = examine_static(str(folder), str(other))
    assert static.gateable == gateable
    assert {one.code for one in findings} == also
    assert bool(static.cost) == (gateable == {"gate": 14})
    for one in findings:
        if one.code == "base-storage":
            assert f"{method} base" in one.message


def test_tokens_that_were_added_to_the_base(tmp_path, base):
    model = tiny_adapter(base=tiny_base(vocab_size=168), target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    write_adapter(tmp_path / "adapter", base, model)
    found = {one.code: one for one in examine_static(str(tmp_path / "adapter"))[1]}
    assert "was trained with 168 tokens" in found["shape-mismatch"].message
    assert "resize_token_embeddings(168)" in found["shape-mismatch"].remedy


def test_a_gated_folder_and_its_damages(tmp_path, base, folder):
    model = lg.attach_gates(write_adapter(folder, base), lg.GateConfig(-3, 2))
    lg.save_gates(shake(model, 0.5), tmp_path / "gated", adapter_source=folder, base_id=str(base))
    static, found = examine_static(str(tmp_path / "gated"))
    assert found == []
    assert static.gates == {
        "lower": -3,
        "upper": 2,
        "granularity": "token",
        "modules": 14,
        "off": False,
        "temperature": None,
    }
    (tmp_path / "gated" / "gates.safetensors").write_bytes(b"no gates")
    assert codes(tmp_path / "gated") == {"gates-unreadable": "error"}
    (tmp_path / "gated" / "gate_config.json").write_text("{}")
    assert codes(tmp_path / "gated") == {"gates-unreadable": "error"}


def counted(folder, model):
    model.get_base_model().config.save_pretrained(folder / "base")
    model.peft_config["default"].base_model_name_or_path = str(folder / "base")
    model.save_pretrained(folder / "adapter")
    return examine_static(str(folder / "adapter"))[0].cost


def test_transposed_linear_layers_are_counted(tmp_path):
    """GPT-2 keeps its linear layers as Conv1D."""
    base = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    total = sum(parameter.numel() for parameter in base.parameters())
    model = get_peft_model(
        base, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    )
    cost = counted(tmp_path, model)
    body, head, gates, lora = 2 * (32 * 96 + 32 * 32 + 2 * 32 * 128), 100 * 32, 2 * 33, 2 * 4 * 128
    passes = 4 * body + 3 * 2 * 4 * 32 * 2048 + 4 * lora  # forward and activation backward of the body
    step = passes + 4 * gates + 0.75 * (2 * head + 2 * 100 * 32)
    assert cost["gate_parameters"] == gates
    assert cost["gate_share"] == gates / total
    assert cost["tflop_per_million_tokens"] == pytest.approx(step / 1e6)
    assert cost["ratio_to_lora_step"] == pytest.approx(step / (passes + 2 * lora + 0.75 * 4 * head))


@pytest.mark.parametrize(
    "beside", [{"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["embed_tokens", "lm_head"]}]
)
def test_a_head_under_lora_and_whole_copies_are_not_the_base(tmp_path, beside):
    plain = counted(tmp_path / "plain", tiny_adapter(target_modules=["q_proj"]))
    more = counted(tmp_path / "more", tiny_adapter(**{"target_modules": ["q_proj"], **beside}))
    assert more == plain
    assert plain["gate_share"] == plain["gate_parameters"] / sum(p.numel() for p in tiny_base().parameters())


def test_every_code_is_in_the_table():
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
                first = node.args[0] if node.args else None
                found |= {one.value for one in ast.walk(first) if isinstance(one, ast.Constant)} if first else set()
    assert {
        one for one in found if isinstance(one, str) and re.fullmatch(r"[a-z]+(-[a-z]+)+|[a-z]+", one)
    } <= CODES.keys()
