"""What loragate relies on in transformers' and TRL's trainers."""

import inspect
from types import SimpleNamespace

import datasets
import pytest
import torch
import transformers
import trl
from torch.distributed.fsdp import fully_shard

import loragate as lg
from loragate.data import Collator, encode_rows
from loragate.training.trainer import StatisticsTrainer
from tiny import gate_values, tiny_adapter, tiny_rows, tiny_tokenizer

pytestmark = pytest.mark.contract


OVERRIDDEN = """compute_loss get_batch_samples log training_step save_model _save _save_checkpoint _get_output_dir _save_rng_state
_load_from_checkpoint _save_optimizer_and_scheduler _load_optimizer_and_scheduler _sync_replicated_trainable_parameters"""


def test_overridden_methods_exist():
    for name in OVERRIDDEN.split():
        assert callable(getattr(transformers.Trainer, name)), name
    assert callable(trl.SFTTrainer.create_model_card)
    assert callable(trl.SFTTrainer._send_telemetry)


def test_the_loss_is_taken_as_scaled_for_accumulation():
    assert StatisticsTrainer.loss_is_scaled_for_ga is True
    assert "loss_is_scaled_for_ga" in inspect.getsource(transformers.Trainer.training_step)


def test_all_passes_of_a_step_are_fetched_before_the_first_one_trains():
    """What a loss needs to know of the whole batch is measured there: after the last update, before any gradient."""
    loop = inspect.getsource(transformers.Trainer._run_epoch)
    fetched = loop.index("= self.get_batch_samples(")
    assert fetched < loop.index("for i, inputs in enumerate(batch_samples)") < loop.index("self.training_step(")
    assert list(inspect.signature(transformers.Trainer.get_batch_samples).parameters)[1:] == [
        "epoch_iterator", "num_batches", "device",
    ]  # fmt: skip
    assert "return batch_samples, num_items_in_batch" in inspect.getsource(transformers.Trainer.get_batch_samples)
    assert trl.SFTTrainer.get_batch_samples is transformers.Trainer.get_batch_samples
    # the model as DDP and FSDP wrap it; a column that is no tensor, list or mapping is handed on as it is
    assert "self.model_wrapped = model" in inspect.getsource(transformers.Trainer._prepare_for_training)
    kept = SimpleNamespace(value=torch.ones(1))
    assert transformers.Trainer._prepare_input(None, kept) is kept


def test_the_denominator_counts_shifted_labels():
    source = inspect.getsource(transformers.Trainer._get_num_items_in_batch)
    assert 'batch["labels"][..., 1:]' in source
    assert "self.accelerator.gather" in source


@pytest.mark.skipif(
    not hasattr(transformers.Trainer, "_defer_fsdp_gradient_reduction"),
    reason="FSDP2 is refused with this transformers, which is older than 5.23",
)
def test_a_model_that_was_sharded_before_is_neither_wrapped_nor_reduced():
    source = inspect.getsource(transformers.Trainer._prepare_for_training)
    assert "if self.is_distributed_loading_by_transformers:" in source
    assert "evaluation_mode=True" in source
    assert "self._sync_replicated_trainable_parameters(model)" in source
    assert "self._defer_fsdp_gradient_reduction" in inspect.getsource(transformers.Trainer._run_epoch)


def test_fsdp2_leaves_parameters_out():
    assert "ignored_params" in inspect.signature(fully_shard).parameters


def test_checkpoints_end_with_the_state_file():
    source = inspect.getsource(transformers.Trainer._save_checkpoint)
    last = source.index("self.state.save_to_json")
    for name in ("self.save_model(", "self._save_optimizer_and_scheduler(", "self._save_rng_state("):
        assert source.index(name) < last, name


class EntropyTrainer(trl.SFTTrainer):
    def compute_loss(self, model, inputs, num_items_in_batch=None, **_):
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
        return lg.topk_entropy(logits[inputs["labels"][:, 1:] != -100], k=20).sum() / num_items_in_batch


def test_trls_trainer_with_the_objective_as_its_loss_trains_the_same_gates(tmp_path):
    """The objective is a loss as any other; what `GateTrainer` adds are checks, the fused head and the artifact."""
    tokenizer, range_ = tiny_tokenizer(), lg.GateConfig(-3, 2)
    encoded = encode_rows(tiny_rows(12), tokenizer, max_length=64)
    settings = lg.GateTrainingSettings(batch_size=4, per_device_train_batch_size=2, learning_rate=1e-2, k=20)
    ours, theirs = tiny_adapter(), tiny_adapter().eval()
    lg.train_gates(ours, tokenizer, tiny_rows(12), range_, settings, encoded=encoded)
    lg.attach_gates(theirs, range_)
    args = trl.SFTConfig(
        str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        adam_beta2=0.95,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
    )
    collate = Collator(tokenizer.pad_token_id)
    rows = datasets.Dataset.from_list(list(encoded))
    EntropyTrainer(theirs, args, train_dataset=rows, data_collator=collate, processing_class=tokenizer).train()
    expected, found = gate_values(ours), gate_values(theirs)
    assert max(float(value.abs().max()) for value in expected.values()) > 1e-2, "they moved"
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
