"""Write scripts for Ray on TPU VMs without Kubernetes: some create the machines, the others run when machines boot.

Every machine runs `ray start --block` in a container, as a systemd unit. When a machine is taken away, systemd stops
the container with SIGTERM, which drains the node; when it boots again, it joins the cluster again. Nothing scales
automatically: the cluster has the slices that were created.

Sources: docs.cloud.google.com/tpu/docs, "Queued resources", for the API and for what a TPU VM's metadata says;
docs.cloud.google.com/container-optimized-os, "Configure the host firewall";
docs.cloud.google.com/artifact-registry, "Set up authentication for Docker"; docs.cloud.google.com/secret-manager,
"Access a secret version", for its REST API; docs.ray.io for `ray start`.
"""

import shlex
from dataclasses import dataclass

from cluster.chips import CHIPS
from cluster.errors import LayoutError
from cluster.layout import Layout
from cluster.provision.node_pools import check_real
from cluster.provision.pods import ENVIRONMENT
from cluster.slice_spec import ACCELERATOR_TYPE, POD_TYPE, SLICE_NAME, TOPOLOGY, WORKER_ID, SliceSpec

PORT, DASHBOARD = 6379, 8265
UNIT = "/etc/systemd/system/wan-tpu.service"

_START = """\
#!/bin/bash
# {role}: joins a Ray cluster at every boot. Written by wan-tpu hosts.
set -euo pipefail

metadata() {{
  curl --silent --fail --header 'Metadata-Flavor: Google' \\
    "http://metadata.google.internal/computeMetadata/v1/instance/$1"
}}
attribute() {{ metadata "attributes/$1"; }}
# The service account's own token, which lasts an hour. There is no gcloud, jq or Python on Container-Optimized OS.
access_token() {{ metadata service-accounts/default/token | sed 's/.*"access_token" *: *"\\([^"]*\\)".*/\\1/'; }}
{variables}
# Anyone holding the cluster's token can run code on it, so it isn't in the machine's metadata.
token=$(curl --silent --show-error --fail --header "Authorization: Bearer $(access_token)" \\
  https://secretmanager.googleapis.com/v1/projects/{project}/secrets/{secret}/versions/latest:access \\
  | sed --quiet 's/.*"data" *: *"\\([^"]*\\)".*/\\1/p' | base64 --decode)
umask 077
mkdir -p /etc/wan-tpu
cat > /etc/wan-tpu/environment <<EOF
RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$token
{environment}
EOF
{login}cat > {unit} <<EOF
[Unit]
Description=A node of a Ray cluster: {role}
Requires=docker.service
After=docker.service network-online.target

[Service]
Environment=DOCKER_CONFIG=/etc/wan-tpu/docker
{log_in}ExecStartPre=-/usr/bin/env docker rm --force wan-tpu
ExecStart=/usr/bin/env docker run --name wan-tpu --rm --privileged --user root --network host --ipc host \\
  --ulimit nofile=1048576 --env-file /etc/wan-tpu/environment --entrypoint ray {image} \\
  start --block --disable-usage-stats {arguments}
ExecStop=/usr/bin/env docker stop --time 25 wan-tpu
TimeoutStopSec=30
Restart=always
RestartSec=5

[Install]
WantedBy=multi-user.target
EOF
systemctl daemon-reload
systemctl enable wan-tpu.service
systemctl restart wan-tpu.service
"""

# Artifact Registry requires credentials whenever the container starts. Use those of the machine's service account.
_LOGIN = """\
cat > /etc/wan-tpu/login <<'EOF'
set -euo pipefail
curl --silent --fail --header 'Metadata-Flavor: Google' \\
  http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default/token \\
  | sed 's/.*"access_token" *: *"\\([^"]*\\)".*/\\1/' \\
  | docker login --username oauth2accesstoken --password-stdin https://{registry}
EOF
"""

# Container-Optimized OS drops all incoming traffic except SSH, even for containers on the host's network, and forgets
# additional rules at every boot.
_ALLOW_SUBNET = """\
subnet=$(metadata network-interfaces/0/ip)/$(metadata network-interfaces/0/subnetmask)
rule="INPUT --protocol tcp --source $subnet --jump ACCEPT"
iptables --wait --check $rule 2> /dev/null || iptables --wait --insert $rule
"""

# libtpu needs transparent huge pages (JAX warns without them), and every boot restores the kernel's default.
_HUGEPAGES = """\
hugepages=/sys/kernel/mm/transparent_hugepage/enabled
[ ! -e $hugepages ] || echo always > $hugepages
"""


@dataclass(frozen=True)
class Machines:
    """The location, image and account of all machines of a cluster."""

    name: str  # The cluster's name, which is the first part of the machines' names.
    project: str
    zone: str
    image: str
    account: str  # The Google service account that the machines act as, to reach buckets and the cluster's token.
    spot: bool = False

    @property
    def secret(self) -> str:
        """The name of the secret in Secret Manager that holds the cluster's token."""
        return f"{self.name}-token"

    @property
    def head(self) -> str:
        return f"{self.name}-head"

    @property
    def registry(self) -> str | None:
        """The image's registry if it is one of Google's, which require the machine's credentials; else None."""
        host = self.image.partition("/")[0]
        return host if host.endswith((".pkg.dev", "gcr.io")) else None

    @property
    def address(self) -> str:
        """The head's DNS name in its network."""
        return f"{self.head}.{self.zone}.c.{self.project}.internal"


def format_scripts(layout: Layout, machines: Machines) -> dict[str, str]:
    """Return all scripts, by the names of their files.

    Raises:
        LayoutError: A kind of slice isn't available as TPU VMs, the layout is for emulated slices, or the machines of
            two pools would have the same names.
    """
    check_real(layout)
    kinds = {pool.slice.pod_type: pool.slice for pool in layout.pools}
    for kind in kinds.values():
        if kind.chip.tpu_vm_runtime is None:
            known = ", ".join(chip.name for chip in CHIPS.values() if chip.tpu_vm_runtime is not None)
            raise LayoutError(
                f"{layout.source}: Cloud TPU's API has no {kind}, only {known}; on GKE: wan-tpu manifests"
            )
    _check_names(layout)
    return {
        "create.sh": _format_create_script(layout, machines),
        "delete.sh": _format_delete_script(layout, machines),
        "head.sh": format_head_script(machines),
        **{f"{name}.sh": format_host_script(kind, machines) for name, kind in kinds.items()},
    }


def format_head_script(machines: Machines) -> str:
    """Return the head's start-up script. As the only machine without TPUs, the head also runs leaders and drivers."""
    arguments = f"--head --port {PORT} --dashboard-host 0.0.0.0 --dashboard-port {DASHBOARD}"
    return _format_start_script("the head", machines, _ALLOW_SUBNET, arguments)


def format_host_script(kind: SliceSpec, machines: Machines) -> str:
    """Return the start-up script of the hosts of one kind of slice."""
    # Set the host's place in its slice from the machine's metadata. Ray looks for it where not every machine has it.
    labels = {
        ACCELERATOR_TYPE: kind.chip.ray_accelerator,
        POD_TYPE: kind.pod_type,
        TOPOLOGY: kind.topology,
        SLICE_NAME: "$slice",
        WORKER_ID: "$worker",
    }
    variables = f"""\
slice=$(attribute instance-id || hostname)
worker=$(attribute agent-worker-number || echo 0)
address=$(attribute wan-tpu-head)
resources='{{"TPU": {kind.chips_per_host}}}'
[ "$worker" != 0 ] || resources='{{"TPU": {kind.chips_per_host}, "{kind.head_resource}": 1}}'
"""
    pairs = ",".join(f"{name}={value}" for name, value in labels.items())
    arguments = f"--address $address:{PORT} --labels {pairs} --resources '$resources'"
    return _format_start_script(f"a host of a slice {kind}", machines, _HUGEPAGES + variables, arguments)


def _format_start_script(role: str, machines: Machines, variables: str, arguments: str) -> str:
    environment = ENVIRONMENT | {"JAX_PLATFORMS": "tpu,cpu"}
    registry = machines.registry
    return _START.format(
        role=role,
        login="" if registry is None else _LOGIN.format(registry=registry),
        log_in="" if registry is None else "ExecStartPre=/usr/bin/env bash /etc/wan-tpu/login\n",
        variables=variables,
        environment="\n".join(f"{name}={value}" for name, value in environment.items()),
        unit=UNIT,
        image=machines.image,
        arguments=arguments,
        project=machines.project,
        secret=machines.secret,
    )


def _check_names(layout: Layout) -> None:
    """Raise `LayoutError` if the machines of two pools would have the same names."""
    pools: dict[str, str] = {}
    for pool in layout.pools:
        other = pools.setdefault(_format_machine_part(pool.name), pool.name)
        if other != pool.name:
            raise LayoutError(
                f"{layout.source}: machines of pools {other} and {pool.name} would have the same names, in which "
                "capital letters become lower-case ones and underscores become dashes; rename one of the pools"
            )


def _format_machine_part(pool: str) -> str:
    """Return a pool's name in the form that is allowed in the names of machines."""
    return pool.replace("_", "-").lower()


def _list_slices(layout: Layout, machines: Machines) -> list[tuple[str, SliceSpec]]:
    return [
        (f"{machines.name}-{_format_machine_part(pool.name)}-{number}", pool.slice)
        for pool in layout.pools
        for number in range(pool.replicas.maximum)
    ]


def _format_create_script(layout: Layout, machines: Machines) -> str:
    where = f"--project {shlex.quote(machines.project)} --zone {shlex.quote(machines.zone)}"
    project, account = f"--project {shlex.quote(machines.project)}", shlex.quote(machines.account)
    secret = f"{machines.secret} {project}"
    lines = [
        "#!/bin/bash",
        f"# Creates the head and the slices of {layout.source}. It reports what already exists, and doesn't change it.",
        "set -uo pipefail",
        'cd "$(dirname "$0")"',
        "umask 077",
        "# Anyone holding this token can run code on all machines.",
        "[ -s token ] || openssl rand -hex 32 > token",
        f"gcloud secrets describe {secret} > /dev/null 2>&1 \\",
        f"  || gcloud secrets create {secret} --replication-policy automatic --data-file token || exit",
        f"gcloud secrets add-iam-policy-binding {secret} --role roles/secretmanager.secretAccessor \\",
        f"  --member serviceAccount:{account} > /dev/null || exit",
        f"gcloud compute instances create {machines.head} {where} --machine-type n2-standard-16 \\",
        "  --image-family cos-stable --image-project cos-cloud --boot-disk-size 100GB --scopes cloud-platform \\",
        f"  --metadata-from-file startup-script=head.sh --service-account {account}",
    ]
    for name, kind in _list_slices(layout, machines):
        lines += [
            f"gcloud compute tpus queued-resources create {name} --node-id {name} {where} \\",
            f"  --accelerator-type {kind.pod_type} --runtime-version {kind.chip.tpu_vm_runtime} \\",
            f"  --metadata wan-tpu-head={machines.address} --metadata-from-file startup-script={kind.pod_type}.sh \\",
            f"  --service-account {account}{' --spot' if machines.spot else ''}",
        ]
    return "\n".join(lines) + "\n"


def _format_delete_script(layout: Layout, machines: Machines) -> str:
    where = f"--project {shlex.quote(machines.project)} --zone {shlex.quote(machines.zone)} --quiet"
    lines = ["#!/bin/bash", f"# Deletes what create.sh has created for {layout.source}."]
    lines += [
        f"gcloud compute tpus queued-resources delete {name} {where} --force"
        for name, _ in _list_slices(layout, machines)
    ]
    lines.append(f"gcloud compute instances delete {machines.head} {where}")
    lines.append(f"gcloud secrets delete {machines.secret} --project {shlex.quote(machines.project)} --quiet")
    return "\n".join(lines) + "\n"
