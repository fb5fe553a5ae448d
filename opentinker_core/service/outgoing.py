"""Answers on their way out: in pieces, so that a client that reads slowly keeps little of them in memory."""

from starlette.types import Message, Send

PIECE = 1 << 18
"""Bytes that are handed to a connection at a time; more than one piece is never buffered for it."""


async def send_in_pieces(message: Message, send: Send) -> None:
    """Send a message; a large body in pieces, each when the connection has room for it.

    Without it, each connection would copy all of an answer that many ask for and none reads.
    """
    body = message.get("body", b"")
    if message["type"] != "http.response.body" or len(body) <= PIECE:
        await send(message)
        return
    whole = memoryview(body)
    last = (len(whole) - 1) // PIECE * PIECE
    for start in range(0, last, PIECE):
        await send({**message, "body": bytes(whole[start : start + PIECE]), "more_body": True})
    await send({**message, "body": bytes(whole[last:])})
