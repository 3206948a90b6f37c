"""Translate the fields of other servers with `/v1/videos` into this service's own.

OpenAI, LiteLLM, OpenRouter, vLLM-Omni, SGLang and MiniMax name the same things differently. Fields with the same
meaning are accepted under either name; for what can't be done, the error says what to send instead. docs/serving.md
compares all fields.
"""

from typing import Any

from actors.api.untrusted.references import IMAGE, LAST, REFERENCE_LISTS, REFERENCES
from wan_tpu.errors import InvalidRequest

# Our field with the same meaning, by another server's.
_SAME = {
    "flow_shift": "shift",  # vLLM-Omni, SGLang
    "duration": "seconds",  # OpenRouter
    "reference_url": IMAGE,  # SGLang
    "generate_sound": "generate_audio",  # vLLM-Omni
}
# Fields that are accepted as long as they have no effect, that is, with one of these values.
_NOTHING = {
    "user": None,  # OpenAI, LiteLLM, vLLM-Omni: for the caller's own records. Any value.
    "generator_device": None,  # SGLang's ComfyUI client: where noise is drawn, which doesn't depend on it here.
    "audio_flow_shift": ("3", "3.0"),  # SGLang's, for MiniMax-H3: the model's own.
    "n": ("1",),
    "num_outputs_per_prompt": ("1",),
    "enable_teacache": ("false", "0"),
    "enable_frame_interpolation": ("false", "0"),
    "enable_upscaling": ("false", "0"),
    "long_video": ("false", "0"),
}
_SEGMENTS = "a long video is made of segments: send the prompts of all after the first as next_prompts"
# What to do instead, by another server's field.
_INSTEAD = {
    "n": "each request makes one video; send it n times, with seeds of your own",
    "num_outputs_per_prompt": "each request makes one video; send it several times, with seeds of your own",
    "enable_teacache": "name a step cache with `cache`, as GET /v1/models shows it",
    "enable_frame_interpolation": "ask for more frames with num_frames and fps",
    "enable_upscaling": "ask for the size itself with `size`",
    "aspect_ratio": "give both sides in pixels with `size`, such as '1280x720'",
    "resolution": "give both sides in pixels with `size`, such as '1280x720'",
    "boundary_ratio": "name the low-noise expert's first step with switch_step",
    "true_cfg_scale": "it is guidance_scale here",
    "callback_url": "it is webhook_url here, and is called as Standard Webhooks say",
    "audio_flow_shift": "the sound's shift is the model's own; leave it out",
    "output_path": "the video is at GET /v1/videos/{id}/content once it has completed; leave it out",
    "lora": 'it is a list here: loras=[{"name": "NAME", "scale": 1.0}], with names that GET /v1/models shows',
    "image": f"the first frame is {IMAGE}",
    "steps": "it is num_inference_steps here",
    "frames": "it is num_frames here",
    "output_format": "videos are mp4 files; leave it out",
    "long_video": _SEGMENTS,
    "long_video_mode": f"{_SEGMENTS}, and say with continue_by what they take from the video before",
    "continuation_prompts": f"the first one is `prompt`; {_SEGMENTS}",
    "continuation_window_frames": "each segment has num_frames frames",
    "continuation_overlap_frames": "how much segments share is the model's own; leave it out",
    "extra_params": "send what it holds beside the other fields, by the names that /docs shows",
}
_REFERENCE_TASK = "ref2va"  # MiniMax-H3's task with references.
_TASKS = ("t2va", "fl2va", _REFERENCE_TASK)
# SGLang's conditions that are references, by their type. A "video" is one without its sound.
_CONDITIONS = {"image": "image_url", "video": "video_url", "video_audio": "video_url", "audio": "audio_url"}
_KEYFRAMES = {"0": IMAGE, "-1": LAST}  # By their index in a request of MiniMax.
# Sizes of MiniMax-H3's videos by aspect ratio, whose short side is that of its own size. "auto" is its image's shape.
_SHORT_EDGE = 768
_SIZES = {"16:9": "1344x768", "9:16": "768x1344", "4:3": "1024x768", "3:4": "768x1024", "1:1": "768x768", "auto": None}
_FRAME_TYPES = {"first_frame": IMAGE, "last_frame": LAST}


def translate(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a body with this service's fields, without nulls; raises `InvalidRequest`."""
    body = _without_nulls(fields)
    if "extra_body" in body:  # OpenAI's clients merge it themselves, but SGLang's examples send it as it is.
        extra = body.pop("extra_body")
        if not isinstance(extra, dict):
            raise InvalidRequest(
                "extra_body isn't an object; send its fields together with the others, at the top level", "extra_body"
            )
        for name, value in extra.items():
            _set(body, name, value, f"extra_body.{name}")
    for name, ours in _SAME.items():
        if name in body:
            _set(body, ours, body.pop(name), name)
    if "width" in body or "height" in body:
        if "width" not in body or "height" not in body:
            missing = "width" if "height" in body else "height"
            raise InvalidRequest(f"{missing} is missing; give both width and height, or `size`", missing)
        _set(body, "size", f"{body.pop('width')}x{body.pop('height')}", "width")
    if "frame_images" in body:
        _set_frames(body, body.pop("frame_images"))
    _translate_minimax(body)
    _translate_lists(body)
    for name in [name for name in body if name in _NOTHING or name in _INSTEAD]:
        harmless = _NOTHING.get(name, ())
        if harmless is not None and str(body[name]).lower() not in harmless:
            raise InvalidRequest(f"there is no field {name!r}: {_INSTEAD[name]}", name)
        del body[name]
    return body


def _set_frames(body: dict[str, Any], frames: Any) -> None:
    """Set the first and last frame from OpenRouter's list."""
    for frame in frames if isinstance(frames, list) else [frames]:
        name = _FRAME_TYPES.get(str(frame.get("frame_type"))) if isinstance(frame, dict) else None
        if name is None:
            raise InvalidRequest(
                'frame_images takes {"type": "image_url", "image_url": {"url": "https://..."}, "frame_type": '
                '"first_frame" or "last_frame"}, one of each at most',
                "frame_images",
            )
        _set(body, name, {key: value for key, value in frame.items() if key != "frame_type"}, "frame_images")


def _translate_minimax(body: dict[str, Any]) -> None:
    """Replace the fields of MiniMax's request scripts for H3 (`task`, `conditions`, `target`)."""
    task = body.pop("task", None)
    if task is not None and task not in _TASKS:
        raise InvalidRequest(
            f"there is no field 'task': {IMAGE} makes a video from its first frame, {LAST} from its last, {REFERENCES} "
            "from other images, videos and sounds; without them it is made from the text",
            "task",
        )
    conditions = body.pop("conditions", [])
    references = []
    for condition in conditions if isinstance(conditions, list) else [conditions]:
        keys = condition if isinstance(condition, dict) else {}
        if keys.get("role") == "reference":
            references.append(_read_condition(keys))
            continue
        name = _KEYFRAMES.get(str(keys.get("frame_index")))
        if name is None or (keys.get("type"), keys.get("role")) != ("image", "keyframe"):
            raise InvalidRequest(
                f"of conditions, only references are accepted, and images with the role keyframe and a frame_index of "
                f"0 ({IMAGE}) or -1 ({LAST})",
                "conditions",
            )
        _set(body, name, keys.get("uri", ""), "conditions")
    if references:
        _set(body, REFERENCES, references, "conditions")
    if task == _REFERENCE_TASK and not any(name in body for name in (REFERENCES, *REFERENCE_LISTS)):
        raise InvalidRequest(f"task is {task!r}, but there is no reference; send {REFERENCES}", "task")
    if task == _REFERENCE_TASK and "image_reference" in body:
        _set(body, REFERENCES, _join_lists(body), "image_reference")
    target = body.pop("target", {})
    if not isinstance(target, dict) or not target.keys() <= {"duration_seconds", "aspect_ratio", "short_edge"}:
        raise InvalidRequest("there is no field 'target': give `seconds` and `size`", "target")
    if "duration_seconds" in target:
        _set(body, "seconds", target["duration_seconds"], "target.duration_seconds")
    ratio = str(target.get("aspect_ratio", "auto"))
    if ratio not in _SIZES or target.get("short_edge", _SHORT_EDGE) != _SHORT_EDGE:
        raise InvalidRequest(
            f"target: only a short_edge of {_SHORT_EDGE} with an aspect_ratio of {', '.join(_SIZES)} is accepted; give "
            "other sizes in pixels with `size` instead, such as '1344x768'",
            "target",
        )
    if (size := _SIZES[ratio]) is not None:
        _set(body, "size", size, "target")


def _read_condition(condition: dict[str, Any]) -> dict[str, Any]:
    """Return one of SGLang's references as one of ours; raises `InvalidRequest`."""
    kind = condition.get("type")
    if kind not in _CONDITIONS or not condition.keys() <= {"type", "role", "uri"}:
        raise InvalidRequest(
            f"of conditions, references have a type of {', '.join(_CONDITIONS)} and a uri, and apply to the whole "
            "video; leave other fields out",
            "conditions",
        )
    return {_CONDITIONS[kind]: condition.get("uri", ""), **({"with_sound": False} if kind == "video" else {})}


def _translate_lists(body: dict[str, Any]) -> None:
    """Replace vLLM-Omni's lists of references. A single image alone is the first frame, as its server has it."""
    images = body.get("image_reference")
    several = isinstance(images, list) and len(images) > 1
    if several or any(name in body for name in REFERENCE_LISTS[1:]):
        _set(body, REFERENCES, _join_lists(body), REFERENCE_LISTS[0] if several else REFERENCE_LISTS[1])
    elif images is not None:
        _set(body, IMAGE, body.pop("image_reference"), "image_reference")


def _join_lists(body: dict[str, Any]) -> list[Any]:
    """Remove vLLM-Omni's lists from a body, and return them as one: images, videos, sounds."""
    lists = [body.pop(name, []) for name in REFERENCE_LISTS]
    return [part for values in lists for part in (values if isinstance(values, list) else [values])]


def _set(body: dict[str, Any], name: str, value: Any, source: str) -> None:
    if name in body:
        raise InvalidRequest(f"{source[:80]} repeats the field {name[:80]}; send it once", name[:80])
    body[name] = value


def _without_nulls(value: Any) -> Any:
    """Return a value without the fields of objects that are null."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
