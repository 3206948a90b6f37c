"""Bodies as clients write them: every form gives the same job, and errors name the field."""

import base64
import contextlib
import json
import random

import httpx
import httpx2
import pytest
import requests
from openai import OpenAI

from actors.api.core.bodies import parse_json
from actors.api.core.create_video import CreateVideo
from actors.api.untrusted import dialects, forms
from actors.api.untrusted.body_parts import FORM, JSON, URLENCODED, split_body
from tests.conftest import ROOT
from wan_tpu.errors import InvalidRequest

URL = "http://here/v1/videos"
PNG = (ROOT / "examples" / "ball.png").read_bytes()
DATA = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
LORAS = [{"name": "lightning", "scale": 0.5}, {"name": "style", "scale": 1.5}]
ASKED = {"prompt": "a cät", "size": "96x64", "seconds": "4", "num_inference_steps": 2, "shift": 3.5, "seed": 7}
LISTS = ASKED | {"sigmas": [1.0, 0.5], "loras": LORAS}
IMAGE = {"image_url": DATA}


def understood(content_type, body):
    """Return what a service takes a body for: the fields, and the images' files."""
    parts = split_body(content_type, body)
    return parse_json(parts.text), parts.uploads


def in_json(**body):
    return JSON, json.dumps(body).encode()


def openai_python(**body):
    """Return the body that OpenAI's own client sends."""
    seen = []

    def answer(request):
        seen.append((request.headers["content-type"], request.read()))
        return httpx2.Response(200, json={"id": "x", "object": "video"})

    own = ("prompt", "size", "seconds") + (
        ("input_reference",) if isinstance(body.get("input_reference"), bytes) else ()
    )
    sent = {name: body.pop(name) for name in own}  # An object goes into `extra_body`: it takes files alone.
    with httpx2.Client(transport=httpx2.MockTransport(answer)) as http:
        OpenAI(base_url="http://here/v1", api_key="x", http_client=http).videos.create(**sent, extra_body=body)
    return seen[0]


def in_requests(**body):
    sent = requests.Request("POST", URL, **body).prepare()
    return sent.headers["content-type"], sent.body.encode() if isinstance(sent.body, str) else sent.body


def in_httpx(**body):
    sent = httpx.Request("POST", URL, **body)
    return sent.headers["content-type"], sent.read()


def in_form(*parts):
    """Return a form. Each part has the text after a field's name, and the content."""
    lines = [f"--x\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + text + b"\r\n" for head, text in parts]
    return f"{FORM}; boundary=x", b"".join(lines) + b"--x--\r\n"


def fields(*pairs):
    return in_form(*((f'name="{name}"', text.encode()) for name, text in pairs))


def texts(body):
    return {name: str(value) for name, value in body.items()}


EMPTY_FILE = 'name="input_reference"; filename=""\r\nContent-Type: application/octet-stream'  # Chromium's and Firefox's
PLAIN = {  # ASKED, by client
    "OpenAI's Python client": lambda: openai_python(**ASKED),
    "a browser's form": lambda: in_form(
        *((f'name="{name}"', text.encode()) for name, text in texts(ASKED).items()),
        ('name="num_frames"', b""), ('name="solver"', b""), (EMPTY_FILE, b""),
    ),
    "OpenAI's Node client, nulls as it asks for": lambda: fields(*texts(ASKED).items(), ("priority", "null")),
    "JSON of texts": lambda: in_json(**texts(ASKED)),
    "LiteLLM": lambda: fields(*texts(ASKED).items(), ("user", "ann")),
    "nulls": lambda: in_json(**ASKED, **dict.fromkeys(("priority", "loras", "sigmas", "input_reference", "fps"))),
    "vLLM-Omni": lambda: fields(
        ("prompt", "a cät"), ("width", "96"), ("height", "64"), ("seconds", "4"), ("num_inference_steps", "2"),
        ("flow_shift", "3.5"), ("seed", "7"), ("num_outputs_per_prompt", "1"),
    ),
    "curl -d": lambda: (URLENCODED, b"&".join(f"{name}={value}".encode() for name, value in ASKED.items())),
    "SGLang's ComfyUI client": lambda: in_json(
        prompt="a cät", size="96x64", seconds=4, num_inference_steps=2, seed=7, generator_device="cuda", flow_shift=3.5
    ),
    "MiniMax's script": lambda: in_json(
        task="t2va", prompt="a cät", conditions=[], target={"duration_seconds": 4}, seed=7, size="96x64",
        num_inference_steps=2, shift=3.5, audio_flow_shift=3.0,
    ),
    "SGLang": lambda: in_json(
        prompt="a cät", size="96x64", seconds=4, n=1, flow_shift=3.5, extra_body={"num_inference_steps": 2, "seed": 7}
    ),
    "OpenRouter": lambda: in_json(
        prompt="a cät", size="96x64", duration=4, seed=7, num_inference_steps=2, shift=3.5
    ),
}  # fmt: skip
WITH_LISTS = {  # LISTS, by client
    "OpenAI's Python client": lambda: openai_python(**LISTS),
    "JSON in a form": lambda: fields(
        *texts(ASKED).items(), ("sigmas", "[1, 0.5]"), ("loras", json.dumps(LORAS))
    ),
    "OpenAI's Node client": lambda: fields(
        *texts(ASKED).items(), ("sigmas[]", "1"), ("sigmas[]", "0.5"), ("loras[][name]", "lightning"),
        ("loras[][scale]", "0.5"), ("loras[][name]", "style"), ("loras[][scale]", "1.5"),
    ),
    "indices": lambda: fields(
        *texts(ASKED).items(), ("sigmas[1]", "0.5"), ("sigmas[0]", "1"), ("loras[1][name]", "style"),
        ("loras[0][name]", "lightning"), ("loras[0][scale]", "0.5"), ("loras[1][scale]", "1.5"),
    ),
    "requests, names repeated, no file": lambda: in_requests(
        data=ASKED | {"sigmas": ["1.0", "0.5"], "loras": [json.dumps(lora) for lora in LORAS]}
    ),
}  # fmt: skip
WITH_IMAGE = {  # ASKED and an image, by client
    "JSON": lambda: in_json(**ASKED, input_reference=IMAGE),
    "a string": lambda: in_json(**ASKED, input_reference=DATA),
    "OpenRouter's object": lambda: in_json(**ASKED, input_reference={"type": "image_url", "image_url": {"url": DATA}}),
    "OpenRouter's frames": lambda: in_json(
        **ASKED, frame_images=[{"type": "image_url", "image_url": {"url": DATA}, "frame_type": "first_frame"}]
    ),
    "vLLM-Omni's JSON": lambda: fields(*texts(ASKED).items(), ("image_reference", json.dumps(IMAGE))),
    "MiniMax's condition": lambda: in_json(
        **ASKED, conditions=[{"type": "image", "uri": DATA, "role": "keyframe", "frame_index": 0}], task="fl2va",
        target={"short_edge": 768, "aspect_ratio": "auto"},
    ),
    "SGLang's URL": lambda: fields(*texts(ASKED).items(), ("reference_url", DATA)),
    "OpenAI's Python client, an object": lambda: openai_python(**ASKED, input_reference=IMAGE),
    "OpenAI's Python client, a file": lambda: openai_python(**ASKED, input_reference=PNG),
    "LiteLLM, a file": lambda: in_httpx(
        data=texts(ASKED), files=[("input_reference", ("input_reference.png", PNG, "image/png"))]
    ),
    "LiteLLM, a URL": lambda: in_httpx(
        data=texts(ASKED), files=[("input_reference", ("input_reference.png", DATA.encode(), "image/png"))]
    ),
    "requests": lambda: in_requests(data=ASKED, files={"input_reference": ("bäll.png", PNG)}),
    "urllib3 1.x": lambda: in_form(
        *((f'name="{name}"', text.encode()) for name, text in texts(ASKED).items()),
        ("name=\"input_reference\"; filename*=utf-8''b%C3%A4ll.png\r\nContent-Type: image/png", PNG),
    ),
}  # fmt: skip


@pytest.mark.parametrize("client", PLAIN)
def test_a_request_is_the_same_in_every_client_s_form(client):
    assert understood(*PLAIN[client]()) == understood(*in_json(**ASKED))


@pytest.mark.parametrize("sound", [True, False])
def test_sound_is_asked_for_in_every_client_s_form(sound):
    sent = [in_json(prompt="x", **{name: sound}) for name in ("generate_audio", "generate_sound")]
    sent += [in_json(prompt="x", generate_audio=text) for text in (str(sound), str(sound).lower())]
    sent += [fields(("prompt", "x"), (name, str(sound).lower())) for name in ("generate_audio", "generate_sound")]
    sent.append(openai_python(prompt="x", size="96x64", seconds="1", generate_audio=sound))
    sent.append(in_requests(data={"prompt": "x", "generate_audio": sound}, files={"": (None, b"")}))
    assert [understood(*each)[0].generate_audio for each in sent] == [sound] * 8
    assert understood(*fields(("prompt", "x"), ("generate_audio", "")))[0].generate_audio is None


@pytest.mark.parametrize("client", WITH_LISTS)
def test_lists_are_the_same_in_every_client_s_form(client):
    request, _ = understood(*WITH_LISTS[client]())
    assert (request.sigmas, [lora.model_dump() for lora in request.loras]) == ([1.0, 0.5], LORAS)
    assert request == understood(*in_json(**LISTS))[0]
    assert understood(*fields(("prompt", "x"), ("loras", "style")))[0].loras[0].name == "style"  # A name says enough.


@pytest.mark.parametrize("client", WITH_IMAGE)
def test_an_image_is_the_same_in_every_client_s_form(client):
    request, uploads = understood(*WITH_IMAGE[client]())
    assert (request, uploads) == (parse_json(json.dumps(ASKED)), {"input_reference": PNG})


def test_files_of_a_client_s_lists_are_references():
    sent = {"video_reference": b"video", "image_reference": b"\xff1"}
    files = [(name, ("a", content)) for name, content in [*sent.items(), ("image_reference", b"\xff2")]]
    request, uploads = understood(*in_requests(data={"prompt": "x", "long_video": "false"}, files=files))
    assert len(request.input_references) == 3
    assert [uploads[f"input_references.{index}"] for index in range(3)] == [b"\xff1", b"\xff2", b"video"]
    with pytest.raises(InvalidRequest, match="input_reference"):
        understood(*in_requests(data={"prompt": "x"}, files={"image": ("a", b"\xff1")}))


def test_an_image_elsewhere_is_the_same_in_every_form():
    there = "https://pictures.test/a.png"
    for reference in (there, {"image_url": there}, {"image_url": {"url": there}}, [there]):
        request, _ = understood(*in_json(prompt="x", input_reference=reference, last_frame=reference))
        assert request.input_reference.image_url == request.last_frame.image_url == there
    for name in ("input_reference", "input_reference[image_url]", "input_reference[image_url][url]"):
        assert understood(*fields(("prompt", "x"), (name, there)))[0].input_reference.image_url == there


@pytest.mark.parametrize(
    ("sent", "param", "remedy"),
    [
        ([], "prompt", "required"),
        ([("prompt", "a"), ("prompt", "b")], "prompt", "send it once"),
        ([("prompt", "a"), ("prompt[x]", "b")], "prompt", "send it once"),
        ([("prompt", "a"), ("input_reference[file_id]", "file-1")], "input_reference", "doesn't store files"),
        ([("prompt", "a"), ("input_reference", "cat.png")], "input_reference", '"image_url": "https://'),
        ([("prompt", "a"), ("n" * 500, "b")], "n" * 80, "the fields are: prompt"),
        ([("prompt", "a"), ("sigmas", "[1, 0.5")], "sigmas", "invalid JSON"),
        ([("prompt", "a"), ("loras[][name]", "a"), ("loras[][name]", "b"), ("loras[][scale]", "1")], "loras", "JSON"),
        ([("prompt", "a"), ("num_frame", "9")], "num_frame", "did you mean num_frames"),
        ([("prompt", "a"), ("width", "96")], "height", "give both"),
        ([("prompt", "a"), ("n", "2")], "n", "send it n times"),
        ([("prompt", "a"), ("aspect_ratio", "16:9")], "aspect_ratio", "`size`"),
        ([("prompt", "a"), ("long_video", "true")], "long_video", "next_prompts"),
        ([("prompt", "a"), ("continuation_prompts", '["a", "b"]')], "continuation_prompts", "next_prompts"),
        # As MiniMax's own scripts may send them.
        ({"task": "ref2va"}, "task", "input_references"),
        ({"target": {"short_edge": 1440, "aspect_ratio": "16:9"}}, "target", "`size`"),
        ({"target": {"duration_seconds": 5}, "seconds": 4}, "seconds", "send it once"),
    ],
)
def test_wrong_fields_are_named_with_the_right_form(sent, param, remedy):
    with pytest.raises(InvalidRequest) as refused:
        understood(*(fields(*sent) if isinstance(sent, list) else in_json(prompt="x", **sent)))
    assert refused.value.field == param
    assert remedy in str(refused.value) and len(str(refused.value)) < 600


def test_minimax_s_shapes_are_its_own_sizes():
    """SGLang, MiniMax's own server, makes 1344x768 of 16:9 (its test_h3_request.py at d035d4b7)."""
    for ratio, size in (("16:9", "1344x768"), ("9:16", "768x1344"), ("auto", None)):
        target = {"short_edge": 768, "aspect_ratio": ratio, "duration_seconds": 8}
        request, _ = understood(*in_json(task="t2va", prompt="x", conditions=[], target=target))
        assert (request.size, request.seconds) == (size, "8")


@pytest.mark.parametrize(
    "body",
    [None, [], "x", 1, {}, {"prompt": 1}, {"prompt": None}, {"prompt": "x", "num_frames": "many"},
     {"prompt": "x", "num_frames": True}, {"prompt": "x", "sigmas": ["NaN"]}, {"prompt": "x", "shift": "inf"},
     {"prompt": "x", "extra_body": 1}, {"prompt": "x", "frame_images": {"frame_type": []}}, {"prompt": "x", "loras": 1},
     {"prompt": "x", "input_reference": [DATA, DATA]}, {"prompt": "x", "input_reference": {"type": "video_url"}}],
)  # fmt: skip
def test_wrong_json_is_refused(body):
    with pytest.raises(InvalidRequest):
        understood(JSON, json.dumps(body).encode())


@pytest.mark.parametrize("content", [b"\xed\xa0\x80", b"\xff"])
def test_what_is_no_text_is_refused_with_the_name_of_its_field(content):
    with pytest.raises(InvalidRequest) as refused:
        understood(*in_form(('name="prompt"', b"a cat " + content)))
    assert refused.value.field == "prompt"


def test_a_prompt_means_itself_whatever_it_is():
    for text in ("null", "[1]", "{", "a[b]"):
        assert understood(*fields(("prompt", text), ("negative_prompt", "")))[0].prompt == text
    assert understood(*fields(("prompt", "x"), ("negative_prompt", "")))[0].negative_prompt == ""


def test_a_form_has_room_for_the_prompts_of_all_segments():
    prompts = [f"[Scene {number}] on" for number in range(29)]
    others = {"prompt": "x", "model": "m", "seconds": "1", "size": "96x64", "seed": "1", "fps": "8", "shift": "3"}
    others |= {"guidance_scale": "2", "num_inference_steps": "4", "solver": "unipc", "priority": "1", "preset": "p"}
    sent = [*others.items(), *(("next_prompts[]", prompt) for prompt in prompts)]
    assert understood(*fields(*sent))[0].next_prompts == prompts


def test_forms_know_which_fields_are_lists():
    """The processes that read them don't import the body's model."""
    assert set(forms.LISTS) == {
        name for name, field in CreateVideo.model_fields.items() if "list" in str(field.annotation)
    }


def test_what_was_sent_isn_t_repeated():
    for body in (b'{"prompt": {"secret": "hunter2"}}', b'{"prompt": "x", "input_reference": "hunter2"}'):
        with pytest.raises(InvalidRequest) as refused:
            understood(JSON, body)
        assert "hunter2" not in str(refused.value)


NAMES = [*CreateVideo.model_fields, *dialects._SAME, *dialects._INSTEAD, "frame_images", "extra_body", "width", "", "["]
KEYS = ["", "0", "1", "99999", "name", "scale", "image_url", "url", "type", "file_id", "frame_type"]
VALUES = ["", "null", "1", "0.5", "{", "[1", "[[[]]]", '{"a": null}', DATA[:40], "https://a.test/b", "NaN", "9" * 500]
VALUES.append("\0")


def any_value(rng, depth=0):
    match rng.randrange(8 if depth < 4 else 5):
        case 0 | 1:
            return rng.choice([None, True, 0, -1, 1e308, 10**30, 1.5])
        case 5:
            return [any_value(rng, depth + 1) for _ in range(rng.randrange(3))]
        case 6 | 7:
            return {rng.choice(KEYS): any_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return rng.choice(VALUES)


def any_part(rng):
    name = rng.choice(NAMES) + "".join(f"[{rng.choice(KEYS)}]" for _ in range(rng.choice([0, 0, 1, 2, 3, 4])))
    file = rng.choice(["", "", "", '; filename=""', '; filename="a.png"', "; filename*=utf-8''a"])
    return f'name="{name}"{file}', rng.choice([*map(str.encode, VALUES), b"\xed\xa0\x80", b"\xff\0"])


def test_whatever_is_sent_is_understood_or_refused():
    rng, accepted_count = random.Random(3), 0
    for number in range(1500):
        fields = {rng.choice(NAMES): any_value(rng) for _ in range(rng.randrange(5))}
        parts = [any_part(rng) for _ in range(rng.randrange(6))] + [('name="prompt"', b"x")]
        with contextlib.suppress(InvalidRequest):
            request, _ = understood(*(in_json(**{"prompt": "x"} | fields) if number % 2 else in_form(*parts)))
            assert request.model_dump_json().encode()
            accepted_count += 1
    assert accepted_count > 100
