"""A port that can't be listened on is refused with who has it, and one that is free."""

import os
import re
import socket

import pytest

from cluster.errors import PortTaken
from cluster.ports import check_port


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_port_that_is_taken_is_refused_with_one_that_is_free(host):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortTaken) as refused:
            check_port(host, port)
    message = str(refused.value)
    assert f"process {os.getpid()} (" in message
    check_port(host, int(re.search(r"--port (\d+)$", message)[1]))
    check_port(host, port)  # nobody listens there any more


def test_a_port_shared_by_whoever_asks_for_it_is_taken_too():
    """As HAProxy's: a second one would get half of the first one's requests."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(PortTaken, match=rf"process {os.getpid()}\b"):
            check_port("127.0.0.1", other.getsockname()[1])


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-machine.invalid"])
def test_an_address_of_another_machine_is_refused(host):
    with pytest.raises(PortTaken, match=rf"{host} port 8000\b.*--host"):
        check_port(host, 8000)
