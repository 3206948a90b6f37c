"""Let a client read its answer when it is answered before all of its body has arrived.

A server that closes a connection with unread bytes makes the kernel reset it, and a reset discards what the client has
not read yet: the answer. So the rest of the body is read, and discarded, for a while (nginx calls this
`lingering_close`). Many clients read only after they have sent everything.
"""

import asyncio

from starlette.types import Message, Receive, Send

_LINGER_S = 5.0  # How long the rest of a body is read at most.
_IDLE_S = 1.0  # How long its next part may take: as long as an answer may be on its way.


async def end_answer(message: Message, receive: Receive, send: Send) -> None:
    """Send the last part of an answer, and read what the client still sends before the server closes the connection.

    Args:
        message: The last part, of type http.response.body.
        receive: Receives the rest of the body.
        send: Sends to the server. It closes the connection when it is given the end of the answer.
    """
    await send({**message, "more_body": True})
    try:
        async with asyncio.timeout(_LINGER_S):
            while True:
                rest = await asyncio.wait_for(receive(), _IDLE_S)
                if rest["type"] != "http.request" or not rest.get("more_body", False):
                    break
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b""})
