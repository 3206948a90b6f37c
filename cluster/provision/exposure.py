"""How a service on GKE is reached from outside: Google's load balancer with TLS, through the Gateway API.

    client ─ https ─► Google's load balancer ─ http ─► Service ─► HAProxy on the head pod

Sources: docs.cloud.google.com/kubernetes-engine/docs/how-to/deploying-gateways, secure-gateway and
configure-gateway-resources; gateway.networking.k8s.io/v1.
"""

from dataclasses import dataclass

from cluster.provision.kubernetes import HEAD, SERVE_PORT, SERVES, Object, Target

GATEWAY_API, POLICY_API = "gateway.networking.k8s.io/v1", "networking.gke.io/v1"
# The load balancer ends a request after so long; event streams last as long as a video, and clients resume them.
REQUEST_S = 3600
_DRAIN_S = 60  # An upgrade lets requests of the cluster before go on for so long.
_HEALTH_PATH = "/health"


@dataclass(frozen=True)
class Exposure:
    """How a service is reached.

    Attributes:
        hostname: The name that clients use.
        certificate_map: Certificate Manager's map with a certificate for it.
        address: Name of a reserved global address; the load balancer takes any where it is left out.
        armor: Name of a Cloud Armor security policy in front of it.
    """

    hostname: str
    certificate_map: str
    address: str | None = None
    armor: str | None = None


def exposing(target: Target, exposure: Exposure) -> dict[str, Object]:
    """Return the objects that expose a service, each with a comment.

    The service that KubeRay makes for a head has no address of its own, which a Gateway needs. During an upgrade two
    heads serve; the load balancer leaves out the one whose health check fails, because its pools have no slices yet.
    """
    ports = [{"name": "http", "port": SERVE_PORT, "targetPort": SERVE_PORT}]
    service = target.object(
        "v1",
        "Service",
        suffix="public",
        spec={"type": "ClusterIP", "selector": target.labels | HEAD | SERVES, "ports": ports},
    )
    name = service["metadata"]["name"]
    backend = {"group": "", "kind": "Service", "name": name}
    gateway = target.object(
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
    return {
        "the head's HTTP port, for the load balancer": service,
        "the load balancer; its certificate is Certificate Manager's": gateway,
        "requests to the service": _route(target, exposure, "https", [{"backendRefs": [_backend_of(name)]}]),
        "http becomes https": _route(target, exposure, "http", [{"filters": [_to_https()]}]),
        "when the load balancer sends requests to a head: once the service answers": target.object(
            POLICY_API, "HealthCheckPolicy", spec={"default": health, "targetRef": backend}
        ),
        "event streams last longer than the load balancer's 30 seconds": target.object(
            POLICY_API, "GCPBackendPolicy", spec={"default": policy, "targetRef": backend}
        ),
    }


def _route(target: Target, exposure: Exposure, listener: str, rules: list[Object]) -> Object:
    parent = {"name": target.name, "sectionName": listener}
    return target.object(
        GATEWAY_API,
        "HTTPRoute",
        suffix=listener,
        spec={"parentRefs": [parent], "hostnames": [exposure.hostname], "rules": rules},
    )


def _backend_of(service: str) -> Object:
    return {"name": service, "port": SERVE_PORT}


def _to_https() -> Object:
    return {"type": "RequestRedirect", "requestRedirect": {"scheme": "https", "statusCode": 301}}
