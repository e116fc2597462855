"""What loragate relies on in transformers' and TRL's trainers."""

import inspect

import pytest
import transformers
import trl

from loragate.training.trainer import StatisticsTrainer

pytestmark = pytest.mark.contract


def test_overridden_methods_exist():
    for name in ("compute_loss", "prediction_step", "log", "_save", "_load_from_checkpoint"):
        assert callable(getattr(transformers.Trainer, name)), name
    assert callable(trl.SFTTrainer.create_model_card)
    assert callable(trl.SFTTrainer._send_telemetry)


def test_the_loss_is_taken_as_scaled_for_accumulation():
    assert StatisticsTrainer.loss_is_scaled_for_ga is True
    assert "loss_is_scaled_for_ga" in inspect.getsource(transformers.Trainer.training_step)


def test_the_denominator_counts_shifted_labels():
    source = inspect.getsource(transformers.Trainer._get_num_items_in_batch)
    assert 'batch["labels"][..., 1:]' in source
    assert "self.accelerator.gather" in source


def test_configuration_fields_exist():
    fields = trl.SFTConfig.__dataclass_fields__
    for name in ("train_sampling_strategy", "dataset_kwargs", "average_tokens_across_devices", "router_aux_loss_coef"):
        assert name in fields, name


def test_telemetry_is_off():
    assert StatisticsTrainer._send_telemetry is not trl.SFTTrainer._send_telemetry
    assert StatisticsTrainer._send_telemetry(None) is None
