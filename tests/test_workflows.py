"""Workflows name targets and scripts that there are, and install what the tests ask for."""

import os
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    for path in sorted((ROOT / ".github/workflows").glob("*.yml"))
}


def commands(job):
    return [step["run"] for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_what_workflows_run_is_there(name):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    found = 0
    for job in WORKFLOWS[name].values():
        for command in commands(job):
            for target in re.findall(r"\bmake (\S+)", command):
                many = job["strategy"]["matrix"]["target"] if target == '"$TARGET"' else [target]
                assert set(many) <= targets
                found += 1
            for script in re.findall(r"\.ci/run|tools/\w+\.py", command):
                assert (ROOT / script).is_file()
                found += 1
    assert found
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_what_takes_long_runs_every_week():
    jobs = WORKFLOWS["weekly"]
    assert {"test-all", "sanitize", "fuzz"} <= set(jobs["long"]["strategy"]["matrix"]["target"])
    assert commands(jobs["arm"]) == ["make test"]


def test_a_release_first_runs_the_tests_and_refuses_a_tag_that_is_not_the_version():
    jobs = WORKFLOWS["release"]
    check, tests = commands(jobs["tests"])
    assert "pyproject.toml" in check
    assert "exit 1" in check
    assert tests == ".ci/run"
    assert jobs["wheels"]["needs"] == jobs["rest"]["needs"] == "tests"
    assert jobs["publish"]["needs"] == ["wheels", "rest"]


def test_the_oldest_and_the_newest_of_what_is_claimed_are_installed():
    matrix = WORKFLOWS["tests"]["installed"]["strategy"]["matrix"]
    pinned = [(row["python"], row["torch"]) for row in matrix["include"] if row["torch"] != "torch"]
    (bound,) = (each for each in PROJECT["dependencies"] if each.startswith("torch>="))
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert pinned == [(oldest, f"{bound.replace('>=', '==')}.*")]
    assert matrix["torch"] == ["torch"]
    claimed = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert [oldest, *matrix["python"]] == claimed


def test_versions_agree():
    version = PROJECT["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_packages_that_tests_may_lack_are_in_an_extra():
    extras = PROJECT["optional-dependencies"]
    listed = {
        re.split(r"[\[<>=;]", entry)[0].replace("-", "_")
        for extra in ("test", "serve", "gpu", "types")
        for entry in extras[extra]
    }
    asked = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r'importorskip\("(\w+)"', path.read_text(encoding="utf-8"))
    }
    assert len(asked) > 5
    assert asked <= listed
