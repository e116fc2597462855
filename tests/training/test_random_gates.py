"""Stage II over the whole vocabulary, with the complete gradient and at every granularity."""

import math

import pytest
import torch

import loragate as lg
from loragate.data import Collator, encode_rows, load_rows
from loragate.gates import draw_gates, sizes_of, train_gates_only
from loragate.training.reference import response_entropies
from loragate.training.settings import GateTrainingSettings
from tiny import VOCABULARY, tiny_adapter


def settings(**options):
    usual = {
        "batch_size": 24,
        "per_device_train_batch_size": 24,
        "learning_rate": 0.05,
        "max_length": 64,
        "logging_steps": 1,
        "k": 20,
    }
    return GateTrainingSettings(**{**usual, **options})


def test_draws_depend_on_seed_and_name_alone():
    drawn = []
    for seed in (0, 0, 1):
        model = lg.attach_gates(tiny_adapter(), lg.GateConfig(-1, 2))
        torch.manual_seed(len(drawn))
        drawn.append(draw_gates(model, seed, 0.1))
    name = next(iter(drawn[0]))
    assert torch.equal(drawn[0][name], drawn[1][name])
    assert not torch.equal(drawn[0][name], drawn[2][name])
    sizes = sizes_of(drawn[0])
    again = draw_gates(model, 5, sizes)
    assert sizes_of(again)[name] == pytest.approx(sizes[name], rel=0.7)


def test_full_entropy_is_k_of_zero(tokenizer, rows):
    losses = []
    for k in (0, VOCABULARY, 10 * VOCABULARY):
        run = lg.train_gates(tiny_adapter(), tokenizer, rows, lg.GateConfig(-3, 2), settings(k=k, max_steps=2))
        losses.append([run.entropy_before, *(record["loss"] for record in run.history if "loss" in record)])
    assert losses[0] == losses[1] == losses[2]
    adapter = lg.attach_gates(tiny_adapter(), lg.GateConfig(-3, 2))
    batch = Collator(0)(list(encode_rows(load_rows(rows).shuffled(42), tokenizer, max_length=64)))
    with torch.no_grad():
        logits = adapter(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    p = torch.softmax(logits[batch["labels"][:, 1:] != -100].double(), -1)
    expected = (-(p * p.log()).sum(-1) / math.log(VOCABULARY)).mean().item()
    assert losses[0][1] == pytest.approx(expected, rel=1e-5)


def test_the_complete_gradient_is_that_of_autograd_and_not_the_semi_gradient(tokenizer, rows):
    """Finite differences of the loss over the gate of the first module: the complete gradient fits, the other does not."""
    batch = Collator(0)(list(encode_rows(rows[:6], tokenizer, max_length=64)))

    def loss_of(model):
        return response_entropies(model, batch, 0).mean()

    gradients = {}
    for detach in (True, False):
        model = lg.attach_gates(tiny_adapter().double(), lg.GateConfig(-3, 2, detach_input=detach, init_scale=0.3))
        for parameter in lg.gate_parameters(model).values():
            parameter.data = parameter.data.double()
        train_gates_only(model, "default")
        name = next(iter(lg.gate_parameters(model)))
        parameter = lg.gate_parameters(model)[name]
        loss_of(model).backward()
        gradients[detach] = parameter.grad.clone()
    # transformers normalises in fp32 whatever the model's dtype, so differences must be wide
    step, found = 1e-3, torch.zeros_like(parameter)
    with torch.no_grad():
        for index in range(6):
            for sign in (1, -1):
                parameter[index] += sign * step
                found[index] += sign * loss_of(model) / (2 * step)
                parameter[index] -= sign * step
    scale = found[:6].abs().max()
    assert (gradients[False][:6] - found[:6]).abs().max() < 0.03 * scale
    assert (gradients[True][:6] - found[:6]).abs().max() > 0.1 * scale
