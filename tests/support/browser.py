"""The installed Chromium without a window, driven by the DevTools protocol over two pipes.

Chromium takes commands on file descriptor 3 and answers on 4: JSON that ends with a zero byte.
"""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from support.waiting import PATIENCE_S

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
KEY_CODES = {"Enter": 13, "Escape": 27}


class PageError(Exception):
    """JavaScript failed, or what was waited for did not come."""


class Browser:
    """A Chromium with a profile of its own, which ends with the `with`."""

    def __init__(self, profile: Path) -> None:
        self._profile = profile

    def __enter__(self) -> "Browser":
        assert CHROMIUM is not None
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        options = [
            "--headless",
            "--no-sandbox",  # root has none
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--force-color-profile=srgb",
            "--remote-debugging-pipe",
            f"--user-data-dir={self._profile}",
        ]
        self._process = subprocess.Popen(
            # bash puts the pipes where Chromium looks for them. (sh knows one digit only.)
            ["bash", "-c", f'exec "$0" "$@" 3<&{commands} 4>&{answers}', CHROMIUM, *options],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._number = 0
        self._unread = b""
        self.events: list[dict[str, Any]] = []
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._commands)  # Chromium ends when its pipe does
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)

    def command(self, method: str, session: str | None = None, **params: object) -> dict[str, Any]:
        """The result of a DevTools command. What the browser tells meanwhile is added to `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        self._write(json.dumps(message).encode() + b"\0")
        for answer in self._read():
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise PageError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)
        raise PageError(f"{method}: the browser has ended with {self._process.wait()}")

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._commands, data) :]

    def _read(self) -> Iterator[dict[str, Any]]:
        while True:
            line, zero, rest = self._unread.partition(b"\0")
            if zero:
                self._unread = rest
                yield json.loads(line)
            elif piece := os.read(self._answers, 1 << 20):
                self._unread += piece
            else:
                return

    @contextmanager
    def page(self, address: str, *, width: int = 1280, height: int = 860, dark: bool = False) -> "Iterator[Page]":
        """A tab with a session storage of its own."""
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log"):
            page.command(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.command("Emulation.setEmulatedMedia", features=[scheme])
        page.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        page.open(address)
        try:
            yield page
        finally:
            self.command("Target.closeTarget", targetId=target)


class Page:
    """A tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def command(self, method: str, **params: object) -> dict[str, Any]:
        return self._browser.command(method, self._session, **params)

    def open(self, address: str) -> None:
        self.command("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def ask(self, text: str) -> None:
        """Type it into the chat, and wait for all of the answer."""
        answers = self.run("document.querySelectorAll('.figures').length")
        self.write("#question", text)
        self.press("Enter")
        self.wait(f"document.querySelectorAll('.figures').length > {answers} && document.querySelector('#stop').hidden")

    def run(self, script: str) -> Any:
        """The value of an expression, once its promise is kept."""
        done = self.command("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in done:
            raise PageError(done["exceptionDetails"].get("exception", {}).get("description", script))
        return done["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression is true."""
        script = f"""new Promise((resolve, reject) => {{
            const end = Date.now() + {PATIENCE_S * 1000};
            const look = () => {{
                if ({condition}) resolve();
                else if (Date.now() > end) reject(new Error("waited in vain"));
                else setTimeout(look, 20);
            }};
            look();
        }})"""
        for _ in range(3):
            try:
                return self.run(script)
            except PageError as error:
                # The page that was asked has gone, since another is being opened.
                if "navigated" not in str(error) and "context" not in str(error):
                    raise PageError(f"{error} for {condition}; the page says: {self.text('body')}") from None
        return None

    def text(self, selector: str) -> str:
        """What a reader sees of the first such element."""
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of the first such element that is shown."""
        found = self.run(f"""(() => {{
            const shown = [...document.querySelectorAll({json.dumps(selector)})].find((one) => one.checkVisibility());
            if (!shown) return null;
            shown.scrollIntoView({{block: "nearest"}});
            const {{x, y, width, height}} = shown.getBoundingClientRect();
            return [x + width / 2, y + height / 2];
        }})()""")
        if found is None:
            raise PageError(f"nothing to click is shown as {selector}; the page says: {self.text('body')}")
        for kind in ("mousePressed", "mouseReleased"):
            self.command("Input.dispatchMouseEvent", type=kind, x=found[0], y=found[1], button="left", clickCount=1)

    def write(self, selector: str, text: str) -> None:
        """In place of what a field has."""
        self.run(f"(() => {{ const it = document.querySelector({json.dumps(selector)}); it.focus(); it.select(); }})()")
        self.command("Input.insertText", text=text)
        self.run("document.activeElement.dispatchEvent(new Event('change', {bubbles: true}))")

    def press(self, key: str, *, shift: bool = False) -> None:
        """Enter or Escape, where the focus is."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": KEY_CODES[key], "modifiers": 8 if shift else 0}
        self.command("Input.dispatchKeyEvent", type="keyDown", text="\r" if key == "Enter" else "", **common)
        self.command("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"]))

    def complaints(self) -> list[str]:
        """What the console has of errors: scripts that failed, and what the security policy stopped."""
        self.run("0")  # all before it has then been read
        found = []
        for event in self._browser.events:
            params = event.get("params", {})
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"].get("exception", {}).get("description", "an exception"))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        return found
