"""Takes memory in a control group until the monitor says so: `python hog.py`; prints JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["ORACLE_OFFLOAD_HEARTBEAT"] = "0"
from oracle_offload.train import PressureMonitor

CHUNK = 16 << 20
saved: list[int] = []
monitor = PressureMonitor(host_warn=0.7, host_critical=0.85, device="cpu", checkpoint=saved.append)
held, levels = [], [monitor.host.level]
while monitor.level != "critical" and len(held) < 200:
    held.append(b"x" * CHUNK)
    if monitor.step(len(held)) != levels[-1]:
        levels.append(monitor.level)
share = monitor.host.used_bytes / monitor.host.total_bytes
total = monitor.host.total_bytes
held.clear()
monitor.step(len(held))
levels.append(monitor.level)
print(json.dumps({"levels": levels, "share": share, "total": total, "saved": len(saved)}))
