"""A headless Chromium, spoken to over its DevTools protocol.

``python -m tests.report.browser PAGE.html OUT.png [--width 390] [--dark] [--height 2000]`` takes a
screenshot.
"""

import argparse
import asyncio
import base64
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

_LOADED = """new Promise((done) => {
  const there = document.readyState === "complete" && location.href !== "about:blank";
  if (there) done(); else addEventListener("load", () => done());
})"""
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def chromium() -> str | None:
    """The browser of this machine, if it has one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """One page: what it says of itself, and how it looks."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._sent = 0
        self.told: list[str] = []
        """Exceptions, errors on the console and requests that the page made, as they came."""

    async def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        await self._socket.send_json({"id": self._sent, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=120)
            if message.get("id") == self._sent:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.told.append(str(message["params"]["exceptionDetails"]))
            case "Log.entryAdded":
                self.told.append(str(message["params"]["entry"]))
            case "Network.requestWillBeSent":
                url = str(message["params"]["request"]["url"])
                if not url.startswith("file:"):
                    self.told.append(f"asked for {url}")
            case _:
                pass

    async def open(self, url: str, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Load it without a network, on a screen of that size."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.command(f"{domain}.enable")
        await self.command(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=0,
            uploadThroughput=0,
        )
        await self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.command("Emulation.setEmulatedMedia", features=[scheme])
        await self.command("Page.navigate", url=url)
        await self.command("Runtime.evaluate", expression=_LOADED, awaitPromise=True)

    async def evaluate(self, script: str) -> Any:
        """The value of an expression, as JSON carries it."""
        answer = await self.command("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def screenshot(self, *, top: int = 0, height: int | None = None) -> bytes:
        """PNG of the page from ``top`` for ``height`` pixels; None: all of it."""
        metrics = (await self.command("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {
            "x": 0,
            "y": top,
            "width": metrics["width"],
            "height": height or metrics["height"] - top,
            "scale": 1,
        }
        shot = await self.command("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def browsing(executable: str) -> AsyncIterator[Tab]:
    """A browser with one empty tab."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            executable,
            *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--hide-scrollbars", "--disable-dev-shm-usage", "--disable-background-networking"),
            *("--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await asyncio.to_thread(_port, Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = await answer.json()
                url = next(t["webSocketDebuggerUrl"] for t in tabs if t["type"] == "page")
                async with session.ws_connect(url, max_msg_size=0) as socket:
                    yield Tab(socket)
        finally:
            process.terminate()
            await process.wait()


def _port(file: Path) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if file.exists() and (lines := file.read_text().split()):
            return int(lines[0])
        time.sleep(0.05)
    raise RuntimeError("the browser opened no debugging port within a minute")


def _wanted() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--top", type=int, default=0)
    parser.add_argument("--height", type=int)
    parser.add_argument("--dark", action="store_true")
    return parser.parse_args()


async def _shot(wanted: argparse.Namespace) -> bytes:
    executable = chromium()
    if executable is None:
        raise SystemExit("there is no Chromium on this machine: apt-get install chromium")
    async with browsing(executable) as tab:
        url = wanted.page.absolute().as_uri()
        await tab.open(url, width=wanted.width, dark=wanted.dark)
        return await tab.screenshot(top=wanted.top, height=wanted.height)


if __name__ == "__main__":
    asked = _wanted()
    asked.out.write_bytes(asyncio.run(_shot(asked)))
