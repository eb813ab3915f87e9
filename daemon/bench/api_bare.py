"""The floor of the API benchmark: the least that passes requests on with aiohttp and uvloop. No checks, no metrics, no
log, no time limits, no retries; headers are copied but for the hop-by-hop ones, streams are passed chunk by chunk.
"""

from __future__ import annotations

import asyncio
import sys

import aiohttp
import uvloop
from aiohttp import web

HOP_BY_HOP = frozenset(("connection", "keep-alive", "transfer-encoding", "content-length", "host", "te", "upgrade"))


async def main(worker: str) -> None:
    session = aiohttp.ClientSession(
        worker, connector=aiohttp.TCPConnector(limit=0), auto_decompress=False, timeout=aiohttp.ClientTimeout()
    )

    async def pass_on(request: web.BaseRequest) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        body = await request.read()
        async with session.request(request.method, request.raw_path, headers=headers, data=body) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
            if answer.content_length is not None:
                return web.Response(body=await answer.read(), status=answer.status, headers=kept)
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            while chunk := await answer.content.readany():
                await response.write(chunk)
            await response.write_eof()
            return response

    server = web.Server(pass_on, access_log=None)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0, backlog=4096)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
