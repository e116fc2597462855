"""The last layer served only where it is read: same losses, gradients and λ statistics, fewer FLOPs."""

import pytest
import torch
import transformers as tf
from torch.utils.flop_counter import FlopCounterMode

import loragate as lg
from loragate.gates import record_gates
from loragate.losses import StatisticsRequest
from loragate.losses.causal_head import causal_model
from loragate.training import GateTrainingSettings
from loragate.training.last_layer import LastLayer, read_positions_only, read_rows
from loragate.training.model_state import statistics_forward, without_dropout
from test_families import FAMILIES as families
from test_families import GROUPED
from tiny import VOCABULARY, tiny_adapter, tiny_base

FAMILIES = {name: make for name, make in families.items() if name not in ("gpt_neox", "gpt2", "qwen2_moe")}
FAMILIES["gemma3"] = lambda: tf.Gemma3TextConfig(**GROUPED, head_dim=8)
REQUEST = StatisticsRequest(20, ("log_prob", "topk_entropy"))


def gated(config, dropout=0.0):
    torch.manual_seed(0)
    base = tf.AutoModelForCausalLM.from_config(config)
    return lg.attach_gates(tiny_adapter(base=base, lora_dropout=dropout), lg.GateConfig(-3, 2, init_scale=0.2))


def batch():
    ids = torch.randint(2, VOCABULARY, (3, 11), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[:, :4] = -100
    labels[1, 9:] = -100
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gradients_of(model):
    """The gates' gradients, which are taken off."""
    gradients = {name: parameter.grad for name, parameter in lg.gate_parameters(model).items()}
    model.zero_grad(set_to_none=True)
    return gradients


def step(model, last=None, data=None):
    """(log_prob, top-k entropy, {gate: gradient}, λ statistics) of one forward and backward."""
    data = data or batch()
    last = last or LastLayer("not asked for")
    with record_gates(model) as recording, last.reading(data["labels"]):
        recording.token_mask = data["labels"].ne(-100)
        stats = model(**data, statistics=REQUEST)
    (stats.topk_entropy.sum() - stats.log_prob.sum()).backward()
    gradients = gradients_of(model)
    return stats.log_prob.detach(), stats.topk_entropy.detach(), gradients, recording.statistics()


def assert_same(some, whole, rtol=2e-4, atol=2e-6):
    for left, right in zip(some[:2], whole[:2], strict=True):
        torch.testing.assert_close(left, right, rtol=rtol, atol=atol)
    for name, gradient in whole[2].items():
        torch.testing.assert_close(
            some[2][name], gradient, rtol=rtol, atol=atol * 10, msg=lambda text, n=name: n + text
        )
    assert some[3].keys() == whole[3].keys()
    for name, values in whole[3].items():
        assert some[3][name] == pytest.approx(values, rel=1e-4, abs=1e-6), name


def hooks_of(model):
    """Gated modules have hooks of their own."""
    return [(*module._forward_pre_hooks, *module._forward_hooks) for module in model.modules()]


@pytest.mark.parametrize("name", FAMILIES)
def test_losses_gradients_and_gate_statistics_are_those_of_the_whole_layer(name):
    model = gated(FAMILIES[name]())
    model.train()
    hooks = hooks_of(model)
    with without_dropout(model), statistics_forward(model):
        whole = step(model)
        with read_positions_only(model, causal_model(model)) as last:
            assert last.reason is None
            assert last.arrived
            some = step(model, last)
            again = step(model)  # the hooks alone change nothing
        after = step(model)
    assert_same(some, whole)
    for other in (again, after):
        assert torch.equal(other[0], whole[0])
        assert all(torch.equal(other[2][key], value) for key, value in whole[2].items())
    assert hooks_of(model) == hooks


def test_fp64_agreement():
    model = gated(FAMILIES["qwen3"]()).double()
    for parameter in lg.gate_parameters(model).values():
        parameter.data = parameter.data.double()
    data = batch()
    gradients = []
    with statistics_forward(model), read_positions_only(model, causal_model(model)) as last:
        for reading in (LastLayer("whole"), last):
            with reading.reading(data["labels"]):
                hidden = causal_model(model).base_model(data["input_ids"]).last_hidden_state
            read = hidden.view(-1, 32)[read_rows(data["labels"])]
            (read * torch.linspace(-1, 1, read.numel(), dtype=read.dtype).view_as(read)).sum().backward()
            gradients.append(gradients_of(model))
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_keep_the_rows_of_their_own_forward(reentrant):
    """Two forward passes of the same number of rows at other positions, then both backward passes."""
    model = gated(FAMILIES["qwen2"]())
    model.train()
    first = batch()
    second = {**first, "labels": first["labels"].roll(3, 1)}
    assert read_rows(first["labels"]).numel() != first["labels"].numel()

    def both(last):
        totals = []
        for data in (first, second):
            with last.reading(data["labels"]):
                totals.append(model(**data, statistics=REQUEST).topk_entropy.sum())
        (totals[0] - 2 * totals[1]).backward()
        return gradients_of(model)

    with statistics_forward(model), read_positions_only(model, causal_model(model)) as last:
        assert last.reason is None
        expected = both(LastLayer("whole"))
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for name, gradient in both(last).items():
            torch.testing.assert_close(gradient, expected[name], rtol=2e-4, atol=2e-5)


def test_flops_fall_by_the_rows_that_are_not_read():
    model = gated(FAMILIES["llama"]())
    data, flops = batch(), []
    with statistics_forward(model), read_positions_only(model, causal_model(model)) as last:
        for reading in (LastLayer("whole"), last):
            with FlopCounterMode(display=False) as counter:
                step(model, reading, data)
            flops.append(counter.get_total_flops())
    skipped = data["labels"].numel() - read_rows(data["labels"]).numel()
    assert skipped == 33 - (8 + 6 + 8)
    base = 32 * 32 + 32 * 32 + 3 * 32 * 48  # q, o and the MLP
    inputs = 4 * 32 + 48
    factors = 4 * (inputs + 3 * 32 + 2 * 48)
    # the gates' own gradient; the counter does not know the forward's matrix-vector product
    assert flops[0] - flops[1] == 2 * skipped * (2 * base + 2 * factors + inputs)


class Mixing(torch.nn.Module):
    """An MLP whose output at a position depends on those before it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return self.inner(hidden) + hidden.cumsum(1)


def mixing():
    base = tiny_base()
    base.model.layers[-1].mlp = Mixing(base.model.layers[-1].mlp)
    return lg.attach_gates(tiny_adapter(base=base), lg.GateConfig(-3, 2))


def dropping():
    model = gated(FAMILIES["llama"]())
    layer = causal_model(model).model.layers[-1]
    attend, call = layer.self_attn.forward, layer.forward
    layer.self_attn.forward = lambda *args, **kwargs: attend(*args, **kwargs)
    layer.forward = lambda hidden, **kwargs: call(hidden, **{k: v for k, v in kwargs.items() if "rows" not in k})
    return model


WHOLE = {
    "has no self_attn and mlp": lambda: gated(families["gpt2"]()),
    "routes its tokens": lambda: gated(families["qwen2_moe"]()),
    "dropout would draw other numbers": lambda: gated(FAMILIES["llama"](), dropout=0.1),
    "log-probabilities would differ": mixing,
    "does not hand its keywords on": dropping,
}


@pytest.mark.parametrize("why", WHOLE)
def test_a_layer_that_cannot_be_read_in_part_stays_whole(why):
    model = WHOLE[why]().eval()
    hooks = hooks_of(model)
    with statistics_forward(model):
        whole = step(model)
        with read_positions_only(model, causal_model(model)) as last:
            assert why in last.reason
            assert hooks_of(model) == hooks
            some = step(model, last)
    assert torch.equal(some[0], whole[0])


def test_no_label_or_all_labels_serve_every_position():
    model = gated(FAMILIES["qwen2"]())
    data = batch()
    with statistics_forward(model), read_positions_only(model, causal_model(model)) as last:
        for labels in (torch.full_like(data["labels"], -100), data["input_ids"]):
            with last.reading(labels):
                assert last.asked is None
                model(**{**data, "labels": labels}, statistics=REQUEST)
            assert last.rows is None


def test_read_rows_are_those_that_predict_or_carry_a_label():
    labels = torch.tensor([[-100, -100, 5, 6], [-100, 7, -100, 8]])
    assert read_rows(labels).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert read_rows(torch.full((1, 3), -100)).numel() == 0


def test_calibration_agrees_with_a_whole_last_layer(tokenizer, rows, monkeypatch):
    settings = GateTrainingSettings(
        batch_size=8,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=2,
        k=20,
        max_length=64,
        max_steps=3,
    )
    models = [tiny_adapter(), tiny_adapter()]
    results = [lg.train_gates(models[0], tokenizer, rows, lg.GateConfig(-3, 2), settings)]
    monkeypatch.setattr(LastLayer, "install", lambda self, layer: setattr(self, "reason", "switched off"))
    results.append(lg.train_gates(models[1], tokenizer, rows, lg.GateConfig(-3, 2), settings))
    losses = [[record["loss"] for record in result.history if "loss" in record] for result in results]
    shares = [[record[key] for record in result.history for key in record if "gate_" in key] for result in results]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert shares[0] == pytest.approx(shares[1], rel=1e-4, abs=1e-6)
    for (name, some), whole in zip(
        lg.gate_parameters(models[0]).items(), lg.gate_parameters(models[1]).values(), strict=True
    ):
        torch.testing.assert_close(some, whole, rtol=1e-3, atol=1e-6, msg=lambda text, n=name: n + text)
