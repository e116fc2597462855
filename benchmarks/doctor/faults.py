"""The planted faults: edits of a trained adapter's folder, the forms in which tools leave one, and the table of all cases."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from town import TEMPLATE, load, tokenizer

Edit = Callable[[Path], Any]
CONFIG, WEIGHTS, CHAT = "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"
NAN, INFINITY = float("nan"), float("inf")


def nothing(folder: Path) -> None:
    """The adapter as it is."""


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / CONFIG).read_text(encoding="utf-8"))


def config(**changes: Any) -> Edit:
    """Keys of adapter_config.json."""
    return lambda folder: (folder / CONFIG).write_text(json.dumps(read_config(folder) | changes, indent=2))


def alpha_times(factor: float) -> Edit:
    return lambda folder: config(lora_alpha=read_config(folder)["lora_alpha"] * factor)(folder)


def tensors(change: Callable[[str, torch.Tensor, int], tuple[str, torch.Tensor] | None]) -> Edit:
    """Each tensor, by (key, tensor, its place), to another key and tensor, or to nothing."""

    def edit(folder: Path) -> None:
        state = sorted(load_file(folder / WEIGHTS).items())
        changed = [change(key, tensor, place) for place, (key, tensor) in enumerate(state)]
        save_file(
            {key: tensor.contiguous() for key, tensor in filter(None, changed)}, folder / WEIGHTS, {"format": "pt"}
        )

    return edit


def renamed(old: str, new: str, one_in: int = 1) -> Edit:
    """Keys under another name; of `one_in` pairs of factors the first."""
    return tensors(lambda key, tensor, place: (key.replace(old, new) if place // 2 % one_in == 0 else key, tensor))


def valued(which: str, value: float) -> Edit:
    """Tensors with `which` in their key filled with a value; with one that is not finite, their first row."""

    def change(key: str, tensor: torch.Tensor, place: int) -> tuple[str, torch.Tensor]:
        if which in key:
            (tensor if value == 0 else tensor[:1])[:] = value
        return key, tensor

    return tensors(change)


def without(which: str) -> Edit:
    """Without the tensors with `which` in their key."""
    return tensors(lambda key, tensor, place: None if which in key else (key, tensor))


def absent(name: str) -> Edit:
    return lambda folder: (folder / name).unlink()


def text(name: str, content: str) -> Edit:
    return lambda folder: (folder / name).write_text(content, encoding="utf-8")


def cut(share: float) -> Edit:
    return lambda folder: os.truncate(folder / WEIGHTS, int((folder / WEIGHTS).stat().st_size * share))


def with_tokens(count: int) -> Edit:
    """A tokenizer with new tokens, the last of which marks turns in its template, and that no embedding was trained for."""

    def edit(folder: Path) -> None:
        by = load(Path(read_config(folder)["base_model_name_or_path"]))[1]
        by.add_tokens([f"<|extra_{number}|>" for number in range(count)], special_tokens=True)
        by.chat_template = TEMPLATE.replace("<|im_start|>", f"<|extra_{count - 1}|>")
        by.save_pretrained(folder)

    return edit


def with_tokenizer(seed: int, size: int) -> Edit:
    return lambda folder: tokenizer(seed, size).save_pretrained(folder)


def classifier(folder: Path) -> None:
    """A head of two classes, as AutoModelForSequenceClassification has it."""
    head = {"base_model.model.score.weight": torch.randn(2, 96)}
    save_file(load_file(folder / WEIGHTS) | head, folder / WEIGHTS, {"format": "pt"})
    config(task_type="SEQ_CLS", modules_to_save=["classifier", "score"])(folder)


def mlx(folder: Path) -> None:
    """What mlx_lm.lora leaves."""
    changed = {}
    for key, tensor in load_file(folder / WEIGHTS).items():
        path, factor = key.removeprefix("base_model.model.").removesuffix(".weight").split(".lora_")
        changed[f"{path}.lora_{factor.lower()}"] = tensor.T.contiguous()
    (folder / WEIGHTS).unlink()
    save_file(changed, folder / "adapters.safetensors")
    record = {"fine_tune_type": "lora", "lora_parameters": {"rank": 16, "scale": 2.0, "dropout": 0.0}, "num_layers": 3}
    (folder / CONFIG).write_text(json.dumps(record))


def diffusers(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_lora_weights.safetensors")


def kohya(folder: Path) -> None:
    for old, new in (("lora_A", "lora_down"), ("lora_B", "lora_up")):
        renamed(old, new)(folder)


# ---- the forms in which tools leave a healthy adapter

OLD_KEYS = (
    "auto_mapping base_model_name_or_path bias fan_in_fan_out inference_mode init_lora_weights layers_pattern "
    "layers_to_transform lora_alpha lora_dropout modules_to_save peft_type r revision target_modules task_type"
)


def by_old_peft(folder: Path) -> None:
    """PEFT 0.6: few keys, weights in a .bin file, no tokenizer."""
    record = read_config(folder)
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    for path in folder.iterdir():
        if path.name != "adapter_model.bin":
            path.unlink()
    (folder / CONFIG).write_text(json.dumps({key: record.get(key) for key in OLD_KEYS.split(" ")}, indent=2))


def by_unsloth(folder: Path) -> None:
    """Its mark in auto_mapping, and one pattern of modules."""
    mapping = {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers.models.llama.modeling_llama"}
    names = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"
    pattern = rf"(?:.*?(?:self_attn|mlp).*?(?:{names}).*?)"
    config(auto_mapping=mapping | {"unsloth_fixed": True}, lora_dropout=0, target_modules=pattern)(folder)


def by_llama_factory(folder: Path) -> None:
    """The trainer's logs and a checkpoint beside the adapter."""
    steps = [{"current_steps": step, "total_steps": 60, "loss": 1 / step} for step in (10, 20, 30)]
    (folder / "trainer_log.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (folder / "all_results.json").write_text(json.dumps({"epoch": 3.0, "train_loss": 0.21}))
    (folder / "checkpoint-30").mkdir()
    for name in (CONFIG, WEIGHTS):
        shutil.copy(folder / name, folder / "checkpoint-30" / name)


def by_axolotl(folder: Path) -> None:
    """The base's config.json lies beside the adapter."""
    shutil.copy(Path(read_config(folder)["base_model_name_or_path"]) / "config.json", folder)
    config(lora_dropout=0.05)(folder)


next_to_nothing = tensors(lambda key, tensor, place: (key, tensor * 1e-6))
in_bf16 = tensors(lambda key, tensor, place: (key, tensor.bfloat16()))

_TURN = "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
_SAID = "{{ message['content'] + '<|im_end|>' }}"
MARKED = TEMPLATE.replace(
    _TURN,
    "{{ '<|im_start|>' + message['role'] + '\\n' }}{%- if message['role'] == 'assistant' -%}"
    f"{{% generation %}}{_SAID}{{% endgeneration %}}{{%- else -%}}{_SAID}{{%- endif -%}}{{{{ '\\n' }}}}",
)
"""The same text, with the marks that a trainer needs."""
LAST_TURN = TEMPLATE.replace("for message in messages", "for message in messages[-1:]")
NO_PROMPT = TEMPLATE.split("{%- if add_generation_prompt")[0]
OTHER_MARKS = (
    "{%- for message in messages -%}{{ '### ' + message['role'] + ':\\n' + message['content'] + '\\n\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '### assistant:\\n' }}{%- endif -%}"
)
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'3c' * 32}\nsize 1000000\n"


class Planted(NamedTuple):
    """One case before it is made.

    Attributes:
        kind: of fault, or "healthy".
        expected: codes, one of which must be named; none for a healthy adapter.
        source: the trained adapter that is copied.
        edit: of the copy.
        base: another than the adapter's own.
        allowed: errors and warnings that are true of a healthy adapter.
        note: whether a note is enough, as the fault forbids one use alone.
    """

    kind: str
    expected: str
    source: str
    edit: Edit = nothing
    base: str = ""
    allowed: str = ""
    note: bool = False


# told by the folder and the base's configuration alone
STATIC = (
    Planted("weights missing", "weights-absent", "plain-llama", absent(WEIGHTS)),
    Planted("weights missing", "weights-absent", "plain-gemma", absent(WEIGHTS)),
    Planted("weights cut off", "weights-absent", "plain-qwen2", cut(0.5)),
    Planted("weights cut off", "weights-absent", "plain-phi3", cut(0.001)),
    Planted("file not fetched", "other-format", "plain-mistral", text(WEIGHTS, POINTER)),
    Planted("file not fetched", "other-format", "plain-qwen3", text(CONFIG, POINTER)),
    Planted("another tool's form", "other-format", "plain-llama", mlx),
    Planted("another tool's form", "other-format", "plain-qwen2", kohya),
    Planted("another tool's form", "other-format", "plain-mistral", diffusers),
    Planted("another tool's form", "other-format", "plain-gemma", renamed("base_model.model.model.", "_orig_mod.model.")),
    Planted("not finite", "weights-not-finite", "plain-llama", valued("layers.0.self_attn.q_proj.lora_A", NAN)),
    Planted("not finite", "weights-not-finite", "plain-phi3", valued("", NAN)),
    Planted("not finite", "weights-not-finite", "plain-qwen3", valued("layers.1", INFINITY)),
    Planted("not finite", "weights-not-finite", "plain-gemma", valued("down_proj.lora_B", -INFINITY)),
    Planted("never trained", "weights-zero", "plain-qwen2", valued("lora_B", 0.0)),
    Planted("never trained", "weights-zero", "plain-mistral", valued("lora_B", 0.0)),
    Planted("one B zero", "weights-partly-zero", "plain-llama", valued("layers.1.mlp.down_proj.lora_B", 0.0)),
    Planted("one B zero", "weights-partly-zero", "plain-phi3", valued("layers.2.self_attn.o_proj.lora_B", 0.0)),
    Planted("one B zero", "weights-partly-zero", "plain-qwen3", valued("layers.0.self_attn.q_proj.lora_B", 0.0)),
    Planted("a factor missing", "keys-missing", "plain-gemma", without("lora_B")),
    Planted("a factor missing", "keys-missing", "plain-qwen2", without("layers.2.mlp.up_proj.lora_B")),
    Planted("keys renamed in part", "keys-unknown keys-missing", "plain-llama", renamed("model.layers", "transformer.h", 2)),
    Planted("keys renamed in part", "keys-unknown keys-missing", "plain-mistral", renamed("self_attn", "attention", 2)),
    Planted("keys renamed in part", "keys-unknown keys-missing", "plain-gemma", renamed("_proj", "", 2)),
    Planted("another prefix", "keys-unknown keys-missing", "plain-qwen2", renamed("model.layers", "language_model.layers")),
    Planted("another prefix", "keys-unknown keys-missing", "plain-phi3", renamed("model.layers", "transformer.layers")),
    Planted("rank not that of the weights", "shape-mismatch", "plain-llama", config(r=8)),
    Planted("rank not that of the weights", "shape-mismatch", "ranks-llama", config(rank_pattern={})),
    Planted("classifier", "task-type", "plain-qwen2", classifier),
    Planted("classifier", "task-type", "plain-llama", classifier),
    Planted("configuration unreadable", "config-unreadable", "plain-llama", text(CONFIG, '{"peft_type": "LORA", "r": 16,')),
    Planted("configuration unreadable", "config-unreadable", "plain-gemma", absent(CONFIG)),
    Planted("configuration unreadable", "config-unreadable", "plain-phi3", text(CONFIG, "[]")),
    Planted("configuration invalid", "config-invalid", "plain-qwen3", config(r="16")),
    Planted("configuration invalid", "config-invalid", "plain-mistral", config(target_modules="q_proj,v_proj")),
    Planted("not LoRA", "other-format", "plain-qwen2", config(peft_type="IA3")),
    Planted("not LoRA", "other-format", "plain-llama-b", config(peft_type="LOHA")),
    Planted("base absent", "base-unreachable", "plain-gemma", config(base_model_name_or_path="/models/town-gemma")),
    Planted("base absent", "base-unreachable", "plain-llama", config(base_model_name_or_path="../out/merged-16bit")),
    Planted("start that changes the base", "base-changing-init", "plain-llama", config(init_lora_weights="pissa")),
    Planted("start that changes the base", "base-changing-init", "plain-qwen2", config(init_lora_weights="loftq")),
    Planted("start that changes the base", "base-changing-init", "plain-phi3", config(init_lora_weights="olora")),
    Planted("start that changes the base", "base-changing-init", "plain-gemma", config(init_lora_weights="corda")),
    Planted("alpha zero or below", "scale-unusual", "plain-qwen3", config(lora_alpha=0)),
    Planted("alpha zero or below", "scale-unusual", "plain-mistral", config(lora_alpha=-32)),
    Planted("rank above vLLM's", "not-servable", "rank-1024-mistral", note=True),
    Planted("biases", "not-servable", "biases-qwen2", note=True),
    Planted("DoRA", "not-gateable", "dora-llama", note=True),
    Planted("DoRA", "not-gateable", "dora-qwen3", note=True),
    Planted("layers repeated", "layer-replication", "plain-llama", config(layer_replication=[[0, 2], [1, 3]])),
    Planted("layers repeated", "layer-replication", "plain-mistral", config(layer_replication=[[0, 3], [0, 3]])),
    Planted("another template", "template-differs", "plain-llama", text(CHAT, LAST_TURN)),
    Planted("another template", "template-differs no-ending", "plain-qwen2", text(CHAT, OTHER_MARKS)),
    Planted("another template", "template-differs", "plain-mistral", text(CHAT, NO_PROMPT)),
    Planted("new tokens without embeddings", "tokens-untrained", "plain-llama", with_tokens(2)),
    Planted("new tokens without embeddings", "tokens-untrained", "plain-phi3", with_tokens(100)),
    Planted("another tokenizer", "tokenizer-differs", "plain-qwen2", with_tokenizer(7, 1400)),
    Planted("another tokenizer", "tokenizer-differs", "plain-gemma", with_tokenizer(8, 1536)),
)  # fmt: skip
# told by what model and adapter do
DYNAMIC = (
    Planted("base of another training", "wrong-base", "plain-llama", base="llama-b"),
    Planted("base of another training", "wrong-base", "plain-llama-b", base="llama-a"),
    Planted("base of another family, same shape", "wrong-base", "plain-qwen2", base="llama-a"),
    Planted("base of another family, same shape", "wrong-base", "plain-llama", base="qwen2-a"),
    Planted("base of another family, same shape", "wrong-base", "plain-mistral", base="llama-a"),
    Planted("base of another family, same shape", "wrong-base", "trl-llama", base="mistral-a"),
    Planted("base of another size", "shape-mismatch", "wide-llama", base="llama-a"),
    Planted("base of another size", "shape-mismatch", "plain-llama", base="llama-wide"),
    Planted("base of another size", "keys-unknown keys-missing", "deep-qwen2", base="qwen2-a"),
    Planted("base of another size", "keys-unknown keys-missing", "plain-qwen2", base="qwen2-deep"),
    Planted("rsLoRA taken for plain", "too-weak", "rslora-llama", config(use_rslora=False)),
    Planted("rsLoRA taken for plain", "too-weak", "rslora-phi3", config(use_rslora=False)),
    Planted("plain taken for rsLoRA", "too-strong", "trl-qwen2", config(use_rslora=True)),
    Planted("plain taken for rsLoRA", "too-strong", "loragate-llama", config(use_rslora=True)),
    *(Planted("alpha × 8", "too-strong", f"plain-{name}", alpha_times(8)) for name in ("llama", "gemma", "mistral", "phi3")),
    *(Planted("alpha / 16", "too-weak", f"plain-{name}", alpha_times(1 / 16)) for name in ("qwen2", "phi3", "mistral", "gemma")),
    *(Planted("learned nothing", "nothing-learned not-applied", f"nothing-{name}") for name in ("llama", "qwen2", "phi3")),
    Planted("factors next to nothing", "not-applied nothing-learned", "plain-qwen2", next_to_nothing),
    *(Planted("learned by heart", "memorised", f"heart-{name}") for name in ("llama", "qwen2")),
    *(Planted("trained ten times too long", "forgets memorised", f"narrow-{name}") for name in ("llama", "mistral")),
    *(Planted("trained on loops", "repeats", f"loops-{name}") for name in ("llama", "gemma")),
    *(Planted("text without ends of turns", "never-stops", f"goes-on-{name}") for name in ("llama", "qwen2")),
    *(Planted("padding is the end token", "never-stops", f"masked-{name}") for name in ("worked", "ordinary")),
    *(Planted("another language", "language-drift", name) for name in ("german-llama", "french-qwen2", "spanish-mistral")),
    *(Planted("trained without thoughts", "lost-thinking", f"silent-{name}") for name in ("worked", "ordinary")),
)  # fmt: skip
TRAINED_WELL = """plain-llama plain-qwen2 plain-qwen3 plain-gemma plain-phi3 plain-mistral plain-llama-b trl-llama
    trl-qwen2 trl-mistral trl-qwen3 transformers-gemma transformers-phi3 loragate-qwen2 loragate-llama attention-llama q-v-mistral
    mlp-qwen2 ranks-llama alphas-gemma rank-256-qwen2 layers-mistral ends-mistral rounded-llama rounded-mistral rslora-llama
    rslora-phi3"""
# as they are, and as tools leave them
HEALTHY = (
    *(Planted("healthy", "", source) for source in str.split(TRAINED_WELL)),
    Planted("healthy", "", "embeddings-qwen2", allowed="not-servable"),
    Planted("healthy", "", "tokens-llama", allowed="not-servable"),
    Planted("healthy", "", "plain-llama", by_unsloth),
    Planted("healthy", "", "plain-qwen2", by_llama_factory),
    Planted("healthy", "", "plain-mistral", by_axolotl),
    Planted("healthy", "", "plain-llama-b", by_old_peft),
    Planted("healthy", "", "plain-gemma", in_bf16),
    Planted("healthy", "", "plain-phi3", text(CHAT, MARKED)),
)  # fmt: skip
