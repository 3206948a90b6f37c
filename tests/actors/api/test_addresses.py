"""Which addresses are public, and that slow names delay nobody else."""

import asyncio
import socket
import threading

import pytest

from actors.api.outbound.addresses import explain_refusal
from actors.api.outbound.resolver import Resolver

HERE = "127.0.0.1"


INSIDE = [
    "127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.0.1", "172.16.5.4", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "100.100.100.200", "168.63.129.16", "192.0.0.192", "198.18.0.1", "224.0.0.1", "239.255.255.250", "255.255.255.255",
    "240.0.0.1", "::", "::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "fe80::1", "fe80::1%eth0", "fc00::1",
    "fd00:ec2::254", "ff02::1", "64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::", "2001:0:1::1", "2001:db8::1",
    "::ffff:0:127.0.0.1", "::ffff:0:8.8.8.8", "100::1", "3fff::1", "4000::1", "5f00::1", "fec0::1",
    "nonsense",
]  # fmt: skip


@pytest.mark.parametrize("address", INSIDE)
def test_addresses_that_aren_t_public_are_refused(address):
    assert explain_refusal(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "100.128.0.1", "172.32.0.1", "2606:4700::1111", "2a00:1450::1"]
)
def test_public_addresses_are_fine(address):
    assert explain_refusal(address) is None


class SlowNames:
    """A look-up that blocks for some names until released, like a name server that doesn't answer."""

    def __init__(self):
        self.released, self.started = threading.Event(), []

    def look_up(self, host, port):
        self.started.append(host)
        if host.startswith("slow"):
            assert self.released.wait(20)
        if host == "none.test":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [HERE]


def test_slow_names_of_an_owner_delay_no_other():
    names = SlowNames()
    resolver = Resolver(threads=6, threads_of_an_owner=4, look_up=names.look_up)

    async def do():
        slow = [asyncio.create_task(resolver.resolve(f"slow{i}.test", 443, "mallory")) for i in range(20)]
        await asyncio.sleep(0)
        for i in range(10):
            assert await asyncio.wait_for(resolver.resolve(f"{i}.test", 443, "ann"), 5) == [HERE]
        assert [name for name in names.started if name.startswith("slow")] == [f"slow{i}.test" for i in range(4)]
        for task in slow[:10]:  # Those whose time is up: their threads count on, and none is started for the others.
            task.cancel()
        await asyncio.wait_for(resolver.resolve("more.test", 443, "ann"), 5)
        assert len([name for name in names.started if name.startswith("slow")]) == 4
        names.released.set()
        assert await asyncio.wait_for(asyncio.gather(*slow[10:]), 10) == [[HERE]] * 10
        assert not {f"slow{i}.test" for i in range(4, 10)} & set(names.started)  # Nobody waited for these any more.
        with pytest.raises(OSError, match="Name or service not known"):
            await resolver.resolve("none.test", 443, "ann")

    try:
        asyncio.run(do())
    finally:
        names.released.set()
