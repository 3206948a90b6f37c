"""Where Ray Serve's one proxy listens, on an emulated cluster: it starts anew elsewhere when nothing runs on it."""

import os
import socket

import pytest
import ray
from ray import serve
from ray.serve.config import ProxyLocation

from actors.api.deploy import ServiceStartFailed, prepare_on_head, start_http, take_down
from actors.api.settings import ServiceSettings
from actors.commands import serve_config
from actors.commands.mounted_layout import MountedLayout
from actors.jobs.keys import make_key
from actors.jobs.store import open_database
from cluster.connect import connect, leave
from cluster.errors import PortTaken
from tests.actors.on_service.conftest import LAYOUT_TEXT, free_port
from tests.waiting import wait_for
from wan_tpu.errors import InvalidInput

pytestmark = pytest.mark.long


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Other:
    def __call__(self):
        return "here"


@pytest.fixture(scope="module", autouse=True)
def cluster(one_slice):
    connect(one_slice.address)
    yield one_slice
    leave()


def listens(host, port):
    with socket.socket() as tried:
        return tried.connect_ex((host, port)) == 0


def controller():
    return serve.context._get_global_client()._controller._actor_id


def run_other():
    serve.run(Other.bind(), name="other", route_prefix=None)


@pytest.mark.soak
def test_serve_starts_anew_elsewhere_unless_something_runs():
    port = free_port()
    serve.start(proxy_location=ProxyLocation.Disabled)
    run_other()
    with pytest.raises(ServiceStartFailed, match=r"\(other\)"):
        start_http("127.0.0.1", port)
    serve.delete("other")

    start_http("127.0.0.1", port)
    run_other()
    wait_for(lambda: listens("127.0.0.1", port))
    same = controller()
    start_http("127.0.0.1", port)
    for host, other_port in (("127.0.0.2", port), ("127.0.0.1", port + 1)):
        with pytest.raises(ServiceStartFailed, match=rf"port {port} .*\(other\)"):
            start_http(host, other_port)
    serve.delete("other")
    start_http("127.0.0.1", port)
    assert controller() == same

    start_http("127.0.0.2", port)
    assert controller() != same
    run_other()
    wait_for(lambda: listens("127.0.0.2", port) and not listens("127.0.0.1", port))
    serve.delete("other")


@pytest.mark.soak
def test_a_service_is_taken_down_where_another_process_has_shut_serve_down():
    start_http("127.0.0.1", free_port())
    client = serve.context._get_global_client()
    serve.shutdown()
    serve.context._set_global_client(client)  # what the other process still has
    take_down("gone")


def test_files_of_one_machine_are_created_where_the_service_looks_for_them(tmp_path, monkeypatch):
    """Paths that mean another file in every process stand for those of two machines."""
    monkeypatch.chdir(tmp_path)
    here = "/proc/self/cwd/"
    settings = ServiceSettings(
        database=f"{here}jobs.sqlite", storage=f"{here}results", model="m", webhook_secret_file=f"{here}secret"
    )
    make_key(open_database(settings.database), "ann")  # where the command runs, which says nothing of the head
    with pytest.raises(InvalidInput, match="wan-tpu keys add"):
        prepare_on_head(settings, "0.0.0.0")
    prepare_on_head(settings, "127.0.0.1")
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("jobs")] == []


def test_a_port_that_is_taken_is_refused_before_anything_is_made(tmp_path):
    settings = ServiceSettings(database=str(tmp_path / "jobs.sqlite"), storage=str(tmp_path / "results"), model="m")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"port {port} .*process {os.getpid()}\b"):
            prepare_on_head(settings, "127.0.0.1", port)
    assert not list(tmp_path.iterdir())
    prepare_on_head(settings, "127.0.0.1", port)


def test_a_config_s_applications_are_built_wherever_serve_does_it(tmp_path, checkpoint):
    (tmp_path / "layout.yaml").write_text(LAYOUT_TEXT)
    arguments = {"layout": str(tmp_path / "layout.yaml"), "model_id": str(checkpoint("wan2.2-i2v-a14b"))}
    arguments |= {"database": str(tmp_path / "jobs.sqlite"), "results": str(tmp_path / "results")}
    arguments |= {"snapshots": str(tmp_path / "snapshots"), "host": "127.0.0.1", "port": free_port()}

    def build(builder, arguments, **others):
        return type(getattr(serve_config, f"build_{builder}")({"arguments": arguments, **others})).__name__

    task = ray.remote(build)
    for builder in ("worker", "ingress"):
        assert ray.get(task.remote(builder, arguments)) == "Application"
    mounted = MountedLayout(arguments["layout"], LAYOUT_TEXT)
    without = {name: value for name, value in arguments.items() if name != "layout"}
    file = {"layout": mounted.path, "layout_sha256": mounted.sha256}
    assert ray.get(task.remote("worker", without, **file)) == "Application"
    assert {"jobs.sqlite", "results"} <= {path.name for path in tmp_path.iterdir()}
    with pytest.raises(ray.exceptions.RayTaskError, match="wan-tpu keys add"):
        ray.get(task.remote("ingress", arguments | {"host": "0.0.0.0"}))
