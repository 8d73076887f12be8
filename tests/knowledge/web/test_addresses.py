"""Which addresses may be fetched from; the lists are those of IANA's registries and of known tricks."""

from __future__ import annotations

import asyncio

import pytest

from routerl_jax.knowledge.web.reading import CheckedResolver, Refused, check_address, check_host, networks


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.9.1", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "192.0.0.8", "192.0.2.1", "198.18.0.1", "198.51.100.7", "203.0.113.9", "224.0.0.1", "240.0.0.1", "255.255.255.255",
        "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1",
        "::ffff:127.0.0.1", "::ffff:169.254.169.254", "2002:7f00:1::", "2002:a9fe:a9fe::", "64:ff9b::7f00:1", "64:ff9b::a00:1",
        "2001:0:c000:221:0:0:f5ff:fffe", "fec0::1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address):
    with pytest.raises(Refused):
        check_address(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_addresses_that_are(address):
    check_address(address)


@pytest.mark.parametrize("host", ["2130706433", "127.1", "0177.0.0.1", "010.8.8.8", "127.0.0.1.", "[::1]", "::1", ""])
def test_addresses_in_odd_notations(host):
    with pytest.raises(Refused):
        check_host(host)


def test_names_are_left_to_the_resolver():
    check_host("example.org")
    check_host("8.8.8.8")


@pytest.mark.parametrize("host", ["localhost", "2130706433", "0x7f.1", "0x7f000001"])
def test_names_that_resolve_to_private_addresses(host):
    with pytest.raises(Refused):
        asyncio.run(CheckedResolver().resolve(host, 80))


def test_allowed_networks():
    check_address("127.0.0.1", networks(["127.0.0.0/8"]))
    with pytest.raises(Refused):
        check_address("10.0.0.1", networks(["127.0.0.0/8"]))
    found = asyncio.run(CheckedResolver(networks(["127.0.0.1", "::1"])).resolve("localhost", 80))
    assert {one["host"] for one in found} <= {"127.0.0.1", "::1"}
    with pytest.raises(ValueError, match=r"allow_networks.*10.0.0.0/33"):
        networks(["10.0.0.0/33"])
