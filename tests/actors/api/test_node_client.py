"""OpenAI's own Node client against the service, if Node and npm are installed."""

import dataclasses
import json
import os
import shutil
import subprocess

import pytest

from actors.api.catalogue import Catalogue
from tests.actors.api.serving import serve, working
from tests.conftest import ROOT

CLIENT = "openai@7.59.0"  # The newest that was tried.
SCRIPT = """
import OpenAI, { toFile } from "openai";
import fs from "node:fs";

const [, , baseURL, image] = process.argv;
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const asked = { prompt: "a cät", size: "96x64", seconds: "1", seed: 7, priority: "null",
                sigmas: [1, 0.5], loras: [{ name: "style", scale: 0.5 }, { name: "other", scale: 1.5 }] };
const file = await toFile(fs.readFileSync(image), "bäll.png", { type: "image/png" });
let video = await client.videos.create({ ...asked, input_reference: file });
while (!["completed", "failed"].includes(video.status)) video = await client.videos.retrieve(video.id);
const content = Buffer.from(await (await client.videos.downloadContent(video.id)).arrayBuffer());
const url = `data:image/png;base64,${fs.readFileSync(image, "base64")}`;
const other = await client.videos.create({ prompt: "x", input_reference: { image_url: url } });
const error = await client.videos.create({ prompt: "x", size: "100x64" }).catch((error) => error);
const ids = [];
for await (const listed of client.videos.list({ limit: 1 })) ids.push(listed.id);
const remixed = await client.videos.remix(video.id, { prompt: "a dog" });
const deleted = await client.videos.delete(video.id);
console.log(JSON.stringify({ video, mp4: content.toString("base64", 4, 8), other, ids, remixed, deleted,
                             error: { status: error.status, param: error.param } }));
"""


@pytest.mark.long
def test_node_s_client_has_a_video_made(settings, engine, tmp_path):
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("Node is not installed (Debian: apt-get install nodejs npm)")
    install = [npm, "install", CLIENT, "--no-audit", "--no-fund", "--ignore-scripts"]
    try:
        subprocess.run(install, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip(f"npm could not install {CLIENT}")
    (tmp_path / "client.mjs").write_text(SCRIPT)
    offering = dataclasses.replace(settings, catalogue=Catalogue.parse(["style=/a/style.safetensors", "other=/a/x"]))
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    with serve(offering) as address, working(offering, engine):
        command = [node, "client.mjs", f"{address}/v1", str(ROOT / "examples" / "ball.png")]
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    videos = json.loads(ran.stdout)
    video = videos["video"]
    assert (video["status"], video["prompt"], video["size"], video["seed"]) == ("completed", "a cät", "96x64", 7)
    assert (video["sigmas"], video["input_size"], video["priority"]) == ([1.0, 0.5], "64x64", 0)
    assert video["loras"] == [{"name": "style", "scale": 0.5}, {"name": "other", "scale": 1.5}]
    assert videos["mp4"] == "ZnR5cA=="  # "ftyp", with which mp4 files begin
    assert (videos["other"]["input_size"], videos["ids"]) == ("64x64", [videos["other"]["id"], video["id"]])
    assert (videos["remixed"]["prompt"], videos["remixed"]["loras"]) == ("a dog", video["loras"])
    assert (videos["deleted"]["id"], videos["deleted"]["deleted"]) == (video["id"], True)
    assert videos["error"] == {"status": 400, "param": "size"}
