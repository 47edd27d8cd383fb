"""State of a sharded parameter is sharded like it; one process here, several in the distributed tests."""

import math

import pytest
import torch
import torch.distributed as dist
from processes import elsewhere
from table import ROUNDED, TABLE, cases, gradients
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import cprop
from cprop.storage import load


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("entry", cases(TABLE))
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


@pytest.mark.parametrize("after", ["float32", "bfloat16"])
@pytest.mark.parametrize("before", ["float32", "bfloat16"])
def test_loaded_state_of_a_dtensor_is_a_dtensor_in_its_format(before, after, mesh):
    def build():
        p = torch.nn.Parameter(distribute_tensor(torch.ones(64, 128), mesh, [Shard(0)]))
        return p, cprop.CPropAdam([p], lr=0.01, cprop_state_dtype=before)

    p, optimizer = build()
    p.grad = distribute_tensor(torch.randn(64, 128, generator=torch.Generator().manual_seed(0)), mesh, [Shard(0)])
    optimizer.step()
    saved = optimizer.state_dict()
    saved["param_groups"][0]["cprop_state_dtype"] = after
    q, resumed = build()
    resumed.load_state_dict(saved)
    for key in ("cprop_m", "exp_avg", "exp_avg_sq"):
        source, loaded = optimizer.state[p][key], resumed.state[q][key]
        assert isinstance(loaded, DTensor)
        assert loaded.placements == q.placements
        assert loaded.to_local().dtype == (torch.bfloat16 if after == "bfloat16" else torch.float32)
        exact, near = load(source.to_local()), load(loaded.to_local())
        assert (exact - near).norm() < (0.05 * exact.norm() if before != after else 1e-12)
    q.grad = p.grad
    resumed.step()


WAYS = ({}, {"foreach": True}, {"fused": True})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "placements"),
    [((3,), [Shard(0)]), ((3,), [Shard(1)]), ((2, 2), [Shard(0), Shard(1)]), ((2, 2), [Shard(1), Shard(2)])],
    ids=["rows", "columns", "rows and columns", "columns and depth"],
)
def test_stochastic_rounding_of_a_shard_is_that_of_the_whole_to_the_bit(ranks, placements):
    """Rank by rank, in imagined groups: a step does not communicate. In processes, see the distributed tests."""
    elsewhere(round_in_shards, ranks, placements)


def round_in_shards(_, ranks, placements):
    """Shards are whole vectors long: the compiler may fuse a product into a sum in a kernel's last elements alone."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    normal = torch.Generator().manual_seed(0)
    whole, *grads = (torch.randn(12, 8, 16, generator=normal).bfloat16() for _ in range(6))

    def trained(share, way):
        """Of two parameters, the second: its own place among them counts too."""
        params = [torch.nn.Parameter(share(whole)) for _ in range(2)]
        optimizer = ROUNDED.build(params, cprop_state_dtype="bfloat16", **way)
        for grad in grads:
            for p in params:
                p.grad = share(grad)
            optimizer.step()
        return params[1].detach()

    expected = [trained(torch.clone, way) for way in WAYS]
    size = math.prod(ranks)
    for rank in range(size):
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        # torch keeps what it knows of a mesh, and takes meshes with equal names for the same.
        names = tuple(f"rank{rank}_{dim}" for dim in range(len(ranks)))
        mesh = init_device_mesh("cpu", ranks, mesh_dim_names=names)

        def share(x, mesh=mesh):
            return distribute_tensor(x, mesh, placements, src_data_rank=None)

        for way, whole_one in zip(WAYS, expected, strict=True):
            assert torch.equal(trained(share, way).to_local(), share(whole_one).to_local()), (rank, way)
        dist.destroy_process_group()
