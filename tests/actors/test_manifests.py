"""`wan-tpu manifests`: what a person gets for a layout, and what is refused before anything is printed."""

import hashlib
import shlex
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import yaml
from sqlalchemy import make_url

from actors.cli import main
from tests.cluster.kuberay_rules import pods_of, selects, services_of
from tests.cluster.schemas import check
from tests.conftest import ROOT

IMAGE = ["--image", "registry/wan-tpu:1"]
MODEL = ["--model_id", "examples/small-wan2.2-i2v"]
OF_THE_HUB = ["--model_id", "Wan-AI/Wan2.2-I2V-A14B-Diffusers"]
DATABASE = ["--database", "postgresql://wan@db/jobs"]
BUCKETS = ["--results", "gs://b/r", "--snapshots", "gs://b/s"]
SERVICE = ["--layout", "four-pools", "--service", *OF_THE_HUB, *DATABASE, *BUCKETS]
PUBLIC = ["--hostname", "videos.example.com", "--certificate_map", "certificates"]


def print_objects(capsys, *argv):
    """Return the objects that the command prints, by kind."""
    assert main(["manifests", *IMAGE, *argv]) == 0, capsys.readouterr().err
    return {item["kind"]: item for item in yaml.safe_load_all(capsys.readouterr().out)}


def test_layout_becomes_the_objects_of_its_cluster(capsys):
    objects = print_objects(
        capsys, "--layout", "a14b-multihost-v6e-16", *MODEL, "--name", "mine", "--namespace", "videos"
    )
    assert list(objects) == ["ServiceAccount", "NetworkPolicy", "PodDisruptionBudget", "PodMonitoring", "RayCluster"]
    assert {manifest["metadata"]["namespace"] for manifest in objects.values()} == {"videos"}
    check(objects["RayCluster"])


def test_model_on_a_hub_that_does_not_answer_is_not_checked_and_said_so(capsys, monkeypatch):
    def fail(*args, **options):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert main(["manifests", *IMAGE, "--layout", "four-pools", *OF_THE_HUB]) == 0
    printed = capsys.readouterr()
    assert "RayCluster" in printed.out
    assert "not checked whether the layout fits the model: can't fetch Wan-AI/" in printed.err


@pytest.mark.parametrize(("monitor", "kinds"), [("PodMonitor", {"PodMonitor"}), ("none", set())])
def test_figures_are_collected_by_what_there_is(monitor, kinds, capsys):
    objects = print_objects(capsys, "--layout", "four-pools", "--monitor", monitor)
    assert {kind for kind in objects if "Monitor" in kind} == kinds


def test_a_service_has_the_arguments_of_serve(capsys):
    objects = print_objects(capsys, *SERVICE, "--secret", "database", "--largest", "1280x720x81")
    check(objects["RayService"])
    config = yaml.safe_load(objects["RayService"]["spec"]["serveConfigV2"])
    assert config["http_options"] == {"host": "0.0.0.0", "port": 8000}
    arguments = config["applications"][0]["args"]["arguments"]
    assert arguments["database"] == "postgresql://wan@db/jobs" and arguments["largest"] == ["1280x720x81"]
    assert not {"image", "secret", "service"} & set(arguments)
    assert all(application["args"]["arguments"] == arguments for application in config["applications"])
    [(name, text)] = objects["ConfigMap"]["data"].items()
    layout = (config["applications"][0]["args"]["layout"], hashlib.sha256(text.encode()).hexdigest())
    assert layout[0].endswith(f"/{name}") and "pools:" in text
    for application in config["applications"]:  # Another layout makes Serve build every application anew.
        assert (application["args"]["layout"], application["args"]["layout_sha256"]) == layout
    assert not {"layout", "layout_text"} & set(arguments)
    assert {8000, 8265} == {
        port["port"] for rule in objects["NetworkPolicy"]["spec"]["ingress"] for port in rule.get("ports", ())
    } - {8080}
    container = objects["RayService"]["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert container["envFrom"] == [{"secretRef": {"name": "database"}}]


def test_service_behind_a_load_balancer_has_its_name_and_certificate(capsys):
    objects = print_objects(capsys, *SERVICE, *PUBLIC)
    assert objects["Gateway"]["spec"]["listeners"][0]["hostname"] == "videos.example.com"
    check(objects["RayService"])
    container = objects["RayService"]["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert environment["WAN_TPU_TRUSTED_PROXIES"] == "35.191.0.0/16 130.211.0.0/22"
    config = yaml.safe_load(objects["RayService"]["spec"]["serveConfigV2"])
    assert not {"hostname", "certificate_map"} & set(config["applications"][0]["args"]["arguments"])


def test_kustomize_renders_what_is_printed_and_an_overlay_that_stays(tmp_path, capsys):
    service = [*SERVICE, *PUBLIC]
    assert main(["manifests", *IMAGE, *service]) == 0
    expected = index_manifests(capsys.readouterr().out)
    assert main(["manifests", *IMAGE, *service, "--kustomize", str(tmp_path)]) == 0
    assert "access.yaml" in capsys.readouterr().out
    assert index_manifests(render(tmp_path / "base")) == expected
    production = tmp_path / "overlays" / "production"
    assert index_manifests(render(production)) == expected
    file = production / "kustomization.yaml"
    file.write_text(file.read_text().replace("newTag: '1'", "newTag: '2'"))
    assert main(["manifests", *IMAGE, *service, "--kustomize", str(tmp_path)]) == 0
    overlaid = index_manifests(render(production))
    assert overlaid != expected
    spec = overlaid["RayService", "wan-tpu"]["spec"]["rayClusterConfig"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert group["template"]["spec"]["containers"][0]["image"] == "registry/wan-tpu:2"


@pytest.mark.parametrize("image", ["registry:5000/wan-tpu", "registry/wan-tpu@sha256:" + 64 * "0"])
def test_overlay_leaves_an_image_without_a_tag_as_it_is(image, tmp_path):
    assert main(["manifests", "--image", image, "--layout", "four-pools", *MODEL, "--kustomize", str(tmp_path)]) == 0
    assert "images:" not in (tmp_path / "overlays" / "production" / "kustomization.yaml").read_text()
    overlaid = index_manifests(render(tmp_path / "overlays" / "production"))
    head = overlaid["RayCluster", "wan-tpu"]["spec"]["headGroupSpec"]
    assert head["template"]["spec"]["containers"][0]["image"] == image


def write_kustomization(folder, *argv):
    assert main(["manifests", *IMAGE, *SERVICE, *argv, "--kustomize", str(folder)]) == 0


ONE_SLICE = "pools:\n  all: {stages: [encoder, denoise_high, denoise_low, decoder], slice: v6e-8}\n"
OVERLAYS = {
    "spot": ["--capacity", "spot"],
    "flex-start": ["--capacity", "flex-start", "--ingresses", "3"],
    "production": ["--hostname", "videos.example.com", "--certificate_map", "wan", "--ssl_policy", "wan"],
    "staging": [
        "--namespace",
        "staging",
        "--layout",
        "LAYOUT",
        "--cloud_sql",
        "p:us-east5:staging",
        "--account",
        "a@p.iam",
    ],
    "prometheus": ["--monitor", "PodMonitor", "--queue", "tpus"],
}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_turns_the_base_into_what_the_same_arguments_print(overlay, tmp_path, capsys):
    (tmp_path / "staging.yaml").write_text(ONE_SLICE)
    argv = [str(tmp_path / "staging.yaml") if word == "LAYOUT" else word for word in OVERLAYS[overlay]]
    service = SERVICE if "--cloud_sql" not in argv else [word for word in SERVICE if word not in DATABASE]
    write_kustomization(tmp_path)
    capsys.readouterr()
    assert main(["manifests", *IMAGE, *service, *argv]) == 0
    printed = capsys.readouterr().out
    overlaid = ["--kustomize", str(tmp_path), "--overlay", overlay]
    assert main(["manifests", "--image", "registry/wan-tpu:2", *service, *argv, *overlaid]) == 0
    rendered_objects = index_manifests(render(tmp_path / "overlays" / overlay))
    assert rendered_objects == index_manifests(printed.replace("registry/wan-tpu:1", "registry/wan-tpu:2"))
    for item in rendered_objects.values():
        check(item)
    spec = rendered_objects["RayService", "wan-tpu"]["spec"]["rayClusterConfig"]
    pods = pods_of(spec, "wan-tpu-x7k2p", in_service=True, version=(1, 5))
    [head, *_] = services_of(spec, "wan-tpu-x7k2p", "wan-tpu")
    assert [name for name, pod in pods.items() if head.selects(pod)] == ["headgroup"]
    others = [item["spec"] for (kind, _), item in rendered_objects.items() if kind == "PodDisruptionBudget"]
    assert all(any(selects(spec["selector"]["matchLabels"], pod) for pod in pods.values()) for spec in others)


def test_overlay_is_small_and_fails_where_the_base_has_other_groups(tmp_path, capsys):
    write_kustomization(tmp_path)
    write_kustomization(tmp_path, "--capacity", "spot", "--overlay", "spot")
    folder = tmp_path / "overlays" / "spot"
    assert {file.name for file in folder.iterdir()} == {"kustomization.yaml", "rayservice-wan-tpu.yaml"}
    operations = yaml.safe_load((folder / "rayservice-wan-tpu.yaml").read_text())
    assert {tuple(item["path"].split("/")[-2:]) for item in operations if item["op"] != "test"} == {
        ("tolerations", "-"),
        ("nodeSelector", "cloud.google.com~1gke-spot"),
    }
    base = tmp_path / "base" / "pipeline.yaml"
    base.write_text(base.read_text().replace("groupName: v6e-4", "groupName: v6e-1"))
    with pytest.raises(subprocess.CalledProcessError):
        render(folder)


def index_manifests(text):
    return {(item["kind"], item["metadata"]["name"]): item for item in yaml.safe_load_all(text)}


def render(folder):
    kubectl = Path(sys.executable).with_name("kubectl")
    return subprocess.run([kubectl, "kustomize", folder], check=True, capture_output=True, text=True).stdout


def test_a_job_drives_its_manifest(capsys):
    job = ["--job", "gs://b/in.jsonl", "--output", "gs://b/out", "--in_flight", "8"]
    objects = print_objects(capsys, *job, "--layout", "four-pools", "--model_id", "Wan-AI/Wan2.2-I2V-A14B-Diffusers")
    check(objects["RayJob"])
    words = shlex.split(objects["RayJob"]["spec"]["entrypoint"])
    assert words[:5] == ["exec", "python", "-m", "actors.cli", "drive"]
    options = dict(zip(words[5::2], words[6::2], strict=True))
    assert (options["--manifest"], options["--in_flight"]) == ("gs://b/in.jsonl", "8")
    assert "--layout_text" not in options and "\n" not in objects["RayJob"]["spec"]["entrypoint"]
    [(name, text)] = objects["ConfigMap"]["data"].items()
    assert options["--layout"].endswith(f"/{name}")
    assert text == (ROOT / "cluster" / "layouts" / "four-pools.yaml").read_text()


def test_service_s_database_is_reached_through_cloud_sql_s_proxy(capsys):
    service = ["--service", "--layout", "four-pools", *OF_THE_HUB, *BUCKETS]
    account = ["--account", "wan-tpu@my-videos.iam.gserviceaccount.com", "--cloud_sql", "my-videos:us-east5:wan"]
    objects = print_objects(capsys, *service, *account)
    check(objects["RayService"])
    config = yaml.safe_load(objects["RayService"]["spec"]["serveConfigV2"])
    url = make_url(config["applications"][0]["args"]["arguments"]["database"])
    assert (url.username, url.host, url.port, url.database) == ("wan-tpu@my-videos.iam", "127.0.0.1", 5432, "jobs")
    head = objects["RayService"]["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    assert head["initContainers"][0]["args"][-1] == "my-videos:us-east5:wan"


def test_queued_batch_requests_each_slice(capsys):
    job = ["--job", "gs://b/in.jsonl", "--output", "gs://b/out", *OF_THE_HUB, "--capacity", "queued"]
    assert main(["manifests", *IMAGE, "--layout", "four-pools", *job]) == 0
    items = [*yaml.safe_load_all(capsys.readouterr().out)]
    for item in items:
        check(item)
    cluster = next(item for item in items if item["kind"] == "RayJob")["spec"]["rayClusterSpec"]
    requests = [item for item in items if item["kind"] == "ProvisioningRequest"]
    assert len(requests) == len(cluster["workerGroupSpecs"]) - 1 > 3


def test_node_pools_are_written_without_an_image(tmp_path, capsys):
    file = tmp_path / "pools.tfvars"
    assert main(["manifests", "--layout", "four-pools", "--capacity", "spot", "--node_pools", str(file)]) == 0
    assert str(file) in capsys.readouterr().out
    text = file.read_text()
    assert 'capacity = "spot"' in text and 'machine_type = "ct6e-standard-8t", topology = "2x4", hosts = 1' in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--layout is missing"),
        (["--layout", "emulated-demo"], "its slices are emulated"),
        (["--layout", "one-expert-v6e", *MODEL], "shipped layouts for"),
        (
            ["--layout", "four-pools", "--job", "in.jsonl", "--output", "gs://b/out", *MODEL],
            "in.jsonl isn't in a bucket",
        ),
        (["--layout", "four-pools", "--service", *OF_THE_HUB, *DATABASE], "--snapshots is missing"),
        (["--layout", "four-pools", "--service", *MODEL, *DATABASE], "examples/small-wan2.2-i2v isn't in a bucket"),
        (["--layout", "four-pools", "--service", *OF_THE_HUB], "--database is missing; give postgresql://"),
        (["--layout", "four-pools", "--capacity", "cheap"], "choose from"),
        (["--layout", "four-pools", "--image", "wan tpu"], "isn't the name of an image; give REGISTRY/NAME:TAG"),
        (["--layout", "four-pools", "--name", "My videos"], "--name is 'My videos'; give up to 40 lower-case"),
        (["--layout", "four-pools", "--namespace", "Videos"], "--namespace is 'Videos'; give up to 63 lower-case"),
        (["--layout", "four-pools", "--account", "wan"], "--account 'wan' isn't a Google service account"),
        (["--layout", "four-pools", "--idle_s", "-4"], "--idle_s is -4; give 0 or more"),
        (["--layout", "four-pools", "--output", "gs://b/o"], "--output has no effect without --job"),
        (
            ["--layout", "four-pools", "--service", "--hostname", "https://a.example", "--certificate_map", "m"],
            "isn't a host name; give one such as videos.example.com",
        ),
        (["--layout", "four-pools", "--hostname", "a.example"], "--hostname has no effect without --service"),
        (["--layout", "four-pools", "--armor", "strict"], "--armor has no effect without --hostname"),
        (["--layout", "four-pools", "--service", "--hostname", "a.example"], "--certificate_map is missing"),
        (
            ["--layout", "four-pools", "--service", *OF_THE_HUB, "--capacity", "queued"],
            "--capacity queued is only for batches",
        ),
        (["--layout", "four-pools", "--service", *OF_THE_HUB, *DATABASE, "--cloud_sql", "a:b:c"], "name two databases"),
        (["--layout", "four-pools", "--service", *OF_THE_HUB, "--cloud_sql", "a:b:c"], "--account is missing"),
        (
            ["--layout", "four-pools", "--service", *OF_THE_HUB, "--cloud_sql", "wan", "--account", "a@b"],
            "--cloud_sql 'wan' isn't an instance's name; give PROJECT:REGION:NAME",
        ),
        (["--layout", "four-pools", "--cloud_sql", "a:b:c"], "--cloud_sql has no effect without --service"),
        (["--layout", "four-pools", "--overlay", "staging"], "--overlay has no effect without --kustomize"),
        (
            ["--layout", "four-pools", "--kustomize", "/no/such", "--overlay", "staging"],
            "/no/such has no base (No such file or directory); write it first",
        ),
        (
            ["--layout", "four-pools", "--kustomize", "/no/such", "--overlay", "../a"],
            "--overlay is '../a'; give up to 63 lower-case",
        ),
        (
            ["--layout", "four-pools", "--node_pools", "/no/such/folder/x.tfvars"],
            "can't write /no/such/folder/x.tfvars",
        ),
    ],
)
def test_what_can_not_be_is_refused(argv, message, capsys):
    assert main(["manifests", *IMAGE, *argv]) == 2
    out, err = capsys.readouterr()
    assert message in err and not out


def test_image_is_needed(capsys):
    assert main(["manifests", "--layout", "four-pools"]) == 2
    assert "--image is missing" in capsys.readouterr().err


def test_it_needs_neither_ray_s_processes_nor_jax():
    code = "import sys; from actors.cli import main; main(sys.argv[1:]); assert 'jax' not in sys.modules"
    command = [sys.executable, "-c", code, "manifests", *IMAGE, "--layout", "four-pools", *MODEL]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
