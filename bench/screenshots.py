"""Makes the pictures of docs/report.md: the page of a synthetic log, in headless Chromium.

    python bench/screenshots.py [--all DIRECTORY]     writes docs/images/*.png

With --all it writes the whole page at 1280 and at 400 pixels, light and dark, of 6, 60 and 1,000
sites, of a spike, of a healthy run, of four ranks, of two runs and of a fleet, to look at.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn

import fastcheck
import fleet_synthetic
import harness
import synthetic_log
from fastcheck.cli.main import main as main_of_fastcheck
from fastcheck.fleet.store import Folder
from fastcheck.report.page.write import write_page
from support.browser import Tab, browser
from support.programs import two_logs

IMAGES = harness.ROOT / "docs" / "images"
READY = "document.documentElement.dataset.ready === 'true'"
LOGS = {"6": (6, 200, 1), "60": (60, 200, 1), "1000": (1000, 1000, 1), "ranks": (120, 200, 4)}
RUNS = ("spike", "healthy")
# Page, name of the picture, the section that it shows, the height in pixels, dark or not.
PICTURES = (
    ("60", "report-heatmap", "heatmap", 740, False),
    ("60", "report-site", "site", 560, True),
    ("two-60", "report-difference", "heatmap", 740, False),
)
_MOST_PIXELS = 8000


def page_of(scratch: Path, name: str) -> Path:
    sites, steps, ranks = LOGS[name]
    for rank in range(ranks):
        synthetic_log.write_log(str(scratch / name), sites, steps, rank, watch=True)
    page = scratch / f"{name}.html"
    write_page(scratch / name, page)
    return page


def settle(tab: Tab) -> None:
    """Waits until all curves are drawn, and for two frames more."""
    plots = "[...document.querySelectorAll('.plot')]"
    tab.wait_for(f"{plots}.every(plot => plot.querySelector('canvas'))")
    frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    tab.value(f"{frames}.then(() => true)")


def pictures(scratch: Path) -> None:
    IMAGES.mkdir(exist_ok=True)
    pages = {"60": page_of(scratch, "60"), "two-60": difference_of(scratch, "60")}
    with browser() as tab:
        for page, name, section, height, dark in PICTURES:
            tab.size(1000, height, dark)
            tab.open(pages[page], READY)
            settle(tab)
            tab.value(f"document.getElementById('{section}').scrollIntoView()")
            settle(tab)
            path = IMAGES / f"{name}.png"
            tab.screenshot(path)
            print(f"{path}: {path.stat().st_size:,} bytes")


def difference_of(scratch: Path, name: str) -> Path:
    """The page of two logs that part at three fifths of their steps."""
    sites, steps, _ = LOGS[name]
    place = scratch / f"two-{name}"
    actual, reference = two_logs.write(place, sites, steps, steps * 3 // 5, sites // 5)
    fastcheck.compare(actual, reference, ask_all=True, html=scratch / f"two-{name}.html")
    return scratch / f"two-{name}.html"


def run_of(scratch: Path, name: str) -> Path:
    """The page of a short run; in a spike one batch has other targets."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)) for _ in range(3)]
    model = nn.ModuleDict({"transformer": nn.Sequential(*blocks), "head": nn.Linear(16, 4)})
    model.forward = lambda x: model["head"](model["transformer"](x))
    optimizer, teacher = torch.optim.AdamW(model.parameters(), lr=3e-3), torch.randn(16, 4)
    monitor = fastcheck.install(model, log_dir=scratch / name, record="full")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(160):
            x = torch.randn(32, 16)
            wanted = torch.tanh(x @ teacher) + (30 if (name, step) == ("spike", 130) else 0)
            optimizer.zero_grad()
            (model(x) - wanted).square().mean().backward()
            optimizer.step()
    monitor.remove()
    page = scratch / f"{name}.html"
    write_page(scratch / name, page)
    return page


def fleet_of(scratch: Path) -> Path:
    """The page of 128 ranks: one with other bits, one with a NaN, one that ends."""
    faults = [
        fleet_synthetic.Fault("bitflip", (5,), 17, 2),
        fleet_synthetic.Fault("nan", (9,), 3, 14),
        fleet_synthetic.Fault("stuck", (30,), 0, 30),
    ]
    place = scratch / "fleet"
    fleet_synthetic.write_fleet(Folder(place), fleet_synthetic.Shape(128, 20, 60, 2), faults, 5)
    page = scratch / "fleet.html"
    main_of_fastcheck(["fleet", str(place), "--html", str(page)])
    return page


def everything(scratch: Path, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    with browser() as tab:
        pages = {name: page_of(scratch, name) for name in LOGS}
        pages |= {f"two-{name}": difference_of(scratch, name) for name in ("6", "60", "1000")}
        pages |= {name: run_of(scratch, name) for name in RUNS} | {"fleet": fleet_of(scratch)}
        for name, page in pages.items():
            for width in (1280, 400):
                for dark in (False, True):
                    tab.size(width, 900, dark)
                    tab.open(page, READY)
                    height = tab.value("document.documentElement.scrollHeight")
                    tab.size(width, min(height, _MOST_PIXELS), dark)
                    settle(tab)
                    colours = "dark" if dark else "light"
                    tab.screenshot(directory / f"{name}-{width}-{colours}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", type=Path, metavar="DIRECTORY")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if options.all is not None:
            everything(Path(scratch), options.all)
        else:
            pictures(Path(scratch))


if __name__ == "__main__":
    main()
