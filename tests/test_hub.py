"""Models from the hub, for real: a server on the loopback speaks the hub's protocol.

What huggingface_hub asks for is answered: the revision's commit, the tree of its files,
HEAD and GET of a file, with ranges. The engine runs in a subprocess whose HF_ENDPOINT
is that server; it is started once and told by lines of JSON which model to load,
because its imports take longer than everything else.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]
REPO = "somebody/some-model"


class Hub(ThreadingHTTPServer):
    """One repository with several revisions: name -> {path: content}.

    `cut` is how many bytes of a file go out before the connection breaks, once per
    entry.
    """

    daemon_threads = True

    def __init__(self, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.revisions = {}
        self.cut = {}
        self.log = []  # (method, path, range)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def commit(self, revision):
        """The revision's commit, a hash of its name and files; None if there is no such
        one.
        """
        names = {
            revision,
            *(name for name in self.revisions if self.sha(name) == revision),
        }
        found = [name for name in names if name in self.revisions]
        return (found[0], self.sha(found[0])) if found else (None, None)

    def sha(self, name):
        files = self.revisions[name]
        digest = hashlib.sha1(name.encode())
        for path in sorted(files):
            digest.update(path.encode() + hashlib.sha1(files[path]).digest())
        return digest.hexdigest()

    def stop(self):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        path = unquote(urlsplit(self.path).path)
        self.server.log.append((self.command, path, self.headers.get("Range")))
        api = re.fullmatch(rf"/api/models/{REPO}/(revision|tree)/([^/]+)(/.*)?", path)
        file = re.fullmatch(rf"/{REPO}/resolve/([^/]+)/(.+)", path)
        if path == f"/api/models/{REPO}":
            return self.revision("main")
        if api:
            return getattr(self, api[1])(api[2])
        if file:
            return self.file(file[1], file[2])
        return self.error("RepoNotFound", "Repository not found")

    def reply(self, status, body, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def json(self, value):
        self.reply(200, json.dumps(value).encode(), Content_Type="application/json")

    def error(self, code, text):
        self.reply(
            404,
            b'{"error": "%s"}' % text.encode(),
            X_Error_Code=code,
            X_Error_Message=text,
        )

    def revision(self, revision):
        name, sha = self.server.commit(revision)
        if sha is None:
            return self.error("RevisionNotFound", f"Invalid rev id: {revision}")
        siblings = [{"rfilename": path} for path in self.server.revisions[name]]
        return self.json({"_id": "1", "id": REPO, "sha": sha, "siblings": siblings})

    def tree(self, revision):
        name, sha = self.server.commit(revision)
        if sha is None:
            return self.error("RevisionNotFound", f"Invalid rev id: {revision}")
        files = self.server.revisions[name].items()
        return self.json(
            [
                {
                    "type": "file",
                    "path": path,
                    "size": len(content),
                    "oid": etag(content),
                }
                for path, content in files
            ]
        )

    def file(self, revision, path):
        name, sha = self.server.commit(revision)
        if sha is None:
            return self.error("RevisionNotFound", f"Invalid rev id: {revision}")
        content = self.server.revisions[name].get(path)
        if content is None:
            return self.error("EntryNotFound", f"Entry not found: {path}")
        headers = {
            "ETag": f'"{etag(content)}"',
            "X_Repo_Commit": sha,
            "Accept_Ranges": "bytes",
        }
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if span:
            start, end = int(span[1]), int(span[2] or len(content) - 1)
            headers["Content_Range"] = f"bytes {start}-{end}/{len(content)}"
            content = content[start : end + 1]
        if self.command == "GET" and self.server.cut.get(path):
            return self.break_off(content, self.server.cut[path].pop(0), headers)
        return self.reply(206 if span else 200, content, **headers)

    def break_off(self, content, count, headers):
        """Promise everything, send the first bytes, and hang up."""
        self.send_response(206 if "Content_Range" in headers else 200)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[:count])
        self.wfile.flush()
        self.close_connection = True


def etag(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


CLIENT = """
import json, sys
import huggingface_hub.constants
from nanopaged import LLM, SamplingParams

# A file is written in pieces of this size. What is written need not be fetched again.
huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 4096

def load(options):
    options = {"dtype": "float32", "device": "cpu", "num_blocks": 32, **options}
    with LLM(**options) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        output = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0]
        return {"tokens": list(output.token_ids), "text": output.text}

replies, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    try:
        reply = load(json.loads(line))
    except Exception as error:
        reply = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(reply), file=replies, flush=True)
"""


class Client:
    """An engine in a process of its own, with its own cache."""

    def __init__(self, endpoint, home, **environment):
        settings = {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DOWNLOAD_TIMEOUT": "5",
            "HF_HUB_ETAG_TIMEOUT": "5",
            "PYTHONPATH": str(ROOT),
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        inherited = {
            k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=inherited | settings | environment,
        )

    def load(self, model=REPO, **options):
        self.process.stdin.write(json.dumps({"model": model, **options}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the client has died"
        return json.loads(line)

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def files(text_model, make_model, tokenizer):
    """Two revisions of a model with different weights, and what each says."""
    other = make_model("llama", seed=99, vocab_size=len(tokenizer))

    def content(path):
        return {file.name: file.read_bytes() for file in path.iterdir()}

    main = content(text_model) | {
        "README.md": b"# some model",
        "pytorch_model.bin": b"nobody asks for this",
        "original/consolidated.pth": b"nor for this",
    }
    return {
        "main": main,
        "v1": main | {"model.safetensors": content(other)["model.safetensors"]},
    }


@pytest.fixture(scope="module")
def said(files, text_model, tmp_path_factory):
    """The tokens that each revision brings from a directory."""
    from nanopaged import LLM, SamplingParams

    said = {}
    for name, revision in files.items():
        path = tmp_path_factory.mktemp(name)
        for file, content in revision.items():
            if "/" not in file:
                (path / file).write_bytes(content)
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        with LLM(str(path), dtype="float32", device="cpu", num_blocks=32) as llm:
            output = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0]
            said[name] = list(output.token_ids)
    assert said["main"] != said["v1"]
    return said


@pytest.fixture(scope="module")
def hub_and_client(files, tmp_path_factory):
    hub = Hub()
    client = Client(hub.url, tmp_path_factory.mktemp("home"))
    yield hub, client
    client.close()
    hub.stop()


@pytest.fixture
def online(hub_and_client, files):
    """The hub with all its revisions, whole connections and an empty log; the client.
    """
    hub, client = hub_and_client
    hub.revisions = {name: dict(revision) for name, revision in files.items()}
    hub.cut = {}
    hub.log.clear()
    return hub, client


@contextmanager
def away(hub):
    """The network is gone: nobody listens at the hub's address."""
    port = hub.server_port
    hub.stop()
    try:
        yield
    finally:
        hub.__init__(port)


def fetched(hub):
    return {
        path.split("/resolve/")[1].split("/", 1)[1]
        for method, path, _ in hub.log
        if method == "GET" and "/resolve/" in path
    }


def test_a_model_is_downloaded_and_served(online, said):
    """With what it needs and nothing else."""
    hub, client = online
    assert client.load() == {"tokens": said["main"], "text": client.load()["text"]}
    names = fetched(hub)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not names & {"README.md", "pytorch_model.bin", "original/consolidated.pth"}


def test_with_a_filled_cache_there_is_nothing_to_download(online, said):
    hub, client = online
    client.load()
    hub.log.clear()
    assert client.load()["tokens"] == said["main"]
    assert not fetched(hub)


def test_a_revision_is_a_branch_a_tag_or_a_commit(online, said):
    hub, client = online
    assert client.load(revision="v1").get("tokens") == said["v1"]
    assert client.load(revision="main").get("tokens") == said["main"]
    assert client.load(revision=hub.sha("v1")).get("tokens") == said["v1"]
    reply = client.load(revision="v9")
    assert reply.get("error") == "ValueError", reply
    assert "v9" in reply["message"] and REPO in reply["message"]


def test_download_dir_is_where_the_files_go(online, said, tmp_path):
    hub, client = online
    assert client.load(download_dir=str(tmp_path)).get("tokens") == said["main"]
    assert list(tmp_path.rglob("model.safetensors"))
    assert "model.safetensors" in fetched(hub), "another cache has to be filled anew"


def test_a_download_goes_on_where_it_was_cut(online, files, said, tmp_path):
    """By a request for the rest of the file, and the whole is right."""
    hub, client = online
    hub.cut = {"model.safetensors": [len(files["main"]["model.safetensors"]) // 3]}
    assert client.load(download_dir=str(tmp_path)).get("tokens") == said["main"]
    ranges = [
        span
        for method, path, span in hub.log
        if method == "GET" and path.endswith("/model.safetensors")
    ]
    assert len(ranges) == 2 and ranges[0] in (None, "bytes=0-")
    assert re.fullmatch(r"bytes=[1-9]\d*-\d*", ranges[1]), ranges


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_file_that_is_missing_is_named(missing, online, files):
    hub, client = online
    name = f"without-{missing}"
    hub.revisions[name] = {k: v for k, v in files["main"].items() if k != missing}
    reply = client.load(revision=name)
    assert reply.get("error") in ("ValueError", "FileNotFoundError"), reply
    assert missing in reply["message"]


def test_a_model_without_tokenizer_serves_token_ids(online, files, said):
    hub, client = online
    hub.revisions["bare"] = {k: v for k, v in files["main"].items() if "token" not in k}
    assert client.load(revision="bare") == {"tokens": said["main"], "text": ""}


def test_a_repository_that_is_not_there_is_named(online):
    _, client = online
    reply = client.load("nobody/no-such-model")
    assert reply["error"] == "ValueError"
    assert "nobody/no-such-model" in reply["message"]
    assert len(reply["message"]) < 1000


def test_without_network_the_cache_serves(online, said):
    """And what is not in there is refused by name."""
    hub, client = online
    assert client.load()["tokens"] == said["main"]
    with away(hub):
        assert client.load()["tokens"] == said["main"]
        reply = client.load(revision="never-seen")
        assert reply["error"] == "ValueError", reply
        assert REPO in reply["message"]


@pytest.mark.slow
def test_after_a_download_that_failed_altogether_the_next_one_works(
    online, files, said, tmp_path
):
    """The server dies in the middle. What was left of the file does no harm."""
    hub, client = online
    whole = len(files["main"]["model.safetensors"])
    hub.cut = {"model.safetensors": [whole // 2] + [0] * 20}
    reply = client.load(download_dir=str(tmp_path))
    assert reply.get("error") == "ValueError", reply
    assert REPO in reply["message"]

    hub.cut = {}
    assert client.load(download_dir=str(tmp_path)).get("tokens") == said["main"]
