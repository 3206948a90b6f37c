"""Bodies as clients send them; the form is made by OpenAI's own client, and received over real HTTP."""

import threading
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, HTTPServer

import openai
import pytest

from actors.api.forms import InvalidField, from_form, from_json


class _Keep(BaseHTTPRequestHandler):
    """Keeps the fields of one form, and refuses it in OpenAI's words."""

    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        kind = b"Content-Type: " + self.headers["Content-Type"].encode() + b"\r\n\r\n"
        parts = BytesParser().parsebytes(kind + content).get_payload()
        for part in parts:
            name = part.get_param("name", header="Content-Disposition")
            self.server.fields.append((name, part.get_payload(decode=True).decode()))
        self.send_response(400)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def sent():
    """Returns what a server receives when OpenAI's client creates a video."""
    server = HTTPServer(("127.0.0.1", 0), _Keep)
    server.fields = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def create(**asked):
        address = f"http://127.0.0.1:{server.server_port}/v1"
        with openai.OpenAI(api_key="k", base_url=address, max_retries=0, timeout=30) as client:
            with pytest.raises(openai.BadRequestError), pytest.deprecated_call():
                client.videos.create(**asked)
        return server.fields

    yield create
    server.shutdown()
    thread.join(30)
    server.server_close()


def test_what_openai_s_client_sends_is_understood(sent):
    extras = {"num_inference_steps": 8, "guidance_scale": 3.5, "input_reference": {"image_url": "https://host/cat.png"}}
    asked = from_form(sent(prompt="a cat", size="1280x720", seconds="4", extra_body=extras))
    assert asked.prompt == "a cat"
    assert (asked.size, asked.seconds, asked.num_inference_steps, asked.guidance_scale) == ("1280x720", "4", 8, 3.5)
    assert asked.input_reference.image_url == "https://host/cat.png"
    assert asked == from_json({"prompt": "a cat", "size": "1280x720", "seconds": "4"} | extras)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ([], "prompt"),
        ([("prompt", "a"), ("prompt", "b")], "prompt"),
        ([("prompt", "a"), ("num_frames", "many")], "num_frames"),
        ([("prompt", "a"), ("prompt[x]", "b")], "prompt"),
        ([("prompt", "a"), ("input_reference[file_id]", "file-1")], "input_reference.image_url"),
        ([("prompt", "a"), ("input_reference", "cat.png")], "input_reference"),
        ([("prompt", "a"), ("", "b")], ""),
        ([("prompt", "a"), ("n" * 500, "b")], "n" * 80),
    ],
)
def test_wrong_fields_are_named(fields, param):
    with pytest.raises(InvalidField) as refused:
        from_form(fields)
    assert refused.value.param == param
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "body", [None, [], "x", 1, {}, {"prompt": 1}, {"prompt": "x", "num_frames": "81"}, {"prompt": None}]
)
def test_wrong_json_is_refused(body):
    with pytest.raises(InvalidField):
        from_json(body)


def test_what_was_sent_isn_t_repeated():
    with pytest.raises(InvalidField) as refused:
        from_json({"prompt": {"secret": "hunter2"}})
    assert "hunter2" not in str(refused.value)
