"""A mistake in a task of your own is told before anything is started, by method and line."""

import re
from uuid import uuid4

import pytest

from cprop_lab.engine import RunsFailedError
from cprop_lab.engine.check import TaskError, check, trimmed
from cprop_lab.engine.engine import Engine
from cprop_lab.run.specification import Specification
from cprop_lab.store import Store

TASK = """import torch
from tasks import Blobs

class Mine(Blobs):
    def {}:
        {}
"""
BATCH = "self, model, batch"


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A file of one's own, with one method replaced."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(method, body):
        name = f"mistake_{uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(TASK.format(method, body))
        return Specification(f"{name}:Mine", "sgd", lr=0.1, iterations=20)

    return write


@pytest.mark.parametrize(
    ("method", "body", "wrong"),
    [
        ("data(self)", "return torch.zeros(5, 2)", "returns a Tensor, not two splits: give training and test data"),
        ("data(self)", "return super().data()[0]", "returns two tensors of 500 rows, which are examples and targets"),
        ("data(self)", "return iter([1]), [1]", "returns a list_iterator as training data, which cannot be indexed"),
        ("data(self)", "return (torch.zeros(9), torch.zeros(8)), []", "returns training data whose tensors have 9, 8"),
        ("data(self)", "return super().data()[0], []", "returns no test data"),
        ("model(self)", "return torch.relu", "returns a builtin_function_or_method: give a torch.nn.Module"),
        ("model(self)", "return torch.nn.ReLU()", "returns a network without trainable parameters"),
        (f"loss({BATCH})", "return model(batch[0]).sum(1)", "returns a tensor of shape (32,): give the mean over"),
        (f"loss({BATCH})", "return super().loss(model, batch).item()", "returns a float: give the mean over the batch"),
        (f"loss({BATCH})", "return super().loss(model, batch).detach()", "returns a loss without gradient"),
        (f"loss({BATCH})", "return super().loss(model, batch) * torch.nan", "returns nan for the first batch"),
        (f"evaluate({BATCH})", "return {'loss': batch[0].mean()}", "does not return 'accuracy': it returns loss"),
        (f"evaluate({BATCH})", "return batch[0].mean()", "returns a Tensor: give a dictionary of loss and accuracy"),
        (f"evaluate({BATCH})", "return {'loss': 1.0, 'accuracy': 1.0}", "returns a float as 'loss': give a scalar"),
        (
            f"evaluate({BATCH})",
            "return dict(loss=torch.tensor(torch.nan), accuracy=batch[0][0, 0])",
            "returns a loss of nan",
        ),
    ],
)
def test_what_a_run_cannot_use(task, method, body, wrong):
    name = method.partition("(")[0]
    with pytest.raises(TaskError, match=rf"^Mine\.{name} \(mistake_\w+\.py, line 5\) {re.escape(wrong)}"):
        check(task(method, body))


def test_a_metric_that_there_is_not(task):
    with pytest.raises(
        TaskError, match=r"cannot tell the metric 'f1': set it to one of accuracy, perplexity, or leave"
    ):
        check(task("__init__(self)", "self.metric = 'f1'; super().__init__()"))


def test_an_exception_is_told_with_the_line_that_raised_it(task):
    with pytest.raises(
        TaskError, match=r"^Mine\.loss fails: KeyError: 'x' \(mistake_\w+\.py, line 6: return \{\}\['x'\]\)$"
    ):
        check(task(f"loss({BATCH})", "return {}['x']"))
    with pytest.raises(TaskError, match=r"^Mine cannot be trained: .*modified by an inplace operation"):
        check(task(f"loss({BATCH})", "y = model(batch[0]).exp(); z = y.sum(); y.zero_(); return z"))


def test_a_file_that_cannot_be_imported_is_told_with_its_line(task):
    with pytest.raises(
        ValueError, match=r"cannot be imported: \n.*line 6\n.*return \((.|\n)*SyntaxError: '\(' was never"
    ):
        check(task("loss(self)", "return ("))
    with pytest.raises(
        ValueError, match=r"cannot be imported: \n(.|\n)*line 7, in Mine\n(.|\n)*NameError: name 'nothing'"
    ):
        check(task("loss(self)", "pass\n    x = nothing"))


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["tasks:Blobs", "tasks:Rows", "fmnist-fc"])
def test_a_task_that_is_right_passes(workload, data_root):
    check(trimmed(Specification(workload, "cprop-adam", lr=0.1, examples=1)))


def test_it_is_tried_once_and_only_for_runs_that_are_to_be_run(tmp_path, monkeypatch):
    tried = []

    def noted(small, device):
        tried.append(small)
        check(small, device)

    monkeypatch.setattr("cprop_lab.engine.engine.check", noted)
    one = Specification("tasks:Blobs", "sgd", lr=0.1, iterations=2)
    engine = Engine(Store(tmp_path), executor="process")
    engine.run([one, one.replace(seed=1), one.replace(optimizer="adam")])
    engine.run([one, one.replace(seed=2)])
    assert tried == [trimmed(one)]
    Engine(Store(tmp_path), executor="process").run([one])
    assert len(tried) == 1
    engine.run([one.replace(batch_size=16)])
    assert len(tried) == 2


def test_a_run_that_fails_later_shows_its_own_lines_alone(tmp_path):
    failing = Specification("tasks:Failing", "sgd", lr=0.1, iterations=20)
    engine = Engine(Store(tmp_path), executor="process")
    with pytest.raises(RunsFailedError) as error:
        engine.run([failing])
    lines = str(error.value).splitlines()
    assert lines[0] == "1 of 1 runs failed; the first, tasks:Failing with sgd: "
    assert re.fullmatch(r'  File ".*tasks.py", line \d+, in before_step', lines[1])
    assert lines[-1] == "IndexError: too far"
    assert len(lines) <= 5
