"""Public access to a service on GKE: Google's load balancer with TLS, through the Gateway API.

    client ─ https ─► Google's load balancer ─ http ─► Service ─► HAProxy on the head pod

Sources: docs.cloud.google.com/kubernetes-engine/docs/how-to/deploying-gateways, secure-gateway and
configure-gateway-resources; gateway.networking.k8s.io/v1.
"""

from dataclasses import dataclass

from cluster.provision.kubernetes import HEAD, SERVE_PORT, SERVES
from cluster.provision.target import Object, Target

GATEWAY_API, POLICY_API = "gateway.networking.k8s.io/v1", "networking.gke.io/v1"
# After this time the load balancer ends a request. Event streams last as long as a video, and clients resume them.
REQUEST_S = 3600
_DRAIN_S = 60  # After an upgrade, requests to the previous cluster may continue for this long.
_HEALTH_PATH = "/health"


@dataclass(frozen=True)
class Exposure:
    """How clients reach a service.

    Attributes:
        hostname: The name that clients use.
        certificate_map: The name of the map in Certificate Manager that has a certificate for it.
        address: The name of a reserved global address; by default the load balancer gets any address.
        armor: The name of a Cloud Armor security policy to put in front of it.
        ssl_policy: The name of an SSL policy, which says which versions of TLS clients may use. Google's default also
            lets TLS 1.0 in.
    """

    hostname: str
    certificate_map: str
    address: str | None = None
    armor: str | None = None
    ssl_policy: str | None = None


def build_exposing_objects(target: Target, exposure: Exposure) -> dict[str, Object]:
    """Return the objects that expose a service, by a comment for each.

    KubeRay's own service for a head has no cluster address, which a Gateway needs. During an upgrade there are two
    heads, and the load balancer leaves out the one whose health check fails because its pools have no slices yet.
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
    objects = {
        "the head's HTTP port, for the load balancer": service,
        "the load balancer; its certificate is Certificate Manager's": gateway,
        "requests to the service": _build_route(target, exposure, "https", [{"backendRefs": [_build_backend(name)]}]),
        "http becomes https": _build_route(target, exposure, "http", [{"filters": [_build_https_redirect()]}]),
        "when the load balancer sends requests to a head: once the service answers": target.object(
            POLICY_API, "HealthCheckPolicy", spec={"default": health, "targetRef": backend}
        ),
        "event streams last longer than the load balancer's 30 seconds": target.object(
            POLICY_API, "GCPBackendPolicy", spec={"default": policy, "targetRef": backend}
        ),
    }
    if exposure.ssl_policy:
        listeners = {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": gateway_name}
        spec = {"default": {"sslPolicy": exposure.ssl_policy}, "targetRef": listeners}
        objects["which versions of TLS clients may use"] = target.object(POLICY_API, "GCPGatewayPolicy", spec=spec)
    return objects


def _build_route(target: Target, exposure: Exposure, listener: str, rules: list[Object]) -> Object:
    parent = {"name": target.name, "sectionName": listener}
    return target.object(
        GATEWAY_API,
        "HTTPRoute",
        suffix=listener,
        spec={"parentRefs": [parent], "hostnames": [exposure.hostname], "rules": rules},
    )


def _build_backend(service: str) -> Object:
    return {"name": service, "port": SERVE_PORT}


def _build_https_redirect() -> Object:
    return {"type": "RequestRedirect", "requestRedirect": {"scheme": "https", "statusCode": 301}}
