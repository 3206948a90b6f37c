"""Machines of test_tpu_vm.py, all in a network of their own: boots each with its start-up script, says what Ray finds.

Argument: the folder of the scripts. Prints JSON: slices with their hosts, and what is left once a host was stopped.
"""

import base64
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import trustme

FOLDER = Path(sys.argv[1])
SHIMS = Path(__file__).with_name("tpu_vm")
TOKEN = "of-the-machines-" * 4
attributes: dict[str, str] = {}


class Metadata(BaseHTTPRequestHandler):
    """Answers with a booting machine's metadata, like Google's metadata server."""

    def do_GET(self):
        names = attributes.get(self.path.rpartition("/")[2])
        ok = names is not None and self.headers["Metadata-Flavor"] == "Google"
        self.send_response(200 if ok else 404)
        self.end_headers()
        self.wfile.write((names or "").encode() if ok else b"")

    def log_message(self, *args):
        pass


class SecretManager(BaseHTTPRequestHandler):
    """Answers with the cluster's token, like Google's REST API."""

    def do_GET(self):
        secret = self.path == "/v1/projects/project/secrets/wan-token/versions/latest:access"
        ok = secret and self.headers["Authorization"] == "Bearer ya29.of-the-account"
        self.send_response(200 if ok else 403)
        self.end_headers()
        data = base64.b64encode(TOKEN.encode()).decode()
        answer = {"name": "projects/1/secrets/wan-token/versions/1", "payload": {"data": data, "dataCrc32c": "1"}}
        self.wfile.write(json.dumps(answer if ok else {}, indent=2).encode())

    def log_message(self, *args):
        pass


def serve_secrets():
    """Answer as secretmanager.googleapis.com, with a certificate that curl takes here."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(FOLDER / "authority.pem")
    os.environ["CURL_CA_BUNDLE"] = str(FOLDER / "authority.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("secretmanager.googleapis.com").configure_cert(context)
    server = ThreadingHTTPServer(("169.254.169.254", 443), SecretManager)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def boot(machine, script, **own):
    attributes.clear()
    attributes.update({"wan-tpu-head": "10.0.0.1"} | own)
    attributes.update({"ip": machine, "subnetmask": "255.255.255.0"})
    attributes["token"] = '{"access_token":"ya29.of-the-account","expires_in":3599,"token_type":"Bearer"}'
    environment = os.environ | {"PATH": f"{SHIMS}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment |= {"MACHINE": machine, "FOLDER": str(FOLDER)}
    subprocess.run(["bash", FOLDER / script], env=environment, check=True)
    time.sleep(3)


def nodes():
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def wait_for(condition, event):
    until = time.monotonic() + 150  # On a busy machine, a node that starts too late is started again.
    while not condition():
        assert time.monotonic() < until, event
        time.sleep(0.2)


subprocess.run("ip link set lo up; ip addr add 169.254.169.254/32 dev lo", shell=True, check=True)
for number in range(1, 4):
    subprocess.run(["ip", "addr", "add", f"10.0.0.{number}/32", "dev", "lo"], check=True)
# The head's Container-Optimized OS lets SSH in, and what it has asked for; the hosts' images let in what comes.
COS = """
iptables --append INPUT --match conntrack --ctstate ESTABLISHED,RELATED --jump ACCEPT
iptables --append INPUT --source 127.0.0.0/8 --jump ACCEPT
iptables --append INPUT --source 10.0.0.1 --destination 10.0.0.1 --jump ACCEPT
iptables --append INPUT --destination 169.254.169.254 --jump ACCEPT
iptables --append INPUT --protocol tcp --dport 22 --jump ACCEPT
iptables --append INPUT --destination 10.0.0.2/31 --jump ACCEPT
iptables --policy INPUT DROP
"""
subprocess.run(["bash", "-ec", COS], check=True)
overlay = f"lowerdir=/etc,upperdir={FOLDER}/up,workdir={FOLDER}/work"
subprocess.run(["mount", "-t", "overlay", "overlay", "-o", overlay, "/etc"], check=True)
Path("/tmp/ray").mkdir(exist_ok=True)
subprocess.run("mount -t tmpfs tmpfs /tmp/ray", shell=True, check=True)
with Path("/etc/hosts").open("a") as hosts:
    hosts.write("\n169.254.169.254 metadata.google.internal secretmanager.googleapis.com\n")
hugepages, of_kernel = FOLDER / "hugepages", "/sys/kernel/mm/transparent_hugepage/enabled"
hugepages.write_text("always [madvise] never")
subprocess.run(["mount", "--bind", hugepages, of_kernel], check=True)  # The machine's own setting stays as it is.
threading.Thread(target=ThreadingHTTPServer(("169.254.169.254", 80), Metadata).serve_forever, daemon=True).start()
serve_secrets()

boot("10.0.0.1", "head.sh")
assert hugepages.read_text() == "always [madvise] never"
boot("10.0.0.2", "v5p-16.sh", **{"instance-id": "slice-a", "agent-worker-number": "1"})
boot("10.0.0.3", "v5p-16.sh", **{"instance-id": "slice-a", "agent-worker-number": "0"})
assert hugepages.read_text() == "always\n"
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}

from cluster.connect import connect, leave  # noqa: E402
from cluster.gang.placement import reserve  # noqa: E402
from cluster.inventory import list_slices  # noqa: E402
from cluster.slice_spec import SliceSpec  # noqa: E402

connect("10.0.0.1:6379")
wait_for(lambda: len(nodes()) == 3, "three nodes")
placed = reserve(SliceSpec("v5p-16"), "low/0", 100)
names = [str(item) for item in list_slices()]
print("found:", json.dumps({"slices": names, "hosts": [host.ip for host in placed.hosts]}), flush=True)
os.kill(int((FOLDER / "10.0.0.2.pid").read_text()), signal.SIGTERM)  # `systemctl stop` does the same.
wait_for(lambda: len(nodes()) == 2, "the stopped host is gone")
leave()
print("left:", json.dumps({"stopped": True}), flush=True)
