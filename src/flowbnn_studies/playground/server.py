"""Server of the page. It listens on the loopback address only, and refuses requests that other sites make through the browser.

A web site that a user visits can send requests to the loopback address. Three checks refuse them:

* The ``Host`` header must be the address of the server. Names that an attacker has pointed here (DNS rebinding) differ from it.
* The ``Origin`` header must be that of the page.
* Bodies must be declared as JSON, which other origins may not send without asking first.
"""

import json
import socket
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from flowbnn import __version__
from flowbnn.errors import FlowBNNError
from flowbnn_studies.playground.methods import describe_entries
from flowbnn_studies.playground.pages import MAX_SECONDS, Pages
from flowbnn_studies.playground.points import MAX_CLASSES, MAX_POINTS, MIN_POINTS, RANGE
from flowbnn_studies.playground.presets import MAX_NOISE, PRESETS, make_preset
from flowbnn_studies.playground.worker import MAX_SAMPLES

ADDRESS = "127.0.0.1"
MAX_BYTES = 128 * 1024  # of the body of a request
STATIC = Path(str(files("flowbnn_studies.playground") / "static"))
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
Handler = Callable[[Request, Any], Awaitable[Response]]


class Guard:
    """Middleware that refuses foreign hosts and origins, and adds the security headers to every response.

    Args:
        app: Application to protect.
        hosts: Values of the ``Host`` header that are served.
    """

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...]) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            headers[name.decode("latin-1").lower()] = value.decode("latin-1")

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        reason = self.refusal(headers)
        app = self.app if reason is None else _error(reason, 403)
        await app(scope, receive, send_with_headers)

    def refusal(self, headers: dict[str, str]) -> str | None:
        """Returns the reason to refuse a request, or None."""
        if headers.get("host", "").lower() not in self.hosts:
            return f"this address is served as {self.hosts[0]} only"
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in [f"http://{host}" for host in self.hosts]:
            return "requests of other sites are refused"
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return "requests of other sites are refused"
        return None


def _error(text: str, status: int) -> Response:
    return JSONResponse({"error": text}, status)


def _json_route(path: str, handler: Handler) -> Route:
    """Returns a POST route whose handler gets the JSON document of the body. Errors of the library become one line."""

    async def endpoint(request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return _error("the body must be application/json", 415)
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BYTES:
                return _error(f"the body may have at most {MAX_BYTES:,} bytes", 413)
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            return _error("the body is not valid JSON", 400)
        if not isinstance(document, dict):
            return _error("the body must be a JSON object", 400)
        try:
            return await handler(request, document)
        except FlowBNNError as error:
            return _error(str(error), 404 if error.kind == "page" else 400)

    return Route(path, endpoint, methods=["POST"])


def create_app(port: int) -> Starlette:
    """Returns the application.

    Args:
        port: Port on which it is served, which the ``Host`` header must have.
    """
    pages = Pages()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await pages.prepare()
        try:
            yield
        finally:
            await pages.close_all()

    async def index(request: Request) -> Response:
        return Response((STATIC / "index.html").read_bytes(), media_type="text/html; charset=utf-8")

    async def options(request: Request) -> Response:
        return JSONResponse(page_options())

    async def open_page(request: Request, document: Any) -> Response:
        return JSONResponse({"page": await pages.open()})

    async def close_page(request: Request, document: Any) -> Response:
        await pages.close(document.get("page"))
        return JSONResponse({})

    async def preset(request: Request, document: Any) -> Response:
        return JSONResponse(_preset(document))

    async def fit(request: Request, document: Any) -> Response:
        page = pages.find(document.pop("page", None))
        if page.fitting is not None:
            return _error("a fit is running; stop it first", 409)

        async def lines() -> AsyncIterator[str]:
            async for answer in page.fit(document, request.is_disconnected):
                yield json.dumps(answer) + "\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def stop(request: Request, document: Any) -> Response:
        return JSONResponse({"stopped": pages.find(document.get("page")).stop()})

    def ask(command: str) -> Handler:
        async def handler(request: Request, document: Any) -> Response:
            page = pages.find(document.pop("page", None))
            answer = await page.ask(command, document)
            return JSONResponse(answer["result"]) if "result" in answer else JSONResponse(answer, 400)

        return handler

    routes = [
        Route("/", index),
        Route("/api/options", options),
        _json_route("/api/open", open_page),
        _json_route("/api/close", close_page),
        _json_route("/api/preset", preset),
        _json_route("/api/fit", fit),
        _json_route("/api/stop", stop),
        _json_route("/api/predict", ask("predict")),
        _json_route("/api/pair", ask("pair")),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    hosts = tuple(f"{name}:{port}" for name in (ADDRESS, "localhost"))
    app = Starlette(routes=routes, middleware=[Middleware(Guard, hosts=hosts)], lifespan=lifespan)
    app.state.pages = pages
    return app


def page_options() -> dict[str, Any]:
    """Returns all that the page needs to know: methods, presets and limits."""
    previews = {name: make_preset(name, number=60)["train"] for name in PRESETS}
    return {
        "version": __version__,
        "methods": describe_entries(),
        "presets": [
            {
                "name": preset.name,
                "label": preset.label,
                "task": preset.task,
                "hint": preset.hint,
                "number": preset.number,
                "noise": preset.noise,
                "preview": previews[preset.name],
            }
            for preset in PRESETS.values()
        ],
        "limits": {
            "range": RANGE,
            "classes": MAX_CLASSES,
            "min_points": MIN_POINTS,
            "max_points": MAX_POINTS,
            "max_noise": MAX_NOISE,
            "max_samples": MAX_SAMPLES,
            "seconds": MAX_SECONDS,
        },
    }


def _preset(document: dict[str, Any]) -> Any:
    """Returns the points of a preset, with the limits of the page."""
    name, number, noise, seed = (document.get(key) for key in ("name", "number", "noise", "seed"))
    if number is not None and (type(number) is not int or not MIN_POINTS <= number <= MAX_POINTS):
        text = f"number must be an integer from {MIN_POINTS} to {MAX_POINTS}, got {number!r:.40}"
        raise FlowBNNError(text, argument="number")
    if noise is not None and (type(noise) not in (int, float) or not 0.0 <= noise <= MAX_NOISE):
        raise FlowBNNError(
            f"noise must be a number from 0 to {MAX_NOISE}, got {noise!r:.40}", argument="noise"
        )
    if seed is not None and (type(seed) is not int or not 0 <= seed < 2**31):
        raise FlowBNNError(f"seed must be an integer of at least 0, got {seed!r:.40}", argument="seed")
    return make_preset(str(name), number, noise, seed or 0)


def serve(port: int = 0, browser: bool = True, announce: Callable[[str], None] = print) -> None:
    """Serves the page until Ctrl-C.

    Args:
        port: Port of the loopback address. 0 chooses a free one.
        browser: If True, opens the page in the browser.
        announce: Function that gets the address.

    Raises:
        FlowBNNError: If the port is invalid or in use.
    """
    import uvicorn

    if not 0 <= port < 2**16:
        raise FlowBNNError(f"a port is a number from 0 to 65535, got {port}", argument="port")
    try:
        listener = socket.create_server((ADDRESS, port))
    except OSError as error:
        text = f"port {port} of {ADDRESS} is not available ({error.strerror}); use another one, or 0 for any"
        raise FlowBNNError(text, kind="port", argument="port") from None
    with listener:
        port = listener.getsockname()[1]
        address = f"http://{ADDRESS}:{port}/"
        announce(f"Playground: {address} (Ctrl-C ends it)")
        if browser:
            webbrowser.open(address)
        config = uvicorn.Config(create_app(port), log_level="warning", timeout_graceful_shutdown=1)
        with suppress(KeyboardInterrupt):  # uvicorn repeats it when everything is closed
            uvicorn.Server(config).run(sockets=[listener])
