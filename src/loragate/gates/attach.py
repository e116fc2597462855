"""Putting gates onto an adapter that is already loaded, taking them off again, and what PEFT does with a gated adapter meanwhile.

Attachment sets PEFT's per-instance extension points (`lora_variant`, `adapter_layer_names`, `frozen_peft_weight_names`), so
that freezing, `set_adapter`, `disable_adapter`, mixed batches and deletion keep working as PEFT does them. PEFT is not patched:

- Running: PEFT's LoRA layers look up `layer.lora_variant[adapter]` at each forward, so a `GatedLora` placed there after loading
  takes effect. The mechanism is PEFT's own but documented as private; tests/contract pins what is relied upon here.
- Merging: a gated layer refuses, but PEFT goes from module to module: embeddings, experts, whole copies of modules and layers
  without a gate that come before the first gated one would be merged by then, and `merge_and_unload` cannot undo it. So the
  tuner object is given a subclass of its own class whose merging methods ask first.
- Saving: the PeftModel object is given a subclass of its own class, `GatedPeftModel`, which writes the whole artifact. An adapter
  loaded natively by transformers, and a trainer's checkpoint, are written in PEFT's form, which loads as the plain adapter. Both
  let the adapter's configuration write itself, so the configuration of a gated adapter is one that warns.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from peft import PeftModel, PeftModelForCausalLM
from peft.tuners.lora import LoraModel
from peft.tuners.lora.layer import LoraVariant
from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from loragate.errors import ConfigError, GateError
from loragate.gates.eligibility import (
    active_adapter,
    adapter_configs,
    config_tables,
    examine_adapter,
    keep_unpacked,
    lora_layers,
    require_gateable,
)
from loragate.gates.gate import GateConfig, SignedGate, seeded_generator
from loragate.gates.recommended import apply_sampling
from loragate.gates.schema import ADAPTER, FACTORS, GLOBAL_BIAS

logger = logging.getLogger("loragate")

NO_MERGE = (
    "a gated adapter cannot be merged: its strength differs from token to token, so no single weight matrix equals it. "
    "Detach the gates first (loragate.detach_gates) to merge the plain adapter, or keep the adapter unmerged."
)
# PEFT's layers over bitsandbytes round a plain delta to the base's dtype before they add it
_ROUNDING = ("Linear4bit", "Linear8bitLt")


class GatedLora(LoraVariant):
    """A LoRA layer whose delta is scaled by the layer's `SignedGate`."""

    def supports_lora_conversion(self) -> bool:
        return False

    @staticmethod
    def init(module: Any, adapter_name: str, **kwargs: Any) -> None:
        """Nothing to do: `attach_gates` creates the gate before the variant is placed."""
        # PEFT calls it where it makes a variant itself, when an adapter is added

    @staticmethod
    def merge_safe(module: Any, active_adapter: str, orig_weight: torch.Tensor) -> NoReturn:
        raise GateError(NO_MERGE)

    merge_unsafe = unmerge = merge_safe

    @staticmethod
    def forward(module: Any, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """`result` (the base output, plus other active adapters) plus this adapter's gated delta.

        LoRA dropout is not applied: the delta is finished, and Stage II must see the function that will be served.
        """
        delta = module.lora_gate[active_adapter].gated_delta(
            x,
            module.lora_A[active_adapter].weight,
            module.lora_B[active_adapter].weight,
            module.scaling[active_adapter],
        )
        if type(module).__name__ in _ROUNDING and not torch.is_autocast_enabled():
            # so that λ = 1 stays equal to the plain adapter bit for bit
            delta = delta.to(result.dtype)
        return add_delta(result, delta, module.base_layer)


def disable_input_cast(layer: Any, args: Any) -> None:
    """Forward pre-hook of a gated layer: PEFT hands x over as it came where every adapter of the layer is gated.

    PEFT would cast x to the dtype of A, anew in each of the layers that read it (q, k, v; gate, up), and each would keep its
    copy for the backward pass: on a bf16 base with fp32 factors three times four bytes in place of two, once. The gated
    operation casts for itself. A plain adapter needs PEFT's cast, and a mixed batch may call one that is not active.
    """
    # by the variant, not the gate: gates that are switched off for a while leave a plain adapter
    gated = (isinstance(layer.lora_variant.get(name), GatedLora) for name in layer.lora_A)
    layer.cast_input_dtype_enabled = not all(gated)


def restore_input_cast(layer: Any) -> None:
    """Take `disable_input_cast` off a layer."""
    # found by identity: a handle kept on the layer would not survive copying and pickling
    for key, hook in list(layer._forward_pre_hooks.items()):
        if hook is disable_input_cast:
            del layer._forward_pre_hooks[key]
    layer.cast_input_dtype_enabled = True


def add_delta(result: torch.Tensor, delta: torch.Tensor, base_layer: torch.nn.Module) -> torch.Tensor:
    """`result + delta`, written into `result` where that changes no bit and nobody else can see it.

    The base output was made a moment ago and no linear layer keeps it for its backward, so its memory can be reused; a
    forward hook on the base layer may have kept it.
    """
    # a view's base may be read elsewhere, and a leaf may be a parameter or an input; a compiler reuses memory by itself
    if torch.compiler.is_compiling() or result.dtype != delta.dtype or result._is_view() or result.is_leaf:
        return result + delta
    if base_layer._forward_hooks:
        return result + delta
    return result.add_(delta)


class _RefusesMerging(BaseTuner):
    """A tuner that refuses as a whole to merge adapters that carry gates at that time."""

    def merge_adapter(self, adapter_names: list[str] | None = None, *args: Any, **kwargs: Any) -> None:
        self._refuse_gated(adapter_names)
        super().merge_adapter(adapter_names, *args, **kwargs)

    def merge_and_unload(
        self, progressbar: bool = False, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> torch.nn.Module:
        self._refuse_gated(adapter_names)
        return super().merge_and_unload(progressbar, safe_merge, adapter_names)

    def _refuse_gated(self, names: list[str] | None) -> None:
        for module in self.modules():
            variants = vars(module).get("lora_variant", {})
            if any(isinstance(variants.get(name), GatedLora) for name in names or self.active_adapters):
                raise GateError(NO_MERGE)


class GatedTuner(_RefusesMerging, LoraModel):
    """PEFT's LoRA tuner that does; with a name of its own, so that a model can be pickled."""


class GatedPeftModel(PeftModel):
    """A PeftModel whose adapter carries gates: what PEFT's class does, and its saving and loading know the gates.

    `attach_gates`, `load_gates` and `load_gated` make one out of a PeftModel: the object's class becomes a subclass of both
    its own class and this one. `detach_gates` gives it its own class back.
    """

    _load_gated: ClassVar[Callable[..., Any] | None] = None
    """`loragate.load_gated`; set by `loragate.models`, which knows where models are."""

    @classmethod
    def from_pretrained(cls, model: Any, folder: str | Path | None = None, **kwargs: Any) -> Any:
        """`loragate.load_gated(folder, **kwargs)`: base, adapter and gates of a gated folder or hub id.

        A base that is in memory may come first, as in `PeftModel.from_pretrained(base, folder)`.
        """
        if cls._load_gated is None:
            raise GateError("import loragate.models first; it finds the folder and its base")
        return cls._load_gated(model, **kwargs) if folder is None else cls._load_gated(folder, base=model, **kwargs)

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        selected_adapters: list[str] | None = None,
        is_main_process: bool = True,
        **kwargs: Any,
    ) -> None:
        """Write the whole artifact (gate_config.json, gates.safetensors, adapter/, README.md); an earlier one there is replaced.

        A model with several adapters is laid out as PEFT does it: "default" in the folder, each other one in a folder of its name
        inside; adapters without gates are written in PEFT's form. So is the checkpoint of a trainer ("checkpoint-N", or where
        it gives a state dict), from which it resumes; that form loads as the plain adapter, and a warning says so.

        Args:
            save_directory: the folder.
            selected_adapters: their names; None for all.
            is_main_process: False writes nothing.
            **kwargs: options of `loragate.save_gates` (evidence, temperature, base_id, ...), the others of PEFT.

        Raises:
            ConfigError: for `safe_serialization=False`; gates are never pickled.
            GateError: for an adapter named "adapter" beside a gated "default", whose own plain adapter lies in that folder.
            GateError, ArtifactError: as `loragate.save_gates`.
        """
        from loragate.gates.artifact import save_gates  # which attaches gates, too

        names = list(self.peft_config) if selected_adapters is None else selected_adapters
        options = {name: kwargs.pop(name) for name in inspect.signature(save_gates).parameters if name in kwargs}
        gated = [name for name in names if is_gated(self, name)]
        plain = [name for name in names if name not in gated]
        folder = Path(save_directory)
        if kwargs.get("state_dict") is not None or folder.name.startswith("checkpoint-"):
            gated, plain = [], names
        elif gated and not kwargs.get("safe_serialization", True):
            raise ConfigError("safe_serialization=False would pickle the adapter; leave it out")
        elif "default" in gated and ADAPTER in names:
            raise GateError(
                f"the adapter {ADAPTER!r} would be written to {folder / ADAPTER}, where the plain adapter of the gates lies; save "
                f"them one by one (selected_adapters=['default'], then [{ADAPTER!r}] into another folder)"
            )
        if plain:
            super().save_pretrained(str(folder), selected_adapters=plain, is_main_process=is_main_process, **kwargs)
        for name in gated if is_main_process else []:
            inside = folder if name == "default" or len(self.peft_config) == 1 else folder / name
            save_gates(self, inside, name, overwrite=True, **options)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        base_id: str = "",
        private: bool | None = None,
        revision: str | None = None,
        commit_message: str = "",
        token: str | bool | None = None,
        **options: Any,
    ) -> str:
        """Upload the artifact of the active adapter as one commit; the arguments are those of `loragate.gates.push_gated`.

        What lies beside the adapter and is not for others (rows, logs, states of a training) is left out, and named in the log.

        Args:
            **options: of `loragate.save_gates` (evidence, temperature, ...).

        Returns:
            The address of the commit.
        """
        from loragate.gates.artifact import save_gates
        from loragate.gates.push import push_gated

        with tempfile.TemporaryDirectory(prefix="loragate-push-") as temporary:
            folder = Path(temporary) / repo_id.rpartition("/")[2]  # its name is the card's title
            save_gates(self, folder, base_id=base_id or None, **options)
            done = push_gated(folder, repo_id, private=private, revision=revision, message=commit_message, token=token)
        if done.left:
            logger.warning("%s: not sent: %s", repo_id, ", ".join(done.left))
        return done.url


class GatedPeftModelForCausalLM(GatedPeftModel, PeftModelForCausalLM):
    """A gated `PeftModelForCausalLM`."""


@functools.cache
def _gated_class(own: Any) -> Any:
    """The gated form of a class of tuners or of PeftModels; those with a name in this module can be pickled."""
    # the object changes its class: a method set on it would be a cycle, which keeps a deleted model in memory
    known: dict[type, type] = {
        LoraModel: GatedTuner,
        PeftModel: GatedPeftModel,
        PeftModelForCausalLM: GatedPeftModelForCausalLM,
    }
    mixin = _RefusesMerging if issubclass(own, BaseTuner) else GatedPeftModel
    return known.get(own) or type(f"Gated{own.__name__}", (mixin, own), {})


def attach_gates(peft_model: nn.Module, config: GateConfig, adapter_name: str | None = None) -> nn.Module:
    """Gate a loaded LoRA adapter in place; only its gate parameters train afterwards.

    Where the named adapter is not the active one, its gates are all that is set to train but no forward pass reads
    them, so a training loop finds no gradient: make it active first (`model.set_adapter`). A PeftModel becomes a
    `GatedPeftModel`, whose `save_pretrained` and `push_to_hub` write the whole artifact; of an adapter that transformers loaded
    natively `model.save_pretrained` writes what loads as the plain adapter, and warns. PEFT's `add_weighted_adapter` combines
    the plain adapters and leaves gates out without a word, `hotswap_adapter` zeroes them (λ = 1), and `load_adapter` under the
    name of a gated adapter leaves its gates on, where they act on the new one: detach them first.

    Gates that were loaded (`load_gates`, `load_gated`) are frozen until `loragate.gates.train_gates_only(model)`, which is
    also to be called after `disable_adapter` where the adapter holds modules_to_save: PEFT sets these to train again.

    Args:
        peft_model: a PeftModel, or a transformers model with a LoRA adapter loaded natively.
        config: range, temperature, granularity and target modules.
        adapter_name: the adapter to gate; None for the active one.

    Returns:
        The same model. The adapter's output changes by no bit at zero gates and by about 1e-4 in logits at the default
        initialisation (fp32).

    Raises:
        GateError: where a gate would have no effect or be wrong (see `loragate.gates.eligibility`); nothing is changed.
    """
    name = active_adapter(peft_model, adapter_name)
    # all that can refuse comes before the first change
    verdicts = require_gateable(examine_adapter(peft_model, name, config.target_modules))
    chosen = {verdict.path for verdict in verdicts}
    layers = list(lora_layers(peft_model, name))
    devices = {layer.lora_A[name].weight.device for path, layer in layers if path in chosen}
    if any(device.type == "meta" for device in devices):
        raise GateError(
            "the adapter's weights are not in memory (offloaded or never loaded), so gates could not act on them; load the "
            "model without offloading"
        )
    if config.granularity == "global" and len(devices) > 1:
        raise GateError(
            "granularity 'global' needs the adapter on one device, found "
            + ", ".join(sorted(str(device) for device in devices))
            + "; use 'module' or 'token' for a model split over devices"
        )
    keep_unpacked(peft_model)
    shared_bias = None
    if config.granularity == "global":
        shared_bias = nn.Parameter(torch.full((1,), -config.init_scale, device=next(iter(devices))))
    for path, layer in layers:
        if path in chosen:
            gate_layer(layer, path, config, name, shared_bias)
        # A new dictionary on the instance: the one that PEFT starts with is the class's, and all layers' of all models.
        # PEFT would train A and B again after `disable_adapter` or `set_adapter`, in ungated layers too
        groups = tuple(group for group in FACTORS if hasattr(layer, group))
        layer.frozen_peft_weight_names = {**layer.frozen_peft_weight_names, name: groups}
        layer._freeze_non_trainable_peft_weights(name)
    train_gates_only(peft_model, name)
    _install_save_warning(peft_model, name)
    for module in peft_model.modules():
        if isinstance(module, BaseTuner | PeftModel) and not isinstance(module, _RefusesMerging | GatedPeftModel):
            own: Any = type(module)
            module.__class__ = _gated_class(own)
    return peft_model


def gate_layer(
    layer: Any, path: str, config: GateConfig, adapter_name: str, shared_bias: nn.Parameter | None = None
) -> None:
    """Put a fresh gate into one LoRA layer, on the device of its factors; what trains is left as it is."""
    if not hasattr(layer, "lora_gate"):
        layer.lora_gate = nn.ModuleDict({})
        layer.register_forward_pre_hook(disable_input_cast)
    # PEFT moves, freezes, switches and deletes what these names hold, by adapter; set on the instance, the class stays as it is
    if "lora_gate" not in layer.adapter_layer_names:
        layer.adapter_layer_names = (*layer.adapter_layer_names, "lora_gate")
    reference = layer.lora_A[adapter_name].weight
    gate = SignedGate(reference.shape[-1], config, path, shared_bias)
    layer.lora_gate[adapter_name] = gate if shared_bias is not None else gate.to(reference.device)
    layer.lora_gate.train(layer.training)
    layer.lora_variant[adapter_name] = GatedLora()


def train_gates_only(model: nn.Module, adapter_name: str | None = None) -> None:
    """Freeze every parameter of the model but the gates of `adapter_name` (None: the active one).

    `attach_gates` does it. Call it before you train gates that were loaded, which are frozen, and again after
    `disable_adapter` where the adapter holds modules_to_save: PEFT sets these to train again.

    Raises:
        GateError: if the adapter carries no gates.
    """
    # by identity: a shared bias has a name in every module
    trainable = {id(parameter) for parameter in gate_parameters(model, adapter_name).values()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trainable)


def detach_gates(peft_model: nn.Module, adapter_name: str | None = None) -> nn.Module:
    """Remove the gates of an adapter in place; the adapter acts at full strength again and its factors stay frozen.

    The sampling that loaded gates recommended goes with them: the generation config gets its own settings back.

    Args:
        peft_model: the gated model.
        adapter_name: the adapter to take them off; None for the active one.

    Raises:
        GateError: if the adapter carries no gates.
    """
    name = active_adapter(peft_model, adapter_name)
    gate_modules(peft_model, name)  # refuses an adapter without any
    for _, layer in lora_layers(peft_model, name):
        layer.frozen_peft_weight_names = {
            other: frozen for other, frozen in layer.frozen_peft_weight_names.items() if other != name
        }
        if not _is_layer_gated(layer, name):
            continue
        del layer.lora_variant[name]
        del layer.lora_gate[name]
        if len(layer.lora_gate) == 0:
            layer.adapter_layer_names = tuple(group for group in layer.adapter_layer_names if group != "lora_gate")
            del layer.lora_gate
            restore_input_cast(layer)
    for config in adapter_configs(peft_model, name):
        vars(config).pop("save_pretrained", None)
    artifacts = loaded_artifacts(peft_model)
    if artifacts.pop(name, None) is not None:
        apply_sampling(peft_model, [record for _, record in artifacts.values()])
    if not any(getattr(module, "lora_gate", None) for module in peft_model.modules()):
        for module in peft_model.modules():
            before: Any = next((kind for kind in type(module).__mro__ if not issubclass(kind, GatedPeftModel)), None)
            if isinstance(module, GatedPeftModel) and type(module) is _gated_class(before):
                module.__class__ = before
    return peft_model


def loaded_artifacts(model: nn.Module) -> dict[str, tuple[Path, dict[str, Any]]]:
    """{adapter name: (folder, gate_config.json)} of the gates that `load_gates` put on, to write them again as they were."""
    records: dict[str, tuple[Path, dict[str, Any]]] = vars(model).setdefault("_gate_records", {})
    return records


def is_gated(model: nn.Module, adapter_name: str) -> bool:
    """Whether an adapter carries gates."""
    return any(_is_layer_gated(layer, adapter_name) for _, layer in lora_layers(model, adapter_name))


def gate_modules(model: nn.Module, adapter_name: str | None = None) -> dict[str, SignedGate]:
    """{module path: gate} of one adapter, in model order; a GateError without gates, so that nothing acts silently on none."""
    name = active_adapter(model, adapter_name)
    found = {path: layer.lora_gate[name] for path, layer in lora_layers(model, name) if _is_layer_gated(layer, name)}
    if not found:
        raise GateError(f"adapter {name!r} carries no gates; attach them with loragate.attach_gates or load_gates")
    return found


def gate_parameters(peft_model: nn.Module, adapter_name: str | None = None) -> dict[str, nn.Parameter]:
    """All that Stage II trains.

    Returns:
        {"<module path>.weight": [d_in], "<module path>.bias": [1]}, fp32; module granularity has biases only, and
        global granularity the one entry "global.bias".

    Raises:
        GateError: if the adapter carries no gates.
    """
    parameters: dict[str, nn.Parameter] = {}
    for path, gate in gate_modules(peft_model, adapter_name).items():
        if gate.config.granularity == "global":
            return {GLOBAL_BIAS: gate.bias}
        if gate.weight is not None:
            parameters[f"{path}.weight"] = gate.weight
        parameters[f"{path}.bias"] = gate.bias
    return parameters


def attached_config(model: nn.Module, adapter_name: str | None = None) -> GateConfig:
    """The `GateConfig` the adapter's gates were made with."""
    return next(iter(gate_modules(model, adapter_name).values())).config


def _is_layer_gated(layer: Any, adapter_name: str) -> bool:
    return isinstance(getattr(layer, "lora_variant", {}).get(adapter_name), GatedLora)


def draw_gates(
    model: nn.Module, seed: int, scale: float | Mapping[str, float], adapter_name: str | None = None
) -> dict[str, torch.Tensor]:
    """Overwrite the attached gates with independent normal values: is a trained gate better than any gate of its size?

    Each tensor has a random stream of its own, seeded by `seed` and its name, so the values depend neither on the order of
    the modules nor on the global random state. `scale` is the standard deviation of all, or of each tensor by its name in
    `gate_parameters`. Returns the values, by name.
    """
    drawn = {}
    for name, parameter in gate_parameters(model, adapter_name).items():
        size = scale if isinstance(scale, (int, float)) else scale[name]
        drawn[name] = torch.randn(parameter.shape, generator=seeded_generator(f"random:{seed}:{name}")) * size
        with torch.no_grad():
            parameter.copy_(drawn[name])
    return drawn


def sizes_of(gates: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Root mean square of each gate tensor: the scale at which random gates are as large as these."""
    return {name: float(value.detach().double().pow(2).mean().sqrt()) for name, value in gates.items()}


def _install_save_warning(model: nn.Module, adapter_name: str) -> None:
    """Give the adapter a configuration of its own that warns when it is written."""
    for configs in config_tables(model, adapter_name):
        # a copy: the caller's object may serve other adapters and models, which carry no gates
        config = copy.copy(configs[adapter_name])
        # on the instance, where it comes before the class's method; a partial of a module's function, not a closure, so that
        # the model can still be copied and pickled
        vars(config)["save_pretrained"] = functools.partial(_save_and_warn, config, adapter_name)
        configs[adapter_name] = config


def _save_and_warn(config: Any, adapter_name: str, save_directory: str, **kwargs: Any) -> None:
    type(config).save_pretrained(config, save_directory, **kwargs)
    logger.warning(
        "the gated adapter %r was written to %s in a form that loads as the plain adapter, without its gates; to keep them, write "
        "loragate.save_gates(model, folder) and load that folder with loragate.load_gated",
        adapter_name,
        save_directory,
    )
