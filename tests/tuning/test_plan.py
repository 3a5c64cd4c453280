"""`Plan`: its report and its JSON files."""

import json
import math
import re
from dataclasses import replace

import pytest

from smyrf import Dense, PerHead, Plan, Smyrf, Tangent
from smyrf.models.plan import LayerPlan

PLAN = Plan(
    (
        LayerPlan(0, PerHead((Tangent(0.1), Tangent(0.3), Tangent(0.1))), 100, 600, 0.07, 1.5, "cheapest that fits"),
        LayerPlan(1, Smyrf(4, 16), 64, 600, 0.09, None, "cheapest that fits"),
        LayerPlan(2, Dense(), 600, 600, 0.0, 1.0, "dense is as fast at this length"),
    ),
    max_error=0.1,
    machine="a machine",
)


def test_a_plan_survives_json(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_keeps_its_backend(tmp_path):
    file = tmp_path / "plan.json"
    PLAN.save(file)
    assert "backend" not in json.loads(file.read_text())
    plan = replace(PLAN, backend="torch")
    plan.save(file)
    assert Plan.load(file) == plan
    file.write_text(file.read_text().replace('"torch"', "3"))
    with pytest.raises(ValueError, match="backend=3 is not a name"):
        Plan.load(file)


def test_the_report_says_everything():
    lines = str(PLAN).splitlines()
    assert re.split("  +", lines[0]) == ["layer", "method", "key visits", "error", "speed-up", "why"]
    row = ["0", "Tangent 2×10% + 1×30%", "100 of 600", "0.070", "1.50", "cheapest that fits"]
    assert re.split("  +", lines[1]) == row
    assert "Smyrf 4×16" in lines[2]
    assert "Dense" in lines[3] and "dense is as fast" in lines[3]
    assert lines[4] == "3 layers, max_error=0.1: 42.4% of the keys visited; a machine"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.pop("layers"), "layers missing"),
        (lambda data: data.update(colour=1), "colour unknown"),
        (lambda data: data.update(layers=[]), "layers must be"),
        (lambda data: data.update(max_error="x"), "max_error='x'"),
        (lambda data: data["layers"][1].pop("error"), "layer 1: error missing"),
        (lambda data: data["layers"][1].update(error=math.nan), "layer 1: error=nan"),
        (lambda data: data["layers"][1].update(n_keys=0), "layer 1: n_keys=0"),
        (lambda data: data["layers"][1]["method"].update(kind="best"), "layer 1: kind='best'"),
        (lambda data: data["layers"][1]["method"].update(n_hashes=0), "layer 1: smyrf: n_hashes=0"),
        (lambda data: data["layers"].__setitem__(1, 7), "layer 1: an object is needed"),
        (lambda data: data["layers"][1].update(key_visits=10**400), r"layer 1: key_visits=10{19} is not a count$"),
        (lambda data: data["layers"][1].update(index=10**400), r"layer 1: index=10{19} is not a count$"),
        (lambda data: data["layers"][1].update(reason=[[]]), r"layer 1: reason=\[\[\]\] is not text"),
        (lambda data: data["layers"][1].update(name="\ud800"), r"layer 1: name='\\ud800' is not text"),
        (lambda data: data.update(machine=None), "machine=None is not text"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, change, words):
    file = tmp_path / "plan.json"
    PLAN.save(file)
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"plan.json is not a plan: {words}"):
        Plan.load(file)


def test_a_file_that_is_not_json_is_named(tmp_path):
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(ValueError, match=r"plan.json is not JSON"):
        Plan.load(tmp_path / "plan.json")
    for depth in (900, 990, 10**5):  # json may fail at some depth, and repr at another
        (tmp_path / "plan.json").write_text("[" * depth + "]" * depth)
        with pytest.raises(ValueError, match=r"plan.json is not"):
            Plan.load(tmp_path / "plan.json")
