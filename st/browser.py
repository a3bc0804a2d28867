"""Opens a page in a headless Chromium through selenium, for st/test_report_page.py and
st/screenshots.py. Nothing is downloaded: the browser and its driver are those of the machine."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
DRIVER = "chromedriver"
STARTS = 3  # attempts to start the browser
WIDTH, HEIGHT = 1200, 900


def missing() -> str:
    """Returns what this machine lacks for a browser; empty if there is one."""
    lacks = [] if importlib.util.find_spec("selenium") else ["selenium (pip install selenium)"]
    if not any(map(shutil.which, CHROMIUM)):
        lacks.append("Chromium (apt-get install chromium)")
    if not shutil.which(DRIVER):
        lacks.append(f"{DRIVER} (apt-get install chromium-driver)")
    return "this machine lacks " + " and ".join(lacks) if lacks else ""


class Browser:
    """One headless Chromium. ``driver``: of selenium."""

    def __init__(self, script: bool = True) -> None:
        """``script``: whether pages may run scripts."""
        from selenium import webdriver
        from selenium.common.exceptions import WebDriverException

        options = webdriver.ChromeOptions()
        options.binary_location = next(filter(None, map(shutil.which, CHROMIUM)))
        for option in (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            f"--window-size={WIDTH},{HEIGHT}",
        ):
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        for left in reversed(range(STARTS)):
            try:
                self.driver = webdriver.Chrome(
                    options=options, service=webdriver.ChromeService(shutil.which(DRIVER))
                )
                break
            except WebDriverException:
                # another process took the port meanwhile, or the machine is too busy
                if not left:
                    raise
        self.command("Emulation.setScriptExecutionDisabled", value=not script)

    def command(self, name: str, **arguments: Any) -> Any:
        """Sends one command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(name, arguments)

    def open(
        self,
        page: Path,
        language: str = "en-US",
        dark: bool = False,
        width: int = WIDTH,
        height: int = HEIGHT,
    ) -> None:
        """Opens a file anew, with nothing remembered, as a browser in this language and these
        colours shows it."""
        self.driver.get("about:blank")
        self.command(
            "Emulation.setUserAgentOverride",
            userAgent=self.driver.capabilities["browserName"],
            acceptLanguage=language,
        )
        colours = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[colours])
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.logged()
        self.driver.get(page.resolve().as_uri())
        self.driver.execute_script("sessionStorage.clear()")
        self.driver.refresh()

    def logged(self) -> list[str]:
        """Returns what the console got since the last call: errors, and violations of the
        policy."""
        return [row["message"] for row in self.driver.get_log("browser")]

    def requested(self) -> list[str]:
        """Returns the addresses that were requested since the last call."""
        rows = [json.loads(row["message"])["message"] for row in self.driver.get_log("performance")]
        return [
            row["params"]["request"]["url"]
            for row in rows
            if row["method"] == "Network.requestWillBeSent"
        ]

    def run(self, script: str, *arguments: Any) -> Any:
        """Returns the value of a script."""
        return self.driver.execute_script(script, *arguments)

    def scroll_to(self, selector: str) -> None:
        """Scrolls until an element is in the window, and waits until that was drawn: a page that
        scrolls hides its values."""
        self.driver.execute_async_script(
            """document.querySelector(arguments[0]).scrollIntoView({block: "nearest"});
            requestAnimationFrame(() => requestAnimationFrame(arguments[1]))""",
            selector,
        )

    def plot(self, name: str) -> dict[str, Any]:
        """Returns the visible range of a chart, and the box of its inside in the window."""
        self.scroll_to(f"#plot-{name}")
        return self.run(
            """const plot = document.getElementById("plot-" + arguments[0]);
            const box = plot.querySelector(".inside").getBoundingClientRect();
            return {from: +plot.dataset.from, to: +plot.dataset.to,
                    left: box.left, top: box.top, width: box.width, height: box.height}""",
            name,
        )

    def place(self, name: str, value: float, height: float = 0.5) -> tuple[float, float]:
        """Returns where a value of the x axis of a chart is in the window. ``height``: share of the
        chart, from its top."""
        box = self.plot(name)
        return (
            box["left"] + (value - box["from"]) / (box["to"] - box["from"]) * box["width"],
            box["top"] + height * box["height"],
        )

    def mouse(self, kind: str, place: tuple[float, float], **more: Any) -> None:
        """Sends an event of the mouse: "Moved", "Pressed" or "Released"."""
        button = {"button": "left", "clickCount": 1} if kind != "Moved" else {}
        self.command(
            "Input.dispatchMouseEvent",
            type=f"mouse{kind}",
            x=place[0],
            y=place[1],
            **{**button, **more},
        )

    def point_at(self, name: str, value: float, height: float = 0.5) -> str:
        """Moves the mouse to a value of a chart, and returns what the page shows there."""
        self.mouse("Moved", self.place(name, value, height))
        return self.tip()

    def tip(self) -> str:
        """Returns the text of the box with values; empty if it is hidden."""
        return self.run(
            'const tip = document.querySelector(".tip"); return tip.hidden ? "" : tip.innerText'
        )

    def drag(self, name: str, begin: float, end: float, modifiers: int = 0) -> None:
        """Drags the mouse from one value of a chart to another. ``modifiers``: 8 is Shift."""
        first, last = self.place(name, begin), self.place(name, end)
        self.mouse("Moved", first)
        self.mouse("Pressed", first, modifiers=modifiers)
        for share in (0.5, 1):
            at = (first[0] + (last[0] - first[0]) * share, first[1])
            self.mouse("Moved", at, modifiers=modifiers, buttons=1, button="left")
        self.mouse("Released", last, modifiers=modifiers)

    def press(self, *keys: str) -> None:
        """Presses keys, one after the other, by their DOM names."""
        for key in keys:
            self.command(
                "Input.dispatchKeyEvent",
                type="keyDown",
                key=key,
                **({"text": key} if len(key) == 1 else {}),
            )
            self.command("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, path: Path, selector: str = "body") -> None:
        """Writes the window as PNG, or one element of the page."""
        path.write_bytes(
            self.driver.get_screenshot_as_png()
            if selector == "body"
            else self.driver.find_element("css selector", selector).screenshot_as_png
        )

    def close(self) -> None:
        """Ends the browser."""
        self.driver.quit()
