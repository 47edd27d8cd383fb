"""A run that is killed, resized and damaged ends with the losses of one that was left alone (the short form)."""

import pytest
from benchmarks import preemption


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", [3, pytest.param(8, marks=pytest.mark.nightly)])
def test_killed_resized_and_damaged_runs_end_where_an_undisturbed_one_does(kills, tmp_path):
    reference = preemption.undisturbed(tmp_path / "undisturbed", 1, 150, 10, 500)
    events = preemption.soak(tmp_path / "soak", kills, steps=150, every=10, seed=1, patience=500, damages=2)
    assert len(events) == kills + 1
    curve = preemption.curve(tmp_path / "soak")
    assert curve.keys() == reference.keys()
    # Other numbers of ranks add gradients up in another order; the rest is equal.
    assert max(abs(curve[step] - loss) for step, loss in reference.items()) < 1e-3
