"""A head spread by vocabulary over two gloo processes against the whole head in one."""

import multiprocessing
import os
import traceback

import pytest
import torch

from loragate.errors import ConfigError
from loragate.losses import StatisticsRequest, add_statistics_forward, token_statistics
from loragate.losses.causal_head import ReferenceRequest
from loragate.losses.sharded_head import is_vocabulary_sharded, local_head
from tiny import tiny_base

V, D = 37, 8  # 19 rows and 18
STATISTICS = ("log_prob", "entropy", "topk_entropy")
CASES = {
    f"k={k} {options} {gradients}": (k, options, gradients)
    for k in (5, 25, 100)
    for options in ({}, {"scale": 0.5, "softcap": 4.0})
    for gradients in (None, ("log_prob",), ("entropy",), ("topk_entropy",))
}


def operands():
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, D, generator=draw, dtype=torch.float64)
    weight = torch.randn(V, D, generator=draw, dtype=torch.float64)
    bias = torch.randn(V, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, V, (11,), generator=draw)
    labels[2] = -100
    return hidden, weight, bias, labels


def results(weight, bias):
    """{case: (values, gradients)} of all statistics."""
    hidden, _, _, labels = operands()
    found = {}
    for name, (k, options, gradients) in CASES.items():
        leaf = hidden.clone().requires_grad_()
        stats = token_statistics(leaf, weight, labels, k=k, bias=bias, gradients=gradients, chunk_tokens=4, **options)
        slopes = []
        for wanted in gradients or STATISTICS:
            value = getattr(stats, wanted)
            (slope,) = torch.autograd.grad((value * torch.linspace(1, 2, 11)).sum(), leaf, retain_graph=True)
            slopes.append(slope)
        found[name] = (torch.stack([getattr(stats, wanted).detach() for wanted in STATISTICS]), torch.stack(slopes))
    return found


def of_model(shard):
    """(statistics, gradient by the final norm, reference states) of a tiny model whose head is spread by `shard`."""
    model = tiny_base(tie_word_embeddings=False)
    shard(model)
    model.requires_grad_(False)  # torch 2.8 makes what it spreads trainable again
    model.model.norm.weight.requires_grad_(True)
    ids = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(0))
    fused = add_statistics_forward(model)
    stats = model(input_ids=ids, labels=ids, statistics=StatisticsRequest(20))
    (stats.topk_entropy.sum() + stats.log_prob.sum()).backward()
    reference = model(input_ids=ids, labels=ids, statistics=ReferenceRequest())
    kept = model(input_ids=ids, labels=ids, statistics=StatisticsRequest(0, ("log_prob",), None, reference))
    return fused, torch.stack([*stats[:3], kept.kl]).detach(), model.model.norm.weight.grad


def worker(rank, folder):
    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        hidden, weight, bias, labels = operands()
        spread = distribute_tensor(weight, mesh, [Shard(0)])
        assert is_vocabulary_sharded(spread)
        found = results(spread, distribute_tensor(bias, mesh, [Shard(0)]))
        with pytest.raises(ConfigError, match="different labels"):
            token_statistics(hidden, spread, torch.where(labels >= 0, (labels + rank).clamp(max=V - 1), labels))
        with pytest.raises(ConfigError, match="different labels"):
            token_statistics(hidden, spread, torch.full_like(labels, -100) if rank else labels)
        with pytest.raises(ConfigError, match="without a row"):
            token_statistics(hidden, distribute_tensor(weight[:1], mesh, [Shard(0)]), labels.clamp(max=0))
        other = init_device_mesh("cpu", (2,))
        with pytest.raises(ConfigError, match=r"weight\.full_tensor\(\)"):
            token_statistics(hidden, distribute_tensor(weight, other, [Shard(0)]), labels)
        styles = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
        model = of_model(lambda model: parallelize_module(model, mesh, styles))
        torch.save((found, model), f"{folder}/{rank}.pt")
        torch.distributed.destroy_process_group()
    except BaseException:
        with open(f"{folder}/error.{rank}", "w") as file:
            traceback.print_exc(file=file)
        os._exit(1)
    os._exit(0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=worker, args=(rank, str(folder))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
        process.kill()
    errors = "\n".join(path.read_text() for path in folder.glob("error.*"))
    assert not errors, errors
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_two_processes_equal_one(pair):
    _, weight, bias, _ = operands()
    expected = results(weight, bias)
    for found, _ in pair:
        for name, (values, slopes) in expected.items():
            torch.testing.assert_close(
                found[name][0], values, rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )
            torch.testing.assert_close(
                found[name][1], slopes, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_a_models_head_in_two_processes(pair):
    fused, values, slope = of_model(lambda model: None)
    assert fused
    for _, found in pair:
        assert found[0], "the fused head is used"
        torch.testing.assert_close(found[1], values, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[2], slope, rtol=1e-4, atol=1e-5)


def test_a_whole_head_comes_back_as_it_is():
    _, weight, bias, _ = operands()
    assert local_head(weight, bias) == (weight, bias, None)
    assert not is_vocabulary_sharded(weight)
