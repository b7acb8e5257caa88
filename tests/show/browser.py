"""The browser on this machine, if there is one: nothing is downloaded."""

import shutil


def find_browser() -> str | None:
    """Where Chromium or Chrome is."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return next((found for name in names if (found := shutil.which(name))), None)
