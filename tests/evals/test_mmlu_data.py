import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quantrot.evals.harness import subject_names
from quantrot.evals.mmlu_data import as_dataset, read_data

SUBJECTS = ["anatomy", "virology"]
LETTERS = "ABCD"


@pytest.fixture
def two(questions):
    return {subject: questions[subject] for subject in SUBJECTS}


def write_csv(path, rows, header, record):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerows([header] if header else [])
        writer.writerows(record(row) for row in rows)


CSV_LAYOUTS = {
    "json": ("{s}/{p}.csv", ["question", "subject", "choices", "answer"],
             lambda r: [r["question"], r["subject"], json.dumps(r["choices"]), r["answer"]]),
    "python list": ("{s}/{p}.csv", ["question", "choices", "answer"],
                    lambda r: [r["question"], repr(r["choices"]), r["answer"]]),
    "letters": ("{s}/{p}.csv", ["question", *LETTERS, "answer"],
                lambda r: [r["question"], *r["choices"], LETTERS[r["answer"]]]),
    "authors": ("{p}/{s}_{p}.csv", None, lambda r: [r["question"], *r["choices"], LETTERS[r["answer"]]]),
}  # fmt: skip


@pytest.mark.parametrize("layout", CSV_LAYOUTS)
def test_every_csv_layout_gives_the_rows_of_the_parquet_files(two, tmp_path, layout):
    path, header, record = CSV_LAYOUTS[layout]
    for subject, splits in two.items():
        for split, rows in splits.items():
            write_csv(tmp_path / path.format(s=subject, p=split), rows, header, record)
    assert read_data(tmp_path, SUBJECTS, 2) == two


def test_parquet_files_of_the_hubs_own_layout_are_read_in_order(two, tmp_path):
    for subject, splits in two.items():
        (tmp_path / subject).mkdir()
        for split, rows in splits.items():
            for shard, part in enumerate((rows[:1], rows[1:])):
                pq.write_table(pa.Table.from_pylist(part), tmp_path / subject / f"{split}-0000{shard}-of-00002.parquet")
    assert read_data(tmp_path, SUBJECTS, 2) == two


def test_rows_are_the_dataset_that_datasets_reads_from_files(two, mmlu_dir, tmp_path):
    import datasets

    read = datasets.load_dataset(str(mmlu_dir), "virology", cache_dir=str(tmp_path / "cache"))
    made = as_dataset(two["virology"])
    assert {split: list(made[split]) for split in made} == two["virology"]
    assert {split: (list(made[split]), made[split].features) for split in made} == {
        split: (list(read[split]), read[split].features) for split in read
    }


def test_lm_eval_has_57_subjects():
    assert len(subject_names()) == 57


def test_every_missing_split_is_named(mmlu_dir, tmp_path):
    for subject in ("anatomy", "virology"):
        (tmp_path / subject).mkdir()
    (tmp_path / "anatomy" / "test.parquet").symlink_to(mmlu_dir / "anatomy" / "test.parquet")
    with pytest.raises(ValueError) as error:
        read_data(tmp_path, SUBJECTS, 2)
    assert "lacks 3 of 4 splits: anatomy (dev), virology (dev), virology (test)" in str(error.value)


def test_a_directory_that_is_none_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere is not a directory"):
        read_data(tmp_path / "nowhere", SUBJECTS, 2)


def test_too_few_examples_are_refused(mmlu_dir):
    with pytest.raises(ValueError, match="anatomy has 2 dev rows, fewer than fewshot, 5"):
        read_data(mmlu_dir, SUBJECTS, 5)


HEAD = "question,choices,answer\n"


@pytest.mark.parametrize(
    "content, message",
    [
        (HEAD + "q,\"['a' 'b' 'c' 'd']\",0\n", r"row 1: choices must be four texts"),  # as numpy prints a list
        (HEAD + 'q,"[""a"", ""b"", ""c""]",0\n', r"row 1: choices must be four texts"),
        (HEAD + "q,\"['a', 'b', 'c', 4]\",0\n", r"row 1: choices must be four texts"),
        (HEAD + "q,\"['a', 'b', 'c', 'd']\",4\n", r"row 1: answer must be 0 to 3 or A to D, got '4'"),
        (HEAD + "q,\"['a', 'b', 'c', 'd']\",E\n", r"row 1: answer must be 0 to 3 or A to D, got 'E'"),
        (HEAD + 'q,"{[""a""]: 1}",0\n', r"row 1: choices must be four texts"),  # no literal: a list is no key
        (HEAD + f"q,{'[' * 60000},0\n", r"row 1: choices must be four texts"),
        (HEAD + f"q,\"['a', 'b', 'c', 'd']\",{'1' * 5000}\n", r"row 1: answer must be 0 to 3 or A to D, got '1"),
        (HEAD + "q,\"['a', 'b', 'c', 'd']\",\n", r"row 1: answer must be 0 to 3 or A to D, got ''"),
        (HEAD + "\" \",\"['a', 'b', 'c', 'd']\",1\n", r"row 1: no question"),
        ("q,,,, ,A\n", r"row 1: all choices are empty"),
        ("q,a,b,c,d,A\nq,a,b,c,A\n", r"row 2: 5 columns instead of 6"),
        ("", "has 0 dev rows"),
    ],
)
def test_a_row_that_is_no_question_is_named(tmp_path, content, message):
    (tmp_path / "anatomy").mkdir()
    for split in ("dev", "test"):
        (tmp_path / "anatomy" / f"{split}.csv").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_data(tmp_path, ["anatomy"], 1)


@pytest.mark.parametrize("name, message", [("dev.parquet", "as parquet"), ("dev.csv", "as UTF-8 CSV")])
def test_an_unreadable_file_is_named(tmp_path, name, message):
    (tmp_path / "anatomy").mkdir()
    (tmp_path / "anatomy" / name).write_bytes(b"\xff\xfe\x00 not a table")
    (tmp_path / "anatomy" / "test.csv").write_text("q,a,b,c,d,A\n")
    with pytest.raises(ValueError, match=message):
        read_data(tmp_path, ["anatomy"], 1)
