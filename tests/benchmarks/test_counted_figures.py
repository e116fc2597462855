"""The speed benchmarks' exact half: counted FLOPs and saved bytes are the committed ones, and the counting itself is right."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tiny import scripts_of

ROOT = Path(__file__).parents[2]
SPEED = ROOT / "benchmarks" / "speed"


@pytest.fixture(scope="module")
def speed():
    """The modules of benchmarks/speed by name."""
    with scripts_of(SPEED) as load:
        yield load


def test_counts_are_the_committed_ones(speed):
    counted = speed("counted")
    known = json.loads(counted.FILE.read_text(encoding="utf-8"))
    if known["versions"] != counted.pinned():
        pytest.skip(f"counted with {known['versions']}, here is {counted.pinned()}")
    lines = counted.differences(known["counted"], counted.counted())
    assert not lines, "\n".join(
        [
            *lines,
            f"More is a regression; less is a gain to be kept. If it is meant: {counted.UPDATE}, and commit the file",
        ]
    )


def test_the_counter_knows_every_product(speed):
    """Against numbers worked out by hand: matrices, a vector, attention, a bag of rows."""
    common = speed("common")
    x = torch.nn.Parameter(torch.randn(6, 8))
    owner = torch.nn.Module()
    owner.register_parameter("x", x)
    owner.register_buffer("w", torch.randn(8, 5))
    assert common.count(owner, lambda: (x @ owner.w).sum()).flops == 2 * (2 * 6 * 8 * 5)
    assert common.count(owner, lambda: (x @ owner.w[:, 0]).sum()).flops == 2 * 6 * 8
    assert common.count(owner, lambda: torch.zeros(6, 5).addmm_(x.detach(), owner.w)).flops == 2 * 6 * 8 * 5
    index = torch.zeros(3, 4, dtype=torch.int64)
    bag = torch.nn.functional.embedding_bag
    weights = torch.rand(3, 4)
    counts = common.count(owner, lambda: bag(index, owner.w, per_sample_weights=weights, mode="sum").sum())
    assert (counts.flops, counts.attention) == (2 * 3 * 4 * 5, 0)
    query = torch.nn.Parameter(torch.randn(1, 4, 7, 16))
    owner.register_parameter("query", query)
    attention = torch.nn.functional.scaled_dot_product_attention
    counts = common.count(owner, lambda: attention(query, query, query, is_causal=True).sum())
    assert counts.flops == counts.attention == (4 + 10) * 4 * 7 * 7 * 16


def test_saved_bytes_count_each_storage_once_and_no_parameters(speed):
    common = speed("common")
    owner = torch.nn.Linear(8, 8, bias=False)
    data = torch.randn(3, 8)

    def loss():
        hidden = owner(data)
        return (hidden * hidden.view(3, 8)).sum()

    assert common.count(owner, loss).saved == 4 * (3 * 8 + 3 * 8)


def test_nothing_is_kept_out_of_sight_of_the_saved_bytes(speed):
    """What is alive before the backward of a Stage-II step, by watching every storage, is what was counted as saved."""
    contestants = speed("contestants")
    model, loss = contestants.gates_loragate(speed("counted").SMALL)
    loss()  # what is made once and kept, such as the rotary table
    counts = speed("common").count(model, loss)
    tracker = speed("fake").StorageTracker([*model.parameters(), *model.buffers()])
    with tracker:
        value = loss()
    assert tracker.live == pytest.approx(counts.saved, rel=0.01)
    del value


def test_an_unknown_operator_is_refused(speed):
    @torch.library.custom_op("loragate_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    with pytest.raises(RuntimeError, match="give it a formula"):
        speed("common").count(torch.nn.Module(), lambda: twice(torch.ones(2)))


def test_the_floor_is_forward_backward_and_one_projection(speed):
    """Against the sum over all matrices, from shapes alone."""
    contestants, floor = speed("contestants"), speed("floor")
    shape = contestants.Shape(32, 96, 3, 4, 2, vocabulary=512, rows=2, sequence=24, rank=4)
    tokens, heads = 2 * 24, 4 * 8
    widths = {
        "q": (32, 32),
        "k": (32, 16),
        "v": (32, 16),
        "o": (32, 32),
        "up": (32, 96),
        "gate": (32, 96),
        "down": (96, 32),
    }
    layer = {name: 2 * tokens * (d_in * d_out + 4 * (d_in + d_out)) for name, (d_in, d_out) in widths.items()}
    attention = 4 * 2 * 24 * 24 * heads
    first = layer["q"] + layer["k"] + layer["v"]  # no gradient flows into the embeddings
    expected = 3 * 2 * sum(layer.values()) - first + 3 * (attention + attention * 5 // 2)
    expected += 2 * shape.labelled * 512 * 32
    assert floor.floor(shape).flops == expected


def test_models_without_data_are_counted_as_real_ones(speed):
    common, contestants, floor, fake = (speed(name) for name in ("common", "contestants", "floor", "fake"))
    counts, shape = speed("true_shapes").counts, replace(speed("counted").SMALL, layers=4, rows=1)
    makers = {
        "gates": lambda changed: common.count(*contestants.gates_loragate(changed)),
        "floor": floor.floor,
    }
    for name, make in makers.items():
        real, extended = make(shape), counts(shape, make)
        assert (real.flops, real.attention) == (extended.flops, extended.attention), name
    assert not fake.under_fake_mode()


def test_the_page_shows_the_results_as_they_are(speed):
    page = speed("page")
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(text) == text, "run python benchmarks/speed/page.py"
