"""Shrink the figures that notebooks store: 720 pixels wide, 96 colours, as `make notebooks` does.

python -m benchmarks.small_figures notebooks/*.ipynb
"""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path

from PIL import Image

WIDTH, COLOURS = 720, 96


def small(png: str) -> str:
    """Return a PNG, in base64 as a notebook holds it, in fewer pixels and colours."""
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    image.thumbnail((WIDTH, 10 * WIDTH), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        out, "png", optimize=True
    )
    return base64.b64encode(out.getvalue()).decode()


def main() -> None:
    """Rewrite the notebooks where they lie."""
    for path in map(Path, sys.argv[1:]):
        content = json.loads(path.read_text())
        for cell in content["cells"]:
            for output in cell.get("outputs", ()):
                if "image/png" in output.get("data", {}):
                    output["data"]["image/png"] = small(output["data"]["image/png"])
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
