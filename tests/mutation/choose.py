"""Draws the changes to make, evenly over all places where a change can move a number."""

import argparse
import random
import sqlite3

# The arithmetic opposites, comparisons and their edges, numbers, signs and switches. What these leave out fails at once (a
# shift of floats), cannot be told apart (`is` for `==`) or is about messages (which exception).
OPPOSITES = {
    "Add": ("Sub",),
    "Sub": ("Add",),
    "Mul": ("Div", "Add"),
    "Div": ("Mul",),
    "Pow": ("Mul",),
    "FloorDiv": ("Mul",),
    "Mod": ("Mul",),
    "Lt": ("LtE", "Gt"),
    "LtE": ("Lt", "Gt"),
    "Gt": ("GtE", "Lt"),
    "GtE": ("Gt", "Lt"),
    "Eq": ("NotEq",),
    "NotEq": ("Eq",),
}
OTHERS = {
    "core/NumberReplacer",
    "core/ReplaceTrueWithFalse",
    "core/ReplaceFalseWithTrue",
    "core/ReplaceAndWithOr",
    "core/ReplaceOrWithAnd",
    "core/AddNot",
    "core/ReplaceUnaryOperator_USub_UAdd",
    "core/ReplaceUnaryOperator_Delete_Not",
    "core/ReplaceUnaryOperator_Delete_USub",
}


def moves_a_number(operator):
    """Whether this operator of cosmic-ray is among those drawn."""
    kind, _, names = operator.removeprefix("core/Replace").partition("_")
    old, _, new = names.partition("_")
    return operator in OTHERS or (kind in ("BinaryOperator", "ComparisonOperator") and new in OPPOSITES.get(old, ()))


def places(rows):
    """Operators and jobs by place (module, line, column): one of each place is drawn, for a test sees all of them together."""
    found = {}
    for job, module, operator, line, column in rows:
        found.setdefault((module, line, column), []).append((operator, job))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("session")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    with sqlite3.connect(arguments.session) as session:
        rows = session.execute(
            "select job_id, module_path, operator_name, start_pos_row, start_pos_col from mutation_specs"
            " order by module_path, start_pos_row, start_pos_col, operator_name, occurrence"
        ).fetchall()
        found = places([row for row in rows if moves_a_number(row[2])])
        chosen = draw.sample(sorted(found), min(arguments.count, len(found)))
        kept = {draw.choice(found[place])[1] for place in chosen}
        jobs = [(job,) for (job,) in session.execute("select job_id from work_items") if job not in kept]
        session.executemany("delete from mutation_specs where job_id = ?", jobs)
        session.executemany("delete from work_items where job_id = ?", jobs)
    print(f"{len(rows)} changes at {len(found)} places that can move a number; {len(kept)} drawn")


if __name__ == "__main__":
    main()
