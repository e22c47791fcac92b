"""Pages of docs/ and examples/: snippets run, in order, and print what the page says they print."""

import contextlib
import io
import re
import runpy
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

import performance_pictures
import polyhead as ph
from mask_pictures import pictures
from notebooks import NOTEBOOKS, notebook
from polyhead.cli.app import command
from reference import documented, imported_by_pages, returned

DOCS = Path(__file__).parents[1] / "docs"
EXAMPLES = DOCS.parent / "examples"
SNIPPET = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)


def with_model(*values, **options):
    return pytest.param(*values, marks=[pytest.mark.model, *options.get("marks", ())])


@pytest.fixture
def smollm2():
    try:
        return ph.load("smollm2")
    except ph.ModelNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("page", "printing"),
    [
        ("attention.md", 14),
        ("caches.md", 9),
        ("extending.md", 2),
        ("long-context.md", 4),
        ("parallel.md", 3),
        ("recurrence.md", 5),
        ("selecting.md", 3),
        ("replacing.md", 4),
        ("tutorials/small-transformer.md", 6),
        ("which-kernel.md", 1),
        with_model("start.md", 5),
        with_model("../README.md", 1),
        with_model("find-a-head.md", 4, marks=[pytest.mark.slow]),
        with_model("activations.md", 2, marks=[pytest.mark.slow]),
    ],
)
def test_snippets_run_and_print_what_the_page_shows(page, printing, request):
    if request.node.get_closest_marker("model"):
        request.getfixturevalue("smollm2")
    found = SNIPPET.findall((DOCS / page).read_text(encoding="utf-8"))
    assert sum(bool(shown) for _, shown in found) == printing
    names = {}
    for code, shown in found:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(code, names)
        assert printed.getvalue() == shown, code
    torch.compiler.reset()


def test_notebooks_are_the_pages_that_they_are_written_from():
    found = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.ipynb")}
    assert found == set(NOTEBOOKS)
    for name in NOTEBOOKS:
        written = (EXAMPLES / name).read_text(encoding="utf-8")
        assert written == notebook(name), "run: python tools/notebooks.py"


def test_the_example_of_contexts_finds_more_room_at_fewer_bits(capsys):
    runpy.run_path(str(EXAMPLES / "context_budget.py"))["main"]("24GiB", "llama-3-8b")
    name, *numbers = capsys.readouterr().out.splitlines()[1].split()
    contexts = [int(number.replace(",", "")) for number in numbers]
    assert name == "LLaMA-3-8B"
    assert contexts[0] == ph.plan("llama-3-8b", memory="24GiB").fit.longest_context
    assert contexts == sorted(set(contexts)), numbers


@pytest.mark.slow
@pytest.mark.model
def test_the_example_of_a_pair_draws_the_head_that_connects_it(smollm2, tmp_path, capsys):
    main = runpy.run_path(str(EXAMPLES / "draw_pair.py"))["main"]
    text = "The animal didn't cross the street because it was too tired"
    main(text, "it", "animal", str(tmp_path / "pair.svg"))
    assert capsys.readouterr().out.startswith("13.8: 0.75")
    assert (tmp_path / "pair.svg").read_text(encoding="utf-8").startswith("<svg")


def test_pictures_of_masks_are_those_that_their_command_writes():
    page = (DOCS / "attention.md").read_text(encoding="utf-8")
    shown = re.findall(r"!\[.+?\]\(pictures/(.+?)\)", page)
    assert "python tools/mask_pictures.py" in page
    assert shown == list(pictures())
    for name, picture in pictures().items():
        assert (DOCS / "pictures" / name).read_text(encoding="utf-8") == picture, name


def test_pictures_of_speed_are_drawn_from_the_tables_of_the_page():
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    assert re.findall(r"!\[.+?\]\(pictures/(.+?)\)", page) == list(performance_pictures.pictures())
    for name, picture in performance_pictures.pictures().items():
        written = (DOCS / "pictures" / name).read_text(encoding="utf-8")
        assert written == picture, "run: python tools/performance_pictures.py"


def test_pictures_have_a_dark_colour_for_each_light_one():
    files = sorted((DOCS / "pictures").glob("*.svg"))
    assert len(files) > 10
    for file in files:
        picture = file.read_text(encoding="utf-8")
        style = re.search(r"<style>(.*?)</style>", picture)[1]
        assert style.startswith("@media(prefers-color-scheme:dark)"), file.name
        colours = set(re.findall(r'(?:fill|stroke)="(#\w+)"', picture))
        assert colours, file.name
        for colour in colours:
            assert f"svg:root [fill='{colour}']{{" in style, (file.name, colour)


def test_the_reference_has_every_public_name():
    described = documented()
    assert set(ph.__all__) | {f"parallel.{name}" for name in ph.parallel.__all__} <= set(described)
    for name, thing in described.items():
        assert thing.__doc__, name


def test_the_reference_has_what_pages_import_and_what_public_names_return():
    described = list(documented().values())
    wanted = dict(imported_by_pages())
    assert len(wanted) > 30
    for name in ph.__all__:
        wanted |= {f"of {name}: {kind.__name__}": kind for kind in returned(getattr(ph, name))}
    modules = type(re)
    missing = [
        name
        for name, thing in wanted.items()
        if not isinstance(thing, modules) and not any(thing is each for each in described)
    ]
    assert missing == []


def test_the_list_of_the_reference_names_what_its_pages_describe():
    index = (DOCS / "reference/index.md").read_text(encoding="utf-8")
    for page, names in re.findall(r"^\| \[.+\]\((.+)\) \| (.+) \|$", index, re.M):
        text = (DOCS / "reference" / page).read_text(encoding="utf-8")
        found = re.findall(r"^::: polyhead\.(\S+)$", text, re.M)
        listed = re.findall(r"`([^`]+)`", names)
        assert [each.rpartition(".")[2] for each in found] == [
            each.rpartition(".")[2] for each in listed
        ], page


def test_the_page_of_commands_has_every_verb():
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+`) \|", page, re.M)
    assert set(re.findall(r"`(?:polyhead )?([a-z]+)", "\n".join(rows))) == set(command().commands)


def test_source_files_that_pages_name_are_there():
    roots = ("", "src", "src/polyhead", "src/polyhead/semantics", "src/polyhead/viewer", "tests")
    pages = [*DOCS.rglob("*.md"), *(DOCS.parent / name for name in ("README.md", "SECURITY.md"))]
    named = {
        (name, page.name)
        for page in pages
        for name in re.findall(
            r"`([\w.-]+/[\w./-]+\.(?:py|h|cpp|toml))`", page.read_text(encoding="utf-8")
        )
    }
    assert len(named) > 50
    there = {
        name for name, _ in named if any((DOCS.parent / root / name).is_file() for root in roots)
    }
    assert [each for each in sorted(named) if each[0] not in there] == []


def test_the_packages_of_the_architecture_are_those_of_the_import_rule():
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^  (\w+)(?:/|\.py) ", page, re.MULTILINE)
    settings = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    assert listed == [name.removeprefix("polyhead.") for name in reversed(layers)]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_no_two_pages_have_the_same_title(language):
    pages = [
        page for page in DOCS.rglob("*.md") if page.name.endswith(".zh.md") == (language == "zh")
    ]
    titles = [re.search(r"^# (.+)", page.read_text(encoding="utf-8"), re.M)[1] for page in pages]
    assert sorted(titles) == sorted(set(titles))
    if language == "en":
        named = re.findall(
            r"^ +- ([^:\n]+): [\w/-]+\.md$", (DOCS.parent / "mkdocs.yml").read_text(), re.M
        )
        assert len(named) > 30
        assert sorted(named) == sorted(set(named))
