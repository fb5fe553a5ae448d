"""What every benchmark prints: a table for people, or one JSON object with ratios and the machine."""

import json
import os
import platform
from typing import Any

import torch
from rich.console import Console
from rich.table import Table


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def show(title: str, rows: list[tuple[str, float, str]], ratios: dict[str, float], *, as_json: bool) -> None:
    """Print `rows` of (name, value, unit) and the `ratios` (name → value), medians unless named otherwise."""
    if as_json:
        measured = {name: {"value": value, "unit": unit} for name, value, unit in rows}
        print(json.dumps({"benchmark": title, "ratios": ratios, "measured": measured, "machine": machine()}))
        return
    table = Table(title=title)
    for heading in ("what", "value", "unit"):
        table.add_column(heading)
    for name, value, unit in rows:
        table.add_row(name, f"{value:.4g}", unit)
    for name, value in ratios.items():
        table.add_row(f"[bold]{name}[/]", f"[bold]{value:.4g}[/]", "ratio")
    Console().print(table)
