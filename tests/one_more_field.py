"""Run by test_one_more_field.py in a separate process, where one more line in a file gives requests one more field.

The rest of the program is unchanged. usage: one_more_field.py FOLDER, which must be empty
"""

import importlib.util
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINE = '    sharpness: Number | None = Field(default=None, ge=0, le=2, description="Of edges, in 100 % of `frames`.")\n'


def add_field(folder: Path) -> None:
    """Import `wan_tpu.request` from a copy of its file that has the additional line."""
    before, last_field, after = (ROOT / "wan_tpu/request.py").read_text().partition("    preset: str | None = None\n")
    assert last_field
    copy = folder / "request.py"
    copy.write_text(before + LINE + last_field + after)
    place = importlib.util.spec_from_file_location("wan_tpu.request", copy)
    module = sys.modules["wan_tpu.request"] = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)


def on_the_command_line():
    """Return the value that an option sets, its text in --help, and the error for a value that is too large."""
    from wan_tpu.commands import arguments
    from wan_tpu.commands.parser import Parser
    from wan_tpu.errors import InvalidRequest

    parser = Parser(prog="generate")
    arguments.add_request_arguments(parser)

    def request(value):
        return arguments.request_from(parser.parse_args(["--prompt", "a cat", "--sharpness", value]))

    try:
        request("3")
    except InvalidRequest as error:
        refused = str(error)
    help_text = " ".join(parser.format_help().split())
    return {
        "value": request("1.5").sharpness,
        "help": "--sharpness SHARPNESS of edges, in 100 % of --frames" in help_text,
        "refused": refused,
    }


def in_a_manifest(folder):
    """Return the value in the plan of each of two lines, and whether both lines have the same digest."""
    from actors.batch.manifest import read_manifest
    from tests.actors.small_spec import SPEC

    path = folder / "requests.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "a cat", "sharpness": value}) for value in (0.5, 1.5)))
    entries = read_manifest(path, SPEC).entries
    return {
        "values": [entry.load().request.sharpness for entry in entries],
        "alike": entries[0].digest == entries[1].digest,
    }


def list_digests(folder):
    """Return what the results and snapshots of a request that has only a prompt are stored under."""
    from actors.batch.manifest import read_manifest
    from actors.slices.snapshots import name_of
    from tests.actors.small_spec import SPEC

    path = folder / "one.jsonl"
    path.write_text('{"prompt": "a cat"}')
    [entry] = read_manifest(path, SPEC).entries
    return [entry.digest, name_of("x", entry.load().request, "model")]


def over_http(folder):
    """Return the API's description of the field, and its value from a request's body to the plan of the worker."""
    import httpx

    from actors.api.settings import ServiceSettings
    from actors.jobs.store import JobStore, open_database
    from actors.slices.snapshots import name_of
    from tests.actors.api import serving

    (folder / "frames").mkdir()
    settings = ServiceSettings(
        database=str(folder / "jobs.sqlite"), storage=str(folder / "results"), model=serving.MODEL
    )
    engine = serving.Engine(folder / "frames")
    with serving.serve(settings) as address, httpx.Client(base_url=address, timeout=30) as http:
        schemas = http.get("/openapi.json").json()["components"]["schemas"]
        refused = serving.create(http, sharpness=3).json()["error"]
        job = serving.create(http, sharpness="1.5", seed=1).json()
        other = serving.create(http, seed=1).json()
        with serving.working(settings, engine):
            videos = [serving.wait_for_end(http, each["id"]) for each in (job, other)]
    database = open_database(settings.database)
    stored = JobStore(database).get(job["id"]).request
    database.close()
    return {
        "body": schemas["CreateVideo"]["properties"]["sharpness"],
        "form": "sharpness" in schemas["CreateVideoForm"]["properties"],
        "refused": [refused["param"], refused["message"]],
        "stored": stored["sharpness"],
        "shown": [video["sharpness"] for video in videos],
        "planned": [request.sharpness for request in engine.requests],
        "snapshots": len({name_of("x", request, "model") for request in engine.requests}),
    }


if __name__ == "__main__":
    add_field(Path(sys.argv[1]))
    sys.path.insert(0, str(ROOT))
    reached = {"command line": on_the_command_line(), "manifest": in_a_manifest(Path(sys.argv[1]))}
    reached["digests"] = list_digests(Path(sys.argv[1]))
    print(json.dumps(reached | {"http": over_http(Path(sys.argv[1]))}))
