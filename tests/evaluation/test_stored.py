"""An evaluation's folder that came from somebody else: its record cannot lead a judge out of the folder."""

import json

import pytest

from loragate.errors import DataError
from loragate.evaluation.stored import open_evaluation
from loragate.evaluation.variants import Variant

ROW = {"acts": "adapter", "control": None, "temperature": None, "constant": None, "random": None}


@pytest.mark.parametrize("control", ["/../../../../elsewhere/x", "\\..\\x", "T=0.6"])
def test_a_row_whose_name_is_a_path_is_refused(tmp_path, control):
    row = {**ROW, "control": control}
    identity = {"variants": [row], "tasks": [], "models": {}, "seed": 0, "suites": []}
    (tmp_path / "eval.json").write_text(json.dumps(identity))
    if control == "T=0.6":
        assert open_evaluation(tmp_path).variants == [Variant(**row)]
    else:
        with pytest.raises(DataError, match=r"eval\.json.*is a path"):
            open_evaluation(tmp_path)
