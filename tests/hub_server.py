"""A Hub on the loopback interface: the part of its HTTP API that pushing and loading a model goes through."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

TOKEN = "hf_of_the_tester"
USER = "tester"


@dataclass
class Repository:
    """
    Args:
        commits: for every commit id the files at that commit: path to sha256 of the content, or `lfs:sha256`.
        branches: the commit id that each branch is at.
    """

    private: bool
    commits: dict[str, dict[str, str]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, str]) -> str:
        oid = hashlib.sha1(f"{len(self.commits)}{sorted(files.items())}".encode()).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        return oid

    def resolve(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)


class HubServer(ThreadingHTTPServer):
    """
    Serves `http://127.0.0.1:PORT`; contents lie in `folder`, named by their sha256.

    Args:
        requests: every request so far, as `METHOD path`.
        fail: requests of this beginning are answered with 507, which the client takes for final.
    """

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.fail: str | None = None

    def store(self, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        (self.folder / digest).write_bytes(content)
        return digest

    def content(self, entry: str) -> bytes:
        return (self.folder / entry.removeprefix("lfs:")).read_bytes()

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """What a repository holds."""
        repository = self.repositories[repo_id]
        return {path: self.content(entry) for path, entry in repository.commits[repository.resolve(revision)].items()}


class Refusal(Exception):
    def __init__(self, status: int, code: str | None = None, message: str | None = None):
        self.status, self.code, self.message = status, code, message


class Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    ROUTES = (
        ("POST", r"/api/repos/create", "create"),
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/validate-yaml", "validate_yaml"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<revision>[^/]+))?", "info"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?", "tree"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<branch>[^/]+)", "branch"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)", "preupload"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)", "commit"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "lfs_batch"),
        ("PUT", r"/lfs/(?P<digest>\w{64})", "lfs_put"),
        ("GET", r"/lfs/(?P<digest>\w{64})", "lfs_get"),
        ("POST", r"/lfs/verify", "lfs_verify"),
        ("GET", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "file"),
    )

    def handle_request(self) -> None:
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.body = self.read_body()
        self.server.requests.append(f"{self.command} {url.path}")
        method = "GET" if self.command == "HEAD" else self.command
        try:
            if self.server.fail and f"{self.command} {url.path}".startswith(self.server.fail):
                raise Refusal(507, message="out of order")
            for verb, pattern, name in self.ROUTES:
                if verb == method and (match := re.fullmatch(pattern, url.path)):
                    found = {key: value and unquote(value) for key, value in match.groupdict().items()}
                    return getattr(self, name)(**found)
            raise Refusal(404, message=f"no such route: {self.command} {url.path}")
        except Refusal as refusal:
            self.refuse(refusal)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def read_body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def answer(self, content: bytes | dict | list, status: int = 200, **headers: str) -> None:
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
            headers["Content-Type"] = "application/json"
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, refusal: Refusal) -> None:
        headers = {"X_Error_Code": refusal.code, "X_Error_Message": refusal.message}
        self.answer(
            {"error": refusal.message or refusal.code},
            refusal.status,
            **{name: value for name, value in headers.items() if value},
        )

    def log_message(self, *arguments) -> None:
        pass

    # Who asks, and for what

    @property
    def is_user(self) -> bool:
        token = self.headers.get("Authorization")
        if token not in (None, f"Bearer {TOKEN}"):
            raise Refusal(401, message="Invalid credentials in Authorization header")
        return token is not None

    def require_user(self) -> None:
        if not self.is_user:
            raise Refusal(401, message="Invalid username or password.")

    def repository(self, repo_id: str) -> Repository:
        is_user = self.is_user
        found = self.server.repositories.get(repo_id)
        if found is None or (found.private and not is_user):
            raise Refusal(404 if is_user else 401, "RepoNotFound", "Repository not found")
        return found

    def files(self, repo_id: str, revision: str) -> tuple[str, dict[str, str]]:
        repository = self.repository(repo_id)
        oid = repository.resolve(revision)
        if oid is None:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return oid, repository.commits[oid]

    # Routes

    def whoami(self) -> None:
        self.require_user()
        self.answer({"type": "user", "name": USER, "orgs": []})

    def create(self) -> None:
        self.require_user()
        wanted = json.loads(self.body)
        repo_id = f"{wanted.get('organization') or USER}/{wanted['name']}"
        answer = {"url": f"{self.server.url}/{repo_id}", "name": repo_id}
        if not repo_id.startswith(f"{USER}/"):
            raise Refusal(403, message=f"You don't have the rights to create a model under the namespace of {repo_id}")
        if repo_id in self.server.repositories:
            return self.answer({"error": "You already created this model repo", **answer}, 409)
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        self.server.repositories[repo_id] = Repository(private)
        self.server.repositories[repo_id].commit("main", {".gitattributes": self.server.store(b"*.safetensors lfs\n")})
        self.answer(answer)

    def validate_yaml(self) -> None:
        """The checks of the real one that a card of ours could fail."""
        content = json.loads(self.body)["content"]
        errors = []
        match = re.match(r"---\n(.*?)\n---\n", content, flags=re.DOTALL)
        metadata = yaml.safe_load(match[1]) if match else {}
        for model in metadata.get("model-index", []):
            if not model.get("name"):
                errors.append({"message": '"model-index[0].name" is required'})
            for result in model["results"]:
                if not (result["task"].get("type") and result["dataset"].get("type") and result["metrics"]):
                    errors.append({"message": '"model-index[0].results" is incomplete'})
        self.answer({"errors": errors, "warnings": []}, 400 if errors else 200)

    def info(self, repo: str, revision: str | None) -> None:
        oid, files = self.files(repo, revision or "main")
        self.answer(
            {
                "id": repo,
                "sha": oid,
                "private": self.repository(repo).private,
                "siblings": [{"rfilename": path} for path in files],
            }
        )

    def tree(self, repo: str, revision: str, path: str | None) -> None:
        _, files = self.files(repo, revision)
        found = {name: entry for name, entry in files.items() if name.startswith(f"{path}/" if path else "")}
        if path and not found:
            raise Refusal(404, "EntryNotFound", f"{path} does not exist")
        self.answer([self.tree_entry(name, entry) for name, entry in found.items()])

    def tree_entry(self, path: str, entry: str) -> dict:
        size = len(self.server.content(entry))
        found = {"type": "file", "path": path, "size": size, "oid": self.git_oid(entry)}
        if entry.startswith("lfs:"):
            found["lfs"] = {"oid": entry.removeprefix("lfs:"), "size": size, "pointerSize": 134}
        return found

    def git_oid(self, entry: str) -> str:
        content = self.server.content(entry)
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def branch(self, repo: str, branch: str) -> None:
        self.require_user()
        repository = self.repository(repo)
        if branch in repository.branches:
            raise Refusal(409, message=f"Reference already exists: {branch}")
        repository.branches[branch] = repository.branches["main"]
        self.answer({})

    def preupload(self, repo: str, revision: str) -> None:
        self.require_user()
        _, files = self.files(repo, revision)
        self.answer(
            {
                "files": [
                    {
                        "path": wanted["path"],
                        "uploadMode": "lfs" if wanted["path"].endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                        "oid": self.oid(files.get(wanted["path"])),
                    }
                    for wanted in json.loads(self.body)["files"]
                ]
            }
        )

    def oid(self, entry: str | None) -> str | None:
        if entry is None or not entry.startswith("lfs:"):
            return entry and self.git_oid(entry)
        return entry.removeprefix("lfs:")

    def lfs_batch(self, repo: str) -> None:
        self.require_user()
        self.repository(repo)
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            found = {"oid": wanted["oid"], "size": wanted["size"]}
            if not (self.server.folder / wanted["oid"]).exists():
                found["actions"] = {
                    "upload": {"href": f"{self.server.url}/lfs/{wanted['oid']}"},
                    "verify": {"href": f"{self.server.url}/lfs/verify"},
                }
            objects.append(found)
        self.answer({"transfer": "basic", "objects": objects})

    def lfs_put(self, digest: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != digest:
            raise Refusal(400, message="the content is not what its name says")
        self.server.store(self.body)
        self.answer(b"")

    def lfs_verify(self) -> None:
        self.require_user()
        wanted = json.loads(self.body)
        file = self.server.folder / wanted["oid"]
        if not file.exists() or file.stat().st_size != wanted["size"]:
            raise Refusal(404, message="not uploaded")
        self.answer({})

    def lfs_get(self, digest: str) -> None:
        self.answer((self.server.folder / digest).read_bytes(), ETag=f'"{digest}"')

    def commit(self, repo: str, revision: str) -> None:
        self.require_user()
        repository = self.repository(repo)
        _, files = self.files(repo, revision)
        files = dict(files)
        for line in self.body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = self.server.store(base64.b64decode(value["content"]))
            elif operation["key"] == "lfsFile":
                if not (self.server.folder / value["oid"]).exists():
                    raise Refusal(400, message=f"{value['path']} has not been uploaded")
                files[value["path"]] = f"lfs:{value['oid']}"
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        is_pull_request = self.query.get("create_pr") == ["1"]
        branch = "refs/pr/1" if is_pull_request else revision
        oid = repository.commit(branch, files)
        pull_request = f"{self.server.url}/{repo}/discussions/1" if is_pull_request else None
        self.answer(
            {
                "success": True,
                "commitOid": oid,
                "commitUrl": f"{self.server.url}/{repo}/commit/{oid}",
                "pullRequestUrl": pull_request,
            }
        )

    def file(self, repo: str, revision: str, path: str) -> None:
        oid, files = self.files(repo, revision)
        if path not in files:
            raise Refusal(404, "EntryNotFound", f"{path} does not exist")
        entry = files[path]
        headers = {"X_Repo_Commit": oid, "ETag": f'"{self.oid(entry)}"'}
        if not entry.startswith("lfs:"):
            return self.answer(self.server.content(entry), **headers)
        self.answer(
            b"",
            302,
            **headers,
            X_Linked_Etag=f'"{entry.removeprefix("lfs:")}"',
            X_Linked_Size=str(len(self.server.content(entry))),
            # As on the Hub, large files come from another host, to which the client does not follow with a HEAD.
            Location=f"http://localhost:{self.server.server_port}/lfs/{entry.removeprefix('lfs:')}",
        )


@contextmanager
def hub_server(folder: Path) -> Iterator[HubServer]:
    server = HubServer(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
