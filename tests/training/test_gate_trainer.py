"""`GateTrainer` for those who know TRL: the example that the README shows, and what works as in transformers."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

import loragate as lg
from loragate.data import encode_rows, load_rows
from loragate.errors import ArtifactError, ConfigError, TrainingError
from loragate.gates import trace_gates
from loragate.training.arguments import IGNORED_SFT_ARGUMENTS, recorded_arguments
from loragate.training.gate_training import measure_entropy
from loragate.training.rows import TrainingCollator
from loragate.training.trainer import pooled
from tiny import (
    gate_values,
    same,
    tiny_adapter,
    tiny_base,
    tiny_gated,
    tiny_rows,
    tiny_tokenizer,
    write_adapter,
    write_base,
)

GATES = lg.GateConfig(-3, 2)
EXAMPLE = """
from datasets import load_dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
import loragate as lg

base = AutoModelForCausalLM.from_pretrained("base")
model = PeftModel.from_pretrained(base, "adapter")
trainer = lg.GateTrainer(
    model=model,
    args=lg.GateTrainingArguments("run", max_steps=3),
    train_dataset=load_dataset("json", data_files="train.jsonl", split="train"),
    processing_class=AutoTokenizer.from_pretrained("base"),
    gates=lg.GateConfig(lower=-6, upper=3),
)
trainer.train()
trainer.save_model("gated")
"""


def arguments(folder, **more):
    usual = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "k": 20}
    return lg.GateTrainingArguments(str(folder), **{**usual, "logging_steps": 1, "max_steps": 3, **more})


def trainer_of(folder, rows=None, model=None, callbacks=(), **more):
    other = {name: more.pop(name) for name in ("eval_dataset", "data_collator") if name in more}
    gates = more.pop("gates", GATES)
    return lg.GateTrainer(
        model=model or tiny_adapter(),
        args=arguments(folder, **more),
        train_dataset=Dataset.from_list(tiny_rows(24) if rows is None else rows),
        processing_class=tiny_tokenizer(),
        callbacks=list(callbacks),
        gates=gates,
        **other,
    )


def test_the_example_trains_gates_and_writes_an_artifact(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_base("base")
    write_adapter("adapter", "base")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tiny_rows(24)))
    assert len([line for line in EXAMPLE.strip().splitlines() if line and "import" not in line]) < 15
    scope: dict = {}
    exec(EXAMPLE, scope)
    assert scope["trainer"].result.steps == 3
    assert same(gate_values(lg.load_gated("gated")), gate_values(scope["model"]))
    record = json.loads((tmp_path / "gated" / "gate_config.json").read_text())
    assert record["k"] == 100
    assert record["training"]["settings"]["learning_rate"] == 5e-4
    assert record["training"]["steps"] == 3
    assert record["stop_token_ids"] == [tiny_tokenizer().eos_token_id]


def test_a_trainer_replaces_what_it_saved_itself_and_nothing_else(tmp_path):
    trainer, folder = trainer_of(tmp_path / "run"), tmp_path / "gated"
    trainer.save_model(str(folder))
    (folder / "notes.txt").write_text("mine")
    trainer.train()
    trainer.save_model(str(folder))
    trained, written = lg.gate_parameters(trainer.original_model), load_file(folder / "gates.safetensors")
    assert all(torch.equal(written[name], value.detach()) for name, value in trained.items())
    assert json.loads((folder / "gate_config.json").read_text())["training"]["steps"] == 3
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "adapter" / "tokenizer" / "tokenizer.json").is_file()
    other = trainer_of(tmp_path / "again")
    with pytest.raises(ArtifactError, match="already holds a gated adapter; choose another folder"):
        other.save_model(str(folder))


def test_the_papers_values_are_the_defaults():
    args = lg.GateTrainingArguments("run")
    assert (args.learning_rate, args.k, args.objective, args.num_train_epochs) == (5e-4, 100, "entropy", 1)
    assert (str(args.lr_scheduler_type.value), args.warmup_steps, args.weight_decay) == ("cosine", 0, 0)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 128
    assert not any((args.bf16, args.fp16, args.gradient_checkpointing))
    with pytest.raises(ConfigError, match="objective must be one of entropy, ce, found 'sft'"):
        lg.GateTrainingArguments("run", objective="sft")


def test_the_best_checkpoint_is_that_of_the_smallest_value(tmp_path):
    for name in ("loss", "nll", "eval_entropy", "topk_entropy", "eval_topk_entropy", "eval_reference_kl"):
        assert arguments(tmp_path, metric_for_best_model=name).greater_is_better is False, name
    more = {"metric_for_best_model": "eval_topk_entropy"}
    assert arguments(tmp_path, **more, greater_is_better=True).greater_is_better
    assert arguments(tmp_path, metric_for_best_model="eval_accuracy").greater_is_better


IGNORED = {
    "chat_template_path": "other.jinja",
    "eos_token": "<|im_end|>",
    "loss_type": "dft",
    "completion_only_loss": False,
    "truncation_mode": "keep_end",
    "label_smoothing_factor": 0.1,
    "packing_strategy": "wrapped",
    "eval_packing": True,
    "router_aux_loss_coef": 0.01,
    "train_sampling_strategy": "random",
    "dataset_num_proc": 2,
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "shuffle_dataset": True,
    "dataset_text_field": "prompt",
    "dataset_kwargs": {"add_special_tokens": False},
    "assistant_only_loss": True,
    "padding_free": True,
    "pad_to_multiple_of": 8,
    "pad_token": "<pad>",
    "model_init_kwargs": {"dtype": "bfloat16"},
    "average_tokens_across_devices": False,
}


@pytest.mark.parametrize(("name", "value"), IGNORED.items())
def test_an_argument_that_would_do_nothing_is_refused(tmp_path, name, value):
    with pytest.raises(ConfigError, match=rf"^{name}=.* would have no effect: .* Leave it out"):
        arguments(tmp_path, **{name: value})


def test_an_argument_that_says_what_is_done_anyway_is_taken(tmp_path):
    assert IGNORED.keys() == IGNORED_SFT_ARGUMENTS.keys()
    args = arguments(tmp_path, completion_only_loss=True, eval_packing=False, router_aux_loss_coef=0.0, loss_type="nll")
    assert args.completion_only_loss
    assert arguments(tmp_path, dataset_num_proc=1).dataset_num_proc == 1
    prepared = {"dataset_kwargs": {"skip_prepare_dataset": True}, "pad_to_multiple_of": None}
    assert arguments(tmp_path, train_sampling_strategy="group_by_length", **prepared).pad_to_multiple_of is None


def test_activations_are_not_moved_off_a_cpu(tmp_path):
    with pytest.raises(ConfigError, match=r"activation_offloading .* runs on the CPU: leave it out"):
        arguments(tmp_path, activation_offloading=True)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("k", 2.5, "integer of at least 2"),
        ("k", "20", "integer of at least 2"),
        ("k", 1, "at least 2"),
        ("k", False, "whole number"),
        ("k", np.int64(20), "whole number"),
        ("adam_beta1", 1.5, "below 1"),
        ("max_steps", 0, "at least 1"),
    ],
)
def test_an_argument_out_of_its_range_is_refused(tmp_path, name, value, told):
    with pytest.raises(ConfigError, match=rf"^{name}.*{told}, "):
        arguments(tmp_path, **{name: value})


def test_the_record_holds_what_decides_numbers(tmp_path):
    usual = recorded_arguments(arguments(tmp_path))
    assert usual.keys().isdisjoint(
        {"optim", "data_seed", "adam_epsilon", "lr_scheduler_kwargs", "dataloader_drop_last"}
    )
    changed = {"optim": "adafactor", "data_seed": 3, "adam_epsilon": 1e-6, "neftune_noise_alpha": 5.0}
    found = recorded_arguments(arguments(tmp_path, **changed, lr_scheduler_kwargs={"num_cycles": 2}))
    assert json.loads(json.dumps(found)) == {**usual, **changed, "lr_scheduler_kwargs": {"num_cycles": 2}}


@pytest.mark.parametrize("granularity", ["token", "module", "global"])
def test_weight_decay_acts_on_every_gate_as_in_the_reference(tmp_path, granularity):
    trainer = trainer_of(tmp_path, rows=tiny_rows(8), gates=replace(GATES, granularity=granularity), weight_decay=0.5)
    decayed, others = trainer.create_optimizer().param_groups
    gates = lg.gate_parameters(trainer.model).values()
    assert {id(parameter) for parameter in decayed["params"]} == {id(parameter) for parameter in gates}
    assert (decayed["weight_decay"], others["params"]) == (0.5, [])


def test_lambda_of_several_passes_is_that_of_all_their_tokens():
    values = torch.tensor([0.5, -1.0, 1.5, 2.0, 0.0])
    parts = [{"tokens": len(part), "modules": 2, "mean": float(part.mean()), "std": float(part.std(correction=0))}
             for part in (values[:2], values[2:])]  # fmt: skip
    whole = {"mean": float(values.mean()), "std": float(values.std(correction=0))}
    assert pooled(parts) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("packing", [False, True])
def test_lambda_is_counted_where_a_response_token_is_chosen(tmp_path, packing):
    model = tiny_gated(-3, 2)
    rows = encode_rows(load_rows(tiny_rows(8)), tiny_tokenizer(), max_length=None)
    seen = []
    for row in rows[:]:
        labels = torch.tensor(row["labels"])
        with torch.no_grad(), trace_gates(model) as traced:
            model(input_ids=torch.tensor([row["input_ids"]]))
        seen += [lam[0, :-1][labels[1:] != -100] for (lam,) in traced.values()]
    values = torch.cat(seen)
    trainer = trainer_of(tmp_path, tiny_rows(8), model, gates=None, max_steps=1, learning_rate=0.0, packing=packing)
    trainer.train()
    logged = trainer.history[0]
    assert logged["gate_mean"] == pytest.approx(float(values.mean()), rel=1e-4)
    assert logged["gate_below_zero"] == pytest.approx(float((values < 0).double().mean()), abs=1e-6)
    result = trainer.result.gates_total
    assert result["mean"] == pytest.approx(float(values.mean()), rel=1e-4)
    assert result["tokens"] == trainer.encoded.summary.response_tokens


def test_it_is_the_training_of_train_gates(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.train()
    model = tiny_adapter()
    settings = lg.GateTrainingSettings(
        batch_size=8, per_device_train_batch_size=4, learning_rate=1e-2, k=20, max_steps=3, logging_steps=1
    )
    result = lg.train_gates(model, tiny_tokenizer(), tiny_rows(24), GATES, settings)
    assert same(gate_values(trainer.model), gate_values(model))
    found = trainer.result
    assert (found.entropy_before, found.entropy_after) == (result.entropy_before, result.entropy_after)
    assert found.parity == result.parity
    assert found.data["fingerprint"] == result.data["fingerprint"]
    assert [r["loss"] for r in found.history if "loss" in r] == [r["loss"] for r in result.history if "loss" in r]


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": f"w{n} w{n + 1}", "completion": f" w{n + 2}"} for n in range(16)],
        [
            {"prompt": [{"role": "user", "content": f"w{n}"}], "completion": [{"role": "assistant", "content": "w9"}]}
            for n in range(16)
        ],
        tiny_rows(16),
    ],
    ids=["prompt and completion", "conversational", "messages"],
)
def test_data_sets_in_the_formats_of_trl(tmp_path, rows):
    trainer = trainer_of(tmp_path, rows, max_steps=-1, num_train_epochs=2)
    trainer.train()
    assert trainer.result.steps == 4
    assert trainer.result.rows == 16
    moved = {name for name, value in trainer.model.named_parameters() if value.requires_grad}
    assert all("lora_gate" in name for name in moved)


def test_evaluation_reports_the_entropy_on_all_response_tokens(tmp_path):
    held, seen = tiny_rows(11, seed=9), []

    class Watch(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            seen.append((state.global_step, metrics.get("eval_loss")))

    more = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    trainer = trainer_of(tmp_path, eval_dataset=Dataset.from_list(held), callbacks=[Watch()], **more)
    forwards = dict(vars(trainer.model.get_base_model()))
    before = trainer.evaluate()["eval_topk_entropy"]
    assert dict(vars(trainer.model.get_base_model())) == forwards, "the model is as it was"
    trainer.train()
    metrics = trainer.evaluate()
    assert [step for step, _ in seen] == [0, 2, 3, 3]
    assert metrics["eval_loss"] == metrics["eval_topk_entropy"] != before
    encoded = encode_rows(load_rows(held), tiny_tokenizer(), max_length=64)
    expected, _, _ = measure_entropy(trainer.model, encoded, TrainingCollator(tiny_tokenizer()), 20, "default")
    assert metrics["eval_topk_entropy"] == pytest.approx(expected, rel=1e-6)
    assert (
        trainer.evaluate({"other": Dataset.from_list(held[:3])})["eval_other_response_tokens"]
        < metrics["eval_response_tokens"]
    )
    assert not trainer.model.training


def test_checkpoints_resume_and_the_best_one_is_loaded_as_in_transformers(tmp_path):
    whole = trainer_of(tmp_path / "whole", save_steps=1)
    whole.train()
    again = trainer_of(tmp_path / "whole", save_steps=1)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert same(gate_values(again.model), gate_values(whole.model))
    ended = trainer_of(tmp_path / "whole", save_steps=1)
    assert ended.train(resume_from_checkpoint=True).global_step == 3
    assert same(gate_values(ended.model), gate_values(whole.model))
    (tmp_path / "whole" / "checkpoint-2" / "trained.safetensors").write_bytes(b"torn")
    with pytest.raises(TrainingError, match=r"checkpoint-2 cannot be resumed: trained.safetensors is not what was"):
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    with pytest.raises(TrainingError, match="holds no checkpoint to resume from"):
        trainer_of(tmp_path / "new").train(resume_from_checkpoint=True)
    best = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    trainer = trainer_of(tmp_path / "best", eval_dataset=tiny_rows(8), greater_is_better=True, **best)
    trainer.train()
    assert trainer.state.best_global_step == 1, "the highest entropy is the first"
    assert trainer.result.evidence()["training"]["best_step"] == 1
    first = trainer_of(tmp_path / "best")
    first._load_from_checkpoint(str(tmp_path / "best" / "checkpoint-1"))
    assert same(gate_values(trainer.model), gate_values(first.model))
    ended = trainer_of(tmp_path / "best", eval_dataset=tiny_rows(8), greater_is_better=True, **best)
    ended.train(resume_from_checkpoint=True)
    assert same(gate_values(ended.model), gate_values(first.model)), "a finished run gives its best, too"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"k": 40}, "k = 20, now it is 40"),
        ({"objective": "ce"}, "objective = 'entropy', now it is 'ce'"),
        ({"rows": tiny_rows(24, seed=5)}, "tokens = "),
        ({"gates": lg.GateConfig(0, 1)}, r"gate\.lower = -3.*, now it is 0"),
        ({"learning_rate": 0.5}, r"optimizer\.learning_rate = 0\.01, now it is 0\.5"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, change, told):
    trainer_of(tmp_path, save_steps=1).train()
    other = trainer_of(tmp_path, **change)
    with pytest.raises(TrainingError, match=rf"trained\.safetensors was begun with .*{told}"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_checkpoint_without_its_optimizer_is_refused(tmp_path):
    trainer_of(tmp_path, save_steps=1, save_only_model=True).train()
    again = trainer_of(tmp_path)
    with pytest.raises(TrainingError, match=r"checkpoint-2 holds no optimizer\.pt, as save_only_model leaves it out"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.result.steps == 3, "a finished run needs none"


def test_what_is_asked_of_transformers_trainer_and_not_done_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="predict would keep logits"):
        trainer_of(tmp_path).predict(Dataset.from_list(tiny_rows(4)))


def test_a_checkpoint_without_a_record_is_compared_by_its_shapes(tmp_path):
    trainer = trainer_of(tmp_path, save_steps=1)
    trainer.train()
    path = tmp_path / "checkpoint-3" / "trained.safetensors"
    tensors = load_file(path)
    save_file(tensors, path)
    again = trainer_of(tmp_path, k=40)
    again._load_from_checkpoint(str(path.parent))
    assert same(gate_values(again.model), gate_values(trainer.model))
    name = next(name for name in tensors if name.endswith("weight"))
    save_file({**tensors, name: tensors[name][:1].clone()}, path)
    with pytest.raises(TrainingError, match="holds other parameters than this run trains"):
        again._load_from_checkpoint(str(path.parent))


def test_a_finished_run_goes_on_for_more_epochs(tmp_path):
    epochs = {"max_steps": -1, "save_steps": 3}  # of 3 steps each
    trainer_of(tmp_path, num_train_epochs=1, **epochs).train()
    ended = trainer_of(tmp_path, num_train_epochs=1, **epochs)
    assert ended.train(resume_from_checkpoint=True).global_step == 3
    more = trainer_of(tmp_path, num_train_epochs=3, **epochs)
    more.train(resume_from_checkpoint=True)
    assert (more.result.steps, more.result.settings["num_train_epochs"]) == (9, 3)
    assert not same(gate_values(more.model), gate_values(ended.model))
    again = trainer_of(tmp_path, num_train_epochs=3, **epochs)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert same(gate_values(again.model), gate_values(more.model))


def test_gates_that_are_there_train_on(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.train()
    before = gate_values(trainer.model)
    more = lg.GateTrainer(
        trainer.model, arguments(tmp_path), train_dataset=tiny_rows(24), processing_class=tiny_tokenizer()
    )
    more.train()
    assert not same(gate_values(trainer.model), before)
    assert more.result.config == GATES
    ended = more.result
    more.train()
    assert more.result.entropy_before == ended.entropy_after < ended.entropy_before
    with pytest.raises(ConfigError, match=r"carries no gates to train: give their range"):
        lg.GateTrainer(
            tiny_adapter(), arguments(tmp_path), train_dataset=tiny_rows(4), processing_class=tiny_tokenizer()
        )


def test_an_optimizer_of_ones_own_must_hold_the_gates(tmp_path):
    model = tiny_adapter()
    more = {"train_dataset": tiny_rows(24), "processing_class": tiny_tokenizer()}
    before = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(ConfigError, match=r"holds 0 of the 28 .* call attach_gates first"):
        lg.GateTrainer(model, arguments(tmp_path), gates=GATES, optimizers=(before, None), **more)
    lg.attach_gates(model, GATES)
    start = gate_values(model)
    own = torch.optim.AdamW(lg.gate_parameters(model).values(), lr=1e-2)
    trainer = lg.GateTrainer(model, arguments(tmp_path), optimizers=(own, None), **more)
    trainer.train()
    assert not any(torch.equal(value, start[name]) for name, value in gate_values(model).items())


def test_collators_packing_grouping_and_bf16(tmp_path):
    padded = TrainingCollator(tiny_tokenizer())

    def own(items):
        return {name: value for name, value in padded(items).items() if name != "row"}

    losses = {}
    for name, more in {
        "plain": {},
        "own collator": {"data_collator": own},
        "packed": {"packing": True},
        "grouped": {"train_sampling_strategy": "group_by_length"},
        "bf16": {"bf16": True, "use_cpu": not torch.cuda.is_available()},
    }.items():
        trainer = trainer_of(tmp_path, max_length=64, **more)
        trainer.train()
        losses[name] = [record["loss"] for record in trainer.result.history if "loss" in record]
        assert {value.dtype for value in lg.gate_parameters(trainer.model).values()} == {torch.float32}
    for name, found in losses.items():
        assert found == pytest.approx(losses["plain"], rel=2e-2 if name == "bf16" else 2e-6), name
    with pytest.raises(ConfigError, match="leave out data_collator, or packing"):
        trainer_of(tmp_path, packing=True, data_collator=own)


def test_entropies_are_measured_in_the_precision_of_training_on_rows_of_about_one_length(tmp_path, monkeypatch):
    rows = [{"prompt": "w1 " * (3 + 20 * (at % 2)), "response": f"w2 w{at} w{2 * at}"} for at in range(24)]
    kept = {"eval_dataset": Dataset.from_list(rows), "bf16": True, "use_cpu": not torch.cuda.is_available()}
    trainer = trainer_of(tmp_path, rows, max_length=64, **kept)
    passes, forward, device = [], trainer.model.forward, trainer.args.device.type

    def watch(*args, **inputs):
        passes.append((tuple(inputs["input_ids"].shape), torch.is_autocast_enabled(device)))
        return forward(*args, **inputs)

    monkeypatch.setattr(trainer.model, "forward", watch)
    found, _, _ = trainer.measure(trainer.encoded[:])
    lengths = sorted(len(row["input_ids"]) for row in trainer.encoded[:])
    assert passes[-3:] == [((8, lengths[7]), True), ((8, lengths[15]), True), ((8, lengths[23]), True)]
    assert lengths[7] + 9 < lengths[15]
    assert found == pytest.approx(trainer.evaluate()["eval_topk_entropy"], rel=1e-3)


def test_what_goes_wrong_before_training_takes_the_gates_off_again(tmp_path):
    model = tiny_adapter(base=tiny_base(max_position_embeddings=8))
    with pytest.raises(TrainingError, match=r"has .* positions"):
        trainer_of(tmp_path, model=model)
    assert not any("lora_gate" in name for name, _ in model.named_modules())
    with pytest.raises(ConfigError, match="push_to_hub would push checkpoints"):
        trainer_of(tmp_path, push_to_hub=True)
