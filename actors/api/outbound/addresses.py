"""Which internet addresses a service may connect to on behalf of a client: public ones only."""

import ipaddress
from collections.abc import Sequence

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Global unicast, all that IANA has given out of IPv6. What lies outside is no public host, or an IPv4 address in one of
# a dozen disguises (mapped, translated, NAT64).
_IPV6 = ipaddress.ip_network("2000::/3")
# Of the rest what is no public host, from IANA's registries of special-purpose addresses (2025), beyond what
# `Address.is_global` knows in every patch release of Python (CVE-2024-4032).
_REFUSED: tuple[Network, ...] = tuple(
    ipaddress.ip_network(network)
    for network in (
        "192.0.0.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "224.0.0.0/4",  # multicast
        "168.63.129.16/32",  # a public address that inside Azure is its control channel
        "2001::/23",  # Teredo, ORCHID, benchmarking
        "2002::/16",  # 6to4
        "3fff::/20",
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
    unicast = address.version == 4 or address in _IPV6
    if not unicast or not address.is_global or any(address in network for network in _REFUSED):
        return "is not a public address"
    return None
