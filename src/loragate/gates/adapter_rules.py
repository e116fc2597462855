"""What the configuration and the keys of an adapter mean: findings, and what the adapter changes beside LoRA's factors.

Rules over plain data, one for each question: are the keys of the right types, is it an adapter of a causal
language model, did its making change the base, do ranks and scale fit, is a part missing, can it be gated and served.
`adapter_folder.py` reads the files and asks all of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from loragate.errors import ArtifactError, ConfigError
from loragate.gates.schema import ADAPTER_CONFIG, PREFIX, factor_of, lora_scaling, without_adapter_name
from loragate.validate import PositiveInt, UnitInterval, validate

Severity = Literal["error", "warning", "note"]
Purpose = Literal["load", "gate", "serve"]

TensorSpecs = Mapping[str, tuple[str, tuple[int, ...]]]
"""{key as in the file: (dtype, shape)}."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for `max_lora_rank`."""
USUAL_SCALES = (1 / 16, 16.0)
"""Between which α/r lies in adapters as people train them (α = r, α = 2r, rsLoRA at rank 256)."""

# codes that forbid one use alone; every finding of severity "error" forbids all
_FORBIDS: dict[str, Purpose] = {
    "base-changing-init": "gate",
    "not-gateable": "gate",
    "not-servable": "serve",
    "weights-zero": "gate",
}
# Initialisations that subtract the new factors from the base's weights, or quantise these, when an adapter is made and each
# time it is loaded. The latter cannot be repeated by a loader: they come from the training's data, from gradients, or from a
# decomposition that is drawn at random.
_BASE_CHANGING_STARTS = ("pissa", "olora", "lora_ga", "corda", "loftq")
_NOT_REPEATABLE = ("corda", "loftq", "lora_ga", "pissa_niter")
# settings under which a LoRA layer computes another delta than B·A·x
_VARIANTS = {
    "use_dora": "a Dora variant of LoRA",
    "use_qalora": "a QALora variant of LoRA",
    "use_bdlora": "a BdLora variant of LoRA",
    "kasa_config": "a KaSA variant of LoRA",
    "arrow_config": "an Arrow variant of LoRA",
    "alora_invocation_tokens": "an aLoRA variant of LoRA",
    "velora_config": "a VeLoRA variant of LoRA",
    "monteclora_config": "a MonteCLoRA variant of LoRA",
}
# what vLLM takes for a start that leaves the base as it is (vllm/lora/peft_helper.py)
_SERVED_STARTS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
_PLAIN_START = (
    "convert it to plain LoRA (PEFT's save_pretrained with path_initial_model_for_weight_conversion), or, where it is plain "
    "already, set init_lora_weights to true"
)
_PEFTS_NAMES = "`loragate export ADAPTER --constant 1 --out DIR` writes it with PEFT's names"
_WITHOUT_VLLM = (
    "generate and evaluate with transformers, or merge it into its base (loragate export --to merged), where PEFT can"
)
# heads of models that do not write text, by the names that transformers gives them
_OTHER_HEADS = ("score", "classifier", "qa_outputs", "pooler", "v_head", "pre_classifier")
_OTHER_TASKS = ("SEQ_CLS", "SEQ_2_SEQ_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")
_OF_LORA = re.compile(r"\.lora_[A-Za-z_]+(?:\.|$)")


@dataclass(frozen=True)
class Finding:
    """One thing about an adapter's folder that its user should know."""

    code: str  # kind of finding, such as "weights-absent"; stable, for programs
    severity: Severity  # "error" forbids every use, a "warning" some, a "note" none
    message: str  # what was found, with file and key
    remedy: str = ""  # what to do; empty where there is nothing to do
    evidence: dict[str, Any] = field(default_factory=dict)  # the figures and names behind it, JSON-able

    def forbids(self, purpose: Purpose) -> bool:
        """Whether the adapter cannot be used so: "load" (run it), "gate" (train gates on it) or "serve" (in vLLM)."""
        return self.severity == "error" or _FORBIDS.get(self.code) == purpose

    def __str__(self) -> str:
        if not self.remedy:
            return self.message
        first = self.remedy.split()[0]  # names of files, modules and functions stay as they are
        capital = self.remedy[0] if "_" in first or "." in first else self.remedy[0].upper()
        return f"{self.message}. {capital}{self.remedy[1:]}"


def split_factor_key(key: str) -> tuple[str, str]:
    """(module path without PEFT's prefix, "lora_A" or another factor) of a tensor's name; two empty texts for any other."""
    return factor_of(without_adapter_name(key))


def find_adapted_parameters(config: Mapping[str, Any], path: str) -> list[str]:
    """The parameters (fused experts, a router) that the factors of a module may belong to, by their whole names: those of its
    target_parameters; none for a module that is adapted itself.

    Its keys name the module alone: which of the parameters a key belongs to, only the base's code tells.
    """
    parameters = read_name_list(config, "target_parameters")
    # PEFT nests the layers of several parameters of one module: the second is at experts.base_layer
    own = [f"{path.replace('.base_layer', '')}.{name.rpartition('.')[2]}" for name in parameters]
    return [name for name in own if f".{name}".endswith(tuple(f".{one}" for one in parameters))]


def find_variants(config: Mapping[str, Any]) -> list[str]:
    """The settings under which the adapter computes another delta than B·A·x, each in a sentence without its end."""
    return [
        f"{key} is set: the adapter is {what}, which computes its delta in another way than B·A·x"
        for key, what in _VARIANTS.items()
        if config.get(key)
    ]


def base_change_reason(init_lora_weights: Any) -> str:
    """Why λ = 0 would not be the base for an adapter of this initialisation; empty where it would."""
    if not (isinstance(init_lora_weights, str) and init_lora_weights.lower().startswith(_BASE_CHANGING_STARTS)):
        return ""
    if init_lora_weights.lower() == "loftq":
        return (
            "init_lora_weights='loftq' puts quantised weights in place of the base's each time the adapter is loaded, so the "
            "model without its delta (λ = 0) is not the base. Where the named base is the one that LoftQ saved, set "
            "init_lora_weights to true in adapter_config.json, as PEFT advises"
        )
    once = init_lora_weights.lower().startswith(_NOT_REPEATABLE)
    return (
        f"init_lora_weights={init_lora_weights!r} subtracts the adapter's first factors from the base's weights, so the model "
        f"without its delta (λ = 0) is not the base{', and no loader finds these factors again' if once else ''}. Convert it to "
        f"plain LoRA{' where it was trained' if once else ' and gate that'}: PEFT's "
        "save_pretrained(folder, path_initial_model_for_weight_conversion=FOLDER_OF_THE_UNTRAINED_ADAPTER)"
    )


# what the keys that a loader relies on may hold
_TEXT, _NAMES = (str | None, "a text"), (list[str] | None, "a list of names")
_CONFIG_KEYS: dict[str, tuple[Any, str]] = {
    "r": (PositiveInt, "a whole number above 0"),
    "lora_alpha": (float, "a number"),
    "rank_pattern": (dict[str, int] | None, "whole numbers by patterns of module names"),
    "alpha_pattern": (dict[str, float] | None, "numbers by patterns of module names"),
    "lora_dropout": (UnitInterval | None, "between 0 and 1"),
    "target_modules": (list[str] | str | None, "a list of module names or one pattern"),
    "modules_to_save": _NAMES,
    "target_parameters": _NAMES,
    "layers_to_transform": (list[int] | int | None, "a layer's number, a list of them, or null for all layers"),
    "bias": (Literal["none", "all", "lora_only"], "'none', 'all' or 'lora_only'"),
    "base_model_name_or_path": _TEXT,
    "revision": _TEXT,
    "task_type": _TEXT,
}


def config_errors(config: Mapping[str, Any]) -> Iterator[str]:
    """Keys that a loader relies on, and that hold something else."""
    patterns: list[str] = []
    for key, (kind, what) in _CONFIG_KEYS.items():
        value = config.get(key, "none" if key == "bias" else None)
        if key.endswith(("_pattern", "_dropout")):
            value = value or None  # an empty list, say, as other programs write none
        try:
            validate(kind, value, key)
        except ConfigError:
            yield f"key {key!r} must be {what}, found {value!r:.200}"
        else:
            patterns += value if isinstance(value, dict) else ()
    targets = config.get("target_modules")
    if targets in ("", []) and not config.get("target_parameters"):
        yield f"key 'target_modules' is empty ({targets!r}), so the adapter would adapt nothing"
    elif isinstance(targets, str) and re.fullmatch(r"[\w.]+(?:\s*,\s*[\w.]+)+", targets):
        yield f"key 'target_modules' is one text with commas ({targets!r:.200}), which PEFT reads as a pattern; write it as a list"
    for pattern in [*patterns, *([targets] if isinstance(targets, str) else [])]:
        try:
            re.compile(pattern)
        except re.error:
            yield f"{pattern!r:.200} in target_modules, rank_pattern or alpha_pattern is no valid regular expression"


def read_name_list(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of names in a configuration; none where it holds something else."""
    value: Any = config.get(key)
    return tuple(value) if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value) else ()


def tensor_kind(key: str, copies: tuple[str, ...]) -> str:
    """factor, copy (modules_to_save), token, bias, embedding, norm, head or other."""
    name = key.removeprefix(PREFIX)
    if _OF_LORA.search(name):
        return "factor"
    if "trainable_tokens" in name or ".token_adapter." in name:
        return "token"
    # the end of a module's name, as PEFT takes it
    if ".modules_to_save." in name or any(f"{copy}." in name for copy in copies):
        return "copy"
    module, _, leaf = name.replace(".base_layer", "").rpartition(".")
    last = module.rpartition(".")[2]
    if leaf == "bias":
        return "bias"
    if re.search(r"embed|wte|wpe|word_embeddings", last):
        return "embedding"
    if re.search(r"norm|ln_|layernorm", last):
        return "norm"
    return "head" if last in ("lm_head", "embed_out", "output", "score") else "other"


_WORDS = {
    "bias": "biases",
    "embedding": "embeddings",
    "norm": "norms",
    "head": "output heads",
    "other": "other weights",
}


def _beside(config: Mapping[str, Any], tensors: TensorSpecs) -> Iterator[str]:
    """What the adapter changes beside A and B, from the configuration and from the keys."""
    copies = read_name_list(config, "modules_to_save")
    kinds = Counter(tensor_kind(key, copies) for key in tensors)
    if copies:
        yield f"whole copies of {', '.join(sorted(copies))} (modules_to_save)"
    if (tokens := config.get("trainable_token_indices")) or kinds["token"]:
        lists = tokens.values() if isinstance(tokens, dict) else [tokens]
        trained = sum(len(one) for one in lists if isinstance(one, list | tuple))
        yield f"{trained or 'some'} trained token embeddings (trainable_token_indices)"
    if config.get("bias", "none") != "none" and not kinds["bias"]:
        yield f"biases (bias={config['bias']!r})"
    if config.get("layer_replication"):
        yield "repeated layers (layer_replication)"
    for kind, words in _WORDS.items():
        if kinds[kind]:
            first = next(key for key in tensors if tensor_kind(key, copies) == kind)
            # the file of weights is PEFT's; whole tensors in it go into the base's own
            count = f"{kinds[kind]} " if kinds[kind] > 1 else ""
            yield f"{count}{words} saved along ({first.removeprefix(PREFIX)}{', …' if kinds[kind] > 1 else ''})"


def _of_task(folder: Path, config: Mapping[str, Any], tensors: TensorSpecs) -> Iterator[Finding]:
    """An adapter is one of a causal language model unless its weights say otherwise; the label alone is often wrong."""
    label, path = config.get("task_type"), folder / ADAPTER_CONFIG
    names = [key.removeprefix(PREFIX).split(".") for key in tensors]
    heads = sorted({parts[0] for parts in names} & {*_OTHER_HEADS})
    # a model of two halves without a label is told by its base
    is_encoder_decoder = label in _OTHER_TASKS and {"encoder", "decoder"} <= {
        part for parts in names for part in parts[:2]
    }
    if heads or is_encoder_decoder:
        what = f"a head of its own ({heads[0]})" if heads else "an encoder beside its decoder"
        message = (
            f"{path}: only adapters of causal language models are loaded (AutoModelForCausalLM), and here task_type is {label}, "
            f"with {what}"
        )
        remedy = (
            f'in Python load the base with its own class, then peft.PeftModel.from_pretrained(base, "{folder}") and, for gates, '
            "loragate.load_gates(model, FOLDER)"
        )
        yield Finding("task-type", "error", message, remedy, {"task_type": label, "heads": heads})
    elif label in _OTHER_TASKS:
        message = (
            f"{path}: task_type is {label}; its weights are those of a causal language model, so it is loaded as one"
        )
        yield Finding("task-type", "note", message, "", {"task_type": label})


def _of_initialisation(folder: Path, config: Mapping[str, Any], tensors: TensorSpecs) -> Iterator[Finding]:
    recorded = config.get("init_lora_weights")
    if why := base_change_reason(recorded):
        severity: Severity = "error" if str(recorded).lower().startswith(_NOT_REPEATABLE) else "warning"
        said, _, remedy = why.partition(". ")
        message = f"{folder / ADAPTER_CONFIG}: {said}"
        yield Finding("base-changing-init", severity, message, remedy, {"init_lora_weights": recorded})


def _check_rank_and_scaling(folder: Path, config: Mapping[str, Any], tensors: TensorSpecs) -> Iterator[Finding]:
    """Ranks of the factors against those of the configuration, and a scale out of the ordinary."""
    if any(config_errors(config)):
        return
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, (_, shape) in tensors.items():
        path, factor = split_factor_key(key)
        if factor and 0 not in shape:
            shapes.setdefault(path, {})[factor] = shape
    wrong, scales = [], set[float]()
    for path, pair in shapes.items():
        # fused experts share one factor, whose rank is a multiple, and their patterns name parameters (experts.down_proj)
        fused = find_adapted_parameters(config, path)
        try:
            strengths = [lora_scaling(config, name) for name in (path, *fused)]
        except ArtifactError:
            continue
        ranks = [rank for rank, _, _ in strengths]
        scales.update(scale for _, _, scale in strengths)
        a, b = pair.get("lora_A"), pair.get("lora_B")
        if a is None or b is None or len(a) != len(b) or len(a) < 2:
            continue
        if a[0] != b[1] or not any(a[0] == rank or (fused and a[0] % rank == 0) for rank in ranks):
            wrong.append((path, a, b, ranks[0]))
    if wrong:
        path, a, b, rank = wrong[0]
        message = (
            f"{folder}: the factors of {len(wrong)} of {len(shapes)} modules have another rank than the configuration: {path} has "
            f"A {list(a)} and B {list(b)}, and {ADAPTER_CONFIG} says r = {rank}"
        )
        remedy = f"{ADAPTER_CONFIG} and weights are of two trainings, or rank_pattern is missing: take both files of one folder"
        evidence = {"modules": [row[0] for row in wrong[:8]], "count": len(wrong)}
        yield Finding("shape-mismatch", "error", message, remedy, evidence)
    low, high = USUAL_SCALES
    if odd := sorted(scale for scale in scales if not low <= scale <= high):
        rule = "α/√r with rsLoRA" if config.get("use_rslora") else "α/r"
        worst = odd[0] if odd[0] <= 0 else odd[-1]
        yield Finding(
            "scale-unusual",
            "warning" if worst <= 0 else "note",  # the adapter does nothing, or the opposite of what was trained
            f"{folder / ADAPTER_CONFIG}: the delta is scaled by {worst:g} ({rule}, α = {config['lora_alpha']:g}, "
            f"r = {config['r']}); usual are {low:g} to {high:g}",
            "check lora_alpha, r and use_rslora against the training's",
            {"scales": odd[:8]},
        )


def _of_keys(folder: Path, config: Mapping[str, Any], tensors: TensorSpecs) -> Iterator[Finding]:
    """Factors without their partner, and weights that the configuration promises."""
    if not tensors:
        return
    pairs: dict[str, set[str]] = {}
    for key in tensors:
        path, factor = split_factor_key(key)
        if factor:
            pairs.setdefault(path, set()).add(factor[-1])
    lone = sorted(path for path, held in pairs.items() if len(held) == 1)
    copies = tuple(name for name in read_name_list(config, "modules_to_save") if name not in _OTHER_HEADS)
    # a name that is no module's has no effect where another has; what is missing of a module, the base tells
    held = any(tensor_kind(key, copies) == "copy" for key in tensors)
    promised = [] if held else [f"{name} (modules_to_save)" for name in copies]
    if config.get("trainable_token_indices") and not any("trainable_tokens" in key for key in tensors):
        promised.append("the trained token embeddings (trainable_token_indices)")
    again = "the file was written in part, or by another tool; fetch or write the adapter again"
    if lone:
        only = pairs[lone[0]].copy().pop()
        message = (
            f"{folder}: {len(lone)} of {len(pairs)} modules have one factor alone, such as {lone[0]} (only {only})"
        )
        yield Finding("keys-missing", "error", message, again, {"modules": lone[:8], "count": len(lone)})
    if promised:
        message = f"{folder}: the weights lack {', '.join(promised)}, which {ADAPTER_CONFIG} names"
        yield Finding("keys-missing", "error", message, again, {"names": promised})


def _check_gating_and_serving(
    beside: tuple[str, ...], folder: Path, config: Mapping[str, Any], tensors: TensorSpecs
) -> Iterator[Finding]:
    """What is neither gated nor served."""
    path = folder / ADAPTER_CONFIG
    if layers := config.get("layer_replication"):
        yield Finding(
            "layer-replication",
            "error",
            f"{path}: layer_replication is {layers!r:.120}: the adapter makes another model of its base, with layers repeated, "
            "which is not the base at λ = 0",
            "build that model once (PEFT's get_peft_model, then unload and save it), and train a plain LoRA adapter on it",
        )
    if config.get("lora_bias"):
        message = f"{path}: lora_bias=True adds a term outside B·A·x that λ would not scale"
        yield Finding("not-gateable", "note", message, "retrain without it, if it is to have gates")
    for said in find_variants(config):
        yield Finding("not-gateable", "note", f"{path}: {said}", "gate a plain LoRA adapter")
    if beside:
        message = f"{folder}: beside LoRA's factors the adapter changes {'; '.join(beside)}"
        remedy = "a strength, or gates, do not reach that: at λ = 0 it is not the base"
        yield Finding("base-changed-beside", "note", message, remedy, {"beside": list(beside)})
    if any(config_errors(config)):
        return
    copies = read_name_list(config, "modules_to_save")
    # PEFT saves the base's own embedding beside an adapter on it, and vLLM skips it
    refused = [
        key
        for key in tensors
        if tensor_kind(key, copies) != "factor" and not re.search(r"\.(embed_tokens|lm_head)\.base_layer\.weight$", key)
    ]
    unserved = [(f"{path}: {said}", _WITHOUT_VLLM) for said in find_variants(config)]
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in _SERVED_STARTS:
        unserved.append((f"{path}: vLLM takes init_lora_weights={start!r} for a change of the base", _PLAIN_START))
    if named := next((key for key in tensors if without_adapter_name(key) != key), ""):
        unserved.append((f"{folder}: {named} has an adapter's name in it, which vLLM does not read", _PEFTS_NAMES))
    for message, remedy in unserved:
        yield Finding("not-servable", "note", message, remedy)
    rank = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    if rank > LORA_RANKS[-1]:
        message = f"{path}: rank {rank} is above {LORA_RANKS[-1]}, the highest that vLLM serves"
        yield Finding("not-servable", "note", message, "evaluate and generate with transformers", {"rank": rank})
    if refused or config.get("bias", "none") != "none" or config.get("lora_bias"):
        what = "; ".join(beside) or "biases"
        message = f"{folder}: vLLM serves LoRA's factors alone, and this adapter has {what}"
        yield Finding("not-servable", "note", message, "merge it into its base to serve it", {"keys": refused[:8]})


def apply_rules(folder: Path, config: Mapping[str, Any], tensors: TensorSpecs) -> tuple[tuple[str, ...], list[Finding]]:
    """(what the adapter changes beside A and B, each in words; the findings of all rules); the configuration is not empty."""
    path = folder / ADAPTER_CONFIG
    found = [Finding("config-invalid", "error", f"{path}: {one}", "correct the key") for one in config_errors(config)]
    beside = tuple(_beside(config, tensors))
    for rule in (_of_task, _of_initialisation, _check_rank_and_scaling, _of_keys):
        found += rule(folder, config, tensors)
    return beside, [*found, *_check_gating_and_serving(beside, folder, config, tensors)]
