"""The picture of a plan shows every GPU in every phase as the plan has it."""

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given

from relax_infer.config import load_recipe, shipped_recipes
from relax_infer.placement import InferencePlacementPlan, placement_svg, plan_inference_placement
from relax_infer.placement.picture import COLOURS, LETTERS, legend, node_rows
from tests.placement.recipes import document, engine, plan
from tests.placement.test_properties import EXAMPLES, RECIPES, cured

SVG = "{http://www.w3.org/2000/svg}"


def titles(svg: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(svg).iter(f"{SVG}title")]


@pytest.mark.parametrize("name", shipped_recipes())
def test_each_shipped_plan_has_a_cell_for_each_gpu_and_phase(name: str) -> None:
    made = plan_inference_placement(load_recipe(name))
    svg = placement_svg(made)
    cells = [title for title in titles(svg) if title.startswith("GPU ")]
    assert len(cells) == made.total_required_gpus * len(made.phases)
    assert placement_svg(InferencePlacementPlan.from_dict(made.to_dict())) == svg
    for placement in made.placements:
        name = f"{placement.role} {placement.model_id} #0"
        held = sum(title.endswith(f": {name}") for title in cells)
        kinds = sum(p.model_id == placement.model_id for p in made.placements)
        assert held == placement.gpus_per_engine or kinds > 1


def test_nothing_in_a_picture_leaves_it() -> None:
    for name in shipped_recipes():
        root = ElementTree.fromstring(placement_svg(plan_inference_placement(load_recipe(name))))
        width, height = (int(n) for n in root.attrib["viewBox"].split()[2:])
        for box in root.iter(f"{SVG}rect"):
            x, y = int(box.attrib.get("x", 0)), int(box.attrib.get("y", 0))
            assert x + int(box.attrib["width"]) <= width
            assert y + int(box.attrib["height"]) <= height


def test_an_engine_over_two_nodes_is_in_both_rows() -> None:
    """pains 23."""
    made = plan(document("defer", 16, rollout=engine(16, 16)))
    first, second = node_rows(made)
    for row in (first, second):
        cells = row.phases[0]
        assert [cell.who for cell in cells if cell] == ["rollout policy #0"] * 8
        assert [cell.begins for cell in cells if cell] == [True, *[False] * 7]
    assert legend(made)[0] == ("rollout", "rollout policy: 1 x 16 GPUs over 2 nodes")


def test_a_picture_within_a_page_brings_neither_background_nor_namespace() -> None:
    made = plan(document())
    svg = placement_svg(made, inline=True)
    assert "http" not in svg
    assert 'fill="#ffffff"' not in svg
    assert len(re.findall("<title>", svg)) == len(titles(placement_svg(made)))


def test_names_are_text_and_never_markup() -> None:
    made = plan(document(genrm=engine(1)), genrm__model_id="<b>&")
    assert any(title.endswith("genrm <b>& #0") for title in titles(placement_svg(made)))


def test_every_role_has_a_colour_and_a_letter_of_its_own() -> None:
    assert len(set(COLOURS.values())) == len(COLOURS)
    assert len(set(LETTERS.values())) == len(LETTERS)
    assert COLOURS.keys() == LETTERS.keys()


@given(RECIPES)
@EXAMPLES
def test_every_plan_can_be_drawn_and_its_cells_are_its_slots(recipe: dict[str, object]) -> None:
    made, *_ = cured(recipe)
    ElementTree.fromstring(placement_svg(made))
    rows = node_rows(made)
    for number, phase in enumerate(made.phases):
        drawn = sum(cell is not None for row in rows for cell in row.phases[number])
        assert drawn == sum(slot.bundle_stop - slot.bundle_start for slot in phase.slots)
    assert all(len(cells) <= made.gpus_per_node for row in rows for cells in row.phases)
