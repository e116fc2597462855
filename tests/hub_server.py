"""A stand-in for the hub's HTTP interface on 127.0.0.1: the few calls that huggingface_hub makes to upload and download.

Repositories, branches and commits live in memory. Small text files travel inside the commit, safetensors through the large
file protocol, as on the real hub. Every request is recorded.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants, hf_api
from transformers.utils import hub as transformers_hub

TOKEN = "hf_onlyForTheseTests"


class Hub:
    """A running stand-in; `close` ends it.

    Attributes:
        url: for HF_ENDPOINT.
        commits: {repository: {commit: {path: bytes}}}.
        refs: {repository: {branch: commit}}.
        private: repositories that need the token.
        requests: "METHOD path" of everything asked.
        refuse: {"METHOD path prefix": status} to answer with an error.
    """

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self.refs: dict[str, dict[str, str]] = {}
        self.private: set[str] = set()
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.bodies: list[tuple[str, bytes]] = []
        self.refuse: dict[str, int] = {}
        self.messages: list[str] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def create(self, repository: str, private: bool = False) -> bool:
        if repository in self.commits:
            return False
        first = hashlib.sha1(repository.encode()).hexdigest()
        self.commits[repository] = {first: {".gitattributes": b"*.safetensors filter=lfs\n"}}
        self.refs[repository] = {"main": first}
        self.private |= {repository} if private else set()
        return True

    def files(self, repository: str, revision: str = "main") -> dict[str, bytes]:
        return self.commits[repository][self.commit(repository, revision) or ""]

    def commit(self, repository: str, revision: str) -> str | None:
        found = self.refs.get(repository, {}).get(revision, revision)
        return found if found in self.commits.get(repository, {}) else None


def blob_id(data: bytes) -> str:
    """git's name of a blob."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def large(name: str) -> bool:
    """Whether a file travels through the large file protocol."""
    return name.endswith(".safetensors")


def oid(name: str, files: dict[str, bytes]) -> str | None:
    """What the hub calls the content of a file; None where it has none of that name."""
    if name not in files:
        return None
    return hashlib.sha256(files[name]).hexdigest() if large(name) else blob_id(files[name])


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, value: object = None, headers: dict[str, str] | None = None) -> None:
        body = value if isinstance(value, bytes) else b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def missing(self, code: str, status: int = 404) -> None:
        self.answer(status, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})

    def handle_any(self) -> None:
        path = urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        line = f"{self.command} {path}"
        self.hub.requests.append(line)
        self.hub.bodies.append((line, body))
        for prefix, status in self.hub.refuse.items():
            if line.startswith(prefix):
                return self.answer(status, {"error": "refused"})
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if self.command not in ("GET", "HEAD") and not known and parts[0] != "lfs":
            return self.answer(401, {"error": "Invalid credentials"})
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if parts[0] == "lfs":
            self.hub.blobs[parts[1]] = body
            return self.answer(200)
        if path.endswith(".git/info/lfs/objects/batch"):
            return self.batch(json.loads(body))
        repository, rest = ("/".join(parts[2:4]), parts[4:]) if parts[0] == "api" else ("/".join(parts[:2]), parts[2:])
        if repository not in self.hub.commits or (repository in self.hub.private and not known):
            return self.missing("RepoNotFound", 401 if not known else 404)
        rest = rest or ["revision", "main"]
        if rest[0] == "branch":
            return self.branch(repository, rest[1])
        commit = self.hub.commit(repository, rest[1])
        if commit is None:
            return self.missing("RevisionNotFound")
        files = self.hub.commits[repository][commit]
        if rest[0] == "revision":
            more = {
                "siblings": [{"rfilename": name} for name in files],
                "tags": [],
                "private": repository in self.hub.private,
            }
            return self.answer(200, {"id": repository, "sha": commit, **more})
        if rest[0] == "tree":
            return self.answer(200, [self.entry(name, data) for name, data in sorted(files.items())])
        if rest[0] == "preupload":
            modes = [
                {
                    "path": name,
                    "uploadMode": "lfs" if large(name) else "regular",
                    "shouldIgnore": False,
                    "oid": oid(name, files),
                }
                for name in (file["path"] for file in json.loads(body)["files"])
            ]
            return self.answer(200, {"files": modes})
        if rest[0] == "commit":
            return self.write(repository, rest[1], commit, body)
        if rest[0] == "resolve":
            return self.resolve(commit, files, "/".join(rest[2:]))
        return self.answer(404, {"error": f"not stood in for: {line}"})

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def entry(self, name: str, data: bytes) -> dict:
        found: dict = {"type": "file", "path": name, "size": len(data), "oid": blob_id(data)}
        stored = {"oid": oid(name, {name: data}), "size": len(data), "pointerSize": 130}
        return {**found, "lfs": stored} if large(name) else found

    def create(self, asked: dict) -> None:
        repository = f"{asked['organization'] or 'someone'}/{asked['name']}"
        made = self.hub.create(repository, asked.get("visibility") == "private" or bool(asked.get("private")))
        self.answer(200 if made else 409, {"url": f"{self.hub.url}/{repository}", "error": "exists"})

    def branch(self, repository: str, name: str) -> None:
        if name in self.hub.refs[repository]:
            return self.answer(409, {"error": "exists"})
        self.hub.refs[repository][name] = self.hub.refs[repository]["main"]
        return self.answer(200, {})

    def batch(self, asked: dict) -> None:
        objects = []
        for wanted in asked["objects"]:
            found = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.blobs:
                found["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}", "header": {}}}
            objects.append(found)
        self.answer(200, {"transfer": "basic", "objects": objects})

    def write(self, repository: str, branch: str, parent: str, body: bytes) -> None:
        files = dict(self.hub.commits[repository][parent])
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                self.hub.messages.append(value["summary"])
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        commit = hashlib.sha1(body + parent.encode()).hexdigest()
        self.hub.commits[repository][commit] = files
        self.hub.refs[repository][branch] = commit
        url = f"{self.hub.url}/{repository}/commit/{commit}"
        self.answer(200, {"commitUrl": url, "commitOid": commit, "success": True})

    def resolve(self, commit: str, files: dict[str, bytes], name: str) -> None:
        if name not in files:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        etag = f'"{hashlib.sha256(files[name]).hexdigest()}"'
        return self.answer(200, files[name], {"ETag": etag, "X-Repo-Commit": commit})


def turn_to(stand_in: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn huggingface_hub and transformers to the stand-in, as HF_ENDPOINT would at their import, with a cache of its own."""
    for name, value in {
        "ENDPOINT": stand_in.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": stand_in.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_XET": True,
    }.items():
        monkeypatch.setattr(constants, name, value)
    # clients that were made before, for another address
    monkeypatch.setattr(hf_api.api, "endpoint", stand_in.url)
    monkeypatch.setattr(transformers_hub, "_hf_api", None, raising=False)
