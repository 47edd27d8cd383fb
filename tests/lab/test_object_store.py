"""A store in an object store: pyarrow's real client, and a small server of our own, as no real one can run here.

The server keeps objects in memory and writes down what it is asked. It refuses requests that the store should not make,
such as uploads in parts.
"""

import io
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlparse

import pytest
from test_results import ROWS, RUN

from cprop_lab.run.identity import run_id
from cprop_lab.store import Store


class S3(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, code, body=b"", **headers):
        self.send_response(code)
        for name, value in {"ETag": '"0"', "Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_any(self):
        address = urlparse(self.path)
        key, asked = unquote(address.path).removeprefix("/bucket/"), parse_qs(address.query, keep_blank_values=True)
        chunked = self.headers.get("Transfer-Encoding") == "chunked"
        body = unframed(self.rfile) if chunked else self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if chunked:
            self.rfile.readline()
        objects, lock = self.server.objects, self.server.lock
        with lock:
            self.server.asked.append((self.command, key))
            if self.command == "GET" and "list-type" in asked:
                prefix = asked["prefix"][0]
                found = [name for name in sorted(objects) if re.fullmatch(re.escape(prefix) + "[^/]+", name)]
                rows = "".join(
                    f"<Contents><Key>{name}</Key><Size>{len(objects[name])}</Size>"
                    "<LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents>"
                    for name in found
                )
                count = f"<KeyCount>{len(found)}</KeyCount><IsTruncated>false</IsTruncated>"
                self.answer(200, f"<ListBucketResult>{rows}{count}</ListBucketResult>".encode())
            elif self.command in ("GET", "HEAD"):
                if key not in objects:
                    self.answer(404)
                    return
                whole = objects[key]
                if part := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                    first, last = int(part[1]), min(int(part[2]), len(whole) - 1)
                    about = {"Content_Range": f"bytes {first}-{last}/{len(whole)}"}
                    self.answer(206, whole[first : last + 1], **about)
                else:
                    self.answer(200, whole)
            elif self.command == "PUT" and not asked:
                objects[key] = unframed(io.BytesIO(body)) if "aws-chunked" in str(self.headers) else body
                self.answer(200)
            elif self.command == "DELETE":
                objects.pop(key, None)
                self.answer(204)
            else:
                self.answer(400)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815

    def log_message(self, *args):
        pass


def unframed(stream):
    """What comes in frames, each with its length before it: HTTP's chunks, and those of the SDK inside them."""
    whole = b""
    while length := int(stream.readline().split(b";")[0], 16):
        whole += stream.read(length)
        stream.readline()
    return whole


@contextmanager
def serving():
    server = ThreadingHTTPServer(("127.0.0.1", 0), S3)
    server.objects, server.asked, server.lock = {}, [], threading.Lock()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def server(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.setenv(name, "true")
    with serving() as one:
        yield one


def test_a_run_is_one_request_and_is_found_by_one_lookup(server):
    address = f"s3://bucket/cprop?endpoint_override=127.0.0.1:{server.server_port}&scheme=http"
    Store(address).write(RUN, "finished", ROWS, {})
    # Neither folders, nor copies, nor parts: a PUT is atomic.
    assert [asked for asked in server.asked if "checkpoints" not in asked[1]] == [
        ("PUT", f"cprop/runs/{run_id(RUN)}.arrow")
    ]
    server.asked.clear()
    assert Store(address).find(run_id(RUN)).status == "finished"
    assert Store(address).find("0123456789abcdef") is None
    assert not [key for _, key in server.asked if not key.endswith(".arrow")]  # nothing was listed


def test_a_packed_experiment_is_read_as_before(server):
    store = Store(f"s3://bucket/cprop?endpoint_override=127.0.0.1:{server.server_port}&scheme=http")
    runs = [RUN.replace(seed=seed) for seed in range(40)]
    for run in runs:
        store.write(run, "finished", ROWS, {})
    names = [run_id(run) for run in runs]
    store.write_experiment("one-smoke", {"runs": names})
    assert [run.run_id for run in store.runs(names)] == names
    assert store.pack() == {"one-smoke": 40}
    assert set(server.objects) - {"cprop/runs/", "cprop/experiments/"} == {"cprop/experiments/one-smoke.parquet"}
    assert [run.run_id for run in Store(store.address).runs(names)] == names
