"""A headless Chromium: found where one is installed, and driven by hand, through its debugging pipe."""

import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1600,1000"),
)
LIMIT_S = 300.0  # for what hangs: on a busy machine a page may take minutes
AT_3_AND_4 = """
import fcntl, os, sys
high = [fcntl.fcntl(int(descriptor), fcntl.F_DUPFD, 10) for descriptor in sys.argv[1:3]]
for descriptor, wanted in zip(high, (3, 4)):
    os.dup2(descriptor, wanted)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """Context manager: a page in a fresh Chromium, whose profile is a folder of its own.

    It keeps the addresses that it `requested` since it began, and what its console `said`, exceptions included.
    """

    def __init__(self, profile):
        self._profile, self._numbers, self._rest = profile, itertools.count(1), b""
        self.requested, self.said = [], []

    def __enter__(self):
        (theirs, self._to), (self._from, theirs_too) = os.pipe(), os.pipe()
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={self._profile}", "--remote-debugging-pipe", "about:blank"]
        # a small program of its own, since only it may move the pipes to where Chromium looks for them
        moved, quiet = [sys.executable, "-c", AT_3_AND_4, str(theirs), str(theirs_too), *command], subprocess.DEVNULL
        self._process = subprocess.Popen(moved, pass_fds=(theirs, theirs_too), stdout=quiet, stderr=quiet)
        os.close(theirs)
        os.close(theirs_too)
        self._session = None
        (target,) = (t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *error):
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def call(self, method, **parameters):
        """Return what the browser answers to a method of its protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        ends = time.monotonic() + LIMIT_S
        while True:
            answer = self._read(ends)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") == "Network.requestWillBeSent":
                self.requested.append(answer["params"]["request"]["url"])
            elif answer.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                self.said.append(answer["params"])

    def evaluate(self, expression):
        """Return the value of an expression in the page."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait(self, expression):
        """Return the value of an expression in the page, once it is true."""
        ends = time.monotonic() + LIMIT_S
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < ends, f"never true: {expression}"
            time.sleep(0.05)
        return value

    def resize(self, width, height, phone=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def drag(self, points):
        """Press the mouse at the first of some points, in pixels of the window, and draw through the others."""
        kinds = ["mousePressed", *["mouseMoved"] * len(points), "mouseReleased"]
        for kind, (x, y) in zip(kinds, [points[0], *points, points[-1]], strict=True):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def click(self, selector):
        box = self.evaluate(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
            f"(document.querySelector({selector!r}).getBoundingClientRect())"
        )
        self.drag([box])

    def choose(self, selector, path):
        """Choose a file in an input for files."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def _read(self, ends):
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(ends - time.monotonic(), 0))
            assert ready, "Chromium does not answer"
            read = os.read(self._from, 1 << 16)
            assert read, "Chromium has ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
