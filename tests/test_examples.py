"""The hospitals example: reading a user's table, what it refuses and what it must never print, and one quick run."""

import gzip
import importlib
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SECRET = "Zaphod-9137"

SMALL = """ward,age,smoker,dose,stage,note,const,outcome
a,10,yes,1.5,2,,5,ill
a,20,no,?,1,,5,well
b,30,,NA,2,,5,ill
b,40,yes,3.5,1,,5,well
b,,yes,nan,2,,5,ill
,60,no,2.5,1,,5,well
b,70,no,2.5,1,,5,
"""


@pytest.fixture(scope="module")
def tables():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("_tables")


@pytest.fixture(scope="module")
def positive(tables):
    return importlib.import_module("_positive")


@pytest.fixture
def write(tmp_path):
    def write(text, name="table.csv"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def refusal(tables, call, *args):
    """The message of a refusal, after checking that neither it nor its traceback holds a row's value."""
    with pytest.raises(tables.TableError) as caught:
        call(*args)
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------- reading a table


def test_missing_values_become_medians_and_indicators(tables, write, monkeypatch):
    monkeypatch.setattr(tables, "MIN_LEVEL_ROWS", 1)
    table = tables.read_table(write(SMALL), "ward", "outcome", "ill")
    assert table.dropped_rows == 2  # one without a ward, one without an outcome
    assert table.groups == ("a", "a", "b", "b", "b")
    assert table.y.tolist() == [1, 0, 1, 0, 1]
    assert table.features == ("age", "age missing", "smoker=no", "smoker missing", "dose", "dose missing", "stage")
    report = {column.name: column for column in table.columns}
    assert {name: column.missing for name, column in report.items()} == {
        "age": 1, "smoker": 1, "dose": 3, "stage": 0, "note": 5, "const": 0,
    }  # fmt: skip
    assert report["const"].became == "dropped: constant"
    assert report["note"].became == "dropped: missing in every row"
    assert report["smoker"].kind == "text"
    # by hand: age 10 20 30 40 and the median 25 in the gap; centred on 25, sd sqrt(100)
    np.testing.assert_allclose(table.X[:, 0], np.array([-15, -5, 5, 15, 0]) / 10, rtol=1e-6)
    np.testing.assert_allclose(table.X[:, 1], np.array([0, 0, 0, 0, 1]) - 0.2, rtol=1e-6)
    # two-valued columns keep a step of 1: stage 2 1 2 1 2
    np.testing.assert_allclose(table.X[:, 6], np.array([0.4, -0.6, 0.4, -0.6, 0.4]), rtol=1e-6)


@pytest.mark.parametrize("word", ["", "NA", "na", "?", "NaN", "n/a", "  "])
def test_every_word_for_missing(tables, write, word):
    table = tables.read_table(write(f"g,x,y\na,1,0\na,2,1\nb,3,0\nb,{word},1\n"), "g", "y")
    assert table.columns[0].missing == 1
    assert table.features == ("x", "x missing")


def test_levels_are_capped_and_rare_ones_pooled(tables, write):
    lines = ["g,colour,id,y"]
    colours = ["red"] * 8 + ["blue"] * 6 + ["pink", "teal", SECRET]
    lines += [f"{'ab'[i % 2]},{colour},{SECRET}{i},{i // 2 % 2}" for i, colour in enumerate(colours)]
    table = tables.read_table(write("\n".join(lines)), "g", "y")
    assert table.features == ("colour=blue", "colour=other")
    assert [column.became for column in table.columns] == ["2 columns", "dropped: text with 17 levels (at most 12)"]
    assert SECRET not in repr(table)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("compressed", [False, True])
def test_delimiters_gzip_and_byte_order_mark(tables, write, delimiter, compressed):
    text = ("\ufeff" + "g,x,y\na,1,0\na,2,1\n\nb,3,0\nb,5,1\n").replace(",", delimiter).encode()
    table = tables.read_table(write(gzip.compress(text) if compressed else text), "g", "y")
    assert table.features == ("x",)
    assert table.group_sizes() == {"a": 2, "b": 2}


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("text", "options", "part"),
    [
        ("g,x,y\na,1,1\nb,2,1\n", ("g", "y"), "all of the 2 rows are positive: the target 'y' has one class"),
        ("g,x,y\na,1,1\nb,2,0\n", ("g", "y", "> 5"), "none of the 2 rows are positive"),
        (f"g,x,y\na,1,{SECRET}\nb,2,no\n", ("g", "y"), "column 'y' is not 0/1 (2 different values)"),
        (f"g,x,y\na,1,{SECRET}\nb,2,2\n", ("g", "y", "y > 1"), "1 of 2 values of column 'y' are not numbers"),
        (f"g,x,y\na,{SECRET},1\nb,2,0\n", ("g", "z"), "--target: the file has no column 'z'"),
        (f"g,x,y\na,{SECRET},1\nb,2,0\n", ("h", "y"), "--group: the file has no column 'h'"),
        (f"g,x,y\na,{SECRET},1\nb,2,0\n", ("y", "y"), "both name column 'y'"),
        (f"g,x,y\n{SECRET},1,1\n{SECRET},2,0\n", ("g", "y"), "column 'g' has 1 different values"),
        ("g,x,y\n" + "".join(f"{SECRET}{i},{i},{i % 2}\n" for i in range(60)), ("g", "y"), "has 60 different values"),
        ("g,x,y\n" + "".join(f"{'ab'[i % 2]},{i},{i % 2}\n" for i in range(40)) + f"a,{SECRET},1\n", ("g", "y"),
         "column 'x': 1 of 41 values are not finite numbers"),
        ("g,x,y\n" + "".join(f"{'ab'[i % 2]},{i},{i % 2}\n" for i in range(40)) + "a,1e999,1\n", ("g", "y"),
         "column 'x': 1 of 41 values are not finite numbers"),
        (f"{SECRET},1.5,0\na,1,1\nb,2,0\n", ("g", "y"), "2 of 3 names in the first line are numbers"),
        (f"g,x,y\na,1,1,{SECRET}\nb,2,0\n", ("g", "y"), "1 of 2 rows do not have the 3 fields"),
        ("g,x,x\na,1,1\nb,2,0\n", ("g", "x"), "unnamed or repeated: 'x'"),
        ("g,,y\na,1,1\nb,2,0\n", ("g", "y"), "every column needs its own name"),
        ("g,x,x missing,y\na,1,1,1\nb,,2,0\nb,2,2,0\n", ("g", "y"), "would both be called 'x missing'"),
        ("g,x,y\na,1,1\n", ("g", "y"), "has 1 rows below the header"),
        ("", ("g", "y"), "has 0 rows below the header"),
        (f"g,x,y\na,{SECRET},1\nb,{SECRET},0\n", ("g", "y"), "no column is left to predict 'y' from"),
        ("g,x,y\n,1,1\n,2,0\n", ("g", "y"), "no row has both a group and a value of column 'y'"),
        (SECRET.encode() + b"\xff\xfe", ("g", "y"), "is not UTF-8 text"),
        (gzip.compress(SECRET.encode() * 99, mtime=0)[:-9], ("g", "y"), "is an incomplete gzip file"),
        (f'g,x,y\na,"{SECRET * 20_000}",1\nb,2,0\n', ("g", "y"), "cannot be read as CSV"),
    ],
)  # fmt: skip
def test_refusals_name_columns_and_counts_only(tables, write, text, options, part):
    assert part in refusal(tables, tables.read_table, write(text), *options)


def test_no_such_file(tables, tmp_path):
    message = refusal(tables, tables.read_table, tmp_path / "absent.csv", "g", "y")
    assert "cannot read absent.csv: No such file" in message


# --------------------------------------------------------------------------------------------------------- --positive


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("num > 0", [0, 1, 1, 1]),
        (">0", [0, 1, 1, 1]),
        ("num>=2", [0, 0, 1, 1]),
        ("< 1.5", [1, 1, 0, 0]),
        ("<= 1e0", [1, 1, 0, 0]),
        ("== 2", [0, 0, 1, 1]),  # 2 and 2.0 are the same number
        ("2", [0, 0, 1, 1]),
        ("== '2'", [0, 0, 1, 0]),  # quoted: the same text
        ("num != 2", [1, 1, 0, 0]),
    ],
)
def test_positive_numbers(positive, expression, expected):
    rule = positive.parse_positive(expression, "num")
    assert rule("num", ["0", "1", "2", "2.0"]).astype(int).tolist() == expected


@pytest.mark.parametrize("expression", ["yes", "== yes", "out == yes", "'yes'", '== "yes"', "out != no", "  yes "])
def test_positive_text(positive, expression):
    assert positive.parse_positive(expression, "out")("out", ["yes", "no", "yes"]).tolist() == [True, False, True]


def test_positive_column_names_that_look_like_expressions(positive):
    assert positive.parse_positive("a > b == 1", "a > b").operator == "=="
    assert positive.parse_positive("numeric", "num").text == "numeric"
    assert positive.parse_positive("'x>y'", "num").text == "x>y"


@pytest.mark.parametrize(
    "expression",
    [
        "", "   ", ">", "num >", "num > 0 and age < 3", "age > 3", "> nan", "> inf", "> 1e999", "> 1_0", "=> 2", "= 2",
        "> yes", "num > 0 > 1", "num > 0; import os", "num > __import__('os').getpid()", "num[0] > 1", "> '0'",
        "x" * 201, "\x00", "a\nb",
    ],
)  # fmt: skip
def test_positive_refuses(tables, positive, expression):
    assert "--positive" in refusal(tables, positive.parse_positive, expression, "num")


@pytest.mark.parametrize(
    "expression", ["__import__('os').system('touch planted')", "(lambda: 1)()", "exit()", "{0.__class__}"]
)
def test_positive_code_is_only_text_to_compare(positive, expression, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not positive.parse_positive(expression, "num")("num", ["1", "0"]).any()
    assert list(tmp_path.iterdir()) == []


@given(st.text(max_size=40), st.lists(st.text(max_size=6), min_size=1, max_size=4))
def test_positive_any_text_gives_a_rule_or_a_table_error(positive, expression, values):
    try:
        rows = positive.parse_positive(expression, "num")("num", values)
    except positive.TableError:
        return
    assert rows.shape == (len(values),)
    assert rows.dtype == bool


# ----------------------------------------------------------------------------------------------- the built-in data


def test_simulated_clinics_are_unequal_and_differ(tables):
    pytest.importorskip("sklearn")
    table = tables.breast_cancer()
    sizes = table.group_sizes()
    assert table.X.shape == (569, 30)
    assert sorted(sizes.values(), reverse=True) == [256, 142, 86, 57, 28]
    assert list(sizes) == ["clinic A", "clinic B", "clinic C", "clinic D", "clinic E"]
    shares = [table.y[table.rows_of(label)].mean() for label in sizes]
    assert shares[0] > shares[1] > shares[2] > shares[-1] > 0
    assert "simulated" in table.source
    np.testing.assert_allclose(table.X.std(axis=0), 1, rtol=1e-5)


# ------------------------------------------------------------------------------------------------------- whole runs


def run_example(*arguments, cwd):
    command = [sys.executable, str(EXAMPLES / "hospitals.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--group", "g"], "--group needs --data"),
        (["--data", "t.csv"], "--data needs --group COLUMN and --target COLUMN"),
        (["--data", "absent.csv", "--group", "g", "--target", "y"], "cannot read absent.csv"),
        (["--out", "nowhere/a.png"], "there is no folder nowhere"),
        (["--rounds", "0"], "--rounds must be at least 1"),
    ],
)
def test_command_line_refusals(arguments, part, tmp_path, capsys, monkeypatch, tables):
    monkeypatch.chdir(tmp_path)
    hospitals = importlib.import_module("hospitals")
    try:
        status = hospitals.main(arguments)
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert part in capsys.readouterr().err


def test_quick_run_on_the_built_in_data(tmp_path):
    pytest.importorskip("sklearn")
    done = run_example("--quick", "--out", "picture.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "picture.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "5 simulated clinics" in done.stdout
    methods = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line[:5] in ("SVI  ", "PVI  ")}
    mean_error, elbo = float(methods["PVI"][1]), float(methods["PVI"][5])
    assert mean_error < 0.3  # in posterior sd; the short chains alone are off by about .1
    assert elbo > float(methods["SVI"][5]) - 0.05
    influence = done.stdout.split("Influence of each group")[1]
    assert all(f"clinic {label} " in influence for label in "ABCDE")
