"""``python -m relax_infer.placement FOLDER``: a picture of every shipped recipe."""

import sys
from pathlib import Path

from relax_infer.config import load_recipe, shipped_recipes
from relax_infer.placement.picture import placement_svg
from relax_infer.placement.plan import plan_inference_placement


def pictures() -> dict[str, str]:
    """SVG by recipe."""
    return {
        name: placement_svg(plan_inference_placement(load_recipe(name)))
        for name in shipped_recipes()
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in pictures().items():
        (folder / f"{name}.svg").write_text(svg, encoding="utf-8")
