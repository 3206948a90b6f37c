"""A remix is a request like every other: what can't be made of the new prompt is refused at once, and warned of."""

import dataclasses

import pytest
from PIL import Image

from tests.actors.api.serving import create, data_url, open_client, serve
from tests.actors.api.test_sound import H3
from wan_tpu.families.minimax_h3.config import TEXT_ROWS
from wan_tpu.families.shared.tokenizer import make_qwen_tokenizer

LONG = "cat. " * TEXT_ROWS[-1]


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    """MiniMax-H3's spec with a tokenizer, so that prompts can be counted."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_qwen_tokenizer([]).save_pretrained(folder)
    return dataclasses.replace(H3, tokenizer=str(folder))


def remix(http, video, prompt):
    return http.post(f"/v1/videos/{video['id']}/remix", json={"prompt": prompt})


def test_prompt_that_is_too_long_is_refused_as_in_a_new_request(settings, spec):
    with serve(settings, spec) as address, open_client(address) as http:
        refusals = [create(http, prompt=LONG), remix(http, create(http).json(), LONG)]
        assert [(answer.status_code, answer.json()["error"]["param"]) for answer in refusals] == [(400, "prompt")] * 2
        assert refusals[0].json() == refusals[1].json()
        assert create(http, next_prompts=["a dog", "a cow"]).status_code == 200
        assert create(http, next_prompts=["a dog", LONG]).json()["error"]["param"] == "next_prompts"


def test_what_is_cut_or_cropped_is_in_the_answer(settings, spec):
    photo = {"image_url": data_url(Image.new("RGB", (96, 64)))}
    with serve(settings, spec) as address, open_client(address) as http:
        video = create(http, input_reference=photo, size="640x384", truncate_prompt=True).json()
        assert [warning.split()[0] for warning in video["warnings"]] == ["input_reference"]
        other = remix(http, video, LONG).json()
        assert other["warnings"][1:] == video["warnings"] and other["warnings"][0].startswith("prompt")
        assert http.get(f"/v1/videos/{other['id']}").json()["warnings"] == other["warnings"]
