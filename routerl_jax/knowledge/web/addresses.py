"""Checks the hosts that a fetcher may contact: those of the public internet, and explicitly allowed ones."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_PROTOCOLS = ipaddress.IPv4Network("192.0.0.0/24")  # IETF protocol assignments, which older Pythons consider public


class Refused(Exception):
    """An address must not be contacted."""


def networks(names: Sequence[str]) -> tuple[Network, ...]:
    """Networks in CIDR notation, or single addresses. Raises ValueError that names the wrong one."""
    try:
        return tuple(ipaddress.ip_network(name, strict=False) for name in names)
    except ValueError as error:
        raise ValueError(f"allow_networks: {error}; give networks such as 10.1.0.0/16") from error


def check_address(address: str, allowed: Sequence[Network] = ()) -> Address:
    """The address, if it is public or allowed. An IPv4 address inside an IPv6 address is checked too.

    Raises:
      Refused: the address is private, loopback, link-local (cloud metadata), multicast, reserved, a tunnel (6to4, Teredo), or
        no address.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError as error:
        raise Refused(f"{address!r} is not an IP address") from error
    inner = _embedded_ipv4(parsed)
    for candidate in {parsed, inner}:
        if any(candidate.version == network.version and candidate in network for network in allowed):
            return parsed
    odd = isinstance(inner, ipaddress.IPv6Address) and (inner.sixtofour or inner.teredo or inner.is_site_local)
    if odd or inner in _PROTOCOLS or not inner.is_global or inner.is_multicast or inner.is_reserved:
        raise Refused(f"{address} is not a public address")
    return parsed


def check_host(host: str, allowed: Sequence[Network] = ()) -> None:
    """Refuses hosts that are addresses, unless they are in the usual notation and public. The resolver checks names."""
    if not host:
        raise Refused("the URL has no host")
    if ":" in host or host.replace(".", "").isdigit():
        check_address(host, allowed)


class CheckedResolver:
    """A resolver for aiohttp that returns only checked addresses. Connections are made only to these.

    So a name that resolves to another address later (DNS rebinding) has no effect. A name with any refused address is refused.
    """

    def __init__(self, allowed: Sequence[Network] = ()) -> None:
        self._allowed = tuple(allowed)

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_UNSPEC) -> list[dict[str, Any]]:
        """The host's addresses in aiohttp's form. Raises Refused, or OSError for an unknown name."""
        import asyncio

        addresses = await asyncio.get_running_loop().getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
        result = []
        for kind, _, protocol, _, address in addresses:
            check_address(str(address[0]), self._allowed)
            result.append(
                {
                    "hostname": host,
                    "host": address[0],
                    "port": port,
                    "family": kind,
                    "proto": protocol,
                    "flags": socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
                }
            )
        return result

    async def close(self) -> None:
        """Does nothing; part of the interface."""


def _embedded_ipv4(address: Address) -> Address:
    """The IPv4 address inside a mapped or NAT64 IPv6 address; the address itself for others."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address
