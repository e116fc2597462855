"""What is given to the two stages: mix-ups are one sentence, before anything is changed or loaded."""

import datetime
import json

import pytest
from transformers.utils import chat_template_utils

import loragate as lg
from loragate.data import encode_rows
from loragate.errors import ConfigError, DataError, SetupError
from loragate.files import require_same_identity
from loragate.training import FineTuningSettings, GateTrainingSettings
from loragate.training.checkpoints import template_hints
from tiny import TEMPLATE, tiny_adapter, tiny_base, tiny_rows, tiny_tokenizer

SHARED = {"batch_size": 8, "per_device_train_batch_size": 4, "max_length": 64, "max_steps": 1, "logging_steps": 1}
ONE = FineTuningSettings(**SHARED, rank=2)
TWO = GateTrainingSettings(**SHARED, k=20)
CONFIG = lg.GateConfig(-3, 2)


def train(tokenizer, rows=None, settings=ONE, base=None, **options):
    return lg.train_adapter(base or tiny_base(), tokenizer, rows or tiny_rows(8), settings, **options)


def calibrate(tokenizer, rows=None, config=CONFIG, settings=TWO, **options):
    return lg.train_gates(tiny_adapter(), tokenizer, rows or tiny_rows(8), config, settings, **options)


def test_a_base_with_an_adapter_is_refused_untouched(tokenizer):
    base = tiny_base()
    first = train(tokenizer, base=base).model
    factors = {name: value.clone() for name, value in first.state_dict().items()}
    for again in (base, first):
        with pytest.raises(ConfigError, match=r"already carries an adapter \(.*q_proj.*load a fresh base.*unload\(\)"):
            train(tokenizer, base=again)
    assert all((value == factors[name]).all() for name, value in first.state_dict().items())
    assert train(tokenizer, base=first.unload()).steps == 1


def test_a_path_and_any_iterable_are_rows(tokenizer, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in tiny_rows(8)))
    assert train(tokenizer, path).data["source"] == str(path)
    assert calibrate(tokenizer, str(path)).data["source"] == str(path)
    assert train(tokenizer, iter(tiny_rows(8))).rows == 8
    with pytest.raises(DataError, match="found no file"):
        train(tokenizer, str(tmp_path / "other.jsonl"))


@pytest.mark.parametrize("stage", [train, calibrate])
def test_mix_ups_of_both_stages(tokenizer, stage):
    with pytest.raises(ConfigError, match="resume=True needs run_folder"):
        stage(tokenizer, resume=True)
    encoded = encode_rows(tiny_rows(12), tokenizer, max_length=64)
    with pytest.raises(DataError, match="encoded holds 12 rows up to index 11, and rows has 8"):
        stage(tokenizer, encoded=encoded)


@pytest.mark.parametrize("stage", [train, calibrate])
def test_a_template_with_the_date_is_named_where_a_run_is_resumed_on_another_day(tmp_path, monkeypatch, stage):
    class Clock(datetime.datetime):
        today_is = 1

        @classmethod
        def now(cls, tz=None):
            return datetime.datetime(2026, 1, cls.today_is)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    dated, given = tiny_tokenizer(), {"run_folder": tmp_path / "run", "settings": ONE if stage is train else TWO}
    dated.chat_template = TEMPLATE.replace("<user> {{", "<user> w{{ strftime_now('%d')[1] }} {{")
    stage(dated, **given)
    Clock.today_is = 2
    with pytest.raises(
        SetupError, match=r"begun with tokens = .*writes today's date.*strftime_now.*--chat-template FILE"
    ):
        stage(dated, **given, resume=True)
    fixed = tiny_tokenizer()
    with pytest.raises(SetupError, match="begun with tokens = ") as caught:
        stage(fixed, **given, resume=True)
    assert "today's date" not in str(caught.value)
    fixed.chat_template = dated.chat_template.replace("{{ strftime_now('%d')[1] }}", "1")
    stage(fixed, **given, resume=True)
    # of calibrate, whose record holds them beside the rows
    both = {"data": {"tokens": "a"}}, {"data": {"tokens": "b"}}
    with pytest.raises(ConfigError, match="writes today's date"):
        require_same_identity(tmp_path, *both, "repeat the command", hints=template_hints(dated))
