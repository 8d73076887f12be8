"""A stand-in of the Hugging Face hub on localhost: it speaks the part of the hub's protocol that uploads take."""

from __future__ import annotations

import base64
import json
from typing import Any

from aiohttp import web

TOKEN = "hf_test"


class Hub:
    """One account's repositories: what was uploaded, by name and path."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.blobs: dict[str, bytes] = {}
        self.messages: list[str] = []

    async def __call__(self, request: Any) -> web.StreamResponse:
        path, body = request.path, await request.read()
        if path.startswith("/blobs/"):
            self.blobs[path.rpartition("/")[2]] = body
            return web.Response()
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": "Invalid username or password."}, status=401)
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization'] or 'me'}/{asked['name']}"
            if asked["organization"] == "others":
                return web.json_response({"error": "You don't have the rights"}, status=403)
            status = 409 if name in self.files else 200
            self.files.setdefault(name, {})
            self.private.setdefault(name, asked.get("visibility") == "private")
            return web.json_response({"url": f"{request.scheme}://{request.host}/{name}"}, status=status)
        if request.method == "GET":
            return web.json_response({"error": "not found"}, status=404, headers={"X-Error-Code": "RepoNotFound"})
        if path == "/api/validate-yaml":
            return web.json_response({"errors": [], "warnings": []})
        if "/preupload/" in path:
            modes = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["path"].endswith((".safetensors", ".png")) else "regular",
                    "shouldIgnore": False,
                }
                for one in json.loads(body)["files"]
            ]
            return web.json_response({"files": modes})
        if path.endswith("/info/lfs/objects/batch"):
            place = f"{request.scheme}://{request.host}/blobs/"
            objects = [
                {**one, "actions": {"upload": {"href": place + one["oid"]}}} for one in json.loads(body)["objects"]
            ]
            return web.json_response({"transfer": "basic", "objects": objects})
        assert "/commit/" in path, path
        files = self.files[path.removeprefix("/api/models/").partition("/commit/")[0]]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                assert line["key"] == "lfsFile"
                files[value["path"]] = self.blobs[value["oid"]]
        return web.json_response(
            {"commitUrl": f"{request.scheme}://{request.host}/me/x/commit/abc", "commitOid": "abc", "hookOutput": ""}
        )
