"""Opens every built page in headless Chromium: python docs/check_pages.py [docs/_build/html].

A page fails for an error on its console, a picture that does not load, a body that scrolls sideways at 1,280 or at 390 pixels, and,
where it is made of a notebook, for having no picture. Where there is no Chromium, the check says so and is skipped; with CI=true that
is a failure. The browser is found by name, or named by the variable CHROMIUM.
"""

import asyncio
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from tornado.websocket import websocket_connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = (1280, 390)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0")
# Pictures that have no size, or have not been asked for; and whether the page is wider than its window.
BROKEN = "[...document.images].filter(i => !(i.complete && i.naturalWidth > 0)).map(i => i.getAttribute('src'))"
WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
PICTURES = "document.querySelectorAll('article img').length"
EAGER = "document.querySelectorAll('img[loading=lazy]').forEach(i => i.loading = 'eager')"


class Browser:
    """One tab of a Chromium, spoken to by its DevTools protocol."""

    def __init__(self, socket):
        self.socket, self.count, self.said = socket, 0, []

    async def call(self, method, **params):
        """One command's result; console errors that are heard meanwhile are kept."""
        self.count += 1
        await self.socket.write_message(json.dumps({"id": self.count, "method": method, "params": params}))
        while True:
            message = await self.heard()
            if message.get("id") == self.count:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]

    async def heard(self):
        """The next message of the browser."""
        text = await asyncio.wait_for(self.socket.read_message(), 60)
        if text is None:
            raise RuntimeError("the browser has closed the connection")
        message = json.loads(text)
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.said.append(params["exceptionDetails"].get("text", "exception"))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.said.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.said.append(params["entry"]["text"])
        return message

    async def value(self, expression):
        """What a JavaScript expression gives."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    async def open(self, address, width):
        """Load a page in a window of this width, and wait until it and its pictures have loaded."""
        self.said = []
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await self.call("Page.navigate", url=address)
        while (await self.heard()).get("method") != "Page.loadEventFired":
            pass
        await self.value(EAGER)
        for _ in range(50):
            if await self.value("[...document.images].every(i => i.complete)"):
                return
            await asyncio.sleep(0.1)


async def faults_of(browser, page, root):
    """Sentences on what is wrong with one page."""
    found = []
    for width in WIDTHS:
        await browser.open(page.as_uri(), width)
        found += [f"console at {width} pixels: {text}" for text in dict.fromkeys(browser.said)]
        found += [f"picture did not load: {name}" for name in await browser.value(BROKEN)]
        if (wider := await browser.value(WIDE)) > 0:
            found.append(f"scrolls sideways by {wider} pixels at {width}")
    if page.parent == root / "notebooks" and not await browser.value(PICTURES):
        found.append("a notebook without a picture")
    return list(dict.fromkeys(found))


async def check(port, path, pages, root):
    """Faults by page."""
    socket = await websocket_connect(f"ws://127.0.0.1:{port}{path}", max_message_size=2**28)
    own = Browser(socket)
    target = (await own.call("Target.createTarget", url="about:blank"))["targetId"]
    socket.close()
    browser = Browser(await websocket_connect(f"ws://127.0.0.1:{port}/devtools/page/{target}", max_message_size=2**28))
    for domain in ("Page", "Runtime", "Log"):
        await browser.call(f"{domain}.enable")
    return {page: await faults_of(browser, page, root) for page in pages}


def main():
    """Exit status 1 where a page fails, or where there is no browser and CI=true."""
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "docs/_build/html").resolve()
    chromium = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if chromium is None:
        print(f"SKIPPED: pages were not opened, because none of {', '.join(NAMES)} was found")
        return int(os.environ.get("CI") == "true")
    pages = sorted(p for p in root.rglob("*.html") if "_static" not in p.parts)
    with tempfile.TemporaryDirectory() as profile:
        process = subprocess.Popen(
            [chromium, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            written = pathlib.Path(profile) / "DevToolsActivePort"
            for _ in range(300):
                if written.exists() and len(written.read_text().split()) == 2:
                    break
                time.sleep(0.1)
            port, path = written.read_text().split()
            found = asyncio.run(check(port, path, pages, root))
        finally:
            process.terminate()
            process.wait(30)
    for page, faults in found.items():
        for fault in faults:
            print(f"{page.relative_to(root)}: {fault}")
    failed = sum(map(bool, found.values()))
    print(f"{len(pages)} pages opened at {' and '.join(map(str, WIDTHS))} pixels, {failed} with faults")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
