"""What loragate relies on in transformers' and TRL's trainers."""

import inspect
from types import SimpleNamespace

import pytest
import torch
import transformers
import trl
from torch.distributed.fsdp import fully_shard

from loragate.training.trainer import StatisticsTrainer

pytestmark = pytest.mark.contract


def test_overridden_methods_exist():
    for name in ("compute_loss", "get_batch_samples", "log", "_save", "_load_from_checkpoint"):
        assert callable(getattr(transformers.Trainer, name)), name
    for name in ("training_step", "save_model", "_save_rng_state", "_sync_replicated_trainable_parameters"):
        assert callable(getattr(transformers.Trainer, name)), name
    for name in ("_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler"):
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
