"""λ per token and slot: against the gates' own map, with padding, without an adapter, in parts, and compiled."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from loragate.gates.range import Range
from loragate.gates.signed_map import SignedMap
from loragate.serving.layers import (
    NO_LIMITS,
    GatedPunica,
    GateMixin,
    TokenLimits,
    empty_slots,
    expand_slots,
    group_rows_by_slot,
    shrink_slots,
    slot_coefficients,
    slot_constants,
)

SLOTS, SLICES, WIDTH = 3, 2, 16
MAPS = [SignedMap(Range(-6, 3)), SignedMap(Range(-1, 2), 0.5), torch.ones_like]  # the last slot holds a plain adapter


def stacks() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two gated slots, one without gates, and the row of tokens without an adapter."""
    torch.manual_seed(0)
    gates = torch.randn(2, SLICES, WIDTH)
    weight, bias, constants = empty_slots(SLOTS, SLICES, WIDTH)
    for slot, signed_map in enumerate(MAPS[:2]):
        for piece in range(SLICES):
            weight[slot, piece] = gates[slot, piece] / signed_map.tau
            bias[slot, piece] = 0.1 * (piece - slot) / signed_map.tau
            constants[slot, piece] = slot_constants(signed_map)
    return weight, bias, constants


def expected(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    gates = torch.cat([torch.randn(2, SLICES, WIDTH), torch.zeros(1, SLICES, WIDTH)])
    found = torch.zeros(len(x), SLICES)
    for at, slot in enumerate(slots.tolist()):
        for piece in range(SLICES if slot >= 0 else 0):
            logit = x[at].float() @ gates[slot, piece] + (0.1 * (piece - slot) if slot < 2 else 0.0)
            found[at, piece] = MAPS[slot](logit)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_token_has_the_gate_of_its_slot(dtype: torch.dtype) -> None:
    x = torch.randn(40, WIDTH).to(dtype)
    slots = torch.arange(40) % 4 - 1
    found = slot_coefficients(x, slots, *stacks())
    torch.testing.assert_close(found, expected(x, slots), rtol=1e-5, atol=2e-6)
    assert (found[slots == 2] == 1).all()
    assert (found[slots == -1] == 0).all()
    assert (found < 0).any()
    assert (found > 1).any()


def test_each_token_has_the_bounds_of_its_request() -> None:
    """Within one slot: clipped to [0, 1], a constant, left alone; a slot held at 1 is reached by none of it."""
    x = 3 * torch.randn(40, WIDTH)
    slots = torch.arange(40) % 4 - 1
    weight, bias, constants = stacks()
    free = slot_coefficients(x, slots, weight, bias, constants)
    constants[2, :, 2:] = 1.0  # what `pin_slot_to_one` does
    limits = TokenLimits(64)
    asked = [(0.0, 1.0), (-0.5, -0.5), NO_LIMITS, (0.0, 0.0)]
    limits.fill(asked, [7, 13, 10, 10])
    assert limits.has_limits
    found = slot_coefficients(x, slots, weight, bias, constants, limits_T2=limits.values_M2[:40])
    gated = (slots == 0) | (slots == 1)
    for (least, most), rows in zip(asked, torch.arange(40).split([7, 13, 10, 10])):
        own = gated[rows]
        assert torch.equal(found[rows][own], free[rows][own].clamp(least, most))
    assert (found[slots == 2] == 1).all()
    assert (found[slots == -1] == 0).all()


def test_limits_are_filled_in_place_and_forgotten_with_their_batch() -> None:
    limits = TokenLimits(8)
    place = limits.values_M2.data_ptr()
    limits.fill([(2.0, 2.0), NO_LIMITS], np.array([3, 2]))
    assert limits.values_M2[:5].tolist() == [[2.0, 2.0]] * 3 + [list(NO_LIMITS)] * 2
    limits.fill([NO_LIMITS], [4])
    assert limits.values_M2.tolist() == [list(NO_LIMITS)] * 8
    assert not limits.has_limits
    assert limits.values_M2.data_ptr() == place


def test_padding_with_arbitrary_indices_disturbs_nobody() -> None:
    x = torch.randn(6, WIDTH)
    slots = torch.tensor([0, 1, 2, -1, 1 << 40, -(1 << 40)])
    x[4:] = torch.nan
    found = slot_coefficients(x, slots, *stacks())
    torch.testing.assert_close(found[:4], expected(x[:4], slots[:4]), rtol=1e-5, atol=2e-6)


def test_a_row_parallel_layer_adds_its_parts_before_the_map() -> None:
    x, slots = torch.randn(9, WIDTH), torch.arange(9) % 3
    weight, bias, constants = stacks()
    half = WIDTH // 2
    other = torch.einsum("td,tnd->tn", x[:, half:], weight[slots][..., half:])
    mine = weight[..., :half].contiguous()
    found = slot_coefficients(x[:, :half], slots, mine, bias, constants, lambda part: part + other)
    torch.testing.assert_close(found, expected(x, slots), rtol=1e-5, atol=2e-6)


def test_gates_changed_in_place_are_seen_by_a_compiled_graph() -> None:
    weight, bias, constants = stacks()
    graph = torch.compile(slot_coefficients, fullgraph=True, dynamic=True, backend="eager")
    for tokens in (5, 9, 33):
        x, slots = torch.randn(tokens, WIDTH), torch.arange(tokens) % 4 - 1
        torch.testing.assert_close(graph(x, slots, weight, bias, constants), expected(x, slots), rtol=1e-5, atol=2e-6)
    weight[0], bias[0], constants[0] = 0, 0, slot_constants(MAPS[0])
    assert (graph(x, slots, weight, bias, constants)[slots == 0] == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slots", [[0] * 7, [2, -1, 0, 2, 1, -1, 2], [-1] * 7, [1, 1, -1, 1, 1, 1, 1], []], ids=str)
@pytest.mark.parametrize("add", [True, False])
def test_products_of_each_token_with_its_own_slot(dtype: torch.dtype, slots: list[int], add: bool) -> None:
    """As token by token in fp32: y + scale · B A x in the columns of each slice; tokens without a slot keep their bits."""
    widths, rank, start = (5, 3), 4, 2
    draw = torch.Generator().manual_seed(len(slots))
    a = [torch.randn(SLOTS, 1, rank, WIDTH, generator=draw).to(dtype) for _ in widths]
    b = [torch.randn(SLOTS, 1, width, rank, generator=draw).to(dtype) for width in widths]
    x = torch.randn(len(slots), WIDTH, generator=draw).to(dtype)
    y = torch.randn(len(slots), start + sum(widths) + 1, generator=draw).to(dtype)
    wanted, at = y.clone(), torch.tensor(slots, dtype=torch.long)
    for row, slot in enumerate(slots):
        left = start
        for piece, width in enumerate(widths if slot >= 0 else ()):
            delta = 0.5 * b[piece][slot, 0].float() @ (a[piece][slot, 0].float() @ x[row].float())
            columns = slice(left, left + width)
            wanted[row, columns] = delta.to(dtype) + (y[row, columns] if add else 0)
            left += width
    buffer, owners = torch.full((2, len(slots), rank), torch.nan), group_rows_by_slot(at)
    shrink_slots(buffer, x, a, 0.5, owners)
    expand_slots(y, buffer, b, widths, owners, start, add)
    torch.testing.assert_close(
        y, wanted, rtol=1e-5, atol=1e-5
    ) if dtype == torch.float32 else torch.testing.assert_close(y, wanted)
    assert torch.equal(y[at < 0], wanted[at < 0])


def test_the_slots_of_a_batch_are_worked_out_once() -> None:
    """vLLM fills one tensor in place for every batch."""
    kept, limits = torch.tensor([0, 0, 2, -1]), TokenLimits(8)
    found = limits.owners(kept[:3])
    assert [(slot, rows.tolist()) for slot, rows in found if rows is not None] == [(0, [0, 1]), (2, [2])]
    assert limits.owners(kept[:3]) is found
    kept[2] = 0
    assert limits.owners(kept[:3]) == [(0, None)]
    assert limits.owners(kept[3:]) == []


class Stacked:
    """What GatedPunica reads of a layer: gates of `stacks`, slots 0 and 1 gated."""

    gate_weight, gate_bias, gate_constants = stacks()
    gate_reduce = None
    gated_slots = frozenset({0, 1})
    pinned_slots: frozenset[int] = frozenset()


@pytest.mark.parametrize("slots", [[0] * 6, [2] * 6, [0, 2, 1, -1, 2, 2], [2, -1, 2, 2, -1, 2]], ids=str)
@pytest.mark.parametrize("strengths", [None, [0.5] * 6, [0.0, -1.5, 0.25, 3.0, 0.5, 1.0]], ids=["free", "half", "many"])
@pytest.mark.parametrize("fixed", [(), (2,)], ids=["", "fixed"])
def test_a_layer_on_a_cpu(slots: list[int], strengths: list[float] | None, fixed: tuple[int, ...]) -> None:
    """y + B(λ A x), λ from the gate of each token's slot, or the strength of its request, which reaches no fixed slot."""
    widths, rank, at = (5, 3), 4, torch.tensor(slots)
    draw = torch.Generator().manual_seed(0)
    a = [torch.randn(SLOTS, 1, rank, WIDTH, generator=draw) for _ in widths]
    b = [torch.randn(SLOTS, 1, width, rank, generator=draw) for width in widths]
    x, y = (torch.randn(len(at), width, generator=draw) for width in (WIDTH, sum(widths)))
    lam = expected(x, at)
    if strengths is not None:
        reached = ~torch.isin(at, torch.tensor(fixed)).unsqueeze(-1)
        lam = torch.where(reached, torch.tensor(strengths).unsqueeze(-1), lam)
    deltas = [
        torch.stack([b[n][slot, 0] @ (lam[t, n] * (a[n][slot, 0] @ x[t])) for t, slot in enumerate(slots)])
        for n in range(SLICES)
    ]
    wanted = torch.where((at >= 0).unsqueeze(-1), y + torch.cat(deltas, dim=1), y)
    wrapper = SimpleNamespace(_token_lora_indices=torch.cat([at, torch.tensor([0, 0])]))
    layer = Stacked()
    layer.pinned_slots = frozenset(fixed)
    layer.gate_constants = Stacked.gate_constants.clone()
    for slot in fixed:
        GateMixin.pin_slot_to_one(SimpleNamespace(pinned_slots=set(), gate_constants=layer.gate_constants), slot)
    punica = GatedPunica(wrapper, layer)
    if strengths is not None:
        punica.limits.fill([(each, each) for each in strengths], [1] * len(at))
    punica.add_lora_linear(y, x, a, b, 1.0, widths)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
