"""Which internet addresses a service may connect to on behalf of a client: public ones only."""

import ipaddress
from collections.abc import Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# What is no public host, or leads to an IPv4 address hidden in an IPv6 one. From IANA's registries of special-purpose
# addresses (2025); `Address.is_global` knows most, but which depends on Python's patch release (CVE-2024-4032).
_REFUSED: tuple[Network, ...] = tuple(
    ipaddress.ip_network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT; a cloud's metadata lives here too
        "127.0.0.0/8",
        "169.254.0.0/16",  # link-local: metadata servers
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",
        "168.63.129.16/32",  # a public address that inside Azure is its control channel
        "::/96",  # unspecified, loopback, and IPv4 addresses in a form of 1998
        "::ffff:0:0/96",  # IPv4-mapped
        "64:ff9b::/96",  # NAT64
        "64:ff9b:1::/48",
        "100::/64",
        "2001::/23",  # Teredo, ORCHID, benchmarking
        "2001:db8::/32",
        "2002::/16",  # 6to4
        "3fff::/20",
        "5f00::/16",
        "fc00::/7",  # unique local
        "fe80::/10",  # link-local
        "fec0::/10",
        "ff00::/8",  # multicast
    )
)


def is_address(text: str) -> bool:
    """Whether a host is given by its address instead of a name."""
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def refusal(text: str, allowed: Sequence[Network] = ()) -> str | None:
    """Return why an address may not be connected to, or None when it may.

    allowed  networks that are fine whatever they are: an operator's own image servers
    """
    try:
        address = ipaddress.ip_address(text.partition("%")[0])  # without an interface (fe80::1%eth0)
    except ValueError:
        return "is no address"
    if any(address in network for network in allowed):
        return None
    if any(address in network for network in _REFUSED) or not address.is_global:
        return "is not a public address"
    return None
