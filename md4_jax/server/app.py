"""Web application of the playground: its files, its actions and its access control."""

import ipaddress
import json
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from md4_jax.generate import pages
from md4_jax.protocols import UserError
from md4_jax.server.actions import Playground

MOST_BYTES = 2**16  # largest size of a request, beside its picture
MOST_AT_ONCE = 8  # largest number of queued requests
READ_SECONDS = 10.0  # for a request to arrive
OWN = Path(__file__).with_name("page")
# Address -> file and type: the only files that the server delivers.
FILES = {
    "/": (OWN / "index.html", "text/html"),
    "/app.css": (OWN / "app.css", "text/css"),
    "/app.js": (OWN / "app.js", "text/javascript"),
    "/trace.css": (pages.STYLE, "text/css"),
    "/trace.js": (pages.SCRIPT, "text/javascript"),
}
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"
POLICY += (
    "; img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
BUSY = f"the model already has {MOST_AT_ONCE} requests: try again in a moment"
FAILED = "the model failed; the server's terminal shows the reason"


def application(playground: Playground, hosts: Iterable[str] = ()) -> ASGIApp:
    """Makes the application; hosts: allowed host names in addition to localhost."""
    server = _Server(playground)
    routes = [Route(path, _file(*what), methods=["GET"]) for path, what in FILES.items()]
    routes += [
        Route("/api/model", server.model, methods=["GET"]),
        Route("/api/tokens", server.tokens, methods=["POST"]),
        Route("/api/costs", server.costs, methods=["POST"]),
        Route("/api/codes", server.codes, methods=["POST"]),
        Route("/api/sample", server.sample, methods=["POST"]),
    ]
    handlers: dict[Any, Callable] = {HTTPException: _refused, UserError: _mistake}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), hosts, server.most)


class _Server:
    """Handles requests; the model runs one step of one request at a time."""

    def __init__(self, playground: Playground):
        self._playground = playground
        self.most = MOST_BYTES + playground.most_bytes
        self._taken = 0
        self._one: anyio.CapacityLimiter | None = None

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._playground.facts)

    async def tokens(self, request: Request) -> Response:
        asked = await _json(request, self.most)
        return JSONResponse(await anyio.to_thread.run_sync(self._playground.tokens, asked))

    async def costs(self, request: Request) -> Response:
        return await self._answer(self._playground.costs, request)

    async def codes(self, request: Request) -> Response:
        return await self._answer(self._playground.codes, request)

    async def _answer(self, action: Callable, request: Request) -> Response:
        asked = await _json(request, self.most)
        self.take()
        try:
            return JSONResponse(await self.alone(action, asked))
        finally:
            self.free()

    async def sample(self, request: Request) -> Response:
        asked = await _json(request, self.most)
        self.take()
        try:
            messages = await self.alone(self._playground.states, asked)
        except BaseException:
            self.free()
            raise
        return _Lines(self, messages)

    async def alone(self, function: Callable, *arguments: Any) -> Any:
        """Runs a function in a thread with exclusive use of the model, in order of arrival."""
        if self._one is None:
            self._one = anyio.CapacityLimiter(1)
        return await anyio.to_thread.run_sync(function, *arguments, limiter=self._one)

    def take(self) -> None:
        if self._taken >= MOST_AT_ONCE:
            raise HTTPException(503, BUSY, {"retry-after": "2"})
        self._taken += 1

    def free(self) -> None:
        self._taken -= 1


class _Lines(Response):
    """Stream of JSON lines, one per message; it ends early if the client disconnects."""

    def __init__(self, server: _Server, messages: Iterator[dict[str, Any]]):
        super().__init__(media_type="application/x-ndjson")
        del self.headers["content-length"]
        self._server, self._messages = server, messages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_until_gone, receive, group.cancel_scope)
                await self._send(send)
                group.cancel_scope.cancel()
        finally:
            self._messages.close()
            self._server.free()

    async def _send(self, send: Send) -> None:
        start = {"status": 200, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        done = object()
        while True:
            message = await self._next(done)
            if message is done:
                break
            line = json.dumps(message, allow_nan=False).encode() + b"\n"
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _next(self, done: object) -> Any:
        """Returns the next message, or the error that ends the stream."""
        try:
            return await self._server.alone(next, self._messages, done)
        except UserError as error:
            return {"error": str(error)}
        except Exception:
            traceback.print_exc()
            return {"error": FAILED}


class Guard:
    """Rejects other hosts, other origins and large requests; adds headers to every response."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str], most: int):
        self._app, self._hosts = app, {"localhost", *(host.lower() for host in hosts)}
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        refused = self._refusal(scope["method"], Headers(scope=scope))
        await (refused or self._app)(scope, receive, guarded)

    def _refusal(self, method: str, headers: Headers) -> Response | None:
        """Returns the response to a rejected request; None if the request is accepted."""
        host = headers.get("host", "")
        if not self._is_own(host):
            return _sentence(421, f"this server is not {host[:80]!r}: open the address it printed")
        origin = headers.get("origin")
        if origin is not None and origin.partition("//")[2] != host:
            return _sentence(403, "requests of other pages are refused")
        kind = headers.get("content-type", "").partition(";")[0]  # "; charset=utf-8" may follow
        if method == "POST" and kind.strip().lower() != "application/json":
            return _sentence(415, "a request must be application/json")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._most:
            return _sentence(413, _too_large(self._most), {"connection": "close"})
        return None

    def _is_own(self, host: str) -> bool:
        """Returns whether a Host header names this server. IP addresses are safe (no DNS)."""
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if name.lower() in self._hosts:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


async def _json(request: Request, most: int) -> Any:
    """Reads the body of a request; HTTPException if it is too large, too slow or not JSON."""
    body = b""
    try:
        with anyio.fail_after(READ_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise HTTPException(413, _too_large(most))
        return json.loads(body)
    except TimeoutError as error:
        raise HTTPException(408, "the request took too long to arrive") from error
    except ClientDisconnect as error:
        raise HTTPException(400, "the request was cut short") from error
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, "the request is not valid JSON") from error


async def _until_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def _file(path: Path, kind: str) -> Callable:
    content = path.read_bytes()

    async def answer(request: Request) -> Response:
        return Response(content, media_type=kind)

    return answer


def _sentence(status: int, text: str, headers: Any = None) -> JSONResponse:
    return JSONResponse({"error": text}, status, headers)


def _too_large(most: int) -> str:
    return f"a request may have at most {most // 1024} KiB"


async def _refused(request: Request, error: HTTPException) -> Response:
    return _sentence(error.status_code, error.detail, error.headers)


async def _mistake(request: Request, error: UserError) -> Response:
    return _sentence(400, str(error))
