"""Decide which addresses the service may connect to for clients: public ones, and those that its operator permits."""

import ipaddress
from collections.abc import Sequence

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Global unicast, all of IPv6 that IANA has allocated. Anything else isn't a public host, or an IPv4 address in one of a
# dozen disguises (mapped, translated, NAT64).
_IPV6 = ipaddress.ip_network("2000::/3")
# Addresses in IANA's registries of special-purpose addresses (2025) that aren't public hosts, as far as
# `Address.is_global` doesn't know them in every patch release of Python (CVE-2024-4032).
_REFUSED: tuple[Network, ...] = tuple(
    ipaddress.ip_network(network)
    for network in (
        "192.0.0.0/24",
        "192.88.99.0/24",  # 6to4 relays.
        "224.0.0.0/4",  # Multicast.
        "168.63.129.16/32",  # A public address that is the control channel inside Azure.
        "2001::/23",  # Teredo, ORCHID, benchmarking.
        "2002::/16",  # 6to4
        "3fff::/20",
    )
)

# Where AWS, Google and Oracle give credentials away, in private networks. Others do so at link-local addresses.
_CREDENTIALS: tuple[Network, ...] = tuple(
    ipaddress.ip_network(network) for network in ("fd00:ec2::/32", "fd20:ce::254/128", "fd00:c1::a9fe:a9fe/128")
)

# This machine and private networks, but not link-local addresses.
LOCAL: tuple[Network, ...] = tuple(
    ipaddress.ip_network(network)
    for network in ("127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
)


def is_address(text: str) -> bool:
    """Return whether a host is an address and not a name."""
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def explain_refusal(text: str, allowed: Sequence[Network] = (), *, only_allowed: bool = False) -> str | None:
    """Return why the service may not connect to an address, or None if it may.

    Args:
        text: The address.
        allowed: Networks that are permitted in any case, such as those of an operator's own image servers.
        only_allowed: Whether public addresses are refused, too.
    """
    try:
        address = ipaddress.ip_address(text.partition("%")[0])  # Without an interface (fe80::1%eth0).
    except ValueError:
        return "is not an address; only the public internet is allowed"
    if any(address in network for network in _CREDENTIALS):
        return "is an address where a cloud gives credentials away; only the public internet is allowed"
    if any(address in network for network in allowed):
        return None
    if only_allowed:
        return "is neither this machine nor in a private network; use https there"
    unicast = address.version == 4 or address in _IPV6
    if not unicast or not address.is_global or any(address in network for network in _REFUSED):
        return "is not a public address; only the public internet is allowed"
    return None
