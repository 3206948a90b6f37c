"""Nodes that have a wan-tpu service make videos, with ComfyUI's own types, progress and interruption.

The service's address and key are in ComfyUI's environment, WAN_TPU_URL and WAN_TPU_API_KEY. They are no inputs,
because ComfyUI writes a workflow into every file that it saves.
"""

from __future__ import annotations

import asyncio
import contextlib
import io as bytes_io
import os
import tempfile
from collections.abc import Coroutine
from typing import Any

import torch
from aiohttp import web
from comfy.model_management import throw_exception_if_processing_interrupted
from comfy_api.latest import ComfyAPI, ComfyExtension, Input, InputImpl, Types, io
from PIL import Image
from server import PromptServer

from .client import File, Service, ServiceError, Video

_CATEGORY = "wan-tpu"
_Settings = io.Custom("WAN_TPU_SETTINGS")
_STAGES = {"encoder": "encoding", "decoder": "decoding"}
# What stands for the model's own value, since an input always has one.
_UNSET = -1.0


def open_service() -> Service:
    """Return the service that ComfyUI's environment names."""
    return Service(os.environ.get("WAN_TPU_URL", "http://127.0.0.1:8000"), os.environ.get("WAN_TPU_API_KEY", ""))


class _MakesVideo(io.ComfyNode):
    """What the nodes have in common that have the service make a video."""

    @classmethod
    def validate_inputs(cls, preset: str = "") -> bool:
        """Leave the check of presets to the service, which knows them."""
        return True


class GenerateVideo(_MakesVideo):
    """A video from a prompt and, where the model takes them, images."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe its inputs and outputs."""
        return _schema(
            "GenerateVideo",
            "Generate Video",
            "Makes a video from a prompt and images on TPUs.",
            io.Int.Input("width", default=0, min=0, max=8192, tooltip="Pixels; 0 is the model's, or the image's."),
            io.Int.Input("height", default=0, min=0, max=8192, tooltip="Pixels; 0 is the model's, or the image's."),
            _preset_input(),
            io.Image.Input("image", optional=True, tooltip="The first frame."),
            io.Image.Input("last_frame", optional=True, tooltip="The last frame."),
        )

    @classmethod
    async def execute(
        cls,
        width: int,
        height: int,
        image: Input.Image | None = None,
        last_frame: Input.Image | None = None,
        **common: Any,
    ) -> io.NodeOutput:
        """Make the video."""
        fields = _common_fields(**common)
        if width or height:
            fields["size"] = f"{width}x{height}"
        pictures = {"input_reference": image, "last_frame": last_frame}
        files = {name: _as_png(name, picture) for name, picture in pictures.items() if picture is not None}
        return await _make(cls.hidden.unique_id, "/v1/videos", fields, files)


class RestyleVideo(_MakesVideo):
    """A video whose frames are noised and denoised again with another prompt."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe its inputs and outputs."""
        return _schema(
            "RestyleVideo",
            "Restyle Video",
            "Makes a video again from its frames and another prompt, where the model takes videos.",
            io.Video.Input("video"),
            io.Float.Input(
                "strength", default=0.8, min=0.001, max=1, step=0.05, tooltip="How much of it is made anew."
            ),
            _preset_input(),
        )

    @classmethod
    async def execute(cls, video: Input.Video, strength: float, **common: Any) -> io.NodeOutput:
        """Make the video."""
        files = {"video": await asyncio.to_thread(_as_mp4, video)}
        return await _make(
            cls.hidden.unique_id, "/v1/videos", {**_common_fields(**common), "strength": str(strength)}, files
        )


class ContinueVideo(_MakesVideo):
    """A video that shows another one, and then what follows its last frame."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe its inputs and outputs."""
        return _schema(
            "ContinueVideo",
            "Continue Video",
            "Continues a video from its end. The result shows both.",
            _preset_input(),
            io.String.Input(
                "video_id", optional=True, force_input=True, tooltip="A video of the service, by the output `id`."
            ),
            io.Video.Input("video", optional=True, tooltip="Or any other video."),
        )

    @classmethod
    async def execute(cls, video_id: str = "", video: Input.Video | None = None, **common: Any) -> io.NodeOutput:
        """Make the video."""
        if bool(video_id) == (video is not None):
            raise ServiceError("Connect either video_id or video: the one that is continued.")
        fields = _common_fields(**common)
        files = {}
        if video is None:
            fields["video"] = video_id
        else:
            files["video"] = await asyncio.to_thread(_as_mp4, video)
        return await _make(cls.hidden.unique_id, "/v1/videos/extensions", fields, files)


class FetchVideo(io.ComfyNode):
    """A video that the service has, or is making."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe its inputs and outputs."""
        return io.Schema(
            node_id="WanTPUFetchVideo",
            display_name="Fetch Video (wan-tpu)",
            category=_CATEGORY,
            description="Gets a video of the service by its id, such as one that was left when ComfyUI stopped.",
            inputs=[io.String.Input("video_id")],
            outputs=_outputs(),
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    async def execute(cls, video_id: str) -> io.NodeOutput:
        """Fetch it. Interrupting that doesn't cancel the video, which another may have asked for."""
        node = cls.hidden.unique_id
        async with open_service() as service:
            work = service.fetch(video_id.strip(), _Display(service, node).show)
            return await _finish(node, *await _until_interrupted(work))


class Settings(io.ComfyNode):
    """Settings that a video rarely needs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe its inputs and outputs."""
        return io.Schema(
            node_id="WanTPUSettings",
            display_name="Settings (wan-tpu)",
            category=_CATEGORY,
            description="Settings of a video. What is -1 or empty is left to the preset and the model.",
            inputs=[
                io.Int.Input("num_inference_steps", default=-1, min=-1, max=1000),
                io.Float.Input("guidance_scale", default=_UNSET, min=_UNSET, max=1000, step=0.1),
                io.Float.Input("shift", default=_UNSET, min=_UNSET, max=1000, step=0.1),
                io.Int.Input("num_frames", default=-1, min=-1, max=100_000, tooltip="Instead of seconds."),
                io.Int.Input("fps", default=-1, min=-1, max=1000),
                io.Combo.Input("sound", options=["as the model does", "yes", "no"]),
                io.String.Input(
                    "more",
                    multiline=True,
                    default="",
                    placeholder="One a line, such as\nsolver = euler\nloras = my-style",
                    tooltip="Any other field of POST /v1/videos; the service's page /docs describes them.",
                ),
            ],
            outputs=[_Settings.Output(display_name="settings")],
        )

    @classmethod
    def execute(cls, sound: str, more: str, **numbers: float) -> io.NodeOutput:
        """Return the settings as the fields of a form."""
        fields = {name: f"{value:g}" for name, value in numbers.items() if value != _UNSET}
        if sound in ("yes", "no"):
            fields["generate_audio"] = "true" if sound == "yes" else "false"
        for line in filter(str.strip, more.splitlines()):
            name, sign, value = line.partition("=")
            if not sign:
                raise ServiceError(f"{line.strip()!r} has no '=': write one setting a line, such as solver = euler")
            fields[name.strip()] = value.strip()
        return io.NodeOutput(fields)


class WanTPU(ComfyExtension):
    """The pack."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Return its nodes."""
        return [GenerateVideo, RestyleVideo, ContinueVideo, FetchVideo, Settings]


@PromptServer.instance.routes.get("/wan_tpu/presets")
async def list_presets(_: web.Request) -> web.Response:
    """Return the names of the service's presets, for the menus of the nodes."""
    try:
        async with open_service() as service:
            presets = (await service.describe_model())["presets"]
    except ServiceError:
        presets = []  # The nodes say why when they run.
    return web.json_response(["", *(preset["name"] for preset in presets)])


def _schema(kind: str, name: str, about: str, *own: io.Input) -> io.Schema:
    """Return the schema of a node that has the service make a video; `own` are its inputs beside the common ones."""
    first = (
        io.String.Input("prompt", multiline=True, dynamic_prompts=True),
        io.String.Input("negative_prompt", multiline=True, default="", tooltip="Empty is the model's."),
        io.Int.Input("seed", default=0, min=0, max=2**63 - 1, control_after_generate=True),
        io.Float.Input("seconds", default=0, min=0, max=600, step=0.5, tooltip="Length; 0 is the model's."),
    )
    return io.Schema(
        node_id=f"WanTPU{kind}",
        display_name=f"{name} (wan-tpu)",
        category=_CATEGORY,
        description=about,
        inputs=[*first, *own, _Settings.Input("settings", optional=True)],
        outputs=_outputs(),
        hidden=[io.Hidden.unique_id],
    )


def _preset_input() -> io.Input:
    return io.Combo.Input(
        "preset",
        remote=io.RemoteOptions(route="/wan_tpu/presets", refresh_button=True),
        tooltip="Quality or speed, as the service offers it; empty is the model's usual one.",
    )


def _outputs() -> list[io.Output]:
    return [
        io.Video.Output(display_name="video"),
        io.Image.Output(display_name="frames"),
        io.Audio.Output(display_name="audio"),
        io.Float.Output(display_name="fps"),
        io.String.Output(display_name="id"),
    ]


def _common_fields(
    prompt: str,
    negative_prompt: str,
    seed: int,
    seconds: float,
    preset: str,
    settings: dict[str, str] | None = None,
) -> dict[str, str]:
    """Return the fields of a form; a setting that is written out has the last word."""
    fields = {"prompt": prompt, "negative_prompt": negative_prompt, "seed": str(seed), "preset": preset}
    if seconds:
        fields["seconds"] = f"{seconds:g}"
    return {name: value for name, value in {**fields, **(settings or {})}.items() if value}


async def _make(node: str, path: str, fields: dict[str, str], files: dict[str, File]) -> io.NodeOutput:
    async with open_service() as service:
        work = service.make(path, fields, files, _Display(service, node).show)
        return await _finish(node, *await _until_interrupted(work))


async def _until_interrupted(work: Coroutine[Any, Any, tuple[Video, bytes]]) -> tuple[Video, bytes]:
    """Return what the work does, which ends when ComfyUI is interrupted."""

    async def watch() -> None:
        while True:
            throw_exception_if_processing_interrupted()
            await asyncio.sleep(0.2)

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(watch())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Display:
    """Shows on a node how far its video is, with a picture where the service has a new one."""

    def __init__(self, service: Service, node: str):
        self._service, self._node, self._step = service, node, None

    async def show(self, video: Video) -> None:
        """Show a video's progress."""
        picture, step = None, video.get("preview_step")
        if step and step != self._step and video["status"] == "in_progress":
            self._step = step
            with contextlib.suppress(ServiceError, OSError):  # It is as good without; the next one may be there.
                picture = Image.open(bytes_io.BytesIO(await self._service.read(video["id"], "preview"))).convert("RGB")
        await ComfyAPI.Execution().set_progress(video["progress"], 100, node_id=self._node, preview_image=picture)
        PromptServer.instance.send_progress_text(_describe(video), self._node)


def _describe(video: Video) -> str:
    if video["status"] == "queued":
        before = video["queue_position"] or 0
        text = f"waiting, {before} before it" if before else "waiting"
    elif video["status"] == "in_progress" and video["stage"]:
        text = _STAGES.get(video["stage"]) or f"step {video['step'] or 0} of {video['num_inference_steps']}"
    else:
        text = video["status"].replace("_", " ")
    left = video["eta_seconds"]
    return text if left is None else f"{text}, about {left:.0f} s left"


async def _finish(node: str, video: Video, mp4: bytes) -> io.NodeOutput:
    """Return a finished video in ComfyUI's types, and show what its owner should know."""
    PromptServer.instance.send_progress_text("\n".join([video["id"], *video["warnings"]]), node)
    file = InputImpl.VideoFromFile(bytes_io.BytesIO(mp4))
    components = await asyncio.to_thread(file.get_components)
    return io.NodeOutput(file, components.images, components.audio, float(components.frame_rate), video["id"])


def _as_png(name: str, image: Input.Image) -> File:
    """Return the one picture of an image, [1, height, width, channels] from 0 to 1, as a file."""
    if len(image) != 1:
        raise ServiceError(f"{name} has {len(image)} pictures; connect one, such as with Get Image from Batch")
    pixels = (image[0, ..., :3].clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()
    file = bytes_io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return f"{name}.png", file.getvalue()


def _as_mp4(video: Input.Video) -> File:
    """Return a video as a file, with whatever ComfyUI has cut from it."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "video.mp4")
        video.save_to(path, format=Types.VideoContainer.MP4)
        with open(path, "rb") as file:
            return "video.mp4", file.read()
