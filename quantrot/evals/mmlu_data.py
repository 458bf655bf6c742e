"""Local MMLU data for lm-eval: find it, check every row, and give it as the dataset `cais/mmlu`."""

from __future__ import annotations

import ast
import csv
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

SPLITS = ("dev", "test")  # what lm-eval reads: few-shot examples from dev, questions from test
CSV_CHOICES = ("A", "B", "C", "D")

Row = dict[str, Any]  # question: str, subject: str, choices: four str, answer: 0..3


def read_data(directory: Path, subjects: list[str], fewshot: int) -> dict[str, dict[str, list[Row]]]:
    """All rows of `directory` as {subject: {split: rows}}, for the splits dev and test.

    A split is DIR/<subject>/<split>.parquet, DIR/<subject>/<split>-*.parquet (the hub's own layout),
    DIR/<subject>/<split>.csv or DIR/<split>/<subject>_<split>.csv (the authors' archive).
    Raises ValueError that names every missing split, or the first file and row that is not a question.
    """
    if not directory.is_dir():
        raise ValueError(f"data: {directory} is not a directory; name one that holds MMLU as parquet or CSV files")
    found = {(subject, split): _find(directory, subject, split) for subject in subjects for split in SPLITS}
    if not any(found.values()):
        raise ValueError(f"data: {directory} holds no subject of MMLU; expected DIR/<subject>/<split>.parquet or .csv")
    missing = [f"{subject} ({split})" for (subject, split), files in found.items() if not files]
    if missing:
        raise ValueError(
            f"data: {directory} lacks {len(missing)} of {len(found)} splits: {', '.join(missing)}; "
            "expected DIR/<subject>/<split>.parquet or .csv"
        )
    data: dict[str, dict[str, list[Row]]] = {subject: {} for subject in subjects}
    for (subject, split), files in found.items():
        data[subject][split] = [row for file in files for row in _read(file, subject)]
    for subject, splits in data.items():
        if len(splits["dev"]) < fewshot:
            raise ValueError(f"data: {subject} has {len(splits['dev'])} dev rows, fewer than fewshot, {fewshot}")
        if not splits["test"]:
            raise ValueError(f"data: {subject} has no test row in {directory}")
    return data


def as_dataset(splits: dict[str, list[Row]]) -> Any:
    """A subject's rows as datasets.load_dataset gives them."""
    from datasets import Dataset, DatasetDict

    return DatasetDict({split: Dataset.from_list(rows) for split, rows in splits.items()})


def _find(directory: Path, subject: str, split: str) -> list[Path]:
    for pattern in (
        f"{subject}/{split}.parquet",
        f"{subject}/{split}-*.parquet",
        f"{subject}/{split}.csv",
        f"{split}/{subject}_{split}.csv",
    ):
        if files := sorted(directory.glob(pattern)):
            return files
    return []


def _read(file: Path, subject: str) -> list[Row]:
    records = _parquet_records(file) if file.suffix == ".parquet" else _csv_records(file)
    return [_checked(record, subject, f"{file}, row {number}") for number, record in enumerate(records, start=1)]


def _parquet_records(file: Path) -> list[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(file).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"data: cannot read {file} as parquet: {error}") from error


def _csv_records(file: Path) -> list[Row]:
    """Rows of a CSV with a header (question, answer, and choices or A, B, C, D), or of the authors' six columns."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            rows = [row for row in csv.reader(stream) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"data: cannot read {file} as UTF-8 CSV: {error}") from error
    header = ["question", *CSV_CHOICES, "answer"]
    if rows and {"question", "answer"} <= set(rows[0]):
        header = rows.pop(0)
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise ValueError(f"data: {file}, row {number}: {len(row)} columns instead of {len(header)}: {header}")
    return [dict(zip(header, row, strict=True)) for row in rows]


def _checked(record: Row, subject: str, where: str) -> Row:
    """One question in the dataset's types; every text exactly as it stands in the file."""
    choices = record.get("choices")
    if choices is None:
        choices = [record.get(letter) for letter in CSV_CHOICES]
    elif isinstance(choices, str):
        choices = _list(choices)
    if not isinstance(choices, list) or len(choices) != 4 or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(
            f"data: {where}: choices must be four texts (a JSON list, or columns A, B, C, D), got {choices!r:.200}"
        )
    answer: Any = record.get("answer")
    if isinstance(answer, str):
        answer = next((i for i, letter in enumerate(CSV_CHOICES) if answer in (letter, str(i))), answer)
    if answer not in range(4):
        raise ValueError(f"data: {where}: answer must be 0 to 3 or A to D, got {answer!r:.80}")
    if not isinstance(record.get("question"), str) or not record["question"].strip():
        raise ValueError(f"data: {where}: no question")
    if not any(choice.strip() for choice in choices):
        raise ValueError(f"data: {where}: all choices are empty")
    return {"question": record["question"], "subject": subject, "choices": choices, "answer": int(answer)}


def _list(text: str) -> Any:
    """A JSON or Python list; what numpy prints ("['a' 'b']") becomes one joined text, which the caller refuses."""
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return read(text)
    return text
