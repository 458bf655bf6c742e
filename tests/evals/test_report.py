import errno
import json
import math
import os
from dataclasses import dataclass

import pytest

from quantrot.evals import report


@dataclass(frozen=True)
class Result:
    ppl: float
    stderr: float | None


def test_a_report_holds_what_is_needed_to_repeat_the_run(model, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/usr/bin/quantrot", "eval", "ppl", "a model"])
    entry = report.model_entry(str(tmp_path), model)
    content = report.report("ppl", entry, {"seed": 1}, {"ppl": Result(2.5, None)})
    assert content["results"] == {"ppl": {"ppl": 2.5, "stderr": None}}
    assert content["model"]["dtype"] == "float32" and content["model"]["device"] == "cpu"
    assert content["model"]["manifest"] is None
    assert content["settings"] == {"seed": 1}
    assert {"python", "quantrot", "torch", "transformers", "lm_eval", "safetensors"} == set(content["versions"])
    assert content["command"] == "quantrot eval ppl 'a model'"


def test_a_converted_model_brings_its_recipe_and_hashes(model, tmp_path):
    manifest = {"recipe": {"R1": {}}, "source": {"revision": "abc"}, "files": {"a": "sha256:0"}, "other": 1}
    (tmp_path / "quantrot.json").write_text(json.dumps(manifest))
    del manifest["other"]
    assert report.model_entry(str(tmp_path), model)["manifest"] == manifest


def test_a_converted_model_from_a_hub_brings_them_too(model, tmp_path, monkeypatch):
    monkeypatch.setattr(model.config, "_name_or_path", str(tmp_path), raising=False)
    (tmp_path / "quantrot.json").write_text('{"recipe": {"R1": {}}}')
    assert report.model_entry("owner/name", model)["manifest"] == {"recipe": {"R1": {}}}


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_manifest_is_named(tmp_path, content):
    (tmp_path / "quantrot.json").write_text(content)
    with pytest.raises(ValueError, match="quantrot.json: .*JSON"):
        report.manifest(str(tmp_path))


def test_what_is_written_is_strict_json_even_for_a_broken_model(tmp_path):
    report.write({"results": Result(math.nan, 1.0).__dict__, "list": [math.inf, (1,)]}, tmp_path / "r.json")
    content = json.loads((tmp_path / "r.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert content == {"results": {"ppl": "nan", "stderr": 1.0}, "list": ["inf", [1]]}


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_report_and_nothing_else(tmp_path, monkeypatch, moment):
    path = tmp_path / "r.json"
    report.write({"run": 1}, path)

    def fail(*args):
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(os, moment, fail)
    with pytest.raises(OSError, match="disk full: '.*/r.json'$"):
        report.write({"run": 2}, path)
    assert json.loads(path.read_text()) == {"run": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_report_is_as_readable_as_any_new_file(tmp_path):
    report.write({}, tmp_path / "r.json")
    (tmp_path / "other").write_text("")
    assert (tmp_path / "r.json").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_an_impossible_output_is_refused_before_the_work(tmp_path):
    report.check_output(None)
    report.check_output(tmp_path / "r.json")
    with pytest.raises(ValueError, match="is a directory"):
        report.check_output(tmp_path)
    with pytest.raises(ValueError, match="does not exist; create it first"):
        report.check_output(tmp_path / "missing" / "r.json")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is a device or a pipe, which a report cannot take the place of"):
        report.check_output(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "r.json")
    with pytest.raises(ValueError, match="nowhere does not exist"):
        report.check_output(tmp_path / "link")
    (tmp_path / "loop").symlink_to("loop")
    for refused in (report.check_output, lambda path: report.write({}, path)):
        with pytest.raises(OSError, match="Too many levels of symbolic links: .*loop"):
            refused(tmp_path / "loop")


def test_what_a_link_is_to_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "r.json").symlink_to(tmp_path / "there" / "r.json")
    for content in ({"a": 1}, {"a": 2}):
        report.write(content, tmp_path / "r.json")
        assert json.loads((tmp_path / "there" / "r.json").read_text()) == content
    assert (tmp_path / "r.json").is_symlink() and len(list((tmp_path / "there").iterdir())) == 1


@pytest.mark.parametrize(
    "value, text", [(None, "-"), (0.0, "0.0000"), (12.34567, "12.3457"), (3.2e-7, "3.2e-07"), (math.nan, "nan")]
)
def test_figures_keep_what_matters(value, text):
    assert report.number(value) == text
