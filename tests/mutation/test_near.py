"""Which mutants of the engine continuous integration tries: those near a change, and a sample."""

from __future__ import annotations

import subprocess
from pathlib import Path

import mutate
import pytest
from mutants import Mutant, all_mutants

HEAD = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]


def mutant(file: str, line: int, original: str) -> Mutant:
    return Mutant(file, line, "delete", 0, 1, "", original)


def commit(root: Path, text: str, message: str) -> str:
    (root / "csrc").mkdir(exist_ok=True)
    (root / "csrc/plan.c").write_text(text)
    for command in (["add", "-A"], ["commit", "-q", "--allow-empty", "-m", message]):
        subprocess.run(["git", *HEAD, *command], cwd=root, check=True)
    return mutate.git("rev-parse", "HEAD", root=root)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", "-b", "main", str(tmp_path)], check=True)
    return tmp_path


def test_a_change_begins_where_the_branch_left_main_or_some_commits_ago(repository: Path) -> None:
    first = commit(repository, "a\n", "first")
    assert mutate.begin_of_change(repository) == ""
    seen = [first, *(commit(repository, "a\n" * n, str(n)) for n in range(2, 14))]
    assert mutate.begin_of_change(repository) == seen[-1 - mutate.NEAR_COMMITS]
    for name, where in (("origin/main", seen[-3]), ("origin/HEAD", seen[-3])):
        command = ["git", "update-ref", f"refs/remotes/{name}", where]
        subprocess.run(command, cwd=repository, check=True)
    assert mutate.begin_of_change(repository) == seen[-3]


def test_lines_that_changed_are_those_of_the_working_tree(repository: Path) -> None:
    lines = [f"line {nth}\n" for nth in range(1, 41)]
    since = commit(repository, "".join(lines), "first")
    lines[19] = "other\n"
    del lines[29:31]
    (repository / "csrc/plan.c").write_text("".join(lines))
    found = mutate.changed_lines(since, repository)
    assert list(found) == ["plan.c"]
    assert set(range(17, 24)) <= found["plan.c"]  # three about line 20
    assert set(range(27, 33)) <= found["plan.c"]  # about where two lines are gone
    assert found["plan.c"].isdisjoint({1, 16, 25, 40})
    assert mutate.changed_lines("", repository) == {}


def test_a_change_of_comments_alone_is_none(repository: Path) -> None:
    before = 'int a; /* one\n * two */\nchar *s = "/* no comment */"; // three\nint b;\n'
    since = commit(repository, before, "first")
    after = 'int a;\n/* another, of\n * more\n * lines */\nchar *s = "/* no comment */";\nint b;\n'
    (repository / "csrc/plan.c").write_text(after)
    assert mutate.changed_lines(since, repository) == {}
    (repository / "csrc/plan.c").write_text(after.replace("no comment", "a text"))
    assert 5 in mutate.changed_lines(since, repository)["plan.c"]


def test_mutants_of_the_lines_and_of_the_programs_that_changed_are_tried_and_a_sample() -> None:
    many = [mutant("plan.c", line, f"call {line}") for line in range(1, 200)]
    killers = {many[150].key: "test_plan::test_a", many[151].key: "test_copies"}
    nothing = mutate.near(many, {}, killers)
    assert len(nothing) == mutate.NEAR_SAMPLE
    found = mutate.near(many, {"plan.c": {5, 6}, "test_plan.c": {1}}, killers)
    assert {many[4], many[5], many[150]} <= set(found)
    assert len(found) == mutate.NEAR_SAMPLE + 3
    assert found == sorted(found, key=lambda one: one.line)
    assert mutate.near(many[:100], {}, {})[0] in many  # fewer than there are in all


def test_of_very_many_some_are_tried() -> None:
    many = [mutant("plan.c", line, f"call {line}") for line in range(1, 500)]
    found = mutate.near(many, {"plan.c": {*range(400)}}, {})
    assert sum(one.line < 400 for one in found) == mutate.NEAR_MOST
    assert sum(one.line >= 400 for one in found) == mutate.NEAR_SAMPLE


def test_the_sample_is_of_many_files() -> None:
    found = mutate.near(all_mutants(), {}, {})
    assert len(found) == mutate.NEAR_SAMPLE
    assert len({one.file for one in found}) > 10
