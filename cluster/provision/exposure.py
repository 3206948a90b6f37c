"""Expose a service on GKE to the internet through Google's load balancer with TLS, by means of the Gateway API.

    client ─ https ─► Google's load balancer ─ http ─► Service ─► HAProxy on the head pod

Sources: docs.cloud.google.com/kubernetes-engine/docs/how-to/deploying-gateways, secure-gateway and
configure-gateway-resources; gateway.networking.k8s.io/v1.
"""

from dataclasses import dataclass

from cluster.provision.pods import HEAD, SERVE_PORT, SERVES
from cluster.provision.target import Object, Target

GATEWAY_API, POLICY_API = "gateway.networking.k8s.io/v1", "networking.gke.io/v1"
# The load balancer ends a request after this time. An event stream lasts as long as its video takes; clients resume it.
REQUEST_S = 3600
_DRAIN_S = 60  # How long requests to the previous cluster may continue after an upgrade.
_HEALTH_PATH = "/health"


@dataclass(frozen=True)
class Exposure:
    """The settings of the load balancer in front of a service."""

    hostname: str
    certificate_map: str  # The name of a map in Certificate Manager that has a certificate for the host name.
    address: str | None = None  # The name of a reserved global address; by default Google assigns an address.
    armor: str | None = None  # The name of a Cloud Armor security policy for the service.
    # The name of an SSL policy, which sets the versions of TLS that clients may use. Google's default policy accepts
    # even TLS 1.0.
    ssl_policy: str | None = None


def build_exposing_objects(target: Target, exposure: Exposure) -> dict[str, Object]:
    """Return the objects that expose a service, by the comment for each.

    They include a Service, because a Gateway needs one with a cluster address, which KubeRay's own Service of a head
    doesn't have. During an upgrade there are two heads. The load balancer then ignores the new one, whose health check
    fails, until its pools have slices.
    """
    ports = [{"name": "http", "port": SERVE_PORT, "targetPort": SERVE_PORT}]
    service = target.build_object(
        "v1",
        "Service",
        suffix="public",
        spec={"type": "ClusterIP", "selector": target.labels | HEAD | SERVES, "ports": ports},
    )
    name = service["metadata"]["name"]
    backend = {"group": "", "kind": "Service", "name": name}
    gateway = target.build_object(
        GATEWAY_API,
        "Gateway",
        spec={
            "gatewayClassName": "gke-l7-global-external-managed",
            "listeners": [
                {"name": "https", "protocol": "HTTPS", "port": 443, "hostname": exposure.hostname},
                {"name": "http", "protocol": "HTTP", "port": 80, "hostname": exposure.hostname},
            ],
            **({"addresses": [{"type": "NamedAddress", "value": exposure.address}]} if exposure.address else {}),
        },
    )
    gateway_name = gateway["metadata"]["name"]
    gateway["metadata"]["annotations"] = {"networking.gke.io/certmap": exposure.certificate_map}
    health = {
        "checkIntervalSec": 5,
        "timeoutSec": 5,
        "healthyThreshold": 1,
        "unhealthyThreshold": 3,
        "config": {
            "type": "HTTP",
            "httpHealthCheck": {
                "portSpecification": "USE_FIXED_PORT",
                "port": SERVE_PORT,
                "requestPath": _HEALTH_PATH,
            },
        },
    }
    policy = {
        "timeoutSec": REQUEST_S,
        "connectionDraining": {"drainingTimeoutSec": _DRAIN_S},
        "logging": {"enabled": True, "sampleRate": 1_000_000},
        **({"securityPolicy": exposure.armor} if exposure.armor else {}),
    }
    redirect = {"type": "RequestRedirect", "requestRedirect": {"scheme": "https", "statusCode": 301}}
    objects = {
        "the head's HTTP port, for the load balancer": service,
        "the load balancer, with the certificate from Certificate Manager": gateway,
        "forwards requests to the service": _build_route(
            target, exposure, "https", {"backendRefs": [{"name": name, "port": SERVE_PORT}]}
        ),
        "redirects http to https": _build_route(target, exposure, "http", {"filters": [redirect]}),
        "makes the load balancer send requests to a head only while the service answers": target.build_object(
            POLICY_API, "HealthCheckPolicy", spec={"default": health, "targetRef": backend}
        ),
        "allows event streams to last longer than the load balancer's default of 30 seconds": target.build_object(
            POLICY_API, "GCPBackendPolicy", spec={"default": policy, "targetRef": backend}
        ),
    }
    if exposure.ssl_policy:
        listeners = {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": gateway_name}
        spec = {"default": {"sslPolicy": exposure.ssl_policy}, "targetRef": listeners}
        objects["sets the versions of TLS that clients may use"] = target.build_object(
            POLICY_API, "GCPGatewayPolicy", spec=spec
        )
    return objects


def _build_route(target: Target, exposure: Exposure, listener: str, rule: Object) -> Object:
    parent = {"name": target.name, "sectionName": listener}
    return target.build_object(
        GATEWAY_API,
        "HTTPRoute",
        suffix=listener,
        spec={"parentRefs": [parent], "hostnames": [exposure.hostname], "rules": [rule]},
    )
