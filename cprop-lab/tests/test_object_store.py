"""A store in an object store: pyarrow's client, and moto's server on the loopback interface in place of Amazon's."""

import os
import subprocess
import sys
import threading
from typing import NamedTuple

import pytest
from conftest import PYTHONPATH
from pyarrow import fs
from test_results import ROWS, RUN

from cprop_lab.run.identity import run_id
from cprop_lab.store import Store

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


class Served(NamedTuple):
    """A folder in the object store, and the requests for it so far."""

    address: str
    requests: list[tuple[str, str]]


@pytest.fixture
def served(monkeypatch, tmp_path):
    pytest.importorskip("moto", reason="needs moto: pip install './cprop-lab[nightly]'")
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.setenv(name, "true")
    s3 = DomainDispatcherApplication(create_backend_app)
    requests, folder = [], tmp_path.name

    def application(environ, start_response):
        requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"].removeprefix(f"/bucket/{folder}/")))
        return s3(environ, start_response)

    server = make_server("127.0.0.1", 0, application, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    subprocess.run([sys.executable, "-c", BUCKET, str(server.port)], check=True)
    yield Served(f"s3://bucket/{folder}?endpoint_override=127.0.0.1:{server.port}&scheme=http", requests)
    server.shutdown()
    thread.join()
    server.server_close()


# In a process of its own: boto3 and pyarrow each bring an SDK that reads the environment once.
BUCKET = """
import sys
import boto3

address = f"http://127.0.0.1:{sys.argv[1]}"
boto3.client("s3", endpoint_url=address, region_name="us-east-1").create_bucket(Bucket="bucket")
"""


def test_a_run_is_one_request_and_is_found_by_one_lookup(served):
    store = Store(served.address)
    served.requests.clear()
    store.write(RUN, "finished", ROWS, {})
    # Neither folders, nor copies, nor parts: a PUT is atomic.
    assert [one for one in served.requests if "checkpoints" not in one[1]] == [("PUT", f"runs/{run_id(RUN)}.arrow")]
    served.requests.clear()
    assert Store(store.address).find(run_id(RUN)).status == "finished"
    assert Store(store.address).find("0123456789abcdef") is None
    assert not [key for _, key in served.requests if not key.endswith(".arrow")]  # nothing was listed


def test_a_packed_experiment_is_read_as_before(served):
    store = Store(served.address)
    runs = [RUN.replace(seed=seed) for seed in range(40)]
    for run in runs:
        store.write(run, "finished", ROWS, {})
    names = [run_id(run) for run in runs]
    store.write_experiment("one-smoke", {"runs": names})
    assert [run.run_id for run in store.runs(names)] == names
    assert store.pack() == {"one-smoke": 40}
    assert Store(store.address).finished() == set(names)
    served.requests.clear()
    assert [run.run_id for run in Store(store.address).runs(names)] == names
    assert len(served.requests) < 40  # one file is read, and not forty
    files, root = fs.FileSystem.from_uri(served.address)
    kept = [one.path for one in files.get_file_info(fs.FileSelector(root, recursive=True)) if one.is_file]
    assert kept == [f"{root}/experiments/one-smoke.parquet"]


def test_commands_work_as_in_a_folder(served, tmp_path, generated):
    def lab(*words):
        environment = {**os.environ, "CPROP_LAB_DATA": str(generated), "PYTHONPATH": PYTHONPATH, "COLUMNS": "160"}
        command = [sys.executable, "-m", "cprop_lab", *words, "--storage", served.address]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run = ("run", "fmnist-fc", "--optimizers", "sgd", "--seeds", "1")
    lab(*run)
    assert "2 of 2 runs are already finished" in lab(*run)
    lab("pack")
    assert "2 of 2 runs are already finished" in lab(*run)
    lab("report")
    assert (tmp_path / "report.html").stat().st_size > 10_000
