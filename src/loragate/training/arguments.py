"""The arguments of a training: those of `GateTrainer`, and those that settings make; what would have no effect is refused.

Both are TRL's SFTConfig, and with it transformers' TrainingArguments. Nothing here trains.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from trl import SFTConfig

from loragate.errors import ConfigError
from loragate.losses.entropy import support_size
from loragate.training.checkpoints import TrainingFolder
from loragate.training.settings import GATE_OBJECTIVES, Decay, TrainSettings
from loragate.training.strategy import detect_launch, process_state
from loragate.validate import NonNegativeInt, validate

# what is recorded of the arguments of a training
_RECORDED = (
    "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "max_length",
    "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm", "seed", "packing", "bf16",
    "fp16", "k",
)  # fmt: skip
# and where it is not the usual value
_RECORDED_IF_UNUSUAL = (
    "optim", "optim_args", "adam_epsilon", "lr_scheduler_kwargs", "data_seed", "neftune_noise_alpha", "dataloader_drop_last",
    "train_sampling_strategy", "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "tf32", "torch_compile",
)  # fmt: skip
# what an evaluation of this trainer gives beside the loss, with or without eval_ and the name of a data set
_SMALLER_IS_BETTER = ("loss", "nll", "entropy", "kl")


@dataclass
class GateTrainingArguments(SFTConfig):
    """Arguments of a `GateTrainer`: those of TRL's SFTConfig and transformers' TrainingArguments, with the paper's values.

    The paper trains for one epoch with a cosine schedule and no warm-up, with 128 sequences a step (here 8 × 16 on one device);
    betas, weight decay and clipping are ours. Gates train in fp32 whatever the model's dtype is; load the model in bf16 to save
    memory. `train_sampling_strategy` may be "group_by_length", or `packing` True: every step keeps its rows. Rows come in one
    order, shuffled by `data_seed` (or `seed`). What this trainer would pass over (`loss_type`, `eos_token`, …) is refused.

    Attributes:
        k: support of the top-k entropy; 0, or at least the vocabulary size, means the full entropy.
        objective: "entropy" is the paper's, "ce" its ablation.
    """

    learning_rate: float = 5e-4
    lr_scheduler_type: str = "cosine"
    optim: str = "adamw_torch"
    weight_decay: float = 0.0
    adam_beta2: float = 0.95
    num_train_epochs: float = 1.0
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 16
    max_length: int | None = 4096
    gradient_checkpointing: bool = False
    bf16: bool | None = False
    logging_first_step: bool = True
    train_sampling_strategy: str = "sequential"
    k: int = field(default=100, metadata={"help": "Support of the top-k entropy; 0 is the whole vocabulary."})
    objective: str = field(default="entropy", metadata={"help": f"One of {', '.join(GATE_OBJECTIVES)}."})

    def __post_init__(self) -> None:
        # transformers takes every metric whose name does not end in "loss" for one to be large
        metric = str(self.metric_for_best_model)
        if getattr(self, "greater_is_better", None) is None and metric.endswith(_SMALLER_IS_BETTER):
            self.greater_is_better = False
        if self.objective not in GATE_OBJECTIVES:
            raise ConfigError(f"objective must be one of {', '.join(GATE_OBJECTIVES)}, found {self.objective!r}")
        for name in ("adam_beta1", "adam_beta2"):
            validate(Decay, getattr(self, name), name)
        support_size(self.k, 1 << 30)
        validate(NonNegativeInt, self.k, "k")  # False is no 0, and a number of numpy cannot be recorded
        if self.max_steps == 0:  # of which transformers makes one
            raise ConfigError("max_steps must be at least 1, or -1 to train for num_train_epochs, found 0")
        reject_ignored_arguments(self)
        if getattr(self, "activation_checkpointing", False) is None:  # the name in newer versions of transformers
            self.activation_checkpointing = self.gradient_checkpointing
        if detect_launch().strategy == "fsdp2":
            process_state()  # before Accelerate reads the launcher's wish: the sharding is loragate's
        super().__post_init__()
        if self.activation_offloading and self.device.type == "cpu":  # of which TRL dies
            raise ConfigError(
                "activation_offloading moves activations from a GPU to the memory of the host, and this training runs on the CPU: "
                "leave it out, and use gradient_checkpointing=True where memory is short"
            )


def recorded_arguments(arguments: GateTrainingArguments) -> dict[str, Any]:
    """What the record of a training says of its arguments; JSON-able."""
    usual = {one.name: one.default for one in fields(arguments)}
    values = {name: getattr(arguments, name) for name in _RECORDED}
    for name in _RECORDED_IF_UNUSUAL:
        if (value := getattr(arguments, name)) not in (usual[name], {}):
            values[name] = value
    return {name: getattr(value, "value", value) for name, value in values.items()}


# arguments of SFTConfig that a training of gates would pass over: why, and which values beside the default agree with it
IGNORED_SFT_ARGUMENTS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "chat_template_path": ("rows get the tokenizer's own template: set processing_class.chat_template", ()),
    "eos_token": ("rows end in the tokenizer's own: set processing_class.eos_token", ()),
    "loss_type": ("the loss is that of the argument objective, 'entropy' or 'ce', or of an objective of your own", ()),
    "completion_only_loss": ("gates train on responses alone", (True,)),
    "truncation_mode": ("a row longer than max_length is cut on the right", ()),
    "label_smoothing_factor": ("no objective smooths labels; give one of your own that does", ()),
    "packing_strategy": ("packing lays the rows of a forward pass end to end, and cuts none", ()),
    "eval_packing": ("rows are packed for the training alone", (False,)),
    "router_aux_loss_coef": ("the loss is that of the response tokens, without a router's", (0,)),
    "train_sampling_strategy": (
        "rows come in one order, shuffled by data_seed (or seed), the same in every epoch",
        ("group_by_length",),
    ),
    "dataset_num_proc": ("rows are tokenised in this process", (1,)),
    "bf16_full_eval": ("an evaluation is made in the precision of the training: bf16, or the dtype of the model", ()),
    "fp16_full_eval": ("an evaluation is made in the precision of the training: fp16, or the dtype of the model", ()),
    "shuffle_dataset": ("rows are shuffled by data_seed (or seed)", ()),
    "dataset_text_field": ("rows are read in the formats of loragate.data: prompt and completion, messages, …", ()),
    "dataset_kwargs": ("rows are read and tokenised by loragate.data", ({}, {"skip_prepare_dataset": True})),
    "assistant_only_loss": ("gates train on the assistant's turns of every row", ()),
    "padding_free": ("packing=True lays the rows of a forward pass end to end, without padding", ()),
    "pad_to_multiple_of": ("rows are padded to the longest of their forward pass", (None,)),
    "pad_token": ("rows are padded with the tokenizer's own: set processing_class.pad_token", ()),
    "model_init_kwargs": ("the model is loaded already: give them to from_pretrained", ({},)),
    "average_tokens_across_devices": ("every response token of a step counts alike, on all devices", ()),
}


def reject_ignored_arguments(arguments: SFTConfig) -> None:
    """Raises ConfigError for an argument of `IGNORED_SFT_ARGUMENTS` that was set to something the training would not do."""
    defaults = {field.name: field.default for field in fields(arguments)}  # an older TRL may lack one
    for name, (reason, agreeing) in IGNORED_SFT_ARGUMENTS.items():
        found = getattr(arguments, name, defaults.get(name))
        if found not in (defaults.get(name), *agreeing):
            raise ConfigError(f"{name}={found!r} would have no effect: {reason}. Leave it out")


def build_trainer_arguments(
    kind: type[SFTConfig], settings: TrainSettings, folder: TrainingFolder, rows: int, device: str, **more: Any
) -> Any:
    """The arguments of a run by its `fitted` settings; every choice of ours is set explicitly."""
    steps = settings.steps(rows)
    if detect_launch().strategy == "fsdp2":
        process_state()  # before Accelerate reads the launcher's wish: the sharding is loragate's
    newer = any(one.name == "activation_checkpointing" for one in fields(kind))  # whose old name would be warned of
    more["activation_checkpointing" if newer else "gradient_checkpointing"] = settings.gradient_checkpointing
    arguments = kind(
        output_dir=str(folder.path),
        per_device_train_batch_size=settings.per_device_train_batch_size,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=settings.lr_scheduler_type,
        warmup_steps=round(settings.warmup_ratio * steps),
        max_steps=steps,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        max_grad_norm=settings.max_grad_norm,
        optim="adamw_torch",
        seed=settings.seed,
        data_seed=settings.seed,
        packing=settings.packing,
        train_sampling_strategy="group_by_length" if settings.group_by_length else "sequential",
        bf16=settings.precision == "bf16",
        fp16=settings.precision == "fp16",
        tf32=None,
        use_cpu=device == "cpu",
        dataloader_pin_memory=device != "cpu",
        logging_strategy="steps",
        logging_steps=settings.logging_steps,
        logging_first_step=True,
        save_strategy="steps" if settings.save_steps and folder.is_persistent else "no",
        save_steps=settings.save_steps or 500,
        save_total_limit=settings.save_total_limit or None,
        report_to=[name.strip() for name in settings.report_to.split(",") if name.strip()] or "none",
        disable_tqdm=True,
        **more,
    )
    arguments.gradient_accumulation_steps = settings.accumulation(arguments.world_size)
    return arguments
