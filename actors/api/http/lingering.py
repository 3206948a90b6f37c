"""Make sure that a client can read its answer if that is sent before the whole body has arrived.

When a server closes a connection with unread bytes, the kernel resets it. A reset discards what the client hasn't read
yet, which is the answer, because many clients read only after they have sent everything. So the rest of the body is
read and discarded for a while (nginx calls this `lingering_close`).
"""

import asyncio

from starlette.types import Message, Receive, Send

_LINGER_S = 5.0  # The longest time for which the rest of a body is read.
_IDLE_S = 1.0  # The longest wait for the next part of a body, which allows for the time an answer is under way.


async def end_answer(message: Message, receive: Receive, send: Send) -> None:
    """Send the last part of an answer, and read what the client still sends before the server closes the connection.

    Args:
        message: The last part, of type http.response.body.
        receive: Receives the rest of the body.
        send: Sends to the server, which closes the connection after the end of the answer.
    """
    await send({**message, "more_body": True})
    try:
        async with asyncio.timeout(_LINGER_S):
            while True:
                received = await asyncio.wait_for(receive(), _IDLE_S)
                if received["type"] != "http.request" or not received.get("more_body", False):
                    break
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b""})
