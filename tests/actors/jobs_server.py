"""What Ray's dashboard answers of one job, on a port that can be closed and opened again while it is being followed."""

import asyncio
import threading

from aiohttp import WSCloseCode, web

JOB = "wan-tpu-1"


class JobsServer:
    """Speaks Ray's jobs API over HTTP and WebSocket, in a thread of its own.

    silent  it takes questions about the job and doesn't answer
    log     of the job, so far
    status  of the job; exit_code  of its driver
    """

    def __init__(self):
        self.log, self.status, self.exit_code, self.tails = "", "RUNNING", None, 0
        self.silent = False
        self._port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._sockets = set()
        self.open()

    @property
    def address(self):
        return f"http://127.0.0.1:{self._port}"

    def open(self):
        """Listen, at the same port as before."""
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)

    def close(self):
        """Break all connections, and take no new ones."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)

    def cut(self):
        """Break the connections over which the log is followed."""
        asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result(10)

    def end(self):
        """Close, for good."""
        self.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _open(self):
        application = web.Application()
        application.add_routes(
            [
                web.get("/api/version", self._version),
                web.get("/api/jobs/", self._jobs),
                web.post("/api/jobs/", self._submit),
                web.get("/api/jobs/{job}", self._job),
                web.post("/api/jobs/{job}/stop", self._stop),
                web.get("/api/jobs/{job}/logs/tail", self._tail),
            ]
        )
        self._runner = web.AppRunner(application, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = site._server.sockets[0].getsockname()[1]

    async def _close(self):
        self.silent = False  # or what waits for an answer would be waited for
        await self._cut()
        await self._runner.cleanup()

    async def _cut(self):
        for socket in list(self._sockets):
            socket._req.transport.abort()

    async def _version(self, request):
        return web.json_response({"version": "4", "ray_version": "2.60.0", "ray_commit": "", "session_name": ""})

    def _details(self):
        return {
            "type": "SUBMISSION",
            "submission_id": JOB,
            "status": self.status,
            "entrypoint": "drive",
            "message": "the driver ended",
            "driver_exit_code": self.exit_code,
        }

    async def _jobs(self, request):
        while self.silent and request.transport is not None:
            await asyncio.sleep(0.01)
        return web.json_response([self._details()])

    async def _submit(self, request):
        return web.json_response({"job_id": JOB, "submission_id": JOB})

    async def _job(self, request):
        while self.silent and request.transport is not None:
            await asyncio.sleep(0.01)
        if request.match_info["job"] != JOB:
            return web.Response(status=404, text="no such job")
        return web.json_response(self._details())

    async def _stop(self, request):
        self.status = "STOPPED"
        return web.json_response({"stopped": True})

    async def _tail(self, request):
        if request.match_info["job"] != JOB:
            return web.Response(status=404, text="no such job")
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.tails += 1
        self._sockets.add(socket)
        sent = 0
        try:
            while request.transport is not None and (self.status == "RUNNING" or sent < len(self.log)):
                if sent < len(self.log):
                    piece, sent = self.log[sent:], len(self.log)
                    await socket.send_str(piece)
                await asyncio.sleep(0.01)
            if request.transport is not None:
                await socket.close(code=WSCloseCode.OK)
        finally:
            self._sockets.discard(socket)
        return socket
