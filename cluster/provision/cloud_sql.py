"""Connect pods to PostgreSQL on Cloud SQL through Google's proxy: an encrypted connection that needs no password.

The proxy runs in each pod and logs in as the pod's Google service account, which is a user of the database.

Source: github.com/GoogleCloudPlatform/cloud-sql-proxy at 2.25.3 (flags); docs.cloud.google.com/sql/docs/postgres,
"Connect from GKE" and "IAM authentication".
"""

from urllib.parse import quote

from cluster.provision.target import CONTAINER_SECURITY, Object

IMAGE = "gcr.io/cloud-sql-connectors/cloud-sql-proxy:2.25.3"
DATABASE = "jobs"
_PORT, _HEALTH_PORT = 5432, 9090


def build_proxy_container(instance: str) -> Object:
    """Return the sidecar that runs the proxy: an init container that keeps running beside the others."""
    return {
        "name": "cloud-sql-proxy",
        "image": IMAGE,
        "restartPolicy": "Always",
        "args": [
            "--private-ip",
            "--auto-iam-authn",
            "--exit-zero-on-sigterm",
            "--structured-logs",
            "--health-check",
            "--http-address=0.0.0.0",
            f"--http-port={_HEALTH_PORT}",
            f"--port={_PORT}",
            instance,
        ],
        "startupProbe": {
            "httpGet": {"path": "/startup", "port": _HEALTH_PORT},
            "periodSeconds": 1,
            "failureThreshold": 120,
        },
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi", "ephemeral-storage": "100Mi"}},
        "securityContext": CONTAINER_SECURITY,
    }


def build_address(account: str) -> str:
    """Return the database's address for processes in the proxy's pod.

    Args:
        account: The Google service account that the proxy logs in as. Its name in PostgreSQL lacks the last part.
    """
    user = account.removesuffix(".gserviceaccount.com")
    return f"postgresql://{quote(user, safe='')}@127.0.0.1:{_PORT}/{DATABASE}?sslmode=disable"
