"""State of a sharded parameter is sharded like it; one process here, several in the distributed tests."""

import pytest
import torch
import torch.distributed as dist
from table import TABLE, gradients
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry.id)
def test_state_of_a_dtensor_is_a_dtensor(entry, mesh):
    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    plain = torch.nn.Parameter(whole.clone())
    sharded = torch.nn.Parameter(distribute_tensor(whole.clone(), mesh, [Shard(0)]))
    on_plain, on_sharded = entry.build([plain]), entry.build([sharded])
    for step in range(10):
        gradients([plain], step)
        sharded.grad = distribute_tensor(plain.grad.clone(), mesh, [Shard(0)])
        on_plain.step()
        on_sharded.step()
    for key in ("cprop_m", "cprop_v"):
        if key in on_sharded.state[sharded]:
            state = on_sharded.state[sharded][key]
            assert isinstance(state, DTensor)
            assert state.placements == sharded.placements
    torch.testing.assert_close(sharded.full_tensor().detach(), plain.detach())
    ((_, scale),) = on_sharded.scales()
    assert isinstance(scale, DTensor)
    torch.testing.assert_close(scale.full_tensor(), next(s for _, s in on_plain.scales()))
