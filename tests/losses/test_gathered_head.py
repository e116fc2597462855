"""A head that tensor parallelism spreads over two gloo processes is gathered, and gives what the whole head gives."""

import pytest
import torch

from loragate.errors import ConfigError
from loragate.losses import StatisticsRequest, add_statistics_forward, token_statistics
from loragate.losses.causal_head import ReferenceRequest
from tiny import tiny_base


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
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    spread = distribute_tensor(torch.randn(37, 8), mesh, [Shard(0)])
    with pytest.raises(ConfigError, match=r"weight\.full_tensor\(\)"):
        token_statistics(torch.randn(3, 8), spread, torch.tensor([1, 2, 3]))
    styles = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    torch.save(of_model(lambda model: parallelize_module(model, mesh, styles)), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_a_models_head_in_two_processes(tmp_path):
    torch.multiprocessing.start_processes(worker, (str(tmp_path),), nprocs=2, start_method="fork")
    fused, values, slope = of_model(lambda model: None)
    assert fused
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert found[0], "the fused head is used"
        torch.testing.assert_close(found[1], values, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[2], slope, rtol=1e-4, atol=1e-5)
